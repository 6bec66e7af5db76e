"""Broadcasts policy weights to the inference engines through the filesystem."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from typing import Protocol

import torch
from transformers import PreTrainedModel

from prime_rl.configs.trainer import FileSystemWeightBroadcastConfig
from prime_rl.run.paths import RunPaths, step_of
from prime_rl.trainer.checkpoints.weights import gather_weights, save_adapter, save_weights
from prime_rl.trainer.lora.adapters import is_adapted
from prime_rl.trainer.lora.export import gather_adapter
from prime_rl.trainer.process.world import Process
from prime_rl.utils.files import publishing_directory, scratch_of


class Broadcast(Protocol):
    """Publishes new weights to the inference engines."""

    def start(self, version: int) -> None:
        """Remove leftover versions of earlier starts. This run starts at `version`."""

    def publish(self, model: PreTrainedModel, version: int, dtype: torch.dtype) -> None:
        """Publish the model's weights as `version`. Collective."""


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
    ) -> None:
        self.config = config
        self.paths = paths
        self.run = paths.orchestrator
        self.process = process
        self.max_async_level = max_async_level

    def publish(self, model: PreTrainedModel, version: int, dtype: torch.dtype) -> None:
        """Write the weights as `version`, in `dtype` and hub format. For a LoRA model, write only the PEFT adapter.

        A resumed run finds its first version published. If that has the same files, it stays, because the servers may
        be reading it. Collective.

        Raises:
            OSError: the weights cannot be written. The run must stop, because the engines would wait for this version.
        """
        adapter = gather_adapter(model, dtype) if is_adapted(model) else None
        weights = gather_weights(model, dtype) if adapter is None else {}
        if self.process.rank != 0:
            return
        with publishing_directory(self.run.broadcast(version)) as scratch:
            if adapter is not None:
                save_adapter(adapter, scratch)
            else:
                save_weights(weights, scratch, self.config.save_sharded, self.config.save_format)
        self._remove(lambda other: other < version - self.max_async_level and not self._is_kept(other))

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
