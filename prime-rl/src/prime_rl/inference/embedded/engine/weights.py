"""Updates the weights of a live model in place, from a checkpoint directory or from the trainer's weight group."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from transformers import PreTrainedModel

from prime_rl.inference.model_files import WeightError, mismatch_error, open_checkpoint, refuse_adapter
from prime_rl.inference.protocol import InitBroadcasterBody, RequestError
from prime_rl.inference.weight_group import NO_WEIGHT_GROUP, join_group, received_tensors
from prime_rl.transport.language_part import part_of
from prime_rl.transport.loading import Checkpoint, fill, unchanged
from prime_rl.transport.weights import WeightGroup
from prime_rl.utils.errors import first_line


class WeightSource:
    """Source of weight updates: checkpoint files, or the trainer's weight group."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.from_trainer = False
        """If true, tensors come from the trainer; a directory only names the version and has no weights to read."""
        self._group: WeightGroup | None = None

    def join(self, body: InitBroadcasterBody) -> None:
        """Join the trainer's weight group, replacing an earlier one. Blocks until the trainer is there.

        Raises:
            RequestError: this server was started to load weights from files.
            TransportError: the trainer does not appear in time, or expects another group.
        """
        if not self.from_trainer:
            raise RequestError(NO_WEIGHT_GROUP)
        self._group = join_group(body, self.device)

    def read(self, directory: Path) -> dict[str, Tensor]:
        """Read, or receive from the trainer, the tensors of the version that `directory` names.

        Raises:
            WeightError: the directory has no weights or no version, or the weight group has not been joined.
            TransportError: the trainer does not send the weights in time.
        """
        return dict(received_tensors(self._group, directory)) if self.from_trainer else read_weights(directory)


@torch.inference_mode()
def load_weights(model: PreTrainedModel, tensors: Mapping[str, Tensor], source: Path) -> None:
    """Copy `tensors` (named as on the hub) into the live parameters, in place. `source` names them in error messages.

    Names and shapes are compared before the first byte is copied. Fused and stacked weights, such as experts, are made
    as when the model was loaded.

    Raises:
        WeightError: a tensor is missing, unexpected, or has another shape, or the tensors are an adapter's.
    """
    refuse_adapter(source)
    part = part_of(model)
    if part is not None:
        tensors = part.from_checkpoint(tensors)
    try:
        plan = Checkpoint(tensors).plan(model)
    except (ValueError, RuntimeError) as exc:
        raise mismatch_error(source, first_line(exc)) from exc
    for kind in ("missing", "unexpected"):
        if names := sorted(plan.report[f"{kind}_keys"]):
            raise mismatch_error(source, f"{len(names)} {kind} tensors, such as {names[0]}")
    for name, given, wanted in sorted(plan.report["mismatched_keys"]):
        raise mismatch_error(source, f"{name} has shape {list(given)} instead of {list(wanted)}")
    fill(model, plan, None, unchanged)


def read_weights(directory: Path) -> dict[str, Tensor]:
    """Read all tensors from the safetensors files in `directory`.

    Raises:
        WeightError: the directory or a file is missing or unreadable.
    """
    tensors: dict[str, Tensor] = {}
    with open_checkpoint(directory) as files:
        for file, held in files.items():
            try:
                tensors.update(load_file(held))
            except (OSError, SafetensorError) as exc:
                raise WeightError(f"cannot read {str(file)!r}: {exc}") from exc
    return tensors
