"""Termination of trainer processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from prime_rl.launch import reserved_ports
from prime_rl.trainer.process.parallel_dims import Mesh
from prime_rl.trainer.process.signals import listen_for_signals

WORKER = Path(__file__).with_name("worker_of_torchrun.py")


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a child that its parent died")
def test_no_worker_outlives_a_killed_torchrun() -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(WORKER)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as torchrun:
        joined = {torchrun.stdout.readline().strip() for _ in range(2)}
        torchrun.send_signal(signal.SIGKILL)
        # The workers hold the write end of this pipe, so it reaches its end when the last worker exits.
        rest = torchrun.stdout.read()
    assert joined == {"joined 0", "joined 1"}
    assert rest == ""


@pytest.fixture
def default_sigterm():
    previous = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, previous)


def test_a_second_sigterm_does_not_kill_a_process_that_is_stopping(mesh: Mesh, default_sigterm: None) -> None:
    with listen_for_signals(mesh.process) as signals:
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)
        assert signals.take().stop
    signal.raise_signal(signal.SIGTERM)


def test_sigterm_has_its_default_action_again_after_a_run(mesh: Mesh) -> None:
    before = signal.getsignal(signal.SIGTERM)
    with listen_for_signals(mesh.process):
        pass
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_whose_peers_never_come_ends_in_one_line(rank: int, tiny_model_dir: Path, tmp_path: Path) -> None:
    with reserved_ports(1) as (port,):
        group = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
        command = [sys.executable, "-m", "prime_rl.trainer.rl.train", "--model.name", tiny_model_dir, "--device", "cpu"]
        command += ["--output-dir", tmp_path / "out", "--dist-timeout-seconds", "2"]
        environment = {**os.environ, **group, "MASTER_PORT": str(port)}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "Traceback" not in done.stdout
    (fault,) = (line for line in done.stdout.splitlines() if "ERROR" in line)
    assert f"the other ranks of the trainer at 127.0.0.1:{port} (2 in all, this is rank {rank}) since " in fault
    assert "(limit: dist_timeout_seconds = 2 s)" in fault
