"""Reads folders of LoRA adapters in PEFT's format: where a run keeps them, and what `adapter_config.json` says."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prime_rl.run.paths import RunPaths, stable_steps
from prime_rl.utils.errors import StartFault

if TYPE_CHECKING:
    from prime_rl.configs.model import LoRAConfig

ADAPTER_CONFIG, ADAPTER_TENSORS = "adapter_config.json", "adapter_model.safetensors"
ADAPTER_DIRECTORY = "lora_adapters"
"""Directory of the adapter in an export, with `ckpt.weights.save_adapter_separately`."""

_PLAIN_LORA: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none", None),
    "rank_pattern": ({}, None),
    "alpha_pattern": ({}, None),
    "use_dora": (False, None),
    "lora_bias": (False, None),
    "fan_in_fan_out": (False, None),
    "layer_replication": ([], None),
}
"""Accepted values of the keys in `adapter_config.json` that change what the two matrices mean."""


@dataclass(frozen=True, slots=True)
class AdapterSettings:
    """A layer's weight update is `scale * lora_B @ lora_A`."""

    rank: int
    scale: float
    modules_to_save: tuple[str, ...]
    """Modules that were trained in full, whose weights are in the adapter's file."""

    @classmethod
    def of(cls, config: dict[str, Any]) -> AdapterSettings:
        """Settings in the contents of an `adapter_config.json`.

        Raises:
            StartFault: they are not those of plain LoRA.
        """
        rank, alpha = config.get("r"), config.get("lora_alpha")
        if not isinstance(rank, int) or rank < 1 or not isinstance(alpha, int | float):
            raise StartFault(f"{ADAPTER_CONFIG} has r = {rank!r} and lora_alpha = {alpha!r}")
        for name, supported in _PLAIN_LORA.items():
            if config.get(name, supported[0]) not in supported:
                raise StartFault(f"{ADAPTER_CONFIG} has {name} = {config[name]!r}, which is not supported")
        # rsLoRA (Kalajdzievski 2023) divides by the root of the rank.
        scale = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
        return cls(rank, scale, tuple(config.get("modules_to_save") or ()))


def adapter_folder(path: Path) -> Path:
    """The adapter at `path`: a folder in PEFT's format, a run's directory (its last step), or one of its exports.

    Raises:
        StartFault: there is none.
    """
    if not path.is_dir():
        raise StartFault("no such directory; download an adapter of the hub first: hf download OWNER/NAME")
    weights = RunPaths(path).weights
    steps = [weights / f"step_{step}" for step in stable_steps(weights)]
    # A run's exports of other steps may be merged alone, for instance those that were only evaluated.
    for folder in (path, path / ADAPTER_DIRECTORY, *(step / ADAPTER_DIRECTORY for step in reversed(steps))):
        if (folder / ADAPTER_CONFIG).is_file():
            return folder
    if steps:
        raise StartFault(
            "this run kept no adapter apart from its weights: set model.name to its export "
            f"{steps[-1]}, which contains it, or train it with ckpt.weights.save_adapter_separately = true"
        )
    raise StartFault(f"it holds no {ADAPTER_CONFIG}, so it is neither an adapter in PEFT's format nor a run with one")


def read_settings(folder: Path) -> AdapterSettings:
    """The settings of the adapter in `folder`.

    Raises:
        StartFault: a file is missing, cannot be read, or does not describe plain LoRA.
    """
    if not (folder / ADAPTER_TENSORS).is_file():
        raise StartFault(f"{folder} has no {ADAPTER_TENSORS}")
    try:
        config = json.loads((folder / ADAPTER_CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise StartFault(f"cannot read {folder / ADAPTER_CONFIG}: {error}") from error
    if not isinstance(config, dict):
        raise StartFault(f"{folder / ADAPTER_CONFIG} is not a JSON object")
    return AdapterSettings.of(config)


def lora_fault(lora: LoRAConfig, path: Path) -> str | None:
    """Why training with `lora` cannot start from the adapter at `path`; None if nothing shows before it is loaded."""
    try:
        given = read_settings(adapter_folder(path))
    except StartFault as fault:
        return str(fault)
    if given.rank != lora.rank or not math.isclose(given.scale, lora.alpha / lora.rank, rel_tol=1e-6):
        alpha = given.scale * given.rank
        return (
            f"this adapter has rank {given.rank} and alpha {alpha:g}, and the config asks for rank {lora.rank} and "
            f"alpha {lora.alpha:g}: set rank = {given.rank} and alpha = {alpha:g}"
        )
    if given.modules_to_save and not lora.modules_to_save:
        names = ", ".join(f'"{name}"' for name in given.modules_to_save)
        return f"this adapter holds modules that were trained in full: set modules_to_save = [{names}]"
    return None
