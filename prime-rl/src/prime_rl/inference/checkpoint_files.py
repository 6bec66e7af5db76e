"""Checkpoint directories as the trainer broadcasts them: safetensors files, checked before anything is loaded."""

from __future__ import annotations

from pathlib import Path

from safetensors import SafetensorError, safe_open

Shapes = dict[str, tuple[int, ...]]


class WeightError(Exception):
    """A directory does not hold weights of the served model. The live weights were not changed."""


def checkpoint_files(directory: Path) -> list[Path]:
    """The safetensors files of a checkpoint.

    Raises:
        WeightError: the directory or its files are missing.
    """
    if not directory.is_dir():
        raise WeightError(f"weight directory {str(directory)!r} does not exist")
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise WeightError(f"weight directory {str(directory)!r} holds no .safetensors file")
    return files


def checkpoint_shapes(directory: Path) -> Shapes:
    """Shape of every tensor, from the files' headers.

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
    """Refuse a checkpoint whose tensors are not those of the start weights. A tied head may be there or not.

    Raises:
        WeightError: names the first tensor that is missing, unknown, or of another shape.
    """
    shapes = checkpoint_shapes(directory)
    tied = {"lm_head.weight"}
    for kind, names in (("missing", base.keys() - shapes.keys()), ("unexpected", shapes.keys() - base.keys())):
        if odd := sorted(names - tied):
            raise misfit(directory, f"{len(odd)} {kind} tensors, such as {odd[0]}")
    for name in base.keys() & shapes.keys():
        if shapes[name] != base[name]:
            raise misfit(directory, f"{name} has shape {list(shapes[name])} instead of {list(base[name])}")


def misfit(directory: Path, reason: str) -> WeightError:
    return WeightError(f"{str(directory)!r} does not fit the model: {reason}")
