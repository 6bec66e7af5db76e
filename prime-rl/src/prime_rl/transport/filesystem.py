"""Filesystem transport: exchanges batches as files, written to a temporary name and renamed when complete.

A batch is not needed after its step has begun, because a resumed orchestrator regenerates the batches after its
checkpoint. So files are kept for one step only, and a sender deletes leftover files when it starts.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path

import msgspec

from prime_rl.run.paths import OrchestratorPaths, RunPaths, step_of
from prime_rl.transport.messages import MicroBatch, TrainingBatch
from prime_rl.utils.files import replacing_file
from prime_rl.utils.logger import get_logger


class FileSystemBatchSender:
    """Writes `RUN/rollouts/step_<s>/rollouts.bin`."""

    def __init__(self, run: OrchestratorPaths) -> None:
        self.run = run
        self._encoder = msgspec.msgpack.Encoder()
        for step in _steps_in(run.rollouts):
            _discard(run.batch(step))

    def send(self, batch: TrainingBatch) -> None:
        with replacing_file(self.run.batch(batch.step)) as scratch:
            scratch.write_bytes(self._encoder.encode(batch))

    def close(self) -> None:
        """Do nothing: sent batches are on disk."""


class FileSystemBatchReceiver:
    """Reads the batch file of the requested step and deletes the files of earlier steps."""

    def __init__(self, run: OrchestratorPaths) -> None:
        self.run = run
        self._decoder = msgspec.msgpack.Decoder(TrainingBatch)
        self._reported_mtime_ns = 0

    def receive(self, step: int) -> TrainingBatch | None:
        """Return the batch of `step`, or None while it is missing or unreadable. Logs each unreadable file once."""
        path = self.run.batch(step)
        try:
            batch = self._decoder.decode(path.read_bytes())
        except FileNotFoundError:
            return None
        except msgspec.DecodeError as error:  # also a ValidationError: well-formed MessagePack of another shape
            self._report(path, str(error))
            return None
        if batch.step != step:
            self._report(path, f"it contains the batch of step {batch.step}")
            return None
        for earlier in _steps_in(self.run.rollouts, before=step):
            _discard(self.run.batch(earlier))
        batch.run_idx = 0
        return batch

    def close(self) -> None:
        """Do nothing: no file stays open."""

    def _report(self, path: Path, fault: str) -> None:
        with contextlib.suppress(FileNotFoundError):  # replaced since it was read: the next poll reads the new file
            mtime_ns = path.stat().st_mtime_ns
            if mtime_ns != self._reported_mtime_ns:
                self._reported_mtime_ns = mtime_ns
                get_logger().error(f"{path} is not a valid training batch ({fault}); waiting for a valid one")


class FileSystemMicroBatchSender:
    """Writes `OUT/rollouts/step_<s>/rank_<r>.bin` for every data-parallel rank r."""

    def __init__(self, run: RunPaths) -> None:
        self.run = run
        self._encoder = msgspec.msgpack.Encoder()
        self._discard_steps()

    def send(self, step: int, rows_of_ranks: Mapping[int, list[MicroBatch]]) -> None:
        # Every rank reads its file before it joins a step's collectives, so files of earlier steps are not needed.
        self._discard_steps(before=step)
        for rank, rows in rows_of_ranks.items():
            with replacing_file(self.run.rank_batch(step, rank)) as scratch:
                scratch.write_bytes(self._encoder.encode(rows))

    def close(self) -> None:
        """Do nothing: no file stays open."""

    def _discard_steps(self, before: int | None = None) -> None:
        for step in _steps_in(self.run.rollouts, before):
            for file in self.run.rank_batch(step, 0).parent.glob("rank_*.bin"):
                _discard(file)


class FileSystemMicroBatchReceiver:
    """Reads the files of one data-parallel rank."""

    def __init__(self, run: RunPaths, data_rank: int) -> None:
        self.run = run
        self.data_rank = data_rank
        self._decoder = msgspec.msgpack.Decoder(list[MicroBatch])

    def receive(self, step: int) -> list[MicroBatch]:
        return self._decoder.decode(self.run.rank_batch(step, self.data_rank).read_bytes())

    def close(self) -> None:
        """Do nothing: no file stays open."""


def _steps_in(parent: Path, before: int | None = None) -> list[int]:
    if not parent.is_dir():
        return []
    steps = (step_of(child) for child in parent.iterdir())
    return [step for step in steps if step is not None and (before is None or step < before)]


def _discard(file: Path) -> None:
    file.unlink(missing_ok=True)
    with contextlib.suppress(OSError):  # the directory is not empty, or is already deleted
        file.parent.rmdir()
