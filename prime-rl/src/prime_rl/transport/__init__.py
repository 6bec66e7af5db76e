"""Transport of training batches: from the orchestrator to the packer, and from the packer to the trainer's ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from prime_rl.configs.shared import TransportConfig
from prime_rl.run.paths import OrchestratorPaths, RunPaths
from prime_rl.transport.batches import (
    FileSystemBatchReceiver,
    FileSystemBatchSender,
    FileSystemMicroBatchReceiver,
    FileSystemMicroBatchSender,
    ZMQBatchReceiver,
    ZMQBatchSender,
    ZMQMicroBatchReceiver,
    ZMQMicroBatchSender,
)
from prime_rl.transport.endpoints import TransportError
from prime_rl.transport.messages import MicroBatch, TrainingBatch, TrainingSample


class BatchSender(Protocol):
    """Sends training batches; used by the orchestrator."""

    def send(self, batch: TrainingBatch) -> None:
        """Send the batch of `batch.step`."""

    def close(self) -> None:
        """Block until the receiver can get every batch sent, even if this process exits afterwards."""


class BatchReceiver(Protocol):
    """Receives training batches; used by the packer, on rank 0 of the trainer."""

    def receive(self, step: int) -> TrainingBatch | None:
        """Return the batch of `step`, or None if it has not arrived. Never blocks."""

    def close(self) -> None: ...


class MicroBatchSender(Protocol):
    """Sends packed rows to the data-parallel ranks; used by the packer."""

    def send(self, step: int, rows_of_ranks: Mapping[int, list[MicroBatch]]) -> None: ...

    def close(self) -> None: ...


class MicroBatchReceiver(Protocol):
    """Receives the packed rows of one data-parallel rank."""

    def receive(self, step: int) -> list[MicroBatch]:
        """Return this rank's rows of `step`. Call only after the packer has sent them."""

    def close(self) -> None: ...


def setup_batch_sender(config: TransportConfig, run: OrchestratorPaths) -> BatchSender:
    """Create the orchestrator's sender. Deletes batches left over from an earlier start."""
    return ZMQBatchSender(config, run) if config.type == "zmq" else FileSystemBatchSender(run)


def setup_batch_receiver(config: TransportConfig, run: OrchestratorPaths) -> BatchReceiver:
    """Create the packer's receiver. Raises TransportError if its socket cannot be opened."""
    return ZMQBatchReceiver(config, run) if config.type == "zmq" else FileSystemBatchReceiver(run)


def setup_micro_batch_sender(config: TransportConfig, run: RunPaths, readers: Mapping[int, int]) -> MicroBatchSender:
    """Create the packer's sender. `readers` is the number of processes that read each data rank's rows.

    Raises:
        TransportError: its socket cannot be opened.
    """
    return ZMQMicroBatchSender(config, run, readers) if config.type == "zmq" else FileSystemMicroBatchSender(run)


def setup_micro_batch_receiver(config: TransportConfig, run: RunPaths, data_rank: int) -> MicroBatchReceiver:
    """Create the receiver of one data-parallel rank."""
    return (
        ZMQMicroBatchReceiver(config, run, data_rank)
        if config.type == "zmq"
        else FileSystemMicroBatchReceiver(run, data_rank)
    )


__all__ = [
    "BatchReceiver",
    "BatchSender",
    "MicroBatch",
    "MicroBatchReceiver",
    "MicroBatchSender",
    "TrainingBatch",
    "TrainingSample",
    "TransportError",
    "setup_batch_receiver",
    "setup_batch_sender",
    "setup_micro_batch_receiver",
    "setup_micro_batch_sender",
]
