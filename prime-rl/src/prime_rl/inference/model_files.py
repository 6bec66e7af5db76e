"""Checks safetensors directories of models and LoRA adapters before anything is loaded.

Only headers are read, so torch is not imported. A directory of an adapter in PEFT's format holds `adapter_config.json`
and `adapter_model.safetensors`. For a linear layer at `<path>`, the keys are `base_model.model.<path>.lora_A.weight`
[R, I] and `lora_B.weight` [O, R], with rank R, I inputs and O outputs.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from prime_rl.checks.adapters import ADAPTER_CONFIG, ADAPTER_TENSORS, AdapterSettings
from prime_rl.checks.model_description import language_start
from prime_rl.utils.errors import RunError, StartFault

Shapes = dict[str, tuple[int, ...]]


class WeightError(RunError):
    """A directory does not contain weights of the served model. The live weights are unchanged."""


@contextlib.contextmanager
def open_checkpoint(directory: Path) -> Iterator[dict[Path, Path]]:
    """Open the safetensors files of a checkpoint. Yields, sorted by name, each file's path and the path to read it by.

    A trainer that resumes may replace the directory at any time. safetensors opens a file by its path more than once,
    and a second file could belong to another version. The paths to read by stay the same files, even deleted ones.

    Raises:
        WeightError: the directory or its files are missing or cannot be opened.
    """
    with contextlib.ExitStack() as stack:
        yield _opened(directory, stack)


def _opened(directory: Path, stack: contextlib.ExitStack) -> dict[Path, Path]:
    while True:
        try:
            folder = _open(directory, os.O_DIRECTORY, stack)
        except (FileNotFoundError, NotADirectoryError) as exc:
            raise WeightError(f"weight directory {str(directory)!r} does not exist") from exc
        except OSError as exc:
            raise WeightError(f"cannot read {str(directory)!r}: {exc}") from exc
        try:
            names = sorted(each.name for each in _held(folder).glob("*.safetensors"))
            files = {directory / name: _held(_open(_held(folder) / name, 0, stack)) for name in names}
        except OSError as exc:
            if _is_replaced(directory, folder):
                continue
            raise WeightError(f"cannot read {str(directory)!r}: {exc}") from exc
        if files:
            return files
        if not _is_replaced(directory, folder):
            raise WeightError(f"weight directory {str(directory)!r} has no .safetensors file{_advice(_held(folder))}")


def _advice(folder: Path) -> str:
    """Advice for an export that `save_format = "torch"` wrote."""
    if next(folder.glob("pytorch_model*.bin"), None) is None:
        return ""
    return ", but PyTorch's .bin, which a running server does not read: start one with this directory as its model"


def _open(path: Path, flags: int, stack: contextlib.ExitStack) -> int:
    descriptor = os.open(path, os.O_RDONLY | flags)
    stack.callback(os.close, descriptor)
    return descriptor


def _held(descriptor: int) -> Path:
    return Path(f"/proc/self/fd/{descriptor}")


def _is_replaced(directory: Path, descriptor: int) -> bool:
    return directory.is_dir() and not os.path.samestat(directory.stat(), os.fstat(descriptor))


def checkpoint_shapes(directory: Path) -> Shapes:
    """Read the shape of every tensor, keyed by name, from the safetensors headers.

    Raises:
        WeightError: a file is missing or damaged.
    """
    shapes: Shapes = {}
    with open_checkpoint(directory) as files:
        for file, held in files.items():
            try:
                with safe_open(held, framework="numpy") as tensors:
                    shapes |= {name: tuple(tensors.get_slice(name).get_shape()) for name in tensors.keys()}  # noqa: SIM118
            except (OSError, SafetensorError) as exc:
                raise WeightError(f"cannot read {str(file)!r}: {exc}") from exc
    return shapes


def check_same_model(directory: Path, base: Shapes) -> None:
    """Check that a checkpoint has the same tensor names and shapes as the base model. A tied head may be left out.

    Raises:
        WeightError: a tensor is missing, unexpected, or has another shape; the message names the first one.
    """
    shapes = checkpoint_shapes(directory)
    refuse_adapter(directory)
    tied = {"lm_head.weight"}
    # A run trains the language part of a checkpoint with a vision tower, and sends nothing else.
    start = language_start(base)
    if start is not None:
        base = {name: shape for name, shape in base.items() if name.startswith(start) or name in shapes}
    for kind, names in (("missing", base.keys() - shapes.keys()), ("unexpected", shapes.keys() - base.keys())):
        if odd := sorted(names - tied):
            raise mismatch_error(directory, f"{len(odd)} {kind} tensors, such as {odd[0]}")
    for name in base.keys() & shapes.keys():
        if shapes[name] != base[name]:
            raise mismatch_error(directory, f"{name} has shape {list(shapes[name])} instead of {list(base[name])}")


def refuse_adapter(directory: Path) -> None:
    """Refuse the directory of an adapter in place of a model's weights.

    Raises:
        WeightError: the directory holds an adapter.
    """
    if (directory / ADAPTER_CONFIG).is_file():
        advice = "load it with /load_lora_adapter, or name weights that it is merged into"
        raise mismatch_error(directory, f"it is an adapter; {advice}")


def mismatch_error(directory: Path, reason: str) -> WeightError:
    """The error for a directory whose contents do not fit the model; the caller raises it."""
    return WeightError(f"{str(directory)!r} does not fit the model: {reason}")


DEFAULT_MAX_RANK = 16
"""Default `max_lora_rank` for both engines, taken from vLLM. Used when the config leaves it unset."""

_KEY = re.compile(r"base_model\.model\.(?P<path>.+)\.lora_(?P<side>[AB])\.weight")


class AdapterMissing(WeightError):
    """The adapter directory, or a file in it, does not exist. On a network filesystem it may appear later: retry."""


@dataclass(frozen=True, slots=True)
class AdapterSpec:
    """A validated adapter. A layer's weight update is `scale * lora_B @ lora_A`."""

    scales: dict[str, float]
    """Scale of each linear layer that the adapter changes, by module path."""
    scale: float
    """The adapter's own scale, which a pattern may replace."""

    @staticmethod
    def key(path: str, side: str) -> str:
        return f"base_model.model.{path}.lora_{side}.weight"


def read_adapter_spec(directory: Path, base: Shapes, max_rank: int) -> AdapterSpec:
    """Check the adapter in `directory` against the shapes of the base model's tensors.

    Raises:
        AdapterMissing: the directory or one of its files does not exist.
        WeightError: the adapter is damaged, its rank exceeds `max_rank`, it is of another kind than LoRA, or it does
            not fit the base model.
    """
    for file in (directory / ADAPTER_CONFIG, directory / ADAPTER_TENSORS):
        if not file.is_file():
            raise AdapterMissing(f"adapter directory {str(directory)!r} has no {file.name}")
    try:
        settings = AdapterSettings.of(_read_config(directory))
    except StartFault as fault:
        raise mismatch_error(directory, str(fault)) from fault
    if settings.use_dora:
        advice = "which is not supported: serve weights that it is merged into, such as a run's export"
        raise mismatch_error(directory, f"{ADAPTER_CONFIG} has use_dora = True, {advice}")
    if (rank := settings.largest_rank) > max_rank:
        raise mismatch_error(directory, f"its rank is {rank}, but this server's max_lora_rank is {max_rank}")
    if settings.modules_to_save:
        saved = list(settings.modules_to_save)
        advice = "which is not supported: serve weights that it is merged into, such as a run's export"
        raise mismatch_error(directory, f"{ADAPTER_CONFIG} has modules_to_save = {saved!r}, {advice}")
    shapes = checkpoint_shapes(directory)
    paths = _paths(directory, shapes)
    # Adapters have the module names of the checkpoint's class, where files may have older ones.
    start, own = language_start(base), next((path for path in paths if ".layers." in path), None)
    if start is not None and own is not None:
        of_class = own[: own.index("layers.")]
        base = {of_class + name.removeprefix(start): shape for name, shape in base.items() if name.startswith(start)}
    for path in paths:
        _check_layer(directory, path, settings.rank_of(path), shapes, base)
    return AdapterSpec({path: settings.scale_of(path) for path in paths}, settings.scale)


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
            f"this server has weights of version {version}, but adapters need its initial weights: "
            "POST /reload_weights first"
        )


def _read_config(directory: Path) -> dict[str, Any]:
    try:
        config = json.loads((directory / ADAPTER_CONFIG).read_text())
    except (OSError, ValueError) as exc:
        raise WeightError(f"cannot read {str(directory / ADAPTER_CONFIG)!r}: {exc}") from exc
    if not isinstance(config, dict):
        raise mismatch_error(directory, f"{ADAPTER_CONFIG} is not a JSON object")
    return config


def _paths(directory: Path, shapes: Shapes) -> tuple[str, ...]:
    matches = {name: _KEY.fullmatch(name) for name in sorted(shapes)}
    if odd := [name for name, match in matches.items() if match is None]:
        raise mismatch_error(directory, f"{len(odd)} tensors do not belong to a LoRA layer, such as {odd[0]}")
    paths = dict.fromkeys(match["path"] for match in matches.values() if match is not None)
    if not paths:
        raise mismatch_error(directory, f"{ADAPTER_TENSORS} contains no tensors")
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
