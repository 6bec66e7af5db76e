"""One launch at a time uses a directory; a second one is told who does."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from prime_rl.run.lock import LOCK_NAME, STALE_S, refuse_if_locked, run_lock
from prime_rl.utils.errors import RunDirError

HOLD = """
import sys
from pathlib import Path
from prime_rl.run.lock import run_lock
with run_lock(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""
HOLD_WITH_GUARD = """
import subprocess, sys
from pathlib import Path
from prime_rl.run.lock import run_lock
with run_lock(Path(sys.argv[1])) as lock:
    guard = subprocess.Popen(["sleep", "600"], pass_fds=(lock,))
    print("held", guard.pid, sep="\\n", flush=True)
    sys.stdin.read()
"""
ELSEWHERE = {"host": "node7", "pid": 12, "since": "2026-11-22 09:00:00", "slurm_job": "55"}


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out"


def hold(out: Path, program: str = HOLD) -> subprocess.Popen[str]:
    holder = subprocess.Popen(
        [sys.executable, "-c", program, str(out)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert holder.stdout is not None
    assert holder.stdout.readline() == "held\n"
    return holder


def test_a_second_launch_is_told_who_uses_the_directory(out: Path) -> None:
    holder = hold(out)
    expected = rf"{out} is in use by process {holder.pid} on \S+ since 20.*: wait for it or stop it, or choose another"

    with pytest.raises(RunDirError, match=expected), run_lock(out):
        pass
    with pytest.raises(RunDirError, match=expected):
        refuse_if_locked(out)
    holder.communicate()


def test_the_lock_ends_with_its_holder_also_when_that_is_killed(out: Path) -> None:
    holder = hold(out)
    holder.kill()
    holder.wait()

    refuse_if_locked(out)
    with run_lock(out):
        pass
    assert not out.exists() or not list(out.iterdir())


def test_after_a_kill_the_lock_lasts_until_the_guard_has_cleaned_up(out: Path) -> None:
    """The guard inherits the descriptor that `run_lock` yields."""
    launcher = hold(out, HOLD_WITH_GUARD)
    assert launcher.stdout is not None
    guard = int(launcher.stdout.readline())
    launcher.kill()
    launcher.wait()

    with pytest.raises(RunDirError, match=f"in use by process {launcher.pid} on"):
        refuse_if_locked(out)
    os.kill(guard, signal.SIGKILL)
    # The pipe ends with the last process that has it.
    assert launcher.stdout.read() == ""
    refuse_if_locked(out)


def test_a_refused_launch_leaves_no_directory(out: Path) -> None:
    with pytest.raises(ValueError, match="refused"), run_lock(out):
        raise ValueError("refused")
    assert not out.exists()


class OtherMachine:
    """A holder whose `flock` is not seen here. Stands in for the time that passes."""

    def __init__(self, lock: Path, beats_after_s: float | None) -> None:
        self.lock = lock
        self.beats_after_s = beats_after_s
        self.waited_s = 0.0

    def sleep(self, seconds: float) -> None:
        self.waited_s += seconds
        if self.beats_after_s is not None and self.waited_s >= self.beats_after_s:
            os.utime(self.lock, (0, self.waited_s))


def left_by(out: Path, **holder: str | int) -> Path:
    out.mkdir()
    lock = out / LOCK_NAME
    lock.write_text(json.dumps(ELSEWHERE | holder))
    return lock


def test_a_launch_on_another_machine_is_found_by_its_beats(out: Path) -> None:
    other = OtherMachine(left_by(out), beats_after_s=8)

    with (
        pytest.raises(RunDirError, match=r"process 12 on node7 \(Slurm job 55\) since"),
        run_lock(out, {}, other.sleep),
    ):
        pass
    assert other.waited_s < STALE_S


def test_a_launch_that_was_killed_on_another_machine_does_not_keep_the_directory(out: Path) -> None:
    other = OtherMachine(left_by(out), beats_after_s=None)

    with run_lock(out, {}, other.sleep):
        assert other.waited_s == STALE_S
        assert json.loads((out / LOCK_NAME).read_text())["pid"] == os.getpid()


def test_where_a_file_system_has_no_locks_the_beats_of_this_machine_count_too(
    out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_locks(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", no_locks)
    other = OtherMachine(left_by(out, host=socket.gethostname()), beats_after_s=8)

    with pytest.raises(RunDirError, match="in use by process 12"), run_lock(out, {}, other.sleep):
        pass


def test_a_job_that_slurm_requeues_does_not_wait_for_itself(out: Path) -> None:
    other = OtherMachine(left_by(out), beats_after_s=8)

    with run_lock(out, {"SLURM_JOB_ID": "55"}, other.sleep):
        assert other.waited_s == 0


@pytest.mark.parametrize("text", ["", "{", "[]", '{"host": 1}', '{"unknown": 1}'])
def test_a_damaged_lock_file_does_not_keep_the_directory(out: Path, text: str) -> None:
    left_by(out).write_text(text)

    with run_lock(out):
        assert json.loads((out / LOCK_NAME).read_text())["pid"] == os.getpid()


def test_a_lock_that_cannot_be_written_is_named_and_does_not_stay(out: Path) -> None:
    limited = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))" + HOLD
    failed = subprocess.run(
        [sys.executable, "-c", limited, out], stdin=subprocess.DEVNULL, capture_output=True, text=True
    )
    assert failed.stderr.splitlines()[-1] == f"OSError: [Errno 27] File too large: '{out / LOCK_NAME}'"
    assert not out.exists()
