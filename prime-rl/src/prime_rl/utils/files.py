"""Atomic writes of files and directories.

Writers write to a temporary path next to the target, then rename it. A directory with a file `STABLE` is complete and
flushed to disk. The file lists sizes and hashes of the others, or is empty.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import shutil
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path
from typing import BinaryIO

from prime_rl.utils.contents import STABLE, Contents, record_contents, write_marker

__all__ = [
    "DELETED",
    "PARTIAL",
    "STABLE",
    "TEMPORARY",
    "begin_directory",
    "complete_directory",
    "disk_fault",
    "fsync_tree",
    "locked_file",
    "missing_advice",
    "naming",
    "nearest_path",
    "open_regular",
    "publishing_directory",
    "remove_directory",
    "replacing_directory",
    "replacing_file",
    "scratch_of",
    "size_text",
    "unexpanded_advice",
]

PARTIAL, TEMPORARY, DELETED = ".partial", ".tmp", ".deleted"
"""Suffixes of directories and files while they are written, and of directories while they are deleted.

`run/directory.py` finds those that a killed run has left.
"""

_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP)
"""Errors of file systems without locks."""

_DISK_FAULTS = {
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "the disk quota is used up",
    errno.EROFS: "the disk is read-only",
    errno.EIO: "the disk failed",
}


def open_regular(path: Path) -> BinaryIO:
    """Open a file for reading. Opening a pipe waits for its writer, and a device may have no end: both are refused.

    Raises:
        OSError: the file cannot be read, or is a pipe, a socket or a device.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        mode = os.fstat(descriptor).st_mode
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        if not stat.S_ISREG(mode):
            raise OSError(errno.EINVAL, "a pipe or a device; write its text to a file", str(path))
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def disk_fault(error: BaseException) -> str | None:
    """One line about an error of a full, broken or read-only disk; None for any other error.

    Libraries written in Rust or C++ raise their own exceptions, with the system's message in the text.
    """
    number = getattr(error, "errno", None)
    for known, fault in _DISK_FAULTS.items():
        if number == known or os.strerror(known) in str(error):
            return f"{fault}: {' '.join(str(error).split())}"
    return None


def size_text(size_bytes: int) -> str:
    """A size in MB or GB, for people."""
    return f"{size_bytes / 1e9:.1f} GB" if size_bytes >= 1e9 else f"{max(1, round(size_bytes / 1e6))} MB"


def fsync_tree(directory: Path) -> None:
    """Flush every file and directory in `directory` to disk, recursively."""
    for path in [*directory.rglob("*"), directory]:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


@contextmanager
def locked_file(
    path: Path, on_wait: Callable[[], None] = lambda: None, flock: Callable[[int, int], None] = fcntl.flock
) -> Iterator[None]:
    """Hold the lock of a file, which is made if it is not there. `on_wait` is called if another process holds it.

    On a file system without locks, goes on without one.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            try:
                flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                on_wait()
                flock(descriptor, fcntl.LOCK_EX)
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
        yield
    finally:
        os.close(descriptor)


@contextmanager
def naming(file: Path) -> Iterator[None]:
    """Let a system's error name the file: one from a write, as on a full disk, names none."""
    try:
        yield
    except OSError as error:
        if error.filename is None and error.errno is not None:
            error.filename = str(file)
        raise


@contextmanager
def replacing_file(target: Path) -> Iterator[Path]:
    """Yield a scratch path next to `target`, and rename it to `target` only if the block succeeds."""
    target.parent.mkdir(parents=True, exist_ok=True)
    scratch = target.with_name(f"{target.name}{TEMPORARY}")
    try:
        with naming(target):
            yield scratch
            scratch.replace(target)
    finally:
        scratch.unlink(missing_ok=True)


@contextmanager
def replacing_directory(target: Path) -> Iterator[Path]:
    """Yield a scratch directory that becomes `target`, flushed and marked `STABLE`, only if the block succeeds.

    An existing `target` is replaced. If the block fails, the scratch directory is deleted. After a crash, either the
    old or the new directory is there; see `complete_directory`.
    """
    with _scratch_directory(target) as scratch:
        yield scratch
        complete_directory(target, record_contents(scratch))


@contextmanager
def publishing_directory(target: Path) -> Iterator[Path]:
    """Like `replacing_directory`, for what others may be reading: a complete `target` with equal files stays.

    The marker holds no hashes, because these directories are read once and soon deleted.
    """
    with _scratch_directory(target) as scratch:
        yield scratch
        if (target / STABLE).is_file() and record_contents(target) == record_contents(scratch):
            shutil.rmtree(scratch)
        else:
            complete_directory(target, {})


@contextmanager
def _scratch_directory(target: Path) -> Iterator[Path]:
    scratch = begin_directory(target)
    try:
        yield scratch
    except BaseException:
        shutil.rmtree(scratch, ignore_errors=True)
        raise


def scratch_of(target: Path) -> Path:
    """Path of the scratch directory that will become `target`."""
    return target.with_name(f"{target.name}{PARTIAL}")


def begin_directory(target: Path) -> Path:
    """Create an empty `scratch_of(target)` and return its path."""
    scratch = scratch_of(target)
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    return scratch


def remove_directory(target: Path) -> None:
    """Delete a directory. If this process is killed meanwhile, no half of it is left under its name."""
    deleted = target.with_name(f"{target.name}{DELETED}")
    shutil.rmtree(deleted, ignore_errors=True)
    target.rename(deleted)
    shutil.rmtree(deleted)


def complete_directory(target: Path, contents: Contents) -> None:
    """Mark `scratch_of(target)` as `STABLE` with these contents, flush it to disk, and rename it to `target`.

    An existing `target` is exchanged in one operation. On file systems that cannot do that, such as NFS, it is deleted
    first, and a crash in between leaves neither.
    """
    scratch = scratch_of(target)
    write_marker(scratch, contents)
    fsync_tree(scratch)
    if not target.exists():
        scratch.replace(target)
    elif _exchange(scratch, target):
        shutil.rmtree(scratch)
    else:
        shutil.rmtree(target)
        scratch.replace(target)


def _exchange(one: Path, other: Path) -> bool:
    """Exchange two paths in one operation; False if the system or file system cannot."""
    rename = getattr(ctypes.CDLL(None), "renameat2", None)
    if rename is None:
        return False
    here, exchange = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
    return bool(rename(here, os.fsencode(one), here, os.fsencode(other), exchange) == 0)


def nearest_path(path: Path) -> Path | None:
    """Nearest existing path to one that does not exist: its first missing part is replaced by a similar name."""
    missing = next(each for each in (*reversed(path.parents), path) if not each.exists())
    if not missing.parent.is_dir():
        return None
    near = get_close_matches(missing.name, [each.name for each in missing.parent.iterdir()], 1)
    return None if not near else missing.parent / near[0] / path.relative_to(missing)


def missing_advice(name: str | Path, root: Path = Path()) -> str:
    """Advice about a path below `root` that does not exist: a similar one, or how far it leads."""
    given, path = Path(name), root / name
    if advice := unexpanded_advice(str(name)):
        return advice
    if near := nearest_path(path):
        return f"; did you mean {str(near if given.is_absolute() else near.relative_to(root))!r}?"
    missing = next(each for each in (*reversed(path.parents), path) if not each.exists())
    if missing != path:
        return f"; there is no directory {missing.absolute()}"
    return "" if given.is_absolute() else f"; looked in {path.parent.absolute()}"


def unexpanded_advice(name: str) -> str:
    """Advice about a path that begins with `~`, which only a shell replaces; empty for others."""
    return "; ~ is not expanded here: write the full path" if name.startswith("~") else ""
