"""How messages travel from the orchestrator to the packer, and from the packer to the trainer's ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from prime_rl.transport.filesystem import (
    FileSystemBatchReceiver,
    FileSystemBatchSender,
    FileSystemMicroBatchReceiver,
    FileSystemMicroBatchSender,
)
from prime_rl.transport.messages import MicroBatch, TrainingBatch, TrainingSample
from prime_rl.utils.paths import OrchestratorPaths, RunPaths

if TYPE_CHECKING:
    from prime_rl.configs.shared import TransportConfig


class BatchSender(Protocol):
    """The orchestrator's end."""

    def send(self, batch: TrainingBatch) -> None:
        """Hand over the batch of `batch.step`; returns when the receiver can see all of it."""

    def close(self) -> None: ...


class BatchReceiver(Protocol):
    """The packer's end, on rank 0 of the trainer."""

    def receive(self, step: int) -> TrainingBatch | None:
        """The batch of `step`, or None while there is none. Never blocks."""

    def close(self) -> None: ...


class MicroBatchSender(Protocol):
    """The packer's end towards the data-parallel ranks."""

    def send(self, step: int, rows_of_ranks: list[list[MicroBatch]]) -> None: ...


class MicroBatchReceiver(Protocol):
    """One data-parallel rank's end."""

    def receive(self, step: int) -> list[MicroBatch]:
        """This rank's rows of `step`, which the packer has already sent."""


def setup_batch_sender(config: TransportConfig, run: OrchestratorPaths) -> BatchSender:
    """The orchestrator's end of the transport. Batches that an earlier start left behind are discarded."""
    _require_filesystem(config)
    return FileSystemBatchSender(run)


def setup_batch_receiver(config: TransportConfig, run: OrchestratorPaths) -> BatchReceiver:
    _require_filesystem(config)
    return FileSystemBatchReceiver(run)


def setup_micro_batch_sender(config: TransportConfig, run: RunPaths) -> MicroBatchSender:
    _require_filesystem(config)
    return FileSystemMicroBatchSender(run)


def setup_micro_batch_receiver(config: TransportConfig, run: RunPaths, data_rank: int) -> MicroBatchReceiver:
    _require_filesystem(config)
    return FileSystemMicroBatchReceiver(run, data_rank)


def _require_filesystem(config: TransportConfig) -> None:
    if config.type != "filesystem":
        raise ValueError(f"rollout_transport.type {config.type!r} is not built yet; use 'filesystem'")


__all__ = [
    "BatchReceiver",
    "BatchSender",
    "MicroBatch",
    "MicroBatchReceiver",
    "MicroBatchSender",
    "TrainingBatch",
    "TrainingSample",
    "setup_batch_receiver",
    "setup_batch_sender",
    "setup_micro_batch_receiver",
    "setup_micro_batch_sender",
]
