"""Validates safetensors checkpoint directories, as the trainer broadcasts them, before anything is loaded."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from safetensors import SafetensorError, safe_open

Shapes = dict[str, tuple[int, ...]]


class WeightError(Exception):
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
    """What to do with an export that `save_format = "torch"` wrote."""
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
    if (directory / "adapter_config.json").is_file():
        advice = "load it with /load_lora_adapter, or name weights that it is merged into"
        raise mismatch_error(directory, f"it is an adapter; {advice}")


def mismatch_error(directory: Path, reason: str) -> WeightError:
    """The error for a directory whose contents do not fit the model; the caller raises it."""
    return WeightError(f"{str(directory)!r} does not fit the model: {reason}")
