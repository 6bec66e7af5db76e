"""LoRA adapter directories in PEFT's format, checked against the base model before anything is loaded.

`adapter_config.json` and `adapter_model.safetensors`, with the keys `base_model.model.<path>.lora_A.weight` [R, I] and
`lora_B.weight` [O, R] for a linear layer at `<path>`. Loads no torch: only the headers of the tensors are read.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prime_rl.inference.checkpoint_files import Shapes, WeightError, checkpoint_shapes, misfit

DEFAULT_MAX_RANK = 16
"""Of a server whose config does not say: vLLM's own default, for both engines."""

_CONFIG, _TENSORS = "adapter_config.json", "adapter_model.safetensors"
_KEY = re.compile(r"base_model\.model\.(?P<path>.+)\.lora_(?P<side>[AB])\.weight")
_PLAIN: dict[str, tuple[Any, ...]] = {
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
"""What an adapter may say in keys that would change what its two matrices mean."""


class AdapterMissing(WeightError):
    """The directory, or a file of it, is not there; on a network filesystem it may appear a moment later."""


@dataclass(frozen=True, slots=True)
class AdapterSpec:
    """A checked adapter. The product of a layer's matrices counts `scale` times."""

    tensors: Path
    scale: float
    paths: tuple[str, ...]
    """The linear layers that it changes."""

    @staticmethod
    def key(path: str, side: str) -> str:
        return f"base_model.model.{path}.lora_{side}.weight"


def read_adapter_spec(directory: Path, base: Shapes, max_rank: int) -> AdapterSpec:
    """Check the adapter in `directory` against the shapes of the base model's tensors.

    Raises:
        AdapterMissing: the directory or one of its files does not exist.
        WeightError: the adapter is damaged, larger than `max_rank`, more than plain LoRA, or made for another model.
    """
    for file in (directory / _CONFIG, directory / _TENSORS):
        if not file.is_file():
            raise AdapterMissing(f"adapter directory {str(directory)!r} holds no {file.name}")
    config = _read_config(directory)
    rank, alpha = config.get("r"), config.get("lora_alpha")
    if not isinstance(rank, int) or rank < 1 or not isinstance(alpha, int | float):
        raise misfit(directory, f"{_CONFIG} has r = {rank!r} and lora_alpha = {alpha!r}")
    if rank > max_rank:
        raise misfit(directory, f"its rank is {rank}, and this server's max_lora_rank is {max_rank}")
    for name, plain in _PLAIN.items():
        if config.get(name, plain[0]) not in plain:
            raise misfit(directory, f"{_CONFIG} has {name} = {config[name]!r}, which no engine here serves")
    shapes = checkpoint_shapes(directory)
    paths = _paths(directory, shapes)
    for path in paths:
        _check_layer(directory, path, rank, shapes, base)
    scale = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
    return AdapterSpec(directory / _TENSORS, scale, paths)


def check_name(name: str, base_model: str, loaded: Collection[str], max_loaded: int) -> None:
    """Whether an adapter may be loaded under `name`.

    Raises:
        WeightError: the name is the base model's, or there are as many adapters as the server keeps.
    """
    if not name or name == base_model:
        raise WeightError(f"{name!r} cannot name an adapter: it is {'the base model' if name else 'empty'}")
    if name not in loaded and len(loaded) >= max_loaded:
        raise WeightError(f"{len(loaded)} adapters are loaded, and this server's max_cpu_loras is {max_loaded}")


def check_base_version(version: int) -> None:
    """Raises WeightError unless the server holds the weights of its start, which are what adapters are made for."""
    if version != 0:
        raise WeightError(
            f"this server holds weights of version {version}, and adapters belong to those of its start: "
            "POST /reload_weights first"
        )


def _read_config(directory: Path) -> dict[str, Any]:
    try:
        config = json.loads((directory / _CONFIG).read_text())
    except (OSError, ValueError) as exc:
        raise WeightError(f"cannot read {str(directory / _CONFIG)!r}: {exc}") from exc
    if not isinstance(config, dict):
        raise misfit(directory, f"{_CONFIG} is no JSON object")
    return config


def _paths(directory: Path, shapes: Shapes) -> tuple[str, ...]:
    matches = {name: _KEY.fullmatch(name) for name in sorted(shapes)}
    if odd := [name for name, match in matches.items() if match is None]:
        raise misfit(directory, f"{len(odd)} tensors are no part of a LoRA layer, such as {odd[0]}")
    paths = dict.fromkeys(match["path"] for match in matches.values() if match is not None)
    if not paths:
        raise misfit(directory, f"{_TENSORS} holds no tensor")
    return tuple(paths)


def _check_layer(directory: Path, path: str, rank: int, shapes: Shapes, base: Shapes) -> None:
    weight = base.get(f"{path}.weight")
    if weight is None or len(weight) != 2:
        raise misfit(directory, f"the model has no linear layer {path}")
    num_outputs, num_inputs = weight
    for side, expected in (("A", (rank, num_inputs)), ("B", (num_outputs, rank))):
        key = AdapterSpec.key(path, side)
        if shapes.get(key) != expected:
            found = f"has shape {list(shapes[key])} instead of {list(expected)}" if key in shapes else "is missing"
            raise misfit(directory, f"{key} {found}")
