"""Atomic writes of files and directories.

Writers write to a temporary path next to the target, then rename it. A directory with a file `STABLE` is complete and
flushed to disk. The file lists sizes and hashes of the others, or is empty.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from prime_rl.utils.contents import STABLE, Contents, record_contents, write_marker

__all__ = [
    "STABLE",
    "begin_directory",
    "complete_directory",
    "fsync_tree",
    "replacing_directory",
    "replacing_file",
    "scratch_of",
]


def fsync_tree(directory: Path) -> None:
    """Flush every file and directory in `directory` to disk, recursively."""
    for path in [*directory.rglob("*"), directory]:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


@contextmanager
def replacing_file(target: Path) -> Iterator[Path]:
    """Yield a scratch path next to `target`, and rename it to `target` only if the block succeeds."""
    target.parent.mkdir(parents=True, exist_ok=True)
    scratch = target.with_name(f"{target.name}.tmp")
    try:
        yield scratch
        scratch.replace(target)
    finally:
        scratch.unlink(missing_ok=True)


@contextmanager
def replacing_directory(target: Path, hashed: bool = True) -> Iterator[Path]:
    """Yield a scratch directory that becomes `target`, flushed and marked `STABLE`, only if the block succeeds.

    An existing `target` is replaced. If the block fails, the scratch directory is deleted. After a crash, either the
    old directory is intact, or there is no `target` but a `.partial` directory next to it. With `hashed=False` the
    marker holds no hashes, for weights that are read once and soon deleted.
    """
    scratch = begin_directory(target)
    try:
        yield scratch
        complete_directory(target, record_contents(scratch) if hashed else {})
    except BaseException:
        shutil.rmtree(scratch, ignore_errors=True)
        raise


def scratch_of(target: Path) -> Path:
    """Path of the scratch directory that will become `target`."""
    return target.with_name(f"{target.name}.partial")


def begin_directory(target: Path) -> Path:
    """Create an empty `scratch_of(target)` and return its path."""
    scratch = scratch_of(target)
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    return scratch


def complete_directory(target: Path, contents: Contents) -> None:
    """Mark `scratch_of(target)` as `STABLE` with these contents, flush it to disk, and rename it to `target`."""
    scratch = scratch_of(target)
    write_marker(scratch, contents)
    fsync_tree(scratch)
    if target.exists():
        shutil.rmtree(target)
    scratch.replace(target)
