"""What is taken from a process before it runs a program: users, capabilities, files, resources, system calls."""

from __future__ import annotations

import ctypes
import os
import resource
import sys
from pathlib import Path

from . import landlock, seccomp

_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_CAPBSET_DROP, _PR_SET_NO_NEW_PRIVS = 1, 4, 24, 38
_CAPABILITY_VERSION_3 = 0x20080522
_LAST_CAPABILITY = 63
MIB = 2**20
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
"""What Python needs of a machine, in addition to its own installation. Not all of it exists everywhere."""


def drop_privileges(uid: int | None) -> None:
    """Become an ordinary user without capabilities. `uid` None: stay who we are."""
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


def hide_files() -> bool:
    """Leave only Python and its libraries to read. Returns whether the kernel can do so."""
    try:
        landlock.restrict([*SHARED, sys.base_prefix, str(Path(__file__).parent)])
    except OSError:
        return False
    return True


def limit(limits: dict[str, int | None]) -> None:
    """Resource limits of one program, from `cpu_s`, `memory_mb`, `threads` (None: not limited)."""
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


def forbid_system_calls() -> bool:
    """Returns whether the kernel can do so."""
    try:
        seccomp.confine()
    except seccomp.Unsupported:
        return False
    return True
