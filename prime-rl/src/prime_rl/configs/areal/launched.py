"""The keys that users of AReaL know, on the roots of runs."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal, get_args

from pydantic import AfterValidator, Field

from prime_rl.configs.areal.grammar import AllocationError
from prime_rl.configs.areal.keys import GPUS_PER_NODE, Keys, conflicts, rl_keys, sft_keys
from prime_rl.configs.areal.mode import AllocationMode, parse
from prime_rl.configs.ranges import AUTO, LATEST
from prime_rl.configs.storage import KeptRunConfig
from prime_rl.utils.pydantic_config import BaseConfig
from prime_rl.utils.pydantic_config.base import NULL_TEXT, Derivation, note_derivation
from prime_rl.utils.pydantic_config.layers import set_at, value_at

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
    """AReaL's way to give GPUs and parallelism in one text, such as `vllm:d4+fsdp:d4`; sets `deployment` and
    `inference.parallel`. None: these keys say it themselves."""

    launcher: Launcher | None = None
    """Who starts the run: this machine, Ray or Slurm. The commands of the others refuse it. None fits all."""

    recover: RecoverConfig = RecoverConfig()
    """Starting again, in AReaL's words."""

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
