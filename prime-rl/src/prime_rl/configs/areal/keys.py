"""What an `allocation_mode` means in our keys: GPUs, nodes, and the parallelism of the servers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from prime_rl.configs.areal.mode import Allocation, AllocationMode
from prime_rl.utils.pydantic_config.base import NULL_TEXT
from prime_rl.utils.pydantic_config.layers import value_at

Keys = Mapping[str, Any]
"""Dotted keys and their values."""

GPUS_PER_NODE = 8
"""The default of `deployment.gpus_per_node`."""
_ABSENT = object()


def sft_keys(mode: AllocationMode, gpus_per_node: int) -> Keys:
    """The keys of an SFT run.

    Raises:
        ValueError: it asks for what SFT does not have; one line for each fault.
    """
    if mode.of_role("inference"):
        raise ValueError(f"{mode.of_role('inference')[0].text}: SFT starts no inference server: leave it out")
    trainer = _only(mode, "training")
    _refuse(_trainer_faults(trainer))
    gpus = trainer.sizes.gpus
    if gpus <= gpus_per_node:
        return {"deployment.type": "single_node", "deployment.num_gpus": gpus}
    return {"deployment.type": "multi_node", "deployment.num_nodes": _nodes(trainer, gpus_per_node)}


def rl_keys(mode: AllocationMode, gpus_per_node: int) -> Keys:
    """The keys of an RL run. Without servers, the run uses those of `orchestrator.client.base_url`.

    Raises:
        ValueError: it asks for what RL does not have; one line for each fault.
    """
    trainer = _only(mode, "training")
    servers = _only(mode, "inference") if mode.of_role("inference") else None
    _refuse([*_trainer_faults(trainer), *([] if servers is None else _server_faults(servers))])
    train, infer = trainer.sizes.gpus, 0 if servers is None else servers.sizes.gpus
    keys: dict[str, Any] = {}
    if servers is not None:
        keys = {"inference.parallel.tp": servers.sizes.tensor, "inference.parallel.dp": servers.sizes.data}
    if servers is not None and len(mode.components) == 1:
        return {**keys, **_shared_gpus(trainer, gpus_per_node)}
    if train + infer <= gpus_per_node:
        counts = {"deployment.num_train_gpus": train, "deployment.num_infer_gpus": infer}
        return {**keys, "deployment.type": "single_node", **counts}
    if servers is None:
        raise ValueError(
            f"{trainer.text}: {train} GPUs without servers, but deployment.gpus_per_node is {gpus_per_node}"
        )
    nodes = {
        "deployment.num_train_nodes": _nodes(trainer, gpus_per_node),
        "deployment.num_infer_nodes": _nodes(servers, gpus_per_node),
    }
    # A server on several nodes is started once on each.
    keys.pop("inference.parallel.dp")
    return {**keys, "deployment.type": "multi_node", **nodes}


def _shared_gpus(trainer: Allocation, gpus_per_node: int) -> Keys:
    gpus = trainer.sizes.gpus
    if gpus > gpus_per_node:
        raise ValueError(f"{trainer.text}: {gpus} shared GPUs, but deployment.gpus_per_node is {gpus_per_node}")
    ids = list(range(gpus))
    counts = {"deployment.num_train_gpus": gpus, "deployment.num_infer_gpus": gpus}
    # GPUs that are counted twice, because both parts use them.
    room = {"deployment.gpus_per_node": 2 * gpus} if 2 * gpus > gpus_per_node else {}
    return {"deployment.type": "single_node", **counts, **room, "trainer_gpu_ids": ids, "inference_gpu_ids": ids}


def conflicts(keys: Keys, data: Mapping[str, Any]) -> Iterator[str]:
    """One line for each of the keys that the raw config gives another value."""
    if "inference.parallel.tp" in keys and value_at(data, ("inference",), _ABSENT) in (None, NULL_TEXT):
        yield "allocation_mode asks for inference servers, but the config sets inference to None: remove one of them"
    for key, value in keys.items():
        given = value_at(data, tuple(key.split(".")), _ABSENT)
        if given is not _ABSENT and given not in (None, NULL_TEXT) and str(given) != str(value):
            yield f"allocation_mode makes {key} {value!r}, but the config sets {given!r}: remove one of them"


def _only(mode: AllocationMode, role: Any) -> Allocation:
    found = mode.of_role(role)
    if not found:
        raise ValueError(f"{mode.allocations[0].text} alone trains nothing: add a trainer, as in vllm:d4+fsdp:d4")
    if len(found) > 1:
        raise ValueError(f"{found[1].text}: a run has one {'trainer' if role == 'training' else 'inference backend'}")
    return found[0]


def _trainer_faults(trainer: Allocation) -> Iterator[str]:
    sizes = trainer.sizes
    missing = {
        "tensor parallelism (t)": sizes.tensor,
        "pipeline parallelism (p)": sizes.pipeline,
        "context parallelism (c)": sizes.context,
        "expert parallelism (e)": max(sizes.expert, sizes.expert_tensor),
    }
    lacks = [what for what, size in missing.items() if size > 1]
    yield from (f"{trainer.text}: the trainer has no {what} yet: use d" for what in lacks)
    if trainer.backend != "fsdp" and not lacks:
        yield f"{trainer.text}: the trainer is FSDP: write fsdp instead of {trainer.backend}"


def _server_faults(servers: Allocation) -> Iterator[str]:
    if servers.backend != "vllm":
        yield f"{servers.text}: {servers.backend} is not supported: write vllm instead"
    if servers.sizes.pipeline > 1:
        yield f"{servers.text}: inference has no pipeline parallelism (p): use d and t"


def _nodes(allocation: Allocation, gpus_per_node: int) -> int:
    gpus = allocation.sizes.gpus
    if gpus % gpus_per_node:
        raise ValueError(
            f"{allocation.text}: {gpus} GPUs are not a whole number of nodes with {gpus_per_node} GPUs "
            "(deployment.gpus_per_node)"
        )
    return gpus // gpus_per_node


def _refuse(faults: Iterator[str] | list[str]) -> None:
    if lines := list(faults):
        raise ValueError("\n".join(lines))
