"""Sizes and hashes of a directory's files, which its marker `STABLE` keeps.

The hash is XXH3-128. It finds damage by a disk or a transfer. It does not protect against someone who can write to the
directory and could write a matching marker.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from prime_rl.utils.errors import RunDirError

STABLE = "STABLE"
CHUNK_BYTES = 1 << 17
"""Small enough to stay in a core's cache between reading and hashing."""


_SAMPLE_BYTES, _SAMPLES = 2**20, 256


class FileRecord(NamedTuple):
    """Recorded size and hash of a file."""

    size_bytes: int
    xxh3_128: str
    """In hexadecimal."""


Contents = dict[str, FileRecord]
"""Records by path relative to the directory."""


def record_contents(directory: Path, files: Iterable[Path] | None = None) -> Contents:
    """Hash `files` of a directory; None takes all of them, in its subdirectories too."""
    if files is None:
        files = sorted(path for path in directory.rglob("*") if path.is_file() and path != directory / STABLE)
    return {path.relative_to(directory).as_posix(): FileRecord(path.stat().st_size, hash_file(path)) for path in files}


def hash_file(path: Path) -> str:
    import xxhash

    digest, buffer = xxhash.xxh3_128(), bytearray(CHUNK_BYTES)
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            digest.update(memoryview(buffer)[:count])
    return digest.hexdigest()


def sampled_digest(files: Iterable[Path], whole_bytes: int) -> str:
    """A hash of the sizes and the content of files; of those above `whole_bytes`, of 256 MiB spread over each."""
    state = hashlib.blake2b(digest_size=16)
    for file in files:
        size = file.stat().st_size
        state.update(f"{size}\0".encode())
        with file.open("rb") as content:
            if size <= whole_bytes:
                while block := content.read(_SAMPLE_BYTES):
                    state.update(block)
                continue
            for index in range(_SAMPLES):
                content.seek(index * max(size - _SAMPLE_BYTES, 0) // (_SAMPLES - 1))
                state.update(content.read(_SAMPLE_BYTES))
    return state.hexdigest()


def write_marker(directory: Path, contents: Contents) -> None:
    """Mark a directory as complete. Empty `contents` make an empty marker, and nothing is checked later."""
    text = json.dumps({"files": contents}, indent=1) if contents else ""
    (directory / STABLE).write_text(text)


def read_contents(directory: Path) -> Contents:
    """The records in a directory's marker. There are none in the markers of older versions, or without a marker.

    Raises:
        RunDirError: the marker is damaged.
    """
    try:
        text = (directory / STABLE).read_text() if (directory / STABLE).exists() else ""
        return {name: FileRecord(*record) for name, record in (json.loads(text)["files"] if text else {}).items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise RunDirError(f"{directory / STABLE} cannot be read: {error}") from error


def find_damage(directory: Path, share: slice = slice(None), hashes: bool = True) -> str | None:
    """Compare a directory with its marker. Returns a message about the first difference, or None.

    Directories of older versions have an empty marker or none, and nothing is compared.

    Args:
        share: the files to check, among those in the marker; processes may divide them.
        hashes: also read the files and compare hashes. False compares only sizes.
    """
    if not (directory / STABLE).exists():
        return None
    try:
        recorded = read_contents(directory)
    except RunDirError as error:
        return str(error)
    faults = (_damage_of(directory / name, recorded[name], hashes) for name in sorted(recorded)[share])
    return next((fault for fault in faults if fault is not None), None)


def _damage_of(path: Path, record: FileRecord, hashes: bool) -> str | None:
    try:
        size_bytes = path.stat().st_size
        if size_bytes != record.size_bytes:
            return f"{path} has {size_bytes} bytes instead of the {record.size_bytes} that were written"
        if hashes and hash_file(path) != record.xxh3_128:
            return f"{path} has changed since it was written (its hash differs)"
    except OSError as error:
        return f"{path} cannot be read: {error.strerror}"
    return None
