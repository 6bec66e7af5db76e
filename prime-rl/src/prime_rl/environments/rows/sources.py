"""Reads the rows of a dataset: files, directories, saved datasets, the hub, S3."""

from __future__ import annotations

import os
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

from prime_rl.configs.storage import BadS3Name, S3Name
from prime_rl.environments.rows.formats import Row
from prime_rl.storage.s3 import S3
from prime_rl.storage.staging import Listing, cache_root, local_copy
from prime_rl.utils.errors import RowFileError, StorageError, UserError, one_line
from prime_rl.utils.files import missing_advice
from prime_rl.utils.logger import get_logger
from prime_rl.utils.rows import KNOWN_KINDS, files_of_split, is_saved, kind_of, stream_file, undecoded, without_fills


class RowsFault(UserError):
    """The user's mistake: a dataset cannot be used as configured. One line that begins with the dataset's name."""

    def __init__(self, message: str) -> None:
        super().__init__(one_line(message))


def read_rows(path: str, subset: str | None = None, split: str = "train") -> Iterator[Row]:
    """Read every row of a dataset, in the order of the source.

    Raises:
        RowsFault: there is nothing at the path, or it cannot be read.
    """
    local = local_path(path)
    try:
        if local.is_file():
            yield from _rows_of_files([local], path)
        elif local.is_dir() and is_saved(local):
            yield from _saved(local, split, path)
        elif local.is_dir():
            root = local / subset if subset else local
            files = files_of_split(root, split)
            if not files:
                raise RowsFault(f"{path}: {root} has no data files of the split {split!r}; known are {KNOWN_KINDS}")
            yield from _rows_of_files(files, path)
        else:
            yield from _from_hub(path, subset, split)
    except (RowFileError, OSError) as error:
        raise RowsFault(str(error)) from error


def local_path(path: str | Path) -> Path:
    """The path itself; for an S3 URL, a local copy. Raises RowsFault."""
    try:
        name = S3Name.of(path)
        if name is None:
            return Path(path)
        s3 = S3.connect()
        return local_copy(s3, Listing.of(s3, name), cache_root(os.environ), get_logger().info)
    except (BadS3Name, StorageError) as error:
        raise RowsFault(str(error)) from error


def _rows_of_files(files: list[Path] | tuple[Path, ...], path: str) -> Iterator[Row]:
    for file in files:
        if kind_of(file) is None:
            raise RowsFault(f"{path}: unknown file type; known are {KNOWN_KINDS}")
    yield from (reading() for reading in chain.from_iterable(map(stream_file, files)))


def _saved(directory: Path, split: str, path: str) -> Iterator[Row]:
    import datasets

    saved = datasets.load_from_disk(str(directory))
    if isinstance(saved, datasets.DatasetDict):
        if split not in saved:
            raise RowsFault(f"{path} has no split {split}; it has {', '.join(saved)}")
        saved = saved[split]
    yield from map(without_fills, undecoded(saved))


def _from_hub(path: str, subset: str | None, split: str) -> Iterator[Row]:
    given = Path(path)
    if given.is_absolute() or path.startswith(".") or kind_of(given) is not None or path.count("/") > 1:
        raise RowsFault(f"{path}: no such file or directory{missing_advice(path)}")
    import datasets

    datasets.disable_progress_bars()
    try:
        loaded: Any = datasets.load_dataset(path, subset, split=split)
    except Exception as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise RowsFault(
            f"{path}: no such file or directory, and it could not be loaded from the hub: {reason}"
        ) from error
    yield from map(without_fills, undecoded(loaded))
