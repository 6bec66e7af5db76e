"""Who can read the files of a run."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

from prime_rl.configs.shared import FileAccess

_UMASKS = {"owner": 0o077, "group": 0o027}


@contextlib.contextmanager
def files_readable_by(readers: FileAccess) -> Iterator[None]:
    """Create files and directories for these readers during the block, in this process and those it starts.

    Directories that exist already keep their mode.
    """
    previous = os.umask(_UMASKS["owner"])
    os.umask(_UMASKS.get(readers, previous))
    try:
        yield
    finally:
        os.umask(previous)
