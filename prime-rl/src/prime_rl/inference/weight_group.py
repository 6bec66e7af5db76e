"""Joins the trainer's weight group (the collective that broadcasts new weights) and receives tensors from it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from prime_rl.inference.model_files import WeightError
from prime_rl.inference.protocol import InitBroadcasterBody
from prime_rl.run.paths import step_of
from prime_rl.transport.weights import WeightGroup

NO_WEIGHT_GROUP = 'this server loads weights from files: start it with weight_broadcast.type = "nccl"'


def join_group(body: InitBroadcasterBody, device: torch.device, worker: int = 0, workers: int = 1) -> WeightGroup:
    """Join the group as worker `worker` of the server's `workers`. Rank 0 of the group is the trainer.

    Every server has the same number of workers, so rank = 1 + server_rank * workers + worker.

    Raises:
        TransportError: the trainer does not open its port within `body.timeout` seconds, or expects another group.
    """
    rank = 1 + body.server_rank * workers + worker
    size = 1 + body.num_inference_server * workers
    return WeightGroup((body.host, body.port), rank, size, device, body.timeout)


def received_tensors(group: WeightGroup | None, directory: Path) -> Iterator[tuple[str, Tensor]]:
    """Yield the name and tensor of every weight of version n, in the order sent, for a directory named `step_<n>`.

    Raises:
        WeightError: the directory name has no version, or the group has not been joined.
        TransportError: the trainer does not send the weights in time.
    """
    version = step_of(directory)
    if group is None:
        raise WeightError("this server has not joined the trainer's weight group: POST /init_broadcaster first")
    if version is None:
        raise WeightError(f"{str(directory)!r} has no version in its name: expected step_<n>")
    return group.receive(version)
