"""Swapping the weights of a live model for those of a checkpoint directory."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from transformers import PreTrainedModel

from prime_rl.inference.embedded.errors import WeightError


@torch.inference_mode()
def load_weights(model: PreTrainedModel, directory: Path) -> None:
    """Copy the safetensors of `directory` (hub key naming) into the live parameters, in place.

    Everything is checked before the first byte is copied. A checkpoint whose keys are not the model's own (fused or
    stacked experts) is read by Transformers' loader, which knows the conversion of each architecture.

    Raises:
        WeightError: the directory is missing or unreadable, or a tensor is missing, unknown, or of another shape.
    """
    own = _untied_state(model)
    tensors = _read(directory)
    tied = model.state_dict().keys() - own.keys()
    if tensors.keys() - tied != own.keys():
        tensors = _converted(model, directory)
    _check_shapes(own, tensors, directory)
    for name, parameter in own.items():
        parameter.copy_(tensors[name])


def _untied_state(model: PreTrainedModel) -> dict[str, Tensor]:
    """The state dict without second names of a tensor: a tied head is its embedding."""
    state: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, tensor in model.state_dict().items():
        if tensor.data_ptr() not in seen:
            seen.add(tensor.data_ptr())
            state[name] = tensor
    return state


def _read(directory: Path) -> dict[str, Tensor]:
    files = sorted(directory.glob("*.safetensors"))
    if not directory.is_dir():
        raise WeightError(f"weight directory {str(directory)!r} does not exist")
    if not files:
        raise WeightError(f"weight directory {str(directory)!r} holds no .safetensors file")
    tensors: dict[str, Tensor] = {}
    for file in files:
        try:
            tensors.update(load_file(file))
        except (OSError, SafetensorError) as exc:
            raise WeightError(f"cannot read {str(file)!r}: {exc}") from exc
    return tensors


def _converted(model: PreTrainedModel, directory: Path) -> dict[str, Tensor]:
    try:
        loaded, report = type(model).from_pretrained(
            directory, config=model.config, dtype=model.dtype, output_loading_info=True, ignore_mismatched_sizes=True
        )
    except (OSError, ValueError, RuntimeError) as exc:
        raise WeightError(f"{str(directory)!r} does not load as {type(model).__name__}: {exc}") from exc
    for kind in ("missing_keys", "unexpected_keys"):
        if names := sorted(report[kind]):
            label = kind.removesuffix("_keys")
            raise WeightError(f"{str(directory)!r} does not fit the model: {len(names)} {label}, such as {names[0]}")
    if mismatched := sorted(report["mismatched_keys"]):
        raise WeightError(f"{str(directory)!r} does not fit the model: wrong shape of {mismatched[0]}")
    return loaded.state_dict()


def _check_shapes(own: dict[str, Tensor], tensors: dict[str, Tensor], directory: Path) -> None:
    for name, parameter in own.items():
        if tensors[name].shape != parameter.shape:
            raise WeightError(
                f"{str(directory)!r} does not fit the model: {name} is {list(tensors[name].shape)}, "
                f"not {list(parameter.shape)}"
            )
