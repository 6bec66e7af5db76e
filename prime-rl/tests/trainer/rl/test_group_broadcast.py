"""Group broadcast: sends weights from memory to servers that request them, and times out if they do not."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from prime_rl.configs.trainer import ModelConfig, NCCLWeightBroadcastConfig
from prime_rl.launch import reserved_ports
from prime_rl.run.paths import OrchestratorPaths, RunPaths
from prime_rl.trainer.model.build import setup_model
from prime_rl.trainer.process.errors import TrainerError
from prime_rl.trainer.rl.broadcast import GroupBroadcast
from prime_rl.transport.weights import WeightGroup
from prime_rl.utils.files import STABLE

Made = Callable[..., GroupBroadcast]


@pytest.fixture
def model(tiny_model_dir, mesh):
    return setup_model(ModelConfig(name=str(tiny_model_dir), attn="sdpa"), mesh)


@pytest.fixture
def run(tmp_path: Path) -> OrchestratorPaths:
    return RunPaths(tmp_path).orchestrator


@pytest.fixture
def port() -> Iterator[int]:
    with reserved_ports(1) as (port,):
        yield port


@pytest.fixture
def made(run: OrchestratorPaths, mesh, port: int) -> Made:
    """Creates the trainer's side of the broadcast."""

    def make(is_stopping: bool = False) -> GroupBroadcast:
        config = NCCLWeightBroadcastConfig(host="127.0.0.1", port=port, timeout=3600)
        return GroupBroadcast(config, run, mesh.process, lambda: is_stopping)

    return make


def ask_for(run: OrchestratorPaths, version: int) -> None:
    run.broadcast(version).mkdir(parents=True, exist_ok=True)
    run.broadcast_ready(version).touch()


def test_an_engine_receives_every_tensor_of_the_model(made, model, run, port, tiny_model_dir) -> None:
    broadcast, received = made(), {}
    broadcast.start(0)

    def receive() -> None:
        engine = WeightGroup(("127.0.0.1", port), 1, 2, torch.device("cpu"), timeout_s=3600)
        received.update({name: tensor.clone() for name, tensor in engine.receive(3)})

    engine = threading.Thread(target=receive)
    engine.start()
    ask_for(run, 3)
    broadcast.publish(model, 3, torch.bfloat16)
    engine.join()
    original = load_file(tiny_model_dir / "model.safetensors")
    assert received.keys() == original.keys()
    assert all(torch.equal(received[name], original[name].bfloat16()) for name in original)


def test_a_version_waits_for_the_orchestrators_request(made, model, run) -> None:
    broadcast = made()
    broadcast.start(0)
    broadcast.config = broadcast.config.model_copy(update={"timeout": 1})  # the port is open already
    with pytest.raises(
        TrainerError,
        match=r"waited for the orchestrator's request for version 1 since .* weight_broadcast\.timeout = 1 s",
    ):
        broadcast.publish(model, 1, torch.float32)
    assert (run.broadcast(1) / STABLE).exists()


def test_servers_that_have_exited_are_an_error(made, model, run) -> None:
    broadcast = made()
    broadcast.start(0)
    broadcast._group._timeout = timedelta(seconds=1)  # the port is open already
    ask_for(run, 1)
    with pytest.raises(TrainerError, match="version 1 did not reach the inference servers"):
        broadcast.publish(model, 1, torch.float32)


def test_nothing_is_sent_after_the_orchestrator_has_finished(made, model, run) -> None:
    broadcast = made()
    broadcast.start(0)
    run.broadcasts.mkdir(parents=True)
    run.broadcasts_closed.touch()
    # No server requests or joins, so waiting or sending would raise after the timeout.
    broadcast.publish(model, 1, torch.float32)
    assert (run.broadcast(1) / STABLE).exists()


def test_a_trainer_that_is_stopping_does_not_wait(made, model, run) -> None:
    broadcast = made(is_stopping=True)
    broadcast.start(0)
    broadcast.publish(model, 1, torch.float32)
    assert (run.broadcast(1) / STABLE).exists()


def test_markers_of_an_earlier_start_are_removed_before_servers_join(made, run) -> None:
    ask_for(run, 2)
    run.broadcasts_closed.touch()
    made().start(2)
    assert not run.broadcasts.exists()


def test_a_port_in_use_is_named(made, port) -> None:
    first, other = made(), made()
    first.start(0)
    with pytest.raises(TrainerError, match=f"could not join the group at 127.0.0.1:{port}"):
        other.start(0)
