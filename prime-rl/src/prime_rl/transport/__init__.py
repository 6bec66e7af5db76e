"""How messages travel from the orchestrator to the packer, and from the packer to the trainer's ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from prime_rl.configs.shared import TransportConfig
from prime_rl.run.paths import OrchestratorPaths, RunPaths
from prime_rl.transport.errors import TransportError
from prime_rl.transport.filesystem import (
    FileSystemBatchReceiver,
    FileSystemBatchSender,
    FileSystemMicroBatchReceiver,
    FileSystemMicroBatchSender,
)
from prime_rl.transport.messages import MicroBatch, TrainingBatch, TrainingSample
from prime_rl.transport.sockets import ZMQBatchReceiver, ZMQBatchSender, ZMQMicroBatchReceiver, ZMQMicroBatchSender


class BatchSender(Protocol):
    """The orchestrator's end."""

    def send(self, batch: TrainingBatch) -> None:
        """Hand over the batch of `batch.step`."""

    def close(self) -> None:
        """Return when the receiver can have all that was sent, even if this process ends then."""


class BatchReceiver(Protocol):
    """The packer's end, on rank 0 of the trainer."""

    def receive(self, step: int) -> TrainingBatch | None:
        """The batch of `step`, or None while there is none. Never blocks."""

    def close(self) -> None: ...


class MicroBatchSender(Protocol):
    """The packer's end towards the data-parallel ranks."""

    def send(self, step: int, rows_of_ranks: Mapping[int, list[MicroBatch]]) -> None: ...

    def close(self) -> None: ...


class MicroBatchReceiver(Protocol):
    """One data-parallel rank's end."""

    def receive(self, step: int) -> list[MicroBatch]:
        """This rank's rows of `step`, which the packer has already sent."""

    def close(self) -> None: ...


def setup_batch_sender(config: TransportConfig, run: OrchestratorPaths) -> BatchSender:
    """The orchestrator's end of the transport. Batches that an earlier start left behind are discarded."""
    return ZMQBatchSender(config, run) if config.type == "zmq" else FileSystemBatchSender(run)


def setup_batch_receiver(config: TransportConfig, run: OrchestratorPaths) -> BatchReceiver:
    """Raises TransportError where its socket cannot be opened."""
    return ZMQBatchReceiver(config, run) if config.type == "zmq" else FileSystemBatchReceiver(run)


def setup_micro_batch_sender(config: TransportConfig, run: RunPaths) -> MicroBatchSender:
    """Raises TransportError where its socket cannot be opened."""
    return ZMQMicroBatchSender(config) if config.type == "zmq" else FileSystemMicroBatchSender(run)


def setup_micro_batch_receiver(config: TransportConfig, run: RunPaths, data_rank: int) -> MicroBatchReceiver:
    return (
        ZMQMicroBatchReceiver(config, data_rank)
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
