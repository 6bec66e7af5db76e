"""Validation: the loss on a dataset that is not trained on."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch.distributed.fsdp import FSDPModule

from prime_rl.configs.data import SFTDataConfig
from prime_rl.run.process import own_beats
from prime_rl.trainer.process.errors import DataError
from prime_rl.trainer.process.mesh import DataAxis, Mesh
from prime_rl.trainer.sft.data.examination import examine, packed_whole, untrainable_fault, worries
from prime_rl.trainer.sft.data.packer import PackedRow, best_fit, lay_out
from prime_rl.trainer.sft.data.samples import BadRows, DatasetStream, Sample
from prime_rl.trainer.sft.reporting import ValStats
from prime_rl.trainer.sft.step import Objective, RowSums, means, sizes_of
from prime_rl.utils.logger import get_logger

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from prime_rl.trainer.model.images import Images


class Validation:
    """Computes the loss on every row of a dataset once. The packing is the same for any number of processes."""

    def __init__(
        self,
        config: SFTDataConfig,
        tokenizer: PreTrainedTokenizerBase,
        mesh: Mesh,
        objective: Objective,
        images: Images | None = None,
        embeddings: int | None = None,
    ) -> None:
        """Tokenize and pack the dataset, whose tokens are among the model's `embeddings`.

        Raises:
            DataError: the dataset is missing, or too many of its rows have no trained token.
        """
        self.config = config
        self.device = mesh.process.device
        self.objective = objective
        self.data_axis = mesh.data_axis
        self._mesh = mesh
        axis = DataAxis(data_rank=0, data_size=1)
        stream = DatasetStream(packed_whole(config), tokenizer, axis, images, embeddings)
        samples = _first_epoch(stream, mesh.process.is_main)
        rows = packed(samples, config)
        self._with_images = stream.with_images
        self._sizes = sizes_of(rows, objective)
        trained_tokens = sum(int(row.is_trained.sum()) for row in rows)
        # Processes gather sharded weights together, so each must compute the same number of rows.
        empty = lay_out([], config.row_tokens, config.seq_len)
        rows += [empty] * (-len(rows) % mesh.data_axis.data_size)
        self._own_rows = rows[mesh.data_axis.data_rank :: mesh.data_axis.data_size]
        if mesh.process.is_main:
            get_logger().info(
                f"Validation data: {len(samples)} samples in {len(rows)} rows, {trained_tokens} trained tokens"
            )

    def run(self, model: PreTrainedModel) -> ValStats:
        """Compute the loss of `model` without changing it or any random state. A collective call."""
        started_s = time.perf_counter()
        self.objective.prepare(model, self._own_rows, self._mesh)
        with evaluating(model):
            own = means((self._sums(model, row) for row in self._own_rows), self.objective, self._sizes)
        loss, *values = self.data_axis.sum(list(own.values()), self.device)
        metrics = dict(zip(list(own)[1:], values, strict=True))
        return ValStats(loss, time.perf_counter() - started_s, metrics or None)

    def _sums(self, model: PreTrainedModel, row: PackedRow) -> RowSums:
        own_beats().tick()
        sums = self.objective.sums(model, replace(row, members=self._with_images(row.members)), self.device)
        # In float64, as there may be many rows.
        metrics, shares = ({k: v.double() for k, v in each.items()} for each in (sums.metrics, sums.shares))
        return RowSums([each.double() for each in sums.losses], metrics, shares)


@contextmanager
def evaluating(model: PreTrainedModel) -> Iterator[None]:
    """Run forward passes without dropout and without gradients, and leave the model as it was."""
    model.eval()
    with torch.no_grad():
        yield
    model.train()
    # Without a backward pass the gathered weights stay allocated, but the optimizer needs the shards.
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def _first_epoch(stream: DatasetStream, tells: bool) -> list[Sample]:
    """Every row that can be trained on, with the places of its images. `tells` logs what was left out."""
    config = stream.config
    faults = BadRows()
    found = examine(stream.first_ones(stream.row_count, faults), stream.row_count, config)
    faults.refuse(config.section)
    if fault := untrainable_fault(found, config):
        raise DataError(fault)
    for line in worries(found, config) if tells else ():
        get_logger().warning(f"Validation data: {line}")
    return [sample for made in stream.own_share() for sample in made.samples]


def packed(samples: Sequence[Sample], config: SFTDataConfig, row_tokens: int | None = None) -> list[PackedRow]:
    """The rows of `best_fit` that hold some samples. They have `config.row_tokens` unless other rows are wanted."""
    if not samples:
        return []
    row_tokens = row_tokens or config.row_tokens
    bins = best_fit(np.array([sample.inputs for sample in samples]), row_tokens)
    members: list[list[Sample]] = [[] for _ in range(int(bins.max()) + 1)]
    for sample, at in zip(samples, bins.tolist(), strict=True):
        members[at].append(sample)
    return [lay_out(row, row_tokens, config.seq_len) for row in members]
