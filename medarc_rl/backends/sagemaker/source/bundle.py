"""Packs a job's files into one archive, whose bytes depend on nothing but names, contents and executable bits."""

from __future__ import annotations

import gzip
import hashlib
import io
import os
import tarfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from medarc_rl.backends.sagemaker.source.staging import Staged, StagedFile
from medarc_rl.errors import MedarcError

SOURCE = "source"
"""Directory of the archive with the project's files."""
CONFIG = "run.toml"
"""The resolved config, next to it. Its name tells nothing."""
_READ_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Bundle:
    path: Path
    sha256: str
    size_bytes: int


def pack(target: Path, files: Mapping[str, StagedFile], texts: Mapping[str, str], prefix: str = "") -> Bundle:
    """Write a `.tar.gz` of files, under `prefix`, and texts.

    Raises:
        MedarcError: a file cannot be read, or changed its size meanwhile.
    """
    with (
        target.open("wb") as raw,
        gzip.GzipFile(filename="", mode="wb", fileobj=raw, mtime=0, compresslevel=6) as zipped,
        tarfile.open(fileobj=zipped, mode="w", format=tarfile.PAX_FORMAT) as archive,
    ):
        for name, text in sorted(texts.items()):
            content = text.encode()
            archive.addfile(_entry(name, len(content), False), io.BytesIO(content))
        for name, file in sorted(files.items()):
            _add(archive, f"{prefix}{name}", file)
    return Bundle(target, sha256_of(target), target.stat().st_size)


def _add(archive: tarfile.TarFile, name: str, file: StagedFile) -> None:
    try:
        with file.path.open("rb") as reading:
            size = os.fstat(reading.fileno()).st_size
            archive.addfile(_entry(name, size, file.is_executable), reading)
    except OSError as error:
        # tarfile raises this for a file that got shorter, without a number.
        raise MedarcError(f"{file.path}: {error.strerror or 'changed while it was read'}") from error


def _entry(name: str, size_bytes: int, is_executable: bool) -> tarfile.TarInfo:
    entry = tarfile.TarInfo(name)
    entry.size = size_bytes
    entry.mode = 0o755 if is_executable else 0o644
    return entry


def sha256_of(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as reading:
        while chunk := reading.read(_READ_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


@contextmanager
def packed(staged: Staged, config: str) -> Iterator[Bundle]:
    """A job's archive in a directory of its own, which is removed in the end."""
    with TemporaryDirectory(prefix="medarc-sagemaker-") as scratch:
        yield pack(Path(scratch) / "source.tar.gz", staged.files, {CONFIG: config}, prefix=f"{SOURCE}/")


def unpack(archive: Path, target: Path) -> None:
    """Extract an archive. Entries that would leave `target`, links out of it and devices are refused.

    Raises:
        MedarcError: it is damaged or holds such an entry.
    """
    target.mkdir(parents=True, exist_ok=True)
    try:
        with tarfile.open(archive, mode="r:gz") as reading:
            reading.extractall(target, filter="data")
    except (OSError, EOFError, tarfile.TarError) as error:
        raise MedarcError(f"{archive.name} cannot be unpacked: {' '.join(str(error).split())}") from error
