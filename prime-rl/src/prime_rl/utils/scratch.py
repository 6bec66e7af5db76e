"""Temporary directories that cannot outlive their owner for long: the next program of this user removes abandoned ones.

All are in the user's runtime directory. A lock on each, which the kernel releases when the owner dies, says whether it
is in use.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import socket
import stat
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from prime_rl.utils.private import runtime_directory

OWNER_LOCK = "owner.lock"
LAUNCH_KIND = "launch"
"""Directories of launches. Only launchers remove abandoned ones, because processes may be left too."""

LAUNCH_VARIABLE = "PRIME_RL_LAUNCH"
"""Environment variable of the processes of a launch: its directory."""

_SETTLED_S = 60.0
"""A socket that refuses connections may be one that its owner has bound a moment ago."""


@contextlib.contextmanager
def scratch_directory(kind: str) -> Iterator[Path]:
    """A directory with mode 0700 and a name that starts with `kind`, removed at the end of the block.

    Removes abandoned ones of this user first.

    Raises:
        NotPrivate: the runtime directory does not belong to this user alone.
    """
    with owned_directory(kind) as (directory, _):
        yield directory


@contextlib.contextmanager
def owned_directory(kind: str) -> Iterator[tuple[Path, int]]:
    """As `scratch_directory`; also yields the descriptor that holds the lock, for other processes that use it."""
    runtime = runtime_directory()
    remove_abandoned(runtime)
    with _changing(runtime):
        directory = Path(tempfile.mkdtemp(prefix=f"{kind}-", dir=runtime))
        descriptor = os.open(directory / OWNER_LOCK, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
    try:
        yield directory, descriptor
    finally:
        # A process that is being killed may still write.
        shutil.rmtree(directory, ignore_errors=True)
        os.close(descriptor)


def remove_abandoned(runtime: Path) -> None:
    """Remove directories, keys and sockets in `runtime` whose owners are gone."""
    with _changing(runtime):
        for path in runtime.iterdir():
            # Several programs may look at the same time as owners end.
            with contextlib.suppress(FileNotFoundError):
                _remove_if_abandoned(path)


def abandoned_launches(runtime: Path) -> Iterator[tuple[Path, int]]:
    """Directories of launches whose launcher and guard are gone, each with the descriptor of its lock.

    The lock is held until the next one is asked for.
    """
    for directory in sorted(runtime.glob(f"{LAUNCH_KIND}-*")):
        with _changing(runtime):
            if not (directory / OWNER_LOCK).exists():
                # Its launcher was killed before it started anything, or has just ended.
                shutil.rmtree(directory, ignore_errors=True)
            descriptor = _lock_of_dead(directory / OWNER_LOCK)
        if descriptor is None:
            continue
        try:
            yield directory, descriptor
        finally:
            os.close(descriptor)


def locked_file(path: Path, text: str) -> int:
    """Write `text` to a file with mode 0600, and return a descriptor whose lock says that the file is in use.

    An existing file is replaced; a link at its place is not followed.
    """
    with _changing(path.parent):
        scratch = path.with_name(f"{path.name}.new")
        scratch.unlink(missing_ok=True)
        descriptor = os.open(scratch, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        os.write(descriptor, text.encode())
        scratch.replace(path)
    return descriptor


@contextlib.contextmanager
def _changing(runtime: Path) -> Iterator[None]:
    """Let no other process look for abandoned files while one is made that is not locked yet."""
    descriptor = os.open(runtime / ".lock", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _remove_if_abandoned(path: Path) -> None:
    found = path.lstat()
    if stat.S_ISSOCK(found.st_mode):
        if time.time() - found.st_mtime > _SETTLED_S and _is_refused(path):
            path.unlink()
    elif stat.S_ISDIR(found.st_mode):
        if not path.name.startswith(f"{LAUNCH_KIND}-") and _is_dead(path / OWNER_LOCK):
            shutil.rmtree(path, ignore_errors=True)
    elif path.name.endswith((".key", ".key.new")) and _is_dead(path):
        path.unlink()


def _is_dead(lock: Path) -> bool:
    descriptor = _lock_of_dead(lock)
    if descriptor is not None:
        os.close(descriptor)
    return descriptor is not None or not lock.exists()


def _lock_of_dead(lock: Path) -> int | None:
    """The lock of an owner that is gone, now held by this process; None if the owner lives or there is no lock."""
    try:
        descriptor = os.open(lock, os.O_RDWR)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    return descriptor


def _is_refused(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            return True
        except OSError:
            return False
    return False
