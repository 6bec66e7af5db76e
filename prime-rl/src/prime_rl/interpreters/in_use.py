"""Which directories of environments a process uses: none of them is removed meanwhile.

A user holds a shared lock on the directory until its process ends, however it ends.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import shutil
import time
from contextlib import suppress
from pathlib import Path

_DAY_S = 86_400.0


def use(directory: Path) -> None:
    """Keep a directory until this process ends, and note the time. Without such a directory, nothing happens.

    Each call leaves a descriptor open, which holds the lock: call it once when an environment is loaded.
    """
    try:
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH)
    except OSError:  # a file system without locks
        os.close(descriptor)
        return
    with suppress(OSError):  # somebody else's directory
        os.utime(directory)


def remove_unless_used(directory: Path) -> bool:
    """Whether the directory is gone. It stays as long as a process uses it."""
    try:
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        return True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # Nobody finds it under its name while its files go.
        grave = directory.with_name(f".removed-{secrets.token_hex(4)}")
        directory.rename(grave)
        shutil.rmtree(grave, ignore_errors=True)
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return True


def unused_for(directory: Path, days: float) -> bool:
    """Whether a directory was last used, or made, so many days ago."""
    try:
        return time.time() - directory.stat().st_mtime > days * _DAY_S
    except OSError:
        return False
