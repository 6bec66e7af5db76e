"""Landlock: the files that a process and its children may read. Linux 5.13 and later, for every user."""

from __future__ import annotations

import ctypes
import os
import struct
from pathlib import Path

_CREATE, _ADD, _RESTRICT = 444, 445, 446
_VERSION_FLAG, _PATH_BENEATH = 1, 1
_READ_FILE, _READ_DIR = 1 << 2, 1 << 3
_ACCESSES = {1: 13, 2: 14, 3: 15, 4: 15, 5: 16}
"""How many kinds of access to files each version knows."""
_TCP = 0b11
_SCOPES = 0b11
_PR_SET_NO_NEW_PRIVS = 38


def version() -> int:
    """The version of Landlock that this kernel has, or 0."""
    return max(0, int(ctypes.CDLL(None, use_errno=True).syscall(_CREATE, None, 0, _VERSION_FLAG)))


def restrict(readable: list[str]) -> None:
    """Keep this process, for good, from all files except those beneath these paths, and from TCP.

    Raises OSError.
    """
    libc, known = ctypes.CDLL(None, use_errno=True), version()
    if not known:
        raise OSError("this kernel has no Landlock")
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
