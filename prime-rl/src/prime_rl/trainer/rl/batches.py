"""Where the rows of a step come from: the orchestrator's batches, or random tokens."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Protocol, TypeVar

import numpy as np
from transformers import PretrainedConfig

from prime_rl.configs.trainer import FakeDataLoaderConfig, TrainerConfig
from prime_rl.run.paths import RunPaths
from prime_rl.trainer.process.errors import DataError
from prime_rl.trainer.process.world import World
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

EndT = TypeVar("EndT", BatchReceiver, MicroBatchSender, MicroBatchReceiver)

CPU_ROW_TOKENS = 2048
"""Rows hold at least this much on a CPU, where a forward of a short row costs little less than one of a long row."""

SMALL_MODEL_ROW_TOKENS = 4096
"""And this much where it costs little memory: of 2.4 million parameters, a step takes a tenth less."""

SMALL_MODEL_WIDTH = 2048
"""Hidden size times layers of a model whose activations of such a row take some hundred MiB."""

FAKE_TOKEN_IDS = 100
"""Fake tokens are below this, so they suit every vocabulary."""


class BatchSource(Protocol):
    """The rows that this process trains on, step by step."""

    def is_ready(self, step: int) -> bool:
        """Asked on rank 0 only, without blocking. True once every rank can `take` its rows."""

    def take(self, step: int) -> list[MicroBatch]:
        """This rank's rows; every rank gets the same number."""

    def close(self) -> None: ...


class PackedBatches:
    """Packs the orchestrator's batches on rank 0 and hands each rank its rows.

    Every process is a data-parallel rank: the trainer has no tensor or context parallelism yet.
    """

    def __init__(self, config: TrainerConfig, paths: RunPaths, world: World, limit: int) -> None:
        """`limit` is the number of tokens that a row may hold."""
        seq_len = config.model.seq_len
        # On a GPU full rows save more: kernels that take packed rows share no prefixes.
        together = limit // 2 if world.device.type == "cpu" else 0
        self._pack: Callable[[TrainingBatch], list[list[MicroBatch]]] = lambda batch: pack_batch(
            batch, seq_len, limit, world.world_size, config.minibatches, together
        )
        self._own_rows: list[MicroBatch] = []
        transport = config.rollout_transport
        self._closing = ExitStack()
        try:
            if world.is_main:
                self._batches = self._closed_later(setup_batch_receiver(transport, paths.orchestrator))
                self._ranks = (
                    self._closed_later(setup_micro_batch_sender(transport, paths)) if world.world_size > 1 else None
                )
            else:
                self._rows = self._closed_later(setup_micro_batch_receiver(transport, paths, world.rank))
        except TransportError as error:
            raise DataError(str(error)) from error
        self._is_main = world.is_main

    def is_ready(self, step: int) -> bool:
        batch = self._batches.receive(step)
        if batch is None:
            return False
        rows_of_ranks = self._pack(batch)
        self._own_rows = rows_of_ranks[0]
        if self._ranks is not None:
            self._ranks.send(step, dict(enumerate(rows_of_ranks[1:], start=1)))
        return True

    def take(self, step: int) -> list[MicroBatch]:
        return self._own_rows if self._is_main else self._rows.receive(step)

    def close(self) -> None:
        self._closing.close()

    def _closed_later(self, end: EndT) -> EndT:
        self._closing.callback(end.close)
        return end


class FakeBatches:
    """Random tokens, advantages and log-probabilities, to run the trainer without an orchestrator."""

    def __init__(self, config: FakeDataLoaderConfig, seq_len: int, world: World) -> None:
        self.config = config
        self.seq_len = seq_len
        self.world = world

    def is_ready(self, step: int) -> bool:
        return True

    def take(self, step: int) -> list[MicroBatch]:
        """`batch_size` rows over all ranks, at least one on each: full rows, or rows packed from short documents."""
        count = max(1, self.config.batch_size // self.world.world_size)
        rng = np.random.default_rng((self.world.rank, step))
        if not self.config.generate_samples:
            return [fake_row(rng, self.seq_len) for _ in range(count)]
        rows: list[MicroBatch] = []
        while len(rows) < count:
            lengths = rng.integers(max(2, self.seq_len // 8), self.seq_len // 2, size=4 * count, endpoint=True)
            rows += pack_rows([fake_row(rng, int(length)) for length in lengths], self.seq_len)
        return rows[:count]

    def close(self) -> None:
        """Nothing to do."""


def row_tokens(seq_len: int, model: PretrainedConfig, world: World) -> int:
    """Tokens that a packed row may hold."""
    if world.device.type != "cpu":
        return seq_len
    is_small = model.hidden_size * model.num_hidden_layers <= SMALL_MODEL_WIDTH
    return max(seq_len, SMALL_MODEL_ROW_TOKENS if is_small else CPU_ROW_TOKENS)


def fake_row(rng: np.random.Generator, length: int) -> MicroBatch:
    """One sequence of random tokens; all but the first count."""
    return MicroBatch(
        input_ids=rng.integers(0, FAKE_TOKEN_IDS, size=length).tolist(),
        loss_mask=[False] + [True] * (length - 1),
        advantages=[float(rng.normal())] * length,
        inference_logprobs=(-rng.random(length)).tolist(),
        position_ids=list(range(length)),
        temperatures=[1.0] * length,
    )
