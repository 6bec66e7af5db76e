"""Validates LoRA adapter directories in PEFT's format against the base model before anything is loaded.

A directory holds `adapter_config.json` and `adapter_model.safetensors`. For a linear layer at `<path>`, the keys are
`base_model.model.<path>.lora_A.weight` [R, I] and `lora_B.weight` [O, R], with rank R, I inputs and O outputs.
Only safetensors headers are read, so torch is not imported.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prime_rl.inference.checkpoint_files import Shapes, WeightError, checkpoint_shapes, mismatch_error

DEFAULT_MAX_RANK = 16
"""Default `max_lora_rank` for both engines, taken from vLLM. Used when the config leaves it unset."""

_CONFIG, _TENSORS = "adapter_config.json", "adapter_model.safetensors"
_KEY = re.compile(r"base_model\.model\.(?P<path>.+)\.lora_(?P<side>[AB])\.weight")
_SUPPORTED_VALUES: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none", None),
    "modules_to_save": ([], None),
    "rank_pattern": ({}, None),
    "alpha_pattern": ({}, None),
    "use_dora": (False, None),
    "lora_bias": (False, None),
    "fan_in_fan_out": (False, None),
    "layer_replication": ([], None),
}
"""Accepted values of the keys in `adapter_config.json` that change what the two matrices mean."""


class AdapterMissing(WeightError):
    """The adapter directory, or a file in it, does not exist. On a network filesystem it may appear later: retry."""


@dataclass(frozen=True, slots=True)
class AdapterSpec:
    """A validated adapter. A layer's weight update is `scale * lora_B @ lora_A`."""

    scale: float
    paths: tuple[str, ...]
    """Module paths of the linear layers that the adapter changes."""

    @staticmethod
    def key(path: str, side: str) -> str:
        return f"base_model.model.{path}.lora_{side}.weight"


def read_adapter_spec(directory: Path, base: Shapes, max_rank: int) -> AdapterSpec:
    """Check the adapter in `directory` against the shapes of the base model's tensors.

    Raises:
        AdapterMissing: the directory or one of its files does not exist.
        WeightError: the adapter is damaged, its rank exceeds `max_rank`, it uses more than plain LoRA, or it does not
            fit the base model.
    """
    for file in (directory / _CONFIG, directory / _TENSORS):
        if not file.is_file():
            raise AdapterMissing(f"adapter directory {str(directory)!r} has no {file.name}")
    config = _read_config(directory)
    rank, alpha = config.get("r"), config.get("lora_alpha")
    if not isinstance(rank, int) or rank < 1 or not isinstance(alpha, int | float):
        raise mismatch_error(directory, f"{_CONFIG} has r = {rank!r} and lora_alpha = {alpha!r}")
    if rank > max_rank:
        raise mismatch_error(directory, f"its rank is {rank}, but this server's max_lora_rank is {max_rank}")
    for name, supported in _SUPPORTED_VALUES.items():
        if config.get(name, supported[0]) not in supported:
            raise mismatch_error(directory, f"{_CONFIG} has {name} = {config[name]!r}, which is not supported")
    shapes = checkpoint_shapes(directory)
    paths = _paths(directory, shapes)
    for path in paths:
        _check_layer(directory, path, rank, shapes, base)
    scale = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
    return AdapterSpec(scale, paths)


def check_name(name: str, base_model: str, loaded: Collection[str], max_loaded: int) -> None:
    """Check that an adapter may be loaded under `name`.

    Raises:
        WeightError: the name is empty or the base model's, or the server already holds `max_loaded` adapters.
    """
    if not name or name == base_model:
        raise WeightError(f"cannot name an adapter {name!r}: it is {'the base model' if name else 'empty'}")
    if name not in loaded and len(loaded) >= max_loaded:
        raise WeightError(f"{len(loaded)} adapters are loaded, but this server's max_cpu_loras is {max_loaded}")


def check_base_version(version: int) -> None:
    """Raise WeightError unless the server holds its initial weights, because adapters are trained on those."""
    if version != 0:
        raise WeightError(
            f"this server holds weights of version {version}, but adapters need its initial weights: "
            "POST /reload_weights first"
        )


def _read_config(directory: Path) -> dict[str, Any]:
    try:
        config = json.loads((directory / _CONFIG).read_text())
    except (OSError, ValueError) as exc:
        raise WeightError(f"cannot read {str(directory / _CONFIG)!r}: {exc}") from exc
    if not isinstance(config, dict):
        raise mismatch_error(directory, f"{_CONFIG} is not a JSON object")
    return config


def _paths(directory: Path, shapes: Shapes) -> tuple[str, ...]:
    matches = {name: _KEY.fullmatch(name) for name in sorted(shapes)}
    if odd := [name for name, match in matches.items() if match is None]:
        raise mismatch_error(directory, f"{len(odd)} tensors do not belong to a LoRA layer, such as {odd[0]}")
    paths = dict.fromkeys(match["path"] for match in matches.values() if match is not None)
    if not paths:
        raise mismatch_error(directory, f"{_TENSORS} contains no tensors")
    return tuple(paths)


def _check_layer(directory: Path, path: str, rank: int, shapes: Shapes, base: Shapes) -> None:
    weight = base.get(f"{path}.weight")
    if weight is None or len(weight) != 2:
        raise mismatch_error(directory, f"the model has no linear layer {path}")
    num_outputs, num_inputs = weight
    for side, expected in (("A", (rank, num_inputs)), ("B", (num_outputs, rank))):
        key = AdapterSpec.key(path, side)
        if shapes.get(key) != expected:
            found = f"has shape {list(shapes[key])} instead of {list(expected)}" if key in shapes else "is missing"
            raise mismatch_error(directory, f"{key} {found}")
