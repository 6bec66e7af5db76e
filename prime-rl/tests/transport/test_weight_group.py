"""Weight group: weights arrive bit-identical, including layer 0, and only as the requested version."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
from safetensors.torch import load_file

from prime_rl.launch.placement import reserved_ports
from prime_rl.transport.endpoints import TransportError
from prime_rl.transport.weights import NCCL_LATER_S, WeightGroup, bundles_of

CPU = torch.device("cpu")
TIMEOUT_S = 3600

ENGINE = """
import os, sys
import torch
from safetensors.torch import save_file
from prime_rl.transport.weights import WeightGroup

port, target = int(sys.argv[1]), sys.argv[2]
group = WeightGroup(("127.0.0.1", port), rank=1, size=2, device=torch.device("cpu"), timeout_s=3600)
for version in (1, 2):
    save_file({name: part.clone() for name, part in group.receive(version)}, f"{target}/{version}.safetensors")
os._exit(0)
"""
"""Exit as engines do, without interpreter teardown, which gloo's threads do not survive."""


@pytest.fixture
def port() -> Iterator[int]:
    with reserved_ports(1) as (port,):
        yield port


def weights_of(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    names = ["model.embed_tokens.weight", "model.norm.weight"]
    names += [f"model.layers.{layer}.mlp.{part}.weight" for layer in (0, 1, 10, 2) for part in ("up_proj", "down_proj")]
    weights = {name: torch.randn(4, 6, generator=generator) for name in names}
    return weights | {"model.layers.1.norm.weight": torch.randn(5, generator=generator).bfloat16()}


def bundled(weights: dict[str, torch.Tensor]) -> list[dict[str, torch.Tensor]]:
    return [{name: weights[name] for name in names} for names in bundles_of(weights)]


def test_another_process_receives_every_version_bit_by_bit(port, tmp_path) -> None:
    engine = subprocess.Popen([sys.executable, "-c", ENGINE, str(port), str(tmp_path)])
    group = join(port, 0)
    for version in (1, 2):
        group.send(bundled(weights_of(version)), version)
    assert engine.wait() == 0
    for version in (1, 2):
        sent, received = weights_of(version), load_file(tmp_path / f"{version}.safetensors")
        assert received.keys() == sent.keys()
        assert all(torch.equal(received[name], sent[name]) for name in sent)
        assert received["model.layers.1.norm.weight"].dtype == torch.bfloat16


def join(port: int, rank: int, size: int = 2, timeout_s: float = TIMEOUT_S) -> WeightGroup:
    return WeightGroup(("127.0.0.1", port), rank, size, CPU, timeout_s)


def test_another_version_than_the_requested_one_is_an_error(port) -> None:
    trainer, engine = join(port, 0), join(port, 1)
    with ThreadPoolExecutor(1) as threads:
        sending = threads.submit(trainer.send, [{"model.norm.weight": torch.ones(3)}], 4)
        with pytest.raises(TransportError, match="expected the weights of version 5, but received 4"):
            dict(engine.receive(5))
        del engine  # closes its connections: the trainer either notices or has sent everything
        sending.exception()


def test_an_engine_without_a_trainer_fails_with_a_message(port) -> None:
    with pytest.raises(TransportError, match=f"process 1 of 2 could not join the group at 127.0.0.1:{port}"):
        join(port, 1, timeout_s=0.3)


def test_a_port_in_use_is_named(port) -> None:
    first = join(port, 0)
    with pytest.raises(TransportError, match=f"could not join the group at 127.0.0.1:{port}"):
        join(port, 0)
    assert first.rank == 0


def test_sending_without_receivers_fails_after_the_timeout(port) -> None:
    trainer, engine = join(port, 0), join(port, 1)
    trainer._timeout = timedelta(seconds=0.3)  # joining has no limit: it succeeds on a slow machine, too
    with pytest.raises(TransportError, match="version 1 did not reach the inference servers"):
        trainer.send([{"model.norm.weight": torch.ones(3)}], 1)
    assert engine.rank == 1


STOPS_RECEIVING = """
import os, sys
import torch
from prime_rl.transport.weights import WeightGroup

group = WeightGroup(("127.0.0.1", int(sys.argv[1])), rank=1, size=2, device=torch.device("cpu"), timeout_s=3600)
dict(group.receive(1))
sys.stdin.readline()
os._exit(9)
"""


def test_an_engine_that_stops_receiving_is_an_error_after_the_timeout(port) -> None:
    engine = subprocess.Popen([sys.executable, "-c", STOPS_RECEIVING, str(port)], stdin=subprocess.PIPE, text=True)
    trainer = join(port, 0)
    trainer.send([{"model.norm.weight": torch.ones(3)}], 1)
    trainer._timeout = timedelta(seconds=0.3)  # of each message from here on
    more_than_sockets_hold = torch.ones(2**23)
    late = r"version 2 did not reach the inference servers: waited for .* \(limit: weight_broadcast.timeout = 0.3 s\)"
    with pytest.raises(TransportError, match=late):
        trainer.send([{"model.norm.weight": more_than_sockets_hold}], 2)
    engine.communicate("die\n")  # closes the connection that gloo's thread still waits for


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_the_watchdog_of_nccl_ends_no_process_before_it_has_said_why(port) -> None:
    group = WeightGroup(("127.0.0.1", port), 0, 1, torch.device("cuda"), timeout_s=30)
    group.send([{"model.norm.weight": torch.ones(3)}], 1)
    assert group._backend.options._timeout == timedelta(seconds=30 + NCCL_LATER_S)


def test_a_group_of_another_size_is_refused_on_joining(port) -> None:
    trainer = join(port, 0, size=3)
    with pytest.raises(TransportError, match=r"expects 2 inference workers, but there are 1: .*world_size = 1"):
        join(port, 1, size=2)
    assert trainer.size == 3


LOSES_ITS_TRAINER = """
import os, sys
import torch
from prime_rl.transport.weights import WeightGroup

group = WeightGroup(("127.0.0.1", int(sys.argv[1])), rank=0, size=2, device=torch.device("cpu"), timeout_s=3600)
group.send([{"model.norm.weight": torch.ones(3)}], 1)
print("sent", flush=True)
sys.stdin.readline()
os._exit(9)
"""


def test_a_trainer_that_dies_is_an_error_at_once(port) -> None:
    argv = [sys.executable, "-c", LOSES_ITS_TRAINER, str(port)]
    trainer = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    engine = join(port, 1)
    assert dict(engine.receive(1)).keys() == {"model.norm.weight"}
    trainer.communicate("die\n")
    with pytest.raises(TransportError, match="did not receive version 2 from the trainer"):
        dict(engine.receive(2))


def test_bundles_are_the_tensors_outside_the_layers_then_each_layer() -> None:
    first, *layers = bundles_of(weights_of(0))
    assert first == ["model.embed_tokens.weight", "model.norm.weight"]
    assert [names[0].split(".")[2] for names in layers] == ["0", "1", "2", "10"]
