"""Writes and reads the sharded part of a checkpoint, which all processes save together.

Shards are hashed while they are written, so that no save reads them back. Reading runs no code that a damaged or
foreign file may hold.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed.checkpoint as dcp
import xxhash
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint import FileSystemWriter, save
from torch.distributed.checkpoint._nested_dict import set_element
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import ReadItem
from torch.serialization import get_crc32_options, set_crc32_options

from prime_rl.trainer.checkpoints.files import first_reason
from prime_rl.trainer.process.errors import CheckpointError
from prime_rl.trainer.process.world import PlainUnpickler
from prime_rl.utils.contents import CHUNK_BYTES, FileRecord
from prime_rl.utils.errors import first_line


def save_sharded(
    state: dict[str, Tensor | dict[str, Any]], directory: Path, group: ProcessGroup | None
) -> dict[Path, FileRecord]:
    """Write `state` with all processes, and return the records of this process's shards. Collective."""
    files = _HashedFiles()
    writer = FileSystemWriter(directory)
    writer.fs = files
    with _without_crc32():
        save(state, checkpoint_id=directory, storage_writer=writer, process_group=group)
    return {path: written.record() for path, written in files.written.items() if path.name.startswith("__")}


@contextmanager
def _without_crc32() -> Iterator[None]:
    """Leave out the checksum of the zip format. It takes longer than the rest of a save, and our hash replaces it."""
    before = get_crc32_options()
    set_crc32_options(False)
    try:
        yield
    finally:
        set_crc32_options(before)


class _HashedFiles(FileSystem):
    def __init__(self) -> None:
        self.written: dict[Path, _HashedStream] = {}

    @contextmanager
    def create_stream(self, path: Any, mode: str) -> Iterator[io.IOBase]:
        with super().create_stream(path, mode) as stream:
            if "w" in mode:
                self.written[Path(path)] = stream = _HashedStream(cast(io.BufferedWriter, stream))
            yield stream


class _HashedStream(io.IOBase):
    """A file that is only appended to, and the hash of what was written."""

    def __init__(self, file: io.BufferedWriter) -> None:
        self._file = file
        self._digest = xxhash.xxh3_128()
        self._size_bytes = 0

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        # A chunk is still in the core's cache when it is copied.
        for start in range(0, len(view), CHUNK_BYTES):
            chunk = view[start : start + CHUNK_BYTES]
            self._digest.update(chunk)
            self._file.write(chunk)
        self._size_bytes += len(view)
        return len(view)

    def record(self) -> FileRecord:
        return FileRecord(self._size_bytes, self._digest.hexdigest())

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._size_bytes

    def flush(self) -> None:
        if not self._file.closed:
            self._file.flush()

    def fileno(self) -> int:
        return self._file.fileno()


def read_sharded(state: dict[str, Any], directory: Path) -> None:
    """Fill the tensors and values in `state` from a checkpoint of `dcp.save`. Collective.

    Raises:
        CheckpointError: the checkpoint does not fit `state`, cannot be read, or holds anything but plain data.
    """
    reader = _PlainReader(directory)
    try:
        dcp.load(state, storage_reader=reader, planner=_PlainPlanner())
    except dcp.api.CheckpointException as error:
        reason = first_reason(error) if reader.index_fault is None else first_line(reader.index_fault)
        raise CheckpointError(f"{directory} does not fit this model and optimizer: {reason}") from error


class _PlainReader(FileSystemReader):
    """Reads the index with `PlainUnpickler`, where torch unpickles it without limits."""

    index_fault: Exception | None = None
    """Why the index could not be read. torch before 2.12 logs that away, and fails later without a reason."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        try:
            return self._read_index(kwargs.get("rank"))
        except Exception as error:
            self.index_fault = self.index_fault or error
            raise

    def _read_index(self, rank: int | None) -> Metadata:
        with self.fs.create_stream(self._get_metadata_path(rank), "rb") as file:
            metadata: Metadata = PlainUnpickler(file).load()
        if metadata.storage_meta is None:
            metadata.storage_meta = StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


class _PlainPlanner(DefaultLoadPlanner):
    """Reads values that are not tensors, such as an optimizer's settings, as plain data."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        loaded = torch.load(value, weights_only=True)
        name = read_item.dest_index.fqn
        if self.flatten_state_dict:
            set_element(self.original_state_dict, self.mappings[name], loaded)
        else:
            self.state_dict[name] = loaded
