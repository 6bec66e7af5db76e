"""Sources of packed rows for each step: the orchestrator's batches, or random tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Protocol, TypeVar

import numpy as np
import torch
from transformers import PretrainedConfig

from prime_rl.configs.model import cpu_row_tokens
from prime_rl.configs.trainer import FakeDataLoaderConfig, TrainerConfig
from prime_rl.run.paths import RunPaths
from prime_rl.trainer.process.data_axis import DataAxis
from prime_rl.trainer.process.errors import BatchError, DataError, TrainerError
from prime_rl.trainer.process.parallel_dims import Mesh
from prime_rl.trainer.process.world import Process
from prime_rl.trainer.rl.packing import pack_batch, pack_rows
from prime_rl.transport import (
    BatchReceiver,
    MicroBatch,
    MicroBatchReceiver,
    MicroBatchSender,
    TrainingBatch,
    TransportError,
    setup_batch_receiver,
    setup_micro_batch_receiver,
    setup_micro_batch_sender,
)

EndpointT = TypeVar("EndpointT", BatchReceiver, MicroBatchSender, MicroBatchReceiver)

FAKE_TOKEN_IDS = 100
"""Fake token ids are below this number, so that they are valid in every vocabulary."""


class BatchSource(Protocol):
    """Provides the rows that this process trains on in each step."""

    def is_ready(self, step: int) -> bool:
        """Whether every process can `take` its rows. Call on the main process only; never blocks."""

    def take(self, step: int) -> list[MicroBatch]:
        """Return the rows of this process's data rank. Every data rank gets the same number of rows."""

    def close(self) -> None: ...


class PackedBatches:
    """Packs the orchestrator's batches on the main process and sends each data rank its rows."""

    def __init__(
        self, config: TrainerConfig, paths: RunPaths, mesh: Mesh, limit: int, vocab_size: int | None = None
    ) -> None:
        """`limit` is the row capacity in tokens, `vocab_size` that of the model, if it is known."""
        seq_len, process, data_axis = config.model.seq_len, mesh.process, mesh.data_axis
        # Keep groups together only on a CPU: the GPU kernels for packed rows do not share prefixes, so there it is
        # better to fill the rows.
        group_tokens = limit // 2 if process.device.type == "cpu" else 0
        self._pack: Callable[[TrainingBatch], list[list[MicroBatch]]] = lambda batch: pack_batch(
            batch, seq_len, limit, data_axis.data_size, config.minibatches, group_tokens, vocab_size
        )
        self._own_rows: list[MicroBatch] = []
        self._readers = readers_by_data_rank(process, data_axis)
        transport = config.rollout_transport
        self._closing = ExitStack()
        with _transport_errors_as(DataError):
            if process.is_main:
                self._batches = self._close_on_exit(setup_batch_receiver(transport, paths.orchestrator))
                if self._readers:
                    self._ranks = self._close_on_exit(setup_micro_batch_sender(transport, paths, self._readers))
            else:
                rows = setup_micro_batch_receiver(transport, paths, data_axis.data_rank)
                self._rows = self._close_on_exit(rows)
        self._is_main = process.is_main

    def is_ready(self, step: int) -> bool:
        batch = self._batches.receive(step)
        if batch is None:
            return False
        rows_of_ranks = self._pack(batch)
        self._own_rows = rows_of_ranks[0]
        if self._readers:
            with _transport_errors_as(BatchError):
                self._ranks.send(step, {data_rank: rows_of_ranks[data_rank] for data_rank in self._readers})
        return True

    def take(self, step: int) -> list[MicroBatch]:
        if self._is_main:
            return self._own_rows
        with _transport_errors_as(BatchError):
            return self._rows.receive(step)

    def close(self) -> None:
        self._closing.close()

    def _close_on_exit(self, endpoint: EndpointT) -> EndpointT:
        self._closing.callback(endpoint.close)
        return endpoint


class FakeBatches:
    """Generates random tokens, advantages and log-probabilities, to run the trainer without an orchestrator."""

    def __init__(self, config: FakeDataLoaderConfig, seq_len: int, data_axis: DataAxis) -> None:
        self.config = config
        self.seq_len = seq_len
        self.data_axis = data_axis

    def is_ready(self, step: int) -> bool:
        return True

    def take(self, step: int) -> list[MicroBatch]:
        """`batch_size` rows over all data ranks, at least one on each: full, or packed from short documents."""
        count = max(1, self.config.batch_size // self.data_axis.data_size)
        rng = np.random.default_rng((self.data_axis.data_rank, step))
        if not self.config.generate_samples:
            return [fake_row(rng, self.seq_len) for _ in range(count)]
        rows: list[MicroBatch] = []
        while len(rows) < count:
            lengths = rng.integers(max(2, self.seq_len // 8), self.seq_len // 2, size=4 * count, endpoint=True)
            rows += pack_rows([fake_row(rng, int(length)) for length in lengths], self.seq_len)
        return rows[:count]

    def close(self) -> None:
        """Do nothing."""


@contextmanager
def _transport_errors_as(kind: type[TrainerError]) -> Iterator[None]:
    """Convert a TransportError, whose message is enough, to an error that is logged without a traceback."""
    try:
        yield
    except TransportError as error:
        raise kind(str(error)) from error


def readers_by_data_rank(process: Process, data_axis: DataAxis) -> dict[int, int]:
    """Number of processes that read each data rank's rows, without the main process. Ranks with none are omitted."""
    sharing = process.world_size // data_axis.data_size
    # The main process has data rank 0 and keeps its own rows.
    readers = {data_rank: sharing - (data_rank == 0) for data_rank in range(data_axis.data_size)}
    return {data_rank: count for data_rank, count in readers.items() if count}


def row_tokens(seq_len: int, model: PretrainedConfig, device: torch.device) -> int:
    """Capacity of a packed row in tokens."""
    if device.type != "cpu":
        return seq_len
    return cpu_row_tokens(seq_len, model.hidden_size, model.num_hidden_layers)


def fake_row(rng: np.random.Generator, length: int) -> MicroBatch:
    """One sequence of random tokens. All but the first are in the loss mask."""
    return MicroBatch(
        input_ids=rng.integers(0, FAKE_TOKEN_IDS, size=length).tolist(),
        loss_mask=[False] + [True] * (length - 1),
        advantages=[float(rng.normal())] * length,
        inference_logprobs=(-rng.random(length)).tolist(),
        position_ids=list(range(length)),
        temperatures=[1.0] * length,
    )
