"""Validates safetensors checkpoint directories, as the trainer broadcasts them, before anything is loaded."""

from __future__ import annotations

from pathlib import Path

from safetensors import SafetensorError, safe_open

Shapes = dict[str, tuple[int, ...]]


class WeightError(Exception):
    """A directory does not contain weights of the served model. The live weights are unchanged."""


def checkpoint_files(directory: Path) -> list[Path]:
    """List the safetensors files of a checkpoint, sorted by name.

    Raises:
        WeightError: the directory or its files are missing.
    """
    if not directory.is_dir():
        raise WeightError(f"weight directory {str(directory)!r} does not exist")
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise WeightError(f"weight directory {str(directory)!r} has no .safetensors file")
    return files


def checkpoint_shapes(directory: Path) -> Shapes:
    """Read the shape of every tensor, keyed by name, from the safetensors headers.

    Raises:
        WeightError: a file is missing or damaged.
    """
    shapes: Shapes = {}
    for file in checkpoint_files(directory):
        try:
            with safe_open(file, framework="numpy") as tensors:
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
    tied = {"lm_head.weight"}
    for kind, names in (("missing", base.keys() - shapes.keys()), ("unexpected", shapes.keys() - base.keys())):
        if odd := sorted(names - tied):
            raise mismatch_error(directory, f"{len(odd)} {kind} tensors, such as {odd[0]}")
    for name in base.keys() & shapes.keys():
        if shapes[name] != base[name]:
            raise mismatch_error(directory, f"{name} has shape {list(shapes[name])} instead of {list(base[name])}")


def mismatch_error(directory: Path, reason: str) -> WeightError:
    """The error for a directory whose contents do not fit the model; the caller raises it."""
    return WeightError(f"{str(directory)!r} does not fit the model: {reason}")
