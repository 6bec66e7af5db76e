"""Files of a checkpoint that each process writes, and errors of one process that end the write on all."""

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
from prime_rl.trainer.process.world import Process

_NOT_WRITTEN = "could not write a checkpoint; those written before are whole"


@contextmanager
def together(process: Process, group: dist.ProcessGroup | None) -> Iterator[None]:
    """Fail on all processes if a full or broken disk stops the block on one of them. Collective.

    Raises:
        CheckpointError: the reason of the first process that failed.
    """
    fault = None
    try:
        with _explained():
            yield
    except CheckpointError as error:
        fault = str(error)
    faults = [fault]
    if process.world_size > 1:
        faults = [None] * process.world_size
        dist.all_gather_object(faults, fault, group=group)
    for reason in filter(None, faults):
        raise CheckpointError(reason)


def rank_file(directory: Path, rank: int) -> Path:
    return directory / f"rank_{rank}.pt"


def write_object(value: dict[str, Any], path: Path) -> None:
    # Through memory: the exception of `torch.save` on a full disk does not name the reason.
    content = io.BytesIO()
    torch.save(value, content)
    path.write_bytes(content.getbuffer())


def load_object(path: Path) -> dict[str, Any]:
    """Read a file of `write_object`. Runs no code from the file.

    Raises:
        CheckpointError: there is no such file.
    """
    if not path.is_file():
        raise CheckpointError(f"{path} is missing")
    return torch.load(path, weights_only=True)


def random_state(device: torch.device) -> dict[str, Any]:
    """The states of all random generators that training may use."""
    state = {"python": random.getstate(), "torch": torch.get_rng_state()}
    return state | ({"cuda": torch.cuda.get_rng_state(device)} if device.type == "cuda" else {})


def set_random_state(state: dict[str, Any], device: torch.device) -> None:
    random.setstate(state["python"])
    torch.set_rng_state(state["torch"])
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)


@contextmanager
def _explained() -> Iterator[None]:
    """Turn exceptions of a full or broken disk into a one-line error."""
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        yield
    except CheckpointException as error:
        reasons = [str(failure[0]).splitlines()[0] for failure in error.failures.values()]
        raise CheckpointError(f"{_NOT_WRITTEN}: {reasons[0]}") from error
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{_NOT_WRITTEN}: {error}") from error


class BackgroundJobs:
    """Runs jobs in one thread, in order. After a job has failed, later ones are skipped."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoints")
        self._pending: list[Future[None]] = []
        self._has_failed = False

    def submit(self, job: Callable[[], None]) -> None:
        """Run `job` after those before it."""
        self._pending.append(self._thread.submit(self._run, job))

    def wait(self) -> None:
        """Return when all jobs are done. Raises the exception of a failed job, once."""
        pending, self._pending = self._pending, []
        for future in pending:
            future.result()

    def _run(self, job: Callable[[], None]) -> None:
        if self._has_failed:
            return
        self._has_failed = True
        job()
        self._has_failed = False
