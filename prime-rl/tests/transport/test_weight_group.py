"""Weights reach other processes bit by bit, layer 0 among them, and only as the version that was asked for."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from safetensors.torch import load_file

from prime_rl.transport.errors import TransportError
from prime_rl.transport.weights import WeightGroup, bundles_of
from prime_rl.utils.process.ports import reserved_ports

CPU = torch.device("cpu")
TIMEOUT_S = 120

ENGINE = """
import sys
import torch
from safetensors.torch import save_file
from prime_rl.transport.weights import WeightGroup

port, target = int(sys.argv[1]), sys.argv[2]
group = WeightGroup(("127.0.0.1", port), rank=1, size=2, device=torch.device("cpu"), timeout_s=120)
for version in (1, 2):
    save_file({name: part.clone() for name, part in group.receive(version)}, f"{target}/{version}.safetensors")
"""


@pytest.fixture
def port() -> int:
    with reserved_ports(1) as (port,):
        return port


def weights_of(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    names = ["model.embed_tokens.weight", "model.norm.weight"]
    names += [f"model.layers.{layer}.mlp.{part}.weight" for layer in (0, 1, 10, 2) for part in ("up_proj", "down_proj")]
    weights = {name: torch.randn(4, 6, generator=generator) for name in names}
    return weights | {"model.layers.1.norm.weight": torch.randn(5, generator=generator).bfloat16()}


def test_another_process_receives_every_version_bit_by_bit(port, tmp_path) -> None:
    engine = subprocess.Popen([sys.executable, "-c", ENGINE, str(port), str(tmp_path)])
    group = WeightGroup(("127.0.0.1", port), rank=0, size=2, device=CPU, timeout_s=TIMEOUT_S)
    for version in (1, 2):
        group.send(weights_of(version), version)
    assert engine.wait(timeout=TIMEOUT_S) == 0
    for version in (1, 2):
        sent, received = weights_of(version), load_file(tmp_path / f"{version}.safetensors")
        assert received.keys() == sent.keys()
        assert all(torch.equal(received[name], sent[name]) for name in sent)
        assert received["model.layers.1.norm.weight"].dtype == torch.bfloat16


def test_another_version_than_the_one_asked_for_is_a_fault(port) -> None:
    def join(rank: int) -> WeightGroup:
        return WeightGroup(("127.0.0.1", port), rank=rank, size=2, device=CPU, timeout_s=TIMEOUT_S)

    with ThreadPoolExecutor(2) as threads:
        trainer, engine = threads.map(join, (0, 1))
        sending = threads.submit(trainer.send, {"model.norm.weight": torch.ones(3)}, 4)
        with pytest.raises(TransportError, match="expected the weights of version 5, and 4 came"):
            dict(engine.receive(5))
        del engine  # its end closes, and the trainer hears of it or has sent all
        sending.exception(timeout=TIMEOUT_S)


def test_an_engine_that_does_not_come_is_named(port) -> None:
    with pytest.raises(TransportError, match=f"process 0 of 2 could not join the group at 127.0.0.1:{port}"):
        WeightGroup(("127.0.0.1", port), rank=0, size=2, device=CPU, timeout_s=0.3)


def test_bundles_are_what_lies_outside_the_layers_and_then_each_layer_from_0_on() -> None:
    first, *layers = bundles_of(weights_of(0))
    assert first == ["model.embed_tokens.weight", "model.norm.weight"]
    assert [names[0].split(".")[2] for names in layers] == ["0", "1", "2", "10"]
