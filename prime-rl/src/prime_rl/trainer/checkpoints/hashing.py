"""Hashes the shards of a checkpoint while they are written, so that no save reads them back."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import xxhash
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint import FileSystemWriter, save
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.serialization import get_crc32_options, set_crc32_options

from prime_rl.utils.contents import CHUNK_BYTES, FileRecord


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
