"""Finds and ends the processes of a launch. Also the guard process that does this if the launcher itself dies.

Three properties identify the processes of a launch: the session of each child, descent from a child, and a mark in the
environment. The mark finds daemons that left both session and parent. Session and descent find programs that overwrite
their environment to set a process title. All three are read from `/proc`. Without it (macOS), the process groups of the
children are used.

Run as a program (`python -I -S reaper.py`, standard library only), this is the guard. It reads JSON lines from stdin.
If stdin ends without a goodbye, because the launcher crashed or got SIGKILL, it ends the launch's processes and removes
its scratch directories.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

MARK_VARIABLE = "PRIME_RL_LAUNCH"
"""Environment variable of every child; its value is the launch's mark."""

GUARD_GRACE_S = 15.0
"""Seconds for children to stop after their launcher was killed."""

_PROC = Path("/proc")
_HAS_PROC = (_PROC / "self" / "stat").exists()
_POLL_S = 0.05
_GONE_TIMEOUT_S = 5.0


class _Entry(NamedTuple):
    state: str
    parent: int
    group: int
    session: int


def _process_table() -> dict[int, _Entry]:
    table = {}
    for directory in _PROC.glob("[0-9]*"):
        # A process may exit between the listing and the read.
        with contextlib.suppress(OSError):
            # The command name is in parentheses and may contain anything, including parentheses.
            fields = (directory / "stat").read_text(errors="replace").rpartition(")")[2].split()
            table[int(directory.name)] = _Entry(fields[0], *map(int, fields[1:4]))
    return table


def _is_marked(pid: int, mark: str) -> bool:
    # Other users' environments cannot be read.
    with contextlib.suppress(OSError):
        return f"{MARK_VARIABLE}={mark}".encode() in (_PROC / str(pid) / "environ").read_bytes().split(b"\0")
    return False


def members(mark: str, leaders: Iterable[int]) -> set[int]:
    """Live processes of the launch with this mark and with the children `leaders` (process ids)."""
    leaders = set(leaders)
    if not _HAS_PROC:
        return {leader for leader in leaders if _group_exists(leader)}
    table = _process_table()
    found = {
        pid
        for pid, entry in table.items()
        if pid in leaders or entry.session in leaders or entry.group in leaders or _is_marked(pid, mark)
    }
    found = _with_descendants(found, table)
    return {pid for pid in found if pid != os.getpid() and pid in table and table[pid].state not in "ZX"}


def _with_descendants(found: set[int], table: dict[int, _Entry]) -> set[int]:
    while children := {pid for pid, entry in table.items() if entry.parent in found} - found:
        found = found | children
    return found


def _group_exists(leader: int) -> bool:
    try:
        os.killpg(leader, 0)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def is_stopped(pid: int) -> bool:
    """Whether a signal has stopped a process. One that a debugger has stopped does not count."""
    with contextlib.suppress(OSError):
        return (_PROC / str(pid) / "stat").read_text(errors="replace").rpartition(")")[2].split()[0] == "T"
    return False


def listeners(leader: int, signum: signal.Signals) -> set[int]:
    """`leader` and its descendants that handle the signal. The signal would kill the others."""
    return {pid for pid in _with_descendants({leader}, _process_table()) if _handles(pid, signum)}


def _handles(pid: int, signum: signal.Signals) -> bool:
    with contextlib.suppress(OSError):
        for line in (_PROC / str(pid) / "status").read_text().splitlines():
            if line.startswith("SigCgt:"):
                return bool(int(line.split()[1], 16) >> (signum - 1) & 1)
    return False


def send(pid: int, signum: signal.Signals) -> None:
    """Signal one of `members`. It may have exited already."""
    with contextlib.suppress(ProcessLookupError):
        (os.kill if _HAS_PROC else os.killpg)(pid, signum)


def send_group(leader: int, signum: signal.Signals) -> None:
    """Signal the process group of a child. macOS raises PermissionError for a group of zombies."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, signum)


def end(mark: str, leaders: Iterable[int], grace_s: float) -> set[int]:
    """Send SIGTERM to everything that is left of a launch, and SIGKILL after the grace period.

    Returns the process ids that were found. They are gone on return, unless the kernel blocks one.
    """
    leaders = list(leaders)
    found = members(mark, leaders)
    for pid in found:
        send(pid, signal.SIGTERM)
    if _wait_gone(mark, leaders, grace_s):
        return found
    deadline = time.monotonic() + _GONE_TIMEOUT_S
    while time.monotonic() < deadline:
        for pid in members(mark, leaders):
            send(pid, signal.SIGKILL)
        if _wait_gone(mark, leaders, 4 * _POLL_S):
            break
    return found


def _wait_gone(mark: str, leaders: Iterable[int], timeout_s: float) -> bool:
    deadline = time.monotonic() + timeout_s
    while members(mark, leaders):
        if time.monotonic() >= deadline:
            return False
        time.sleep(_POLL_S)
    return True


def guard() -> None:
    """Wait for the launcher's goodbye, or for its death; then end its processes and remove its scratch directories."""
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, signal.SIG_IGN)
    mark, leaders, scratch = "", [], []
    for line in sys.stdin:
        message = json.loads(line)
        mark = message.get("mark", mark)
        leaders += message.get("leaders", [])
        scratch += message.get("scratch", [])
        if message.get("goodbye"):
            return
    end(mark, leaders, GUARD_GRACE_S)
    for directory in scratch:
        shutil.rmtree(directory, ignore_errors=True)


if __name__ == "__main__":
    guard()
