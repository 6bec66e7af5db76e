"""Forecasts what a run will write to disk, from the model's files and the config, without loading the model."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import lcm, prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prime_rl.checks.start_dir import gpus_here
from prime_rl.configs.optim import LOW_BITS, is_rounded
from prime_rl.configs.trainer import CheckpointConfig, OptimizerConfig, TrainerConfig
from prime_rl.run.checkpoints import DEFAULT_KEPT
from prime_rl.utils.files import size_text
from prime_rl.utils.private import home_directory

if TYPE_CHECKING:
    from prime_rl.configs.sft import SFTConfig

_BYTES = {"float32": 4, "bfloat16": 2}
_STATES = {"adamw": 2, "adafactor": 0, "muon": 2, "sgd": 1}
"""Values that an optimizer keeps for each parameter, at most."""
_HEADER_LIMIT = 2**28
_ADVICE = "set ckpt.keep_last, a larger ckpt.interval or another output_dir"


@dataclass(frozen=True, slots=True)
class ModelSize:
    """Size of a model's files."""

    parameters: int
    bytes_each: int
    """4 for float32, otherwise 2: other dtypes are exported as bfloat16."""


@dataclass(frozen=True, slots=True)
class Written:
    """Directories of one kind that a run leaves on disk."""

    what: str
    count: int | None
    """At the most at any time. None if that grows until the run is stopped."""
    bytes_each: int

    def __str__(self) -> str:
        size = size_text(self.bytes_each)
        if self.count is None:
            return f"{size} for each {self.what}"
        return f"{self.count} {self.what}{'s' if self.count > 1 else ''} of {size}"


@dataclass(frozen=True, slots=True)
class DiskForecast:
    """Most bytes that a run will write, and the bytes that are free there."""

    parts: tuple[Written, ...]
    free_bytes: int

    @property
    def needed_bytes(self) -> int:
        """A part that grows without end counts with one directory."""
        return sum((part.count or 1) * part.bytes_each for part in self.parts)

    @property
    def fits(self) -> bool:
        return self.needed_bytes <= self.free_bytes

    def __str__(self) -> str:
        listed = f"{', '.join(map(str, self.parts))}; {size_text(self.free_bytes)} are free"
        if not self.fits:
            return f"this run needs up to {size_text(self.needed_bytes)} on disk ({listed}): {_ADVICE}"
        is_bounded = all(part.count is not None for part in self.parts)
        return f"up to {size_text(self.needed_bytes)} ({listed})" if is_bounded else listed


def disk_forecast(config: SFTConfig | TrainerConfig, output_dir: Path) -> Iterator[str]:
    """Most bytes that the run will write and the free ones, in one line. Empty if the model's size is unknown."""
    forecast = forecast_disk(config, output_dir, model_size(config.model.name))
    if forecast is not None:
        yield f"{'disk' if forecast.fits else 'warning'}: {forecast}"


def forecast_disk(config: SFTConfig | TrainerConfig, output_dir: Path, size: ModelSize | None) -> DiskForecast | None:
    """The forecast for a model of a known size. `output_dir` need not exist yet."""
    if size is None or config.bench is not None:
        return None
    parts = tuple(part for part in _parts(config, size) if part.count != 0 and part.bytes_each)
    return DiskForecast(parts, shutil.disk_usage(existing_parent(output_dir)).free)


def model_size(name: str) -> ModelSize | None:
    """The size of a local model or of one in the hub's cache, from its safetensors headers; None if there are none."""
    return size_of_folder(Path(name) if Path(name).is_dir() else snapshot_in_cache(name, default_hub_cache()))


def size_of_folder(folder: Path | None) -> ModelSize | None:
    """The same for a folder with a model's files; None for no folder."""
    parameters = stored = 0
    for tensor in _stored_tensors(folder).values() if folder is not None else ():
        parameters += prod(tensor["shape"])
        start, end = tensor["data_offsets"]
        stored += end - start
    return ModelSize(parameters, 4 if stored > 3 * parameters else 2) if parameters else None


class PackedShape(tuple[int, ...]):
    """Shape of a weight that is stored in 4 bits, as bitsandbytes does."""

    __slots__ = ()


def tensor_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Shapes by name, from the headers of a folder's safetensors files; empty if it has none."""
    return {
        name: (PackedShape if "is_packed" in tensor else tuple)(tensor["shape"])
        for name, tensor in _stored_tensors(folder).items()
    }


def _parts(config: SFTConfig | TrainerConfig, size: ModelSize) -> Iterator[Written]:
    ckpt = config.ckpt
    kept: int | None = 0
    # Models that are trained: adapters and their states are small.
    trained = [(size, config.model.lora, config.optim)]
    if isinstance(config, TrainerConfig) and (critic := config.critic) is not None:
        of_critic = size if critic.name is None else model_size(critic.name) or size
        trained.append((of_critic, critic.lora, critic.optim))
    if ckpt is not None:
        kept = _kept(ckpt, config.max_steps, DEFAULT_KEPT)
        size_of = _BYTES[config.model.optimization_dtype]
        in_full = [(of.parameters, optim) for of, lora, optim in trained if lora is None]
        # One more checkpoint exists while it is written.
        each = sum(int(count * (size_of + _state_bytes(optim, size_of))) for count, optim in in_full)
        yield Written("checkpoint", None if kept is None else kept + 1, each)
    if ckpt is None or ckpt.weights is not None:
        dtype = "auto" if ckpt is None or ckpt.weights is None else ckpt.weights.dtype
        each = sum(of.parameters for of, *_ in trained) * _BYTES.get(dtype, size.bytes_each)
        yield Written("export", 1 if ckpt is None else _kept(ckpt, config.max_steps, None), each)
    if not isinstance(config, TrainerConfig) and config.eval is not None:
        # One that is evaluated, and the next. More wait if an evaluation takes longer than the steps between two.
        yield Written("evaluation export", 2, size.parameters * size.bytes_each)
    sends_weights = isinstance(config, TrainerConfig) and not config.model.sends_adapter
    if isinstance(config, TrainerConfig) and sends_weights and config.weight_broadcast.type == "filesystem":
        each = size.parameters * _computed_bytes(config)
        # The versions that servers may still read, one that is written, and those of checkpoints.
        recent = config.max_async_level + 2
        yield Written("broadcast", None if kept is None else recent + kept, each)


def _state_bytes(optim: OptimizerConfig, size: int) -> float:
    """Bytes of an optimizer's states for each parameter of `size` bytes, at most."""
    if (low := LOW_BITS.get(optim.type)) is not None:
        return low.state_bytes
    return _STATES[optim.type] * (_BYTES["float32"] if is_rounded(optim) else size)


def _kept(ckpt: CheckpointConfig, max_steps: int | None, default: int | None) -> int | None:
    """Number of steps that stay on disk; None if it grows without end."""
    has_rule = ckpt.keep_last is not None or ckpt.keep_interval is not None
    last = ckpt.keep_last if has_rule else default
    best = int(ckpt.keep_best)
    if ckpt.interval is None:
        return 1 + best
    if max_steps is None:
        return None if ckpt.keep_interval is not None or last is None else last + best
    saves = -(-max_steps // ckpt.interval)
    if last is None and ckpt.keep_interval is None:
        return saves
    multiples = 0 if ckpt.keep_interval is None else max_steps // lcm(ckpt.interval, ckpt.keep_interval)
    return min(saves, (last or 0) + multiples) + best


def _computed_bytes(config: TrainerConfig) -> int:
    if config.model.compute_dtype != "auto":
        return _BYTES[config.model.compute_dtype]
    return 2 if config.device != "cpu" and gpus_here() else 4


PACKED_STATE = ".quant_state.bitsandbytes__"
PACKED_PARTS = (".absmax", ".quant_map", ".nested_absmax", ".nested_quant_map")


def _stored_tensors(folder: Path) -> dict[str, dict[str, Any]]:
    """The tensors by name. A weight in 4 bits has its own shape, and `is_packed`; its parts are left out."""
    files = {file: _header(file) for file in sorted(folder.glob("*.safetensors"))}
    found: dict[str, dict[str, Any]] = {
        name: tensor for header in files.values() for name, tensor in header.items() if "shape" in tensor
    }
    for file, header in files.items():
        for name in [name for name in header if PACKED_STATE in name]:
            weight, state = name.partition(PACKED_STATE)[0], _packed_state(file, found.pop(name))
            for part in PACKED_PARTS:
                found.pop(weight + part, None)
            if weight in found and state is not None:
                found[weight] = {**found[weight], "shape": state["shape"], "is_packed": True}
    return found


def packed_fault(folder: Path) -> str | None:
    """What is wrong with the 4-bit weights of a folder; None if their headers and descriptions are whole."""
    files = {file: _header(file) for file in sorted(folder.glob("*.safetensors"))}
    held = {name for header in files.values() for name in header}
    for file, header in files.items():
        for name in [name for name in header if PACKED_STATE in name]:
            if (state := _packed_state(file, header[name])) is None:
                return f"{file.name}: {name} is damaged"
            parts = ("", *(PACKED_PARTS if "nested_offset" in state else PACKED_PARTS[:2]))
            whole = (name.partition(PACKED_STATE)[0] + part for part in parts)
            if missing := next((part for part in whole if part not in held), None):
                return f"{missing} is missing, and {name} is in {file.name}"
    return None


def _packed_state(file: Path, tensor: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """bitsandbytes' description of a weight in 4 bits, a tensor of `file`; None if it is damaged."""
    try:
        state = json.loads(_read_bytes(file, tensor["data_offsets"]))
    except (OSError, ValueError, RecursionError):
        return None
    return state if isinstance(state, dict) and {"shape", "blocksize", "dtype"} <= state.keys() else None


def _read_bytes(file: Path, offsets: Sequence[int]) -> bytes:
    """Bytes of a tensor in a safetensors file."""
    with file.open("rb") as stream:
        start = 8 + int.from_bytes(stream.read(8), "little")
        stream.seek(start + offsets[0])
        return stream.read(offsets[1] - offsets[0])


def _header(file: Path) -> dict[str, dict[str, list[int]]]:
    """The table of a safetensors file; empty if it is damaged."""
    try:
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            header = json.loads(stream.read(length)) if length < _HEADER_LIMIT else {}
    except (OSError, ValueError):
        return {}  # loading the model will say what is wrong with it
    return header if isinstance(header, dict) else {}


def default_hub_cache() -> Path:
    """Directory of the hub's cache in this process's environment."""
    home = Path(os.environ.get("HF_HOME") or home_directory() / ".cache" / "huggingface")
    return Path(os.environ.get("HF_HUB_CACHE") or home / "hub")


def snapshot_in_cache(name: str, cache: Path, kind: str = "models") -> Path | None:
    """The folder of a hub repository's main branch in `cache`; None if it is not there. `kind`: models or datasets."""
    repository = cache / f"{kind}--{name.replace('/', '--')}"
    reference = repository / "refs" / "main"
    return repository / "snapshots" / reference.read_text().strip() if reference.is_file() else None


def existing_parent(path: Path) -> Path:
    """`path`, or the closest directory above it that exists."""
    path = path.absolute()
    return next(parent for parent in (path, *path.parents) if parent.exists())
