"""How a trainer's process ends."""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress


@contextmanager
def leaving_at_once() -> Iterator[None]:
    """End this process with the block: exit handlers run and output is flushed, but no interpreter is torn down.

    gloo's threads may still hold a tensor of the last collective. One that lets go of it while Python is being torn
    down cannot get the interpreter's lock any more, and C++ aborts: a run that had saved everything would exit with
    134, now and then, on a busy machine. multiprocessing ends its children the same way.

    An exception that is no `SystemExit` passes: Python prints its traceback.
    """
    exit_code = 0
    try:
        yield
    except SystemExit as error:
        if not isinstance(error.code, int | None):
            raise
        exit_code = error.code or 0
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        # The log is on a full disk, or nobody reads it: no reason for another exit code.
        with suppress(OSError):
            stream.flush()
    os._exit(exit_code)
