"""Confines a process before it runs a program: user and capabilities, files, resources, system calls."""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import resource
import struct
import sys
from pathlib import Path

_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_CAPBSET_DROP, _PR_SET_NO_NEW_PRIVS = 1, 4, 24, 38
_CAPABILITY_VERSION_3 = 0x20080522
_LAST_CAPABILITY = 63
MIB = 2**20


def drop_privileges(uid: int | None) -> None:
    """Become an ordinary user without capabilities. `uid` None keeps the user."""
    libc = ctypes.CDLL(None, use_errno=True)
    zero = ctypes.c_ulong(0)
    libc.prctl(_PR_SET_NO_NEW_PRIVS, ctypes.c_ulong(1), zero, zero, zero)
    for capability in range(_LAST_CAPABILITY + 1):
        libc.prctl(_PR_CAPBSET_DROP, ctypes.c_ulong(capability), zero, zero, zero)
    if uid is not None:
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0)
    libc.capset(header, (ctypes.c_uint32 * 6)())


def end_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, 9)


# Files: Landlock (Linux 5.13 and later) works for every user, without root or namespaces.

SHARED = (
    "/usr/lib",
    "/usr/local/lib",
    "/lib",
    "/lib64",
    "/usr/share/zoneinfo",
    "/dev/null",
    "/dev/urandom",
    "/dev/zero",
)
"""Paths that Python needs besides its installation. Some do not exist on every machine."""
_CREATE, _ADD, _RESTRICT = 444, 445, 446
_VERSION_FLAG, _PATH_BENEATH = 1, 1
_READ_FILE, _READ_DIR = 1 << 2, 1 << 3
_ACCESSES = {1: 13, 2: 14, 3: 15, 4: 15, 5: 16}
"""Number of access rights to files that each version of Landlock knows."""
_TCP = 0b11
_SCOPES = 0b11


def hide_files() -> bool:
    """Make everything unreadable except Python and its libraries. Returns whether the kernel can do this."""
    try:
        restrict_files([*SHARED, sys.base_prefix, str(Path(__file__).parent)])
    except OSError:
        return False
    return True


def restrict_files(readable: list[str]) -> None:
    """Forbid this process for good to use TCP and files, except to read files beneath these paths. Raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    known = int(libc.syscall(_CREATE, None, 0, _VERSION_FLAG))
    if known <= 0:
        raise OSError("this kernel has no Landlock")
    # The attribute grew with the versions: files, from 4 on TCP, from 6 on signals and abstract sockets.
    files = (1 << _ACCESSES[min(known, 5)]) - 1
    rules = struct.pack("QQQ", files, _TCP if known >= 4 else 0, _SCOPES if known >= 6 else 0)
    size = 8 if known < 4 else 16 if known < 6 else 24
    ruleset = _checked(libc.syscall(_CREATE, ctypes.c_char_p(rules), size, 0))
    for path in filter(Path.exists, map(Path, readable)):
        descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
        rule = struct.pack("=Qi", _READ_FILE | (_READ_DIR if path.is_dir() else 0), descriptor)
        _checked(libc.syscall(_ADD, ruleset, _PATH_BENEATH, ctypes.c_char_p(rule), 0))
        os.close(descriptor)
    zero = ctypes.c_ulong(0)
    _checked(libc.prctl(_PR_SET_NO_NEW_PRIVS, ctypes.c_ulong(1), zero, zero, zero))
    _checked(libc.syscall(_RESTRICT, ruleset, 0))
    os.close(ruleset)


def _checked(result: int) -> int:
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result


def limit(limits: dict[str, int | None]) -> None:
    """Set the resource limits of one program: `cpu_s`, `memory_mb`, `threads` (None: no limit)."""
    memory_mb = limits["memory_mb"]
    wanted = {
        resource.RLIMIT_CPU: limits["cpu_s"],
        resource.RLIMIT_AS: None if memory_mb is None else memory_mb * MIB,
        resource.RLIMIT_FSIZE: 0,
        resource.RLIMIT_NOFILE: 64,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_MEMLOCK: 0,
        resource.RLIMIT_MSGQUEUE: 0,
        resource.RLIMIT_NPROC: limits["threads"],
    }
    for each, value in wanted.items():
        if value is None:
            continue
        _, hard = resource.getrlimit(each)
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(each, (value, value))
    ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 0)


# System calls: seccomp. Every call that the tables do not list fails with EPERM, so there is no new process, no `exec`,
# no signal to another process, no ptrace, and no socket except a pair of its own. Files are opened for reading only.
# Threads are allowed.

ARCHITECTURES = {"x86_64": (0xC000003E, 0), "aarch64": (0xC00000B7, 1)}
"""Audit number of each architecture, and its column in the tables."""

# (x86_64, aarch64); None: the architecture has no such call.
FREE: dict[str, tuple[int, int | None]] = {
    "read": (0, 63), "write": (1, 64), "close": (3, 57), "stat": (4, None), "fstat": (5, 80), "lstat": (6, None),
    "poll": (7, None), "lseek": (8, 62), "mmap": (9, 222), "mprotect": (10, 226), "munmap": (11, 215), "brk": (12, 214),
    "rt_sigaction": (13, 134), "rt_sigprocmask": (14, 135), "rt_sigreturn": (15, 139), "pread64": (17, 67),
    "pwrite64": (18, 68), "readv": (19, 65), "writev": (20, 66), "access": (21, None), "pipe": (22, None),
    "select": (23, None), "sched_yield": (24, 124), "mremap": (25, 216), "madvise": (28, 233), "dup": (32, 23),
    "dup2": (33, None), "nanosleep": (35, 101), "getitimer": (36, 102), "alarm": (37, None), "setitimer": (38, 103),
    "getpid": (39, 172), "exit": (60, 93), "uname": (63, 160), "fsync": (74, 82),
    "fdatasync": (75, 83), "getcwd": (79, 17), "readlink": (89, None), "umask": (95, 166), "gettimeofday": (96, 169),
    "getrlimit": (97, 163), "getrusage": (98, 165), "sysinfo": (99, 179), "times": (100, 153), "getuid": (102, 174),
    "getgid": (104, 176), "geteuid": (107, 175), "getegid": (108, 177), "getppid": (110, 173),
    "rt_sigpending": (127, 136), "sigaltstack": (131, 132), "arch_prctl": (158, None), "gettid": (186, 178),
    "time": (201, None), "futex": (202, 98), "sched_getaffinity": (204, 123), "getdents64": (217, 61),
    "set_tid_address": (218, 96), "clock_gettime": (228, 113), "clock_getres": (229, 114),
    "clock_nanosleep": (230, 115), "exit_group": (231, 94), "epoll_wait": (232, None), "epoll_ctl": (233, 21),
    "newfstatat": (262, 79), "readlinkat": (267, 78), "faccessat": (269, 48), "pselect6": (270, 72), "ppoll": (271, 73),
    "set_robust_list": (273, 99), "epoll_pwait": (281, 22), "eventfd2": (290, 19), "epoll_create1": (291, 20),
    "dup3": (292, 24), "pipe2": (293, 59), "getrandom": (318, 278), "membarrier": (324, 283), "statx": (332, 291),
    "rseq": (334, 293), "faccessat2": (439, 439), "recvfrom": (45, 207), "shutdown": (48, 210),
}  # fmt: skip
OPENAT, CLONE, CLONE3, IOCTL, FCNTL = (257, 56), (56, 220), (435, 435), (16, 29), (72, 25)
PRLIMIT, TGKILL, SOCKETPAIR, SENDTO = (302, 261), (234, 131), (53, 199), (44, 206)
TERMINAL_QUERIES = (0x5401, 0x5413, 0x5421, 0x5451)
"""Allowed requests of ioctl: is it a terminal, its size; non-blocking, close on exec."""
DESCRIPTOR_QUERIES = (0, 1, 2, 3, 4, 1030)
"""Allowed commands of fcntl: duplicate, flags. F_SETOWN and F_SETSIG could signal any process of the user."""
CLONE_THREAD = 0x10000
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
O_TMPFILE = 0o20000000
X32 = 0x40000000

_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _FAIL, _KILL = 0x7FFF0000, 0x00050000, 0x80000000
_PR_SET_SECCOMP, _FILTER_MODE = 22, 2


def _step(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("HBBI", code, if_true, if_false, value & 0xFFFFFFFF)


def _low(index: int) -> int:
    """Offset of the low half of an argument, on a little-endian machine."""
    return 16 + 8 * index


def program(architecture: str, own_pid: int) -> bytes:
    """Assemble the filter as BPF. Raises OSError for other architectures."""
    if architecture not in ARCHITECTURES:
        raise OSError(f"no table of system calls for {architecture}")
    audit, column = ARCHITECTURES[architecture]
    allow, deny = _step(_RETURN, _ALLOW), _step(_RETURN, _FAIL | errno.EPERM)
    absent = _step(_RETURN, _FAIL | errno.ENOSYS)
    steps = [_step(_LOAD, 4), _step(_EQUAL, audit, 1, 0), _step(_RETURN, _KILL), _step(_LOAD, 0)]
    if architecture == "x86_64":
        steps += [_step(_AT_LEAST, X32, 0, 1), _step(_RETURN, _KILL)]

    def when(number: tuple[int, int | None], *body: bytes) -> None:
        """Append steps that run `body` for this call. Every branch of a body returns."""
        if (own := number[column]) is not None:
            steps.extend([_step(_EQUAL, own, 0, len(body)), *body])

    for number in FREE.values():
        when(number, allow)
    when(OPENAT, _step(_LOAD, _low(2)), _step(_ANY_BIT, WRITES | O_TMPFILE, 1, 0), allow, deny)
    when(CLONE, _step(_LOAD, _low(0)), _step(_ANY_BIT, CLONE_THREAD, 0, 1), allow, deny)
    when(CLONE3, absent)  # its flags lie in memory that a filter cannot read; the C library then uses clone
    for call, known in ((IOCTL, TERMINAL_QUERIES), (FCNTL, DESCRIPTOR_QUERIES)):
        queries = [_step(_EQUAL, each, len(known) - index, 0) for index, each in enumerate(known)]
        when(call, _step(_LOAD, _low(1)), *queries, deny, allow)
    when(PRLIMIT, _step(_LOAD, _low(0)), _step(_EQUAL, 0, 0, 1), allow, deny)
    when(TGKILL, _step(_LOAD, _low(0)), _step(_EQUAL, own_pid, 0, 1), allow, deny)
    when(SOCKETPAIR, _step(_LOAD, _low(0)), _step(_EQUAL, 1, 0, 1), allow, deny)
    no_address = [_step(_LOAD, _low(4)), _step(_EQUAL, 0, 0, 3), _step(_LOAD, _low(4) + 4), _step(_EQUAL, 0, 0, 1)]
    when(SENDTO, *no_address, allow, deny)
    steps.append(deny)
    return b"".join(steps)


def forbid_system_calls() -> bool:
    """Install the filter, for good. Returns whether this machine can do this."""
    try:
        _install_filter()
    except OSError:
        return False
    return True


def _install_filter() -> None:
    """Raises OSError: the kernel has no seccomp, or there is no table for this architecture."""
    code = program(platform.machine(), os.getpid())
    libc = ctypes.CDLL(None, use_errno=True)
    buffer = ctypes.create_string_buffer(code, len(code))

    class Filter(ctypes.Structure):
        _fields_ = (("length", ctypes.c_ushort), ("code", ctypes.c_void_p))

    filter_ = Filter(len(code) // 8, ctypes.cast(buffer, ctypes.c_void_p))
    zero = ctypes.c_ulong(0)
    if libc.prctl(_PR_SET_NO_NEW_PRIVS, ctypes.c_ulong(1), zero, zero, zero):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    if libc.prctl(_PR_SET_SECCOMP, ctypes.c_ulong(_FILTER_MODE), ctypes.byref(filter_), zero, zero):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
