"""An engine worker's way into the trainer's weight group."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from prime_rl.inference.checkpoint_files import WeightError
from prime_rl.inference.protocol import InitBroadcasterBody
from prime_rl.run.paths import step_of
from prime_rl.transport.weights import WeightGroup

NOT_STARTED_FOR_IT = 'this server reads weights from files: start it with weight_broadcast.type = "nccl"'


def join_group(body: InitBroadcasterBody, device: torch.device, worker: int = 0, workers: int = 1) -> WeightGroup:
    """Join as one of `workers` workers of a server, all of them alike; rank 0 of the group is the trainer.

    Raises:
        TransportError: the trainer does not open its port in `body.timeout` seconds, or means another group.
    """
    rank = 1 + body.server_rank * workers + worker
    size = 1 + body.num_inference_server * workers
    return WeightGroup((body.host, body.port), rank, size, device, body.timeout)


def received(group: WeightGroup | None, directory: Path) -> Iterator[tuple[str, Tensor]]:
    """Name and tensor of all weights of the version that `directory` names, as the trainer sends them.

    Raises:
        WeightError: it names none, or there is no group.
        TransportError: the trainer does not send it.
    """
    version = step_of(directory)
    if group is None:
        raise WeightError("this server has not joined the trainer's weight group: POST /init_broadcaster first")
    if version is None:
        raise WeightError(f"{str(directory)!r} names no version: the trainer sends step_<n>")
    return group.receive(version)
