"""The keys that users of AReaL know, on the roots of runs, and what they set in our keys."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Annotated, Any, Literal, get_args

from pydantic import AfterValidator, Field

from prime_rl.configs.areal.mode import Allocation, AllocationError, AllocationMode, parse
from prime_rl.configs.ranges import AUTO, LATEST
from prime_rl.configs.storage import KeptRunConfig
from prime_rl.utils.pydantic_config import BaseConfig
from prime_rl.utils.pydantic_config.base import NULL_TEXT, Derivation, note_derivation
from prime_rl.utils.pydantic_config.layers import set_at, value_at

# What an `allocation_mode` means in our keys: GPUs, nodes, and the parallelism of the servers.


Keys = Mapping[str, Any]
"""Dotted keys and their values."""

GPUS_PER_NODE = 8
"""The default of `deployment.gpus_per_node`."""


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


RecoverMode = Literal["disabled", "off", "on", "auto", "resume", "fault"]
Launcher = Literal["local", "ray", "slurm"]

RESUME_STEPS = {"on": AUTO, "auto": AUTO, "resume": LATEST}
"""What each mode of recovery sets `ckpt.resume_step` to. The others leave it."""
_KEYS: Mapping[str, Callable[[AllocationMode, int], Keys]] = {"sft": sft_keys, "rl": rl_keys}
_CHECKPOINTS = {"sft": ("ckpt",), "rl": ("ckpt", "trainer.ckpt")}
_ABSENT = object()


def _parsed(text: str) -> str:
    parse(text)
    return text


class RecoverConfig(BaseConfig):
    """What a start does with the checkpoints of its run, and how often a run that fails is started again."""

    mode: RecoverMode = "disabled"
    """`auto` and `on` continue from the newest checkpoint if there is one. `resume` requires one. `fault` continues
    only after a failure of this launch. `disabled` and `off` do none of it. An explicit `ckpt.resume_step` wins."""

    retries: int = Field(3, ge=0, le=100)
    """With `auto`, `on` and `fault`: how often a run that fails is started again, from its newest checkpoint."""

    @property
    def starts_again(self) -> int:
        return self.retries if self.mode in ("on", "auto", "fault") else 0


class LaunchedConfig(KeptRunConfig):
    """A config that a launcher starts. Read by the commands."""

    allocation_mode: Annotated[str, AfterValidator(_parsed)] | None = None
    """GPUs and parallelism in AReaL's notation, such as `vllm:d4+fsdp:d4`; sets `deployment` and
    `inference.parallel`. None leaves these keys as they are."""

    launcher: Launcher | None = None
    """Launcher of the run: this machine, Ray or Slurm. Commands of the others refuse the config. None allows all."""

    recover: RecoverConfig = RecoverConfig()
    """Restarts from checkpoints, with AReaL's keys."""

    @classmethod
    def prepare(cls, data: dict[str, Any]) -> dict[str, Any]:
        return super().prepare(with_derived_keys(cls.component, data))


def with_derived_keys(component: str, data: dict[str, Any]) -> dict[str, Any]:
    """Raw data of a run with what `allocation_mode` and `recover.mode` set.

    Raises:
        ValueError: the run cannot do what they ask for, or other keys contradict them; one line for each fault.
    """
    return _with_recovery(component, _with_allocation(component, data))


def _with_allocation(component: str, data: dict[str, Any]) -> dict[str, Any]:
    text = data.get("allocation_mode")
    per_node = str(value_at(data, ("deployment", "gpus_per_node"), GPUS_PER_NODE))
    if not isinstance(text, str) or text == NULL_TEXT or not (per_node.isdecimal() and per_node.strip("0")):
        return data
    try:
        mode = parse(text)
    except AllocationError:
        return data  # the field's own validator reports it
    try:
        keys = _KEYS[component](mode, int(per_node))
    except ValueError as error:
        raise ValueError("\n".join(f"allocation_mode: {line}" for line in str(error).splitlines())) from error
    if lines := list(conflicts(keys, data)):
        raise ValueError("\n".join(lines))
    return _with_keys(data, keys, "allocation_mode")


def _with_recovery(component: str, data: dict[str, Any]) -> dict[str, Any]:
    mode = value_at(data, ("recover", "mode"))
    if mode not in get_args(RecoverMode) or mode in ("disabled", "off"):
        return data
    saved = (value_at(data, tuple(key.split("."))) for key in _CHECKPOINTS[component])
    if all(section in (None, NULL_TEXT) for section in saved):
        raise ValueError(f"recover.mode = {mode!r} needs [ckpt]: without checkpoints there is nothing to continue from")
    step = RESUME_STEPS.get(mode)
    return data if step is None else _with_keys(data, {"ckpt.resume_step": step}, "recover.mode")


def _with_keys(data: dict[str, Any], keys: Keys, because: str) -> dict[str, Any]:
    """The data with keys that it lacks."""
    table = copy.deepcopy(data)
    for key, value in keys.items():
        path = tuple(key.split("."))
        if value_at(table, path, _ABSENT) is _ABSENT:
            note_derivation(Derivation(key, because))
            set_at(table, path, value)
    return table
