"""Swapping the weights of a live model for those of a checkpoint directory."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from transformers import PreTrainedModel

from prime_rl.inference.checkpoints import WeightError, checkpoint_files, misfit
from prime_rl.inference.embedded.errors import first_line


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
        tensors = _converted(model, tensors, directory)
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
    tensors: dict[str, Tensor] = {}
    for file in checkpoint_files(directory):
        try:
            tensors.update(load_file(file))
        except (OSError, SafetensorError) as exc:
            raise WeightError(f"cannot read {str(file)!r}: {exc}") from exc
    return tensors


def _converted(model: PreTrainedModel, tensors: dict[str, Tensor], directory: Path) -> dict[str, Tensor]:
    try:
        loaded, report = type(model).from_pretrained(
            None,
            config=model.config,
            state_dict=tensors,
            dtype=model.dtype,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
        )
    except (ValueError, RuntimeError) as exc:
        raise misfit(directory, first_line(exc)) from exc
    for kind in ("missing", "unexpected", "mismatched"):
        if names := sorted(map(str, report[f"{kind}_keys"])):
            raise misfit(directory, f"{len(names)} {kind} tensors, such as {names[0]}")
    return loaded.state_dict()


def _check_shapes(own: dict[str, Tensor], tensors: dict[str, Tensor], directory: Path) -> None:
    for name, parameter in own.items():
        if tensors[name].shape != parameter.shape:
            raise misfit(directory, f"{name} has shape {list(tensors[name].shape)} instead of {list(parameter.shape)}")
