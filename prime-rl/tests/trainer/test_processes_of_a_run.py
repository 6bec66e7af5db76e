"""Termination of trainer processes."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch.distributed as dist

from prime_rl.launch import reserved_ports
from prime_rl.run.paths import STORE_VARIABLE
from prime_rl.trainer.process.errors import ModelError, TrainerError
from prime_rl.trainer.process.mesh import Mesh
from prime_rl.trainer.process.signals import listen_for_signals
from prime_rl.trainer.process.world import destroy_world, leaving_when_done, setup_world

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


@pytest.mark.skipif(sys.platform != "linux", reason="reads in /proc whether a process waits")
def test_a_checkpoint_that_is_asked_for_while_ranks_wait_for_each_other_is_saved_by_all() -> None:
    script = WORKER.with_name("signal_in_a_collective.py")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert sorted(done.stdout.splitlines()) == ["rank 0 saves: True", "rank 1 saves: True"], done.stderr


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


@pytest.mark.parametrize(("world_size", "stays"), [(1, False), (2, True)])
def test_a_rank_that_fails_leaves_no_group_that_others_are_in(world_size: int, stays: bool) -> None:
    """Leaving an NCCL group waits for its other ranks, so the error would be logged only after their time-out."""
    alone = setup_world("cpu", timeout_s=3600, environ={})
    with pytest.raises(ModelError), leaving_when_done(replace(alone, world_size=world_size)):
        raise ModelError("of one rank")
    assert dist.is_initialized() == stays
    destroy_world()


def test_ranks_that_are_done_leave_their_group() -> None:
    alone = setup_world("cpu", timeout_s=3600, environ={})
    with leaving_when_done(replace(alone, world_size=2)):
        assert dist.is_initialized()
    assert not dist.is_initialized()


def test_a_port_of_the_ranks_that_is_taken_is_one_line() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        ranks = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", STORE_VARIABLE: f"tcp://127.0.0.1:{port}"}
        with pytest.raises(TrainerError, match=f"listen for the other ranks at 127.0.0.1:{port}: Address already"):
            setup_world("cpu", timeout_s=60, environ=ranks)
