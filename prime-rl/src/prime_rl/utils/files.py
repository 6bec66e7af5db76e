"""Files and directories that are written whole or not at all.

Writers write beside the target and rename. A directory that holds the empty file `STABLE` is complete and flushed.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

STABLE = "STABLE"


def fsync_tree(directory: Path) -> None:
    """Flush every file below `directory`, and the directories themselves, to the disk."""
    for path in [*directory.rglob("*"), directory]:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


@contextmanager
def replacing_file(target: Path) -> Iterator[Path]:
    """Yield a scratch path beside `target` that takes its place only if the block succeeds."""
    target.parent.mkdir(parents=True, exist_ok=True)
    scratch = target.with_name(f"{target.name}.tmp")
    try:
        yield scratch
        scratch.replace(target)
    finally:
        scratch.unlink(missing_ok=True)


@contextmanager
def replacing_directory(target: Path) -> Iterator[Path]:
    """Yield a scratch directory that becomes `target`, flushed and marked `STABLE`, only if the block succeeds.

    An existing `target` is replaced. If the block fails nothing is left of it; a crash leaves either the old directory,
    or none and a `.partial` beside it.
    """
    scratch = begin_directory(target)
    try:
        yield scratch
        complete_directory(target)
    except BaseException:
        shutil.rmtree(scratch, ignore_errors=True)
        raise


def scratch_of(target: Path) -> Path:
    """Where a directory is written that will become `target`."""
    return target.with_name(f"{target.name}.partial")


def begin_directory(target: Path) -> Path:
    """Make an empty `scratch_of(target)`, and return it."""
    scratch = scratch_of(target)
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    return scratch


def complete_directory(target: Path) -> None:
    """Put what has been written to `scratch_of(target)` in its place: flushed, marked `STABLE`, renamed."""
    scratch = scratch_of(target)
    (scratch / STABLE).touch()
    fsync_tree(scratch)
    if target.exists():
        shutil.rmtree(target)
    scratch.replace(target)
