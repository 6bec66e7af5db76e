"""Files of a checkpoint that each process writes, and errors of one process that end the write on all."""

from __future__ import annotations

import errno
import io
import os
import pickle
import random
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError

from prime_rl.trainer.process.errors import CheckpointError
from prime_rl.trainer.process.world import Process
from prime_rl.utils.contents import Contents, FileRecord
from prime_rl.utils.errors import first_line

if TYPE_CHECKING:
    from torch.distributed.checkpoint.api import CheckpointException

_FULL_BYTES = 2**20
"""A disk with less free space than this is full."""
_NOT_WRITTEN = "could not write a checkpoint; earlier checkpoints are complete"


@contextmanager
def together(process: Process, group: dist.ProcessGroup | None, directory: Path) -> Iterator[None]:
    """Fail on all processes if a full or broken disk stops the block, which writes below `directory`, on one of them.

    Collective.

    Raises:
        CheckpointError: the reason of the first process that failed.
    """
    fault = None
    try:
        with _explained(directory):
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


def small_files_of_rank(step_directory: Path, directory: Path, rank: int) -> list[Path]:
    """The files that process `rank` has written, apart from its shards: its own, and on rank 0 index and configs."""
    common = [directory / ".metadata", *sorted((step_directory / "configs").glob("*"))] if rank == 0 else []
    return [rank_file(directory, rank), *common]


def gathered_contents(contents: Contents, process: Process, group: dist.ProcessGroup | None) -> Contents:
    """The records of all processes on rank 0, and nothing on the others. Collective."""
    if process.world_size == 1:
        return contents
    gathered: list[Any] | None = [None] * process.world_size if process.is_main else None
    # As plain tuples: ranks exchange no classes of ours.
    plain = {name: tuple(record) for name, record in contents.items()}
    dist.gather_object(plain, gathered, dst=0, group=group)
    return {name: FileRecord(*record) for each in gathered or [] for name, record in each.items()}


def write_object(value: dict[str, Any], path: Path) -> None:
    # Through memory: the exception of `torch.save` on a full disk does not name the reason.
    content = io.BytesIO()
    torch.save(value, content)
    path.write_bytes(content.getbuffer())


def load_object(path: Path) -> dict[str, Any]:
    """Read a file of `write_object`. Runs no code from the file.

    Raises:
        CheckpointError: there is no such file, or it is damaged.
    """
    if not path.is_file():
        raise CheckpointError(f"{path} is missing")
    try:
        loaded: dict[str, Any] = torch.load(path, weights_only=True)
    except (RuntimeError, OSError, EOFError, pickle.UnpicklingError) as error:
        raise CheckpointError(f"{path} cannot be read: {first_line(error)}") from error
    return loaded


def random_state(device: torch.device) -> dict[str, Any]:
    """The states of all random generators that training may use."""
    state = {"python": random.getstate(), "torch": torch.get_rng_state()}
    return state | ({"cuda": torch.cuda.get_rng_state(device)} if device.type == "cuda" else {})


def set_random_state(state: dict[str, Any], device: torch.device) -> None:
    random.setstate(state["python"])
    torch.set_rng_state(state["torch"])
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)


def first_reason(failures: CheckpointException) -> str:
    """Why the first process failed, in one line."""
    return first_line(next(failure[0] for failure in failures.failures.values()))


@contextmanager
def _explained(directory: Path) -> Iterator[None]:
    """Turn exceptions of a full or broken disk into a one-line error."""
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        yield
    except CheckpointException as error:
        # On a full disk torch names an offset in its file.
        is_full = directory.is_dir() and shutil.disk_usage(directory).free < _FULL_BYTES
        raise CheckpointError(
            f"{_NOT_WRITTEN}: {os.strerror(errno.ENOSPC) if is_full else first_reason(error)}"
        ) from error
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
