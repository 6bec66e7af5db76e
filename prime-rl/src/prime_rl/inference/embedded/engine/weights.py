"""Swapping the weights of a live model for those of a checkpoint."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import cast

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from transformers import PreTrainedModel

from prime_rl.inference.checkpoint_files import WeightError, checkpoint_files, misfit
from prime_rl.inference.embedded.errors import first_line
from prime_rl.inference.protocol import InitBroadcasterBody, RequestError
from prime_rl.inference.weight_group import NOT_STARTED_FOR_IT, join_group, received
from prime_rl.transport.weights import WeightGroup


class NewWeights:
    """Where versions after the first come from: files, or the trainer itself."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.from_trainer = False
        """The trainer sends the version that a directory names; there is nothing to read in it."""
        self._group: WeightGroup | None = None

    def join(self, body: InitBroadcasterBody) -> None:
        """Meet the trainer; blocks until it is there. A group of an earlier run is left.

        Raises:
            RequestError: this server was not started for it.
            TransportError: the trainer does not come, or means another group.
        """
        if not self.from_trainer:
            raise RequestError(NOT_STARTED_FOR_IT)
        self._group = join_group(body, self.device)

    def of(self, directory: Path) -> dict[str, Tensor]:
        """The tensors of the version in `directory`.

        Raises:
            WeightError: there is none, or this server has not joined the trainer's group.
            TransportError: the trainer does not send it.
        """
        return dict(received(self._group, directory)) if self.from_trainer else read_weights(directory)


@torch.inference_mode()
def load_weights(model: PreTrainedModel, tensors: Mapping[str, Tensor], source: Path) -> None:
    """Copy `tensors` (hub key naming) into the live parameters, in place. `source` is their name in errors.

    Everything is checked before the first byte is copied. A checkpoint whose keys are not the model's own (fused or
    stacked experts) is read by Transformers' loader, which knows the conversion of each architecture.

    Raises:
        WeightError: a tensor is missing, unknown, or of another shape.
    """
    own = _untied_state(model)
    tied = model.state_dict().keys() - own.keys()
    if tensors.keys() - tied != own.keys():
        tensors = _converted(model, tensors, source)
    _check_shapes(own, tensors, source)
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


def read_weights(directory: Path) -> dict[str, Tensor]:
    """The safetensors of `directory`.

    Raises:
        WeightError: the directory is missing or unreadable.
    """
    tensors: dict[str, Tensor] = {}
    for file in checkpoint_files(directory):
        try:
            tensors.update(load_file(file))
        except (OSError, SafetensorError) as exc:
            raise WeightError(f"cannot read {str(file)!r}: {exc}") from exc
    return tensors


def _converted(model: PreTrainedModel, tensors: Mapping[str, Tensor], source: Path) -> dict[str, Tensor]:
    try:
        answer: object = type(model).from_pretrained(
            None,
            config=model.config,
            state_dict=dict(tensors),
            dtype=model.dtype,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
        )
    except (ValueError, RuntimeError) as exc:
        raise misfit(source, first_line(exc)) from exc
    # Annotated as the model alone, it is a pair with `output_loading_info`.
    loaded, report = cast("tuple[PreTrainedModel, Mapping[str, Iterable[object]]]", answer)
    for kind in ("missing", "unexpected", "mismatched"):
        if names := sorted(map(str, report[f"{kind}_keys"])):
            raise misfit(source, f"{len(names)} {kind} tensors, such as {names[0]}")
    return loaded.state_dict()


def _check_shapes(own: dict[str, Tensor], tensors: Mapping[str, Tensor], source: Path) -> None:
    for name, parameter in own.items():
        if tensors[name].shape != parameter.shape:
            raise misfit(source, f"{name} has shape {list(tensors[name].shape)} instead of {list(parameter.shape)}")
