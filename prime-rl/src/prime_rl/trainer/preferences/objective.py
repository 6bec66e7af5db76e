"""The objective of preference training: log-probabilities of both answers of each pair, and the loss of a pair."""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import islice
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

from prime_rl.configs.dpo import PreferenceLossConfig
from prime_rl.run.process import own_beats
from prime_rl.trainer.model.scoring import LogitsOf, score_tokens, target_logprobs
from prime_rl.trainer.preferences.losses import LOSSES, PairLogprobs, rewards
from prime_rl.trainer.process.errors import CheckpointError
from prime_rl.trainer.process.mesh import Mesh
from prime_rl.trainer.rl.rows import Sequences
from prime_rl.trainer.sft.data.packer import PackedRow, lay_out
from prime_rl.trainer.sft.data.samples import DatasetStream
from prime_rl.trainer.sft.step import RowSums
from prime_rl.trainer.sft.validation import evaluating, packed
from prime_rl.transport.weights import to_device
from prime_rl.utils.errors import one_line
from prime_rl.utils.files import replacing_file
from prime_rl.utils.logger import count_of, get_logger


class Preferences:
    """The mean of the loss over pairs, and with an SFT term the mean cross-entropy of the chosen answers' tokens."""

    def __init__(self, config: PreferenceLossConfig, reference: Tensor | None = None) -> None:
        self.config = config
        self.reference = reference
        """Log-probabilities [rows, 2] of chosen and rejected answer of each of the dataset's rows under the starting
        model, on the host. None for a loss that needs none."""

    @property
    def weights(self) -> Sequence[float]:
        return (1.0, self.config.sft_weight) if self.config.sft_weight else (1.0,)

    def sizes(self, row: PackedRow) -> Sequence[int]:
        chosen_tokens = sum(pair.chosen.targets for pair in row.pairs)
        return (len(row.pairs), chosen_tokens)[: len(self.weights)]

    def sums(self, model: PreTrainedModel, row: PackedRow, device: torch.device) -> RowSums:
        logprobs, counts = sequence_logprobs(model, row, device)
        pairs = PairLogprobs(*logprobs.unbind(1), *counts.unbind(1), *self._references(row, device).unbind(1))
        losses = [LOSSES[self.config.type](pairs, self.config).sum(), -pairs.chosen.sum()]
        chosen, rejected = rewards(pairs, self.config)
        metrics = {
            "rewards/chosen": chosen,
            "rewards/rejected": rejected,
            "rewards/accuracies": (chosen > rejected).float(),
            "rewards/margins": chosen - rejected,
            "logps/chosen": pairs.chosen.detach(),
            "logps/rejected": pairs.rejected.detach(),
        }
        return RowSums(losses[: len(self.weights)], {name: values.sum() for name, values in metrics.items()})

    def _references(self, row: PackedRow, device: torch.device) -> Tensor:
        if not self.config.needs_reference:
            return torch.zeros(len(row.pairs), 2, device=device)
        assert self.reference is not None, "computed before the first step"
        return to_device(self.reference[[pair.key for pair in row.pairs]], device)


def sequence_logprobs(model: PreTrainedModel, row: PackedRow, device: torch.device) -> tuple[Tensor, Tensor]:
    """For both answers of each pair: the sum of the trained tokens' log-probabilities, and their number. [pairs, 2]"""
    lengths = [sequence.targets for pair in row.pairs for sequence in pair.sequences]
    sequences = Sequences.of_lengths(lengths, device)
    trained, targets, input_ids_T = (
        to_device(torch.from_numpy(values), device)
        for values in (np.flatnonzero(row.is_trained), row.target_ids[row.is_trained], row.input_ids)
    )

    def score(hidden_TH: Tensor, logits_of: LogitsOf) -> Tensor:
        return target_logprobs(model, hidden_TH[trained], targets, logits_of)

    logprobs_M = score_tokens(model, input_ids_T[None], torch.from_numpy(row.position_ids)[None], score)
    # A row without pairs keeps its graph: its backward pass takes part in collectives.
    sums_S = sequences.sum(logprobs_M) if lengths else logprobs_M.sum()[None][:0]
    return sums_S.view(-1, 2), sequences.lengths_S.view(-1, 2)


# The reference: log-probabilities of every answer under the model that the run starts from. They are computed once,
# so that no second model is held. A new adapter changes nothing, so with LoRA this is the model without its adapter.

_WINDOW = 1024
"""Rows of data that are tokenized and packed at once. More would fill rows better and hold more tokens in memory."""


def reference_logprobs(model: PreTrainedModel, stream: DatasetStream, mesh: Mesh) -> Tensor:
    """Log-probabilities [rows, 2] of chosen and rejected answer of each of the dataset's rows; 0 for rows that are not
    trained on. A collective call."""
    axis, device = mesh.data_axis, mesh.process.device
    found = torch.zeros(stream.row_count, 2)
    own = stream.own_share()
    with evaluating(model):
        # Every data rank takes as many windows, and as many rows of each: sharded weights are gathered together.
        for _ in range(0, -(-stream.row_count // axis.data_size), _WINDOW):
            samples = [sample for made in islice(own, _WINDOW) for sample in made.samples]
            rows = packed(samples, stream.config)
            empty = lay_out([], stream.config.row_tokens, stream.config.seq_len)
            counts = axis.sum_counts([len(rows) if rank == axis.data_rank else 0 for rank in range(axis.data_size)])
            for row in (*rows, *[empty] * (max(counts) - len(rows))):
                own_beats().tick()
                logprobs, _ = sequence_logprobs(model, row, device)
                found[[pair.key for pair in row.pairs]] = logprobs.float().cpu()
    if axis.data_size > 1:
        on_device = found.to(device)
        dist.all_reduce(on_device, group=axis.group)
        found = on_device.cpu()
    return found


def kept_reference(
    model: PreTrainedModel, stream: DatasetStream, mesh: Mesh, file: Path | None, fingerprint: str, *, is_resumed: bool
) -> Tensor:
    """`reference_logprobs`, which a run with checkpoints keeps in `file`. A collective call, before a checkpoint is
    loaded: until then, `model` is the one that the run starts from.

    A resumed run reads the file, if it is for the same data: weights at `model.name` may have changed meanwhile.

    Raises:
        CheckpointError: the file is damaged, or cannot be written.
    """
    process, section = mesh.process, stream.config.section
    if is_resumed and file is not None and file.is_file():
        try:
            with safe_open(file, "pt") as saved:
                if (saved.metadata() or {}).get("fingerprint") == fingerprint:
                    logprobs: Tensor = saved.get_tensor("logprobs")
                    return logprobs
        except (OSError, SafetensorError) as error:
            raise CheckpointError(
                f"{file} is damaged ({one_line(error)}): restore it, or remove it and the resumed run computes these "
                "log-probabilities again with the weights at model.name"
            ) from error
    own_beats().say(f"log-probabilities of {section} under the starting model")
    started_s = time.perf_counter()
    logprobs = reference_logprobs(model, stream, mesh)
    if process.is_main:
        get_logger().info(
            f"Reference: log-probabilities of {count_of('pair', stream.row_count)} of {section} under the starting "
            f"model, computed once in {time.perf_counter() - started_s:.1f}s"
        )
        if file is not None:
            try:
                with replacing_file(file) as scratch:
                    save_file({"logprobs": logprobs}, scratch, {"fingerprint": fingerprint})
            except (OSError, SafetensorError) as error:
                raise CheckpointError(f"{file} cannot be written: {one_line(error)}") from error
    return logprobs
