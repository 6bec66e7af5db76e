"""Ctrl-C and SIGTERM: the child hears of it once, may end in its own time, and never stays behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

PARENT = """
import os, subprocess, sys
from medarc_rl.launchers.foreground import ForegroundChild
with ForegroundChild(grace_s={grace_s}) as child:
    argv = [sys.executable, "-c", {child!r}]
    code = subprocess.run(argv, env=os.environ | child.env, preexec_fn=child.before_exec).returncode
sys.exit(child.exit_code(code))
"""

CHILD = """
import os, signal, sys
stops = {{signal.SIGINT, signal.SIGTERM, signal.SIGHUP}}
signal.signal(signal.SIGUSR1, lambda *_: out.write("checkpoint "))
signal.pthread_sigmask(signal.SIG_BLOCK, stops)
out = open({gate!r}, "w")
if {has_worker}:
    worker = os.fork()
    if worker == 0:  # as a worker of torchrun: in a session of its own, and slow to end
        os.setsid()
        out.write("up\\n"); out.flush()
        while True:
            signal.sigwait(stops)
else:
    out.write("up\\n"); out.flush()
heard = [signal.Signals(signal.sigwait(stops)).name]
while more := signal.sigtimedwait(stops, {patience_s}):
    heard.append(signal.Signals(more.si_signo).name)
out.write(" ".join(heard) + "\\n")
sys.exit(42)
"""


class Family:
    """A parent that waits for a child which reports through a pipe; the pipe's end is the end of all."""

    def __init__(
        self, tmp_path: Path, grace_s: float = 60.0, patience_s: float = 0.5, has_worker: bool = False
    ) -> None:
        gate = tmp_path / "gate"
        os.mkfifo(gate)
        child = CHILD.format(gate=str(gate), patience_s=patience_s, has_worker=has_worker)
        code = PARENT.format(child=child, grace_s=grace_s)
        self.parent = subprocess.Popen([sys.executable, "-c", code], start_new_session=True)
        self.report = gate.open()
        assert self.report.readline() == "up\n"

    def end(self) -> tuple[str, int]:
        with self.report:
            return self.report.read().strip(), self.parent.wait()


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_the_child_hears_a_signal_to_the_parent_and_chooses_its_end(signum: signal.Signals, tmp_path: Path) -> None:
    family = Family(tmp_path)
    family.parent.send_signal(signum)
    assert family.end() == (signum.name, 128 + signum)


def test_ctrl_c_at_the_terminal_is_heard_once(tmp_path: Path) -> None:
    family = Family(tmp_path)
    os.killpg(family.parent.pid, signal.SIGINT)
    assert family.end() == ("SIGINT", 130)


def test_a_child_that_does_not_end_is_killed_after_the_grace(tmp_path: Path) -> None:
    family = Family(tmp_path, grace_s=0.2, patience_s=600.0)
    family.parent.send_signal(signal.SIGTERM)
    assert family.end() == ("", 137)


@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux: only there a child is told of its parent's death")
def test_the_child_does_not_outlive_a_parent_that_was_killed(tmp_path: Path) -> None:
    family = Family(tmp_path)
    family.parent.kill()
    assert family.end() == ("SIGTERM", -signal.SIGKILL)


def test_a_second_signal_is_not_passed_on(tmp_path: Path) -> None:
    family = Family(tmp_path, patience_s=1.0)
    family.parent.send_signal(signal.SIGINT)
    family.parent.send_signal(signal.SIGTERM)
    assert family.end() == ("SIGINT", 130)


def test_a_worker_that_outlives_the_child_is_ended(tmp_path: Path) -> None:
    family = Family(tmp_path, patience_s=0.0, has_worker=True)
    family.parent.send_signal(signal.SIGTERM)
    assert family.end() == ("SIGTERM", 143)


def test_a_request_for_a_checkpoint_reaches_who_listens(tmp_path: Path) -> None:
    family = Family(tmp_path)
    family.parent.send_signal(signal.SIGUSR1)
    family.parent.send_signal(signal.SIGTERM)
    assert family.end() == ("checkpoint SIGTERM", 143)
