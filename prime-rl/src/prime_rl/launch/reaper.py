"""Finds and ends the processes of a launch. Also the guard process that does this if the launcher itself dies.

Three properties identify the processes of a launch: the session of each child, descent from a child, and a mark in the
environment. The mark finds daemons that left both session and parent. Session and descent find programs that overwrite
their environment to set a process title. All three are read from `/proc`. Without it (macOS), the process groups of the
children are used.

Run as a program (standard library only) with one argument, this is the guard. The argument is the directory of the
launch, with a record of what it has started. If stdin ends while the directory is still there, because
the launcher crashed or got SIGKILL, the guard ends the launch's processes and removes the directory. The launcher
replaces a guard that is killed; if both are killed, a child starts a new guard (`run/process.py`); if all are, the
user's next launch on this machine does the guard's work.
"""

from __future__ import annotations

import contextlib
import fcntl
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
"""Environment variable of every child; its value is the launch's mark, which is the path of its directory."""

RECORD = "record"
"""File in the launch's directory: one JSON object a line, appended as things are started."""

GUARD_LOCK = "guard.lock"
"""File in the launch's directory. Of several guards, one at a time works."""

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


def kill_marked(variable: str, mark: str) -> None:
    """Kill all processes that have inherited an environment variable with this value, daemons too."""
    for directory in _PROC.glob("[0-9]*"):
        if _is_marked(int(directory.name), mark, variable):
            send(int(directory.name), signal.SIGKILL)


def _is_marked(pid: int, mark: str, variable: str = MARK_VARIABLE) -> bool:
    # Other users' environments cannot be read.
    with contextlib.suppress(OSError):
        return f"{variable}={mark}".encode() in (_PROC / str(pid) / "environ").read_bytes().split(b"\0")
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


class Leader(NamedTuple):
    """A child, as the record names it: the kernel uses process ids again, but not with the same start."""

    pid: int
    started_ticks: int
    boot: str

    @classmethod
    def of(cls, pid: int) -> Leader:
        return cls(pid, _started_ticks(pid), _boot())

    @property
    def is_alive(self) -> bool:
        return self.started_ticks > 0 and self == Leader.of(self.pid)


def _started_ticks(pid: int) -> int:
    with contextlib.suppress(OSError):
        return int((_PROC / str(pid) / "stat").read_text(errors="replace").rpartition(")")[2].split()[19])
    return 0


def _boot() -> str:
    with contextlib.suppress(OSError):
        return (_PROC / "sys" / "kernel" / "random" / "boot_id").read_text().strip()
    return ""


def note(directory: Path, **fact: object) -> None:
    """Append a line to a launch's record: `leader` or `lock` (a file to hold)."""
    with (directory / RECORD).open("a") as record:
        record.write(json.dumps(fact) + "\n")


def _facts(directory: Path, name: str) -> list[object]:
    facts = []
    with contextlib.suppress(FileNotFoundError):
        for line in (directory / RECORD).read_text().splitlines():
            # The launcher may have been killed while it wrote the last line.
            with contextlib.suppress(ValueError):
                facts.append(json.loads(line))
    return [fact[name] for fact in facts if name in fact]


def clean_up(directory: Path, at_once: bool) -> set[int]:
    """End what is left of a launch whose launcher is gone, remove its directory, and return the ids found.

    With `at_once` the launcher has only just ended, so that the ids of its children still mean them and their sessions.
    Later they count only if the same processes are alive.
    """
    leaders = [Leader(*fields) for fields in _facts(directory, "leader") if isinstance(fields, list)]
    found = end(str(directory), [each.pid for each in leaders if at_once or each.is_alive], GUARD_GRACE_S)
    shutil.rmtree(directory, ignore_errors=True)
    return found


def guard(directory: Path) -> None:
    """Wait for the end of the launcher. If the launch's directory is still there, clean up."""
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, signal.SIG_IGN)
    sys.stdin.read()
    try:
        lock = os.open(directory / GUARD_LOCK, os.O_RDWR | os.O_CREAT, 0o600)
    except FileNotFoundError:
        return
    fcntl.flock(lock, fcntl.LOCK_EX)
    if (directory / RECORD).exists():
        held = [_held(str(path)) for path in _facts(directory, "lock")]
        clean_up(directory, at_once=True)
        for descriptor in filter(None, held):
            os.close(descriptor)


def _held(path: str) -> int | None:
    """Keep others out of the run's directory until it is quiet. A guard that the launcher started does so already."""
    with contextlib.suppress(OSError):
        descriptor = os.open(path, os.O_RDWR)
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return descriptor
    return None


if __name__ == "__main__":
    guard(Path(sys.argv[1]))
