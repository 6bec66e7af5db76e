"""Errors of the trainer, in the families of `utils/errors.py`.

TrainerError (RunError)  logged as one line, exit code 1, no traceback
├── ModelError           model or tokenizer missing, unreadable, or not supported
├── DataError            dataset missing, unreadable, or without the fields that training needs
│   └── BadRow           one row that cannot be trained on; `data.on_bad_row` decides
├── CheckpointError      no checkpoint at the step to resume from, or a damaged one
│   └── ResumeRefused    a checkpoint of another run, or of other data; exit code 2, since it would be refused again
└── DivergedError        the loss or the gradient is not finite

Any other exception is a bug and is logged with its traceback.
"""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from prime_rl.run.process import REFUSED_EXIT_CODE
from prime_rl.utils.errors import RunError, one_line
from prime_rl.utils.files import disk_fault
from prime_rl.utils.logger import get_logger


class TrainerError(RunError):
    """An error whose message is enough: what is wrong, where, and what to do."""


class ModelError(TrainerError):
    pass


class DataError(TrainerError):
    def __init__(self, message: str) -> None:
        # It may quote the data, which may hold control characters and megabytes.
        super().__init__(one_line(message))


class BadRow(DataError):
    pass


class CheckpointError(TrainerError):
    pass


class ResumeRefused(CheckpointError):
    exit_code = REFUSED_EXIT_CODE


class DivergedError(TrainerError):
    pass


@contextmanager
def exit_on_error() -> Iterator[None]:
    """Log an exception of the block and exit with code 1, or with 2 if the run would be refused again."""
    try:
        yield
    except TrainerError as error:
        get_logger().error(str(error))
        raise SystemExit(error.exit_code) from None
    except Exception as error:  # noqa: BLE001 - the last handler: the log file should have the traceback too
        if (fault := disk_fault(error)) is not None:
            get_logger().error(fault)
        elif _is_lost_peer(error):
            get_logger().error("lost the connection to another rank of the trainer; see that rank's log")
        else:
            get_logger().exception("the trainer failed")
        raise SystemExit(1) from None


def _is_lost_peer(error: Exception) -> bool:
    # gloo raises a plain RuntimeError.
    text = str(error)
    return "gloo/transport" in text and any(words in text for words in ("Connection reset", "Connection closed"))


@contextmanager
def leaving_at_once() -> Iterator[None]:
    """End the process when the block ends: run exit handlers and flush output, but skip the interpreter's teardown.

    A gloo thread may still hold a tensor of the last collective. If it releases the tensor during teardown, it cannot
    take the interpreter's lock, and C++ aborts: on a busy machine a run that had saved everything sometimes exited with
    134. multiprocessing ends its child processes the same way.

    Exceptions other than `SystemExit` pass through, and Python prints their traceback.
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
        # A full disk or a closed pipe must not change the exit code.
        with suppress(OSError):
            stream.flush()
    os._exit(exit_code)
