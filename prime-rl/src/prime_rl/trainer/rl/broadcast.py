"""Broadcasts policy weights to the inference engines: through files, or directly into their memory (NCCL or gloo)."""

from __future__ import annotations

import shutil
import time
from collections import deque
from collections.abc import Callable
from contextlib import nullcontext
from enum import IntEnum
from typing import Protocol

import torch
import torch.distributed as dist
from transformers import PreTrainedModel

from prime_rl.configs.trainer import FileSystemWeightBroadcastConfig, NCCLWeightBroadcastConfig
from prime_rl.run.paths import OrchestratorPaths, RunPaths, step_of
from prime_rl.trainer.checkpoints.weights import (
    gather_bundles,
    gather_weights,
    save_adapter,
    save_own_weights,
    save_weights,
    share_out,
)
from prime_rl.trainer.model.lora import gather_adapter
from prime_rl.trainer.process.errors import TrainerError
from prime_rl.trainer.process.world import Process
from prime_rl.transport import TransportError
from prime_rl.transport.weights import SENDER, WeightGroup, bundles_of
from prime_rl.utils.files import STABLE, publishing_directory, scratch_of
from prime_rl.utils.logger import count_of, get_logger
from prime_rl.utils.waiting import Wait

Gathered = Callable[[], None]


def nothing() -> None: ...


class Broadcast(Protocol):
    """Publishes new weights to the inference engines."""

    def start(self, version: int) -> None:
        """Remove leftover versions of earlier starts. This run starts at `version`."""

    def publish(
        self, model: PreTrainedModel, version: int, dtype: torch.dtype, when_gathered: Gathered = nothing
    ) -> None:
        """Publish the model's weights as `version`. Collective.

        `when_gathered` is called on each process once the model is no longer read. A version in files is announced
        after that.
        """


class FileSystemBroadcast:
    """Writes `RUN/broadcasts/step_<v>` atomically, and removes versions that are no longer needed.

    With k = `max_async_level`, the orchestrator collects batch v - 1 only after the engines have loaded version
    v - 1 - k. So when v is published, versions v - k - 1 and older are no longer read. A version that is also
    saved in a checkpoint is kept as long as the checkpoint: a resumed orchestrator may load it.
    """

    def __init__(
        self,
        config: FileSystemWeightBroadcastConfig,
        paths: RunPaths,
        process: Process,
        max_async_level: int,
        *,
        sends_adapter: bool = False,
    ) -> None:
        self.config = config
        self.sends_adapter = sends_adapter
        """Whether only the adapter is published, in PEFT's format. Otherwise it is merged into the weights."""
        self.paths = paths
        self.run = paths.orchestrator
        self.process = process
        self.max_async_level = max_async_level

    def publish(
        self, model: PreTrainedModel, version: int, dtype: torch.dtype, when_gathered: Gathered = nothing
    ) -> None:
        """Write the weights as `version`, in `dtype` and hub format, or the adapter alone.

        A resumed run finds its first version published. If that has the same files, it stays, because the servers may
        be reading it. Collective.

        Raises:
            OSError: the weights cannot be written. The run must stop, because the engines would wait for this version.
        """
        if not self.sends_adapter and self.config.save_sharded and self.process.world_size > 1:
            self._write_shares(model, version, dtype, when_gathered)
        else:
            self._write(model, version, dtype, when_gathered)
        if self.process.rank == 0:
            self._remove(lambda other: other < version - self.max_async_level and not self._is_kept(other))

    def _write(self, model: PreTrainedModel, version: int, dtype: torch.dtype, when_gathered: Gathered) -> None:
        """Rank 0 writes all files."""
        adapter = gather_adapter(model, dtype, is_served=True) if self.sends_adapter else None
        weights = gather_weights(model, dtype) if adapter is None else {}
        when_gathered()
        if self.process.rank != 0:
            return
        with publishing_directory(self.run.broadcast(version)) as scratch:
            if adapter is not None:
                save_adapter(adapter, scratch)
            else:
                save_weights(weights, scratch, self.config.save_sharded, self.config.save_format)

    def _write_shares(self, model: PreTrainedModel, version: int, dtype: torch.dtype, when_gathered: Gathered) -> None:
        """Each rank writes a file of some layers, and holds no others."""
        target, rank = self.run.broadcast(version), self.process.rank
        bundles = gather_bundles(model, dtype, share_out(model, self.process.world_size))
        own = {name: tensor for bundle in bundles for name, tensor in bundle.items()}
        when_gathered()
        with publishing_directory(target) if rank == 0 else nullcontext(scratch_of(target)) as scratch:
            dist.barrier()  # rank 0 has made the directory
            save_own_weights(own, scratch, self.config.save_format)

    def start(self, version: int) -> None:
        """Remove versions above `version`, left over from an earlier start or another run."""
        if self.process.rank == 0:
            self._remove(lambda other: other > version)

    def _is_kept(self, version: int) -> bool:
        checkpoint = self.paths.checkpoint(version)
        return checkpoint.is_dir() or scratch_of(checkpoint).is_dir()

    def _remove(self, is_unwanted: Callable[[int], bool]) -> None:
        if not self.run.broadcasts.is_dir():
            return
        for directory in self.run.broadcasts.iterdir():
            version = step_of(directory)
            if version is not None and is_unwanted(version):
                shutil.rmtree(directory, ignore_errors=True)


POLL_S = 0.02
QUIET_S = 60.0


class _OfferStatus(IntEnum):
    """Status of a version that the trainer has offered."""

    WAIT = 0
    SEND = 1
    DROP = 2
    LATE = 3


class GroupBroadcast:
    """Sends each version to the servers through NCCL, or gloo on a CPU.

    Only marker files go through the filesystem. `broadcasts/step_<v>/STABLE` offers a version, `NCCL_READY` in the same
    directory means that the servers are ready to receive it, and `broadcasts/CLOSED` means that the orchestrator needs
    no further versions.
    """

    def __init__(
        self,
        config: NCCLWeightBroadcastConfig,
        run: OrchestratorPaths,
        process: Process,
        is_stopping: Callable[[], bool],
    ) -> None:
        self.config = config
        self.run = run
        self.process = process
        self.is_stopping = is_stopping
        """Whether this process has been asked to stop; then the servers may be gone and offers are dropped."""
        self._group: WeightGroup | None = None

    def start(self, version: int) -> None:
        """Remove markers of earlier starts, then open the group's port, so that joining servers see no old markers.

        Raises:
            TrainerError: the port cannot be opened.
        """
        if not self.process.is_main:
            return
        shutil.rmtree(self.run.broadcasts, ignore_errors=True)
        address, size = (self.config.host, self.config.port), self.config.inference_world_size + 1
        try:
            self._group = WeightGroup(address, SENDER, size, self.process.device, self.config.timeout)
        except TransportError as error:
            raise TrainerError(str(error)) from error
        workers = count_of("inference worker", size - 1)
        get_logger().info(f"Weights are broadcast to {workers}, through {address[0]}:{address[1]}")

    def publish(
        self, model: PreTrainedModel, version: int, dtype: torch.dtype, when_gathered: Gathered = nothing
    ) -> None:
        """Offer `version`, and send it in `dtype` and hub format once the servers are ready. Collective.

        Nothing is sent if the orchestrator has finished or this process has been asked to stop.

        Raises:
            TrainerError: the servers are not ready within `weight_broadcast.timeout` seconds, or one has exited.
        """
        if self.process.is_main:
            self._offer(version)
        if not self._is_accepted(version):
            return
        bundles = gather_bundles(model, dtype, [SENDER] * len(bundles_of(model.state_dict())))
        try:
            if self._group is None:
                deque(bundles, maxlen=0)
            else:
                self._group.send(bundles, version)
        except TransportError as error:
            raise TrainerError(str(error)) from error
        when_gathered()

    def _offer(self, version: int) -> None:
        shutil.rmtree(self.run.broadcast(version - 1), ignore_errors=True)
        self.run.broadcast(version).mkdir(parents=True, exist_ok=True)
        (self.run.broadcast(version) / STABLE).touch()

    def _is_accepted(self, version: int) -> bool:
        """Wait until an offer is accepted, dropped or late. Rank 0 shares the status, so that ranks stay in step."""
        wait = Wait(
            f"the orchestrator's request for version {version}",
            f"its log {self.run.log} says what it is doing; raise the timeout if evaluations take longer",
            self.config.timeout,
            "weight_broadcast.timeout",
            QUIET_S,
        )
        status = _OfferStatus.WAIT
        while status is _OfferStatus.WAIT:
            time.sleep(POLL_S)
            polled = torch.tensor(self._poll(version, wait) if self.process.is_main else 0)
            dist.broadcast(polled, src=0)
            status = _OfferStatus(int(polled))
        if status is _OfferStatus.LATE:
            raise TrainerError(wait.fault)
        return status is _OfferStatus.SEND

    def _poll(self, version: int, wait: Wait) -> _OfferStatus:
        if self.run.broadcast_ready(version).exists():
            return _OfferStatus.SEND
        if self.is_stopping() or self.run.broadcasts_closed.exists():
            return _OfferStatus.DROP
        return _OfferStatus.LATE if wait.is_over() else _OfferStatus.WAIT
