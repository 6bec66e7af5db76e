"""Policy weights for the inference engines, straight into their memory."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from enum import IntEnum

import torch
import torch.distributed as dist
from torch import nn

from prime_rl.configs.trainer import NCCLWeightBroadcastConfig
from prime_rl.run.paths import OrchestratorPaths
from prime_rl.trainer.checkpoints.weights import gather_weights
from prime_rl.trainer.process.errors import BroadcastError
from prime_rl.trainer.process.world import Process
from prime_rl.transport import TransportError
from prime_rl.transport.weights import SENDER, WeightGroup
from prime_rl.utils.files import STABLE
from prime_rl.utils.logger import get_logger

POLL_S = 0.02


class _Verdict(IntEnum):
    """What becomes of a version that is offered."""

    WAIT = 0
    SEND = 1
    DROP = 2
    LATE = 3


class GroupBroadcast:
    """Sends each version to the servers through NCCL, or gloo on a CPU.

    Only markers pass through the filesystem: `broadcasts/step_<v>/STABLE` offers a version, `NCCL_READY` beside it says
    that the servers are about to take it, and `broadcasts/CLOSED` that the orchestrator needs no version any more.
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
        """Whether this process was told to stop: then nobody may be left to take a version."""
        self._group: WeightGroup | None = None

    def start(self, version: int) -> None:
        """Remove the markers of earlier starts, and only then let the servers in: whoever joins sees ours alone.

        Raises:
            BroadcastError: the port is taken.
        """
        if not self.process.is_main:
            return
        shutil.rmtree(self.run.broadcasts, ignore_errors=True)
        address, size = (self.config.host, self.config.port), self.config.inference_world_size + 1
        try:
            self._group = WeightGroup(address, SENDER, size, self.process.device, self.config.timeout)
        except TransportError as error:
            raise BroadcastError(str(error)) from error
        get_logger().info(f"Weights go to {size - 1} inference workers, which join at {address[0]}:{address[1]}")

    def publish(self, model: nn.Module, version: int, dtype: torch.dtype) -> None:
        """Send `version` in `dtype` and in the hub's naming, once the servers take it. Collective.

        Nothing is sent when the orchestrator has ended well, or when this process is told to stop.

        Raises:
            BroadcastError: the servers do not take it in `weight_broadcast.timeout`, or one is gone.
        """
        if self.process.is_main:
            self._offer(version)
        if not self._is_taken(version):
            return
        weights = gather_weights(model, dtype)
        if self._group is not None:
            try:
                self._group.send(weights, version)
            except TransportError as error:
                raise BroadcastError(str(error)) from error

    def _offer(self, version: int) -> None:
        shutil.rmtree(self.run.broadcast(version - 1), ignore_errors=True)
        self.run.broadcast(version).mkdir(parents=True, exist_ok=True)
        (self.run.broadcast(version) / STABLE).touch()

    def _is_taken(self, version: int) -> bool:
        """Wait for the answer to an offer. Every rank hears it, so that none runs ahead into another collective."""
        deadline = time.monotonic() + self.config.timeout
        verdict = _Verdict.WAIT
        while verdict is _Verdict.WAIT:
            time.sleep(POLL_S)
            looked = torch.tensor(self._look(version, deadline) if self.process.is_main else 0)
            dist.broadcast(looked, src=0)
            verdict = _Verdict(int(looked))
        if verdict is _Verdict.LATE:
            raise BroadcastError(
                f"weight_broadcast: the orchestrator did not ask for version {version} within "
                f"weight_broadcast.timeout = {self.config.timeout} s; its log says why, and evaluations that take "
                "longer need a larger one"
            )
        return verdict is _Verdict.SEND

    def _look(self, version: int, deadline: float) -> _Verdict:
        if self.run.broadcast_ready(version).exists():
            return _Verdict.SEND
        if self.is_stopping() or self.run.broadcasts_closed.exists():
            return _Verdict.DROP
        return _Verdict.LATE if time.monotonic() > deadline else _Verdict.WAIT
