"""The files of a checkpoint that each process writes for itself, and how all of them fail as one."""

from __future__ import annotations

import io
import random
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError

from prime_rl.trainer.process.errors import CheckpointError
from prime_rl.trainer.process.world import World

_NOT_WRITTEN = "could not write a checkpoint; those written before are whole"


@contextmanager
def together(world: World, group: dist.ProcessGroup | None) -> Iterator[None]:
    """What a full or broken disk does to one process in the block ends it on all; a collective call.

    Raises:
        CheckpointError: with the reason of the first process that failed.
    """
    fault = None
    try:
        with _explained():
            yield
    except CheckpointError as error:
        fault = str(error)
    faults = [fault]
    if world.world_size > 1:
        faults = [None] * world.world_size
        dist.all_gather_object(faults, fault, group=group)
    for reason in filter(None, faults):
        raise CheckpointError(reason)


def rank_file(directory: Path, rank: int) -> Path:
    return directory / f"rank_{rank}.pt"


def write_object(value: dict[str, Any], path: Path) -> None:
    # By way of memory: what `torch.save` raises on a full disk does not say so.
    content = io.BytesIO()
    torch.save(value, content)
    path.write_bytes(content.getbuffer())


def load_object(path: Path) -> dict[str, Any]:
    """What `write_object` wrote; it runs no code.

    Raises:
        CheckpointError: there is no such file.
    """
    if not path.is_file():
        raise CheckpointError(f"{path} is missing")
    return torch.load(path, weights_only=True)


def random_state(device: torch.device) -> dict[str, Any]:
    """The state of every random generator that training may use."""
    state = {"python": random.getstate(), "torch": torch.get_rng_state()}
    return state | ({"cuda": torch.cuda.get_rng_state(device)} if device.type == "cuda" else {})


def set_random_state(state: dict[str, Any], device: torch.device) -> None:
    random.setstate(state["python"])
    torch.set_rng_state(state["torch"])
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)


@contextmanager
def _explained() -> Iterator[None]:
    """Turn what a full or broken disk raises into a line for a person."""
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        yield
    except CheckpointException as error:
        reasons = [str(failure[0]).splitlines()[0] for failure in error.failures.values()]
        raise CheckpointError(f"{_NOT_WRITTEN}: {reasons[0]}") from error
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{_NOT_WRITTEN}: {error}") from error


class BackgroundJobs:
    """Runs jobs in a thread of their own, one after the other. What comes after a failed one is left out."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoints")
        self._pending: list[Future[None]] = []
        self._has_failed = False

    def submit(self, job: Callable[[], None]) -> None:
        """Run `job` when those before it are done."""
        self._pending.append(self._thread.submit(self._run, job))

    def wait(self) -> None:
        """Return when all jobs are done, or raise what one of them raised; once."""
        pending, self._pending = self._pending, []
        for future in pending:
            future.result()

    def _run(self, job: Callable[[], None]) -> None:
        if self._has_failed:
            return
        self._has_failed = True
        job()
        self._has_failed = False
