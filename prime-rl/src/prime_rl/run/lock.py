"""Lets one launch at a time use a run's directory, on this machine and on others that share it.

The lock is `OUT/run.lock`. Its holder keeps an exclusive `flock`, writes who it is, and touches the file every few
seconds, because some shared file systems keep `flock` to one machine.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from prime_rl.utils.errors import RunDirError
from prime_rl.utils.files import naming

LOCK_NAME = "run.lock"
BEAT_S = 10.0
STALE_S = 3 * BEAT_S
"""A file that is older than this belongs to a launch that was killed on another machine."""
_LOOK_S = 1.0


@dataclass(frozen=True, slots=True)
class Holder:
    """Holder of the lock."""

    host: str
    pid: int
    since: str
    """Local time, as text for people."""
    slurm_job: str | None = None

    @classmethod
    def this_process(cls, environ: Mapping[str, str]) -> Holder:
        since = time.strftime("%Y-%m-%d %H:%M:%S")
        return cls(socket.gethostname(), os.getpid(), since, environ.get("SLURM_JOB_ID"))

    @classmethod
    def read(cls, path: Path) -> Holder | None:
        """The holder that a file names; None if it names none, as after a clean end or a crash while writing."""
        try:
            return cls(**json.loads(path.read_text()))
        except (OSError, ValueError, TypeError):
            return None

    def __str__(self) -> str:
        job = f" (Slurm job {self.slurm_job})" if self.slurm_job else ""
        return f"process {self.pid} on {self.host}{job} since {self.since}"


@contextlib.contextmanager
def run_lock(
    root: Path, environ: Mapping[str, str] = os.environ, sleep: Callable[[float], object] = time.sleep
) -> Iterator[int]:
    """Hold the lock of a run's directory, which is made if it is missing. Yields the lock's file descriptor.

    The lock ends with the last process that has the descriptor open. If the last holder was on another machine and its
    file is not yet old, waits up to `STALE_S` seconds to see whether it is alive.

    Raises:
        RunDirError: another launch uses the directory.
    """
    is_new = not root.exists()
    root.mkdir(parents=True, exist_ok=True)
    path, me = root / LOCK_NAME, Holder.this_process(environ)
    descriptor, is_locked = _locked(path)
    try:
        _await_silence(path, me, is_locked, sleep)
        try:
            with naming(path):
                os.ftruncate(descriptor, 0)
                os.pwrite(descriptor, json.dumps(asdict(me)).encode(), 0)
            with _beating(path):
                yield descriptor
        finally:
            path.unlink(missing_ok=True)
            if is_new:
                # A launch that was refused leaves nothing behind.
                with contextlib.suppress(OSError):
                    root.rmdir()
    finally:
        os.close(descriptor)


def refuse_if_locked(root: Path) -> None:
    """Raise RunDirError if a process of this machine, or of one whose locks are seen here, uses the directory."""
    if (root / LOCK_NAME).exists():
        descriptor, _ = _locked(root / LOCK_NAME)
        os.close(descriptor)


def is_running(root: Path) -> bool:
    """Whether a launch uses a run's directory, on this machine or, as far as its lock shows, on another."""
    try:
        touched_s = (root / LOCK_NAME).stat().st_mtime
        refuse_if_locked(root)
    except FileNotFoundError:
        return False
    except RunDirError:
        return True
    return time.time() - touched_s < STALE_S


def _locked(path: Path) -> tuple[int, bool]:
    """The open file, and whether it is locked: some file systems have no locks, and the beats alone decide.

    Raises:
        RunDirError: another process holds the lock.
    """
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_at(path, descriptor):
                return descriptor, True
        except BlockingIOError:
            os.close(descriptor)
            raise _in_use(path) from None
        except OSError:
            return descriptor, False
        # The holder removed its file between our `open` and our `flock`.
        os.close(descriptor)


def _is_at(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _in_use(path: Path) -> RunDirError:
    return RunDirError(
        f"{path.parent} is in use by {Holder.read(path) or 'another launch'}: "
        "wait for it or stop it, or choose another --output-dir"
    )


def _await_silence(path: Path, me: Holder, is_locked: bool, sleep: Callable[[float], object]) -> None:
    """Return once the last holder can no longer be alive where its lock is not seen."""
    last = Holder.read(path)
    if last is None or (is_locked and last.host == me.host):
        return
    # A job that Slurm requeues runs once at a time.
    if last.slurm_job is not None and last.slurm_job == me.slurm_job:
        return
    sys.stderr.write(f"{path.parent} was left by {last}: waiting {STALE_S:.0f} s to see whether it still runs\n")
    first_beat_s = beat_s = path.stat().st_mtime
    # The server of a file system has its own clock: only changes of its times count.
    for _ in range(int(STALE_S / _LOOK_S)):
        if beat_s != first_beat_s:
            raise _in_use(path)
        sleep(_LOOK_S)
        beat_s = path.stat().st_mtime


@contextlib.contextmanager
def _beating(path: Path) -> Iterator[None]:
    ended = threading.Event()

    def beat() -> None:
        while not ended.wait(BEAT_S):
            # A full or lost file system is for others to report.
            with contextlib.suppress(OSError):
                os.utime(path)

    thread = threading.Thread(target=beat, name="run lock", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
