/* Preloaded into a process: makes its writes below one directory fail, from the n-th on or only the n-th.

   gcc -shared -fPIC -O1 -o failing_writes.so failing_writes.c -ldl */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/uio.h>
#include <unistd.h>

static char directory[PATH_MAX];
static long fails_at;
static int error_number, once;
static volatile long count;

/* Count operations below `prefix` from now on. `at` = 0 only counts. */
void arm(const char *prefix, long at, int number, int only_once) {
    strncpy(directory, prefix, sizeof directory - 1);
    fails_at = at, error_number = number, once = only_once, count = 0;
}

long operations(void) { return count; }

static int fails(const char *path) {
    size_t length = strlen(directory);
    if (!length || !path || strncmp(path, directory, length)) return 0;
    long n = __sync_add_and_fetch(&count, 1);
    if (!fails_at || n < fails_at || (once && n > fails_at)) return 0;
    errno = error_number;
    return 1;
}

static int fails_at_descriptor(int descriptor) {
    char link[64], path[PATH_MAX];
    if (!*directory) return 0;
    snprintf(link, sizeof link, "/proc/self/fd/%d", descriptor);
    ssize_t length = readlink(link, path, sizeof path - 1);
    if (length < 0) return 0;
    path[length] = 0;
    return fails(path);
}

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

ssize_t write(int fd, const void *data, size_t size) { return fails_at_descriptor(fd) ? -1 : REAL(write)(fd, data, size); }
ssize_t writev(int fd, const struct iovec *parts, int n) { return fails_at_descriptor(fd) ? -1 : REAL(writev)(fd, parts, n); }
ssize_t pwrite64(int fd, const void *data, size_t size, off64_t at) {
    return fails_at_descriptor(fd) ? -1 : REAL(pwrite64)(fd, data, size, at);
}
int fsync(int fd) { return fails_at_descriptor(fd) ? -1 : REAL(fsync)(fd); }
int ftruncate64(int fd, off64_t size) { return fails_at_descriptor(fd) ? -1 : REAL(ftruncate64)(fd, size); }
int mkdir(const char *path, mode_t mode) { return fails(path) ? -1 : REAL(mkdir)(path, mode); }
int rename(const char *from, const char *to) { return fails(to) ? -1 : REAL(rename)(from, to); }
int renameat2(int a, const char *from, int b, const char *to, unsigned flags) {
    return fails(to) ? -1 : REAL(renameat2)(a, from, b, to, flags);
}

#define OPEN(name)                                                          \
    int name(const char *path, int flags, ...) {                            \
        va_list rest;                                                       \
        va_start(rest, flags);                                              \
        mode_t mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(rest, int) : 0; \
        va_end(rest);                                                       \
        if (flags & (O_WRONLY | O_RDWR | O_CREAT) && fails(path)) return -1; \
        return REAL(name)(path, flags, mode);                               \
    }
OPEN(open)
OPEN(open64)
