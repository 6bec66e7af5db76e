"""What can go wrong in a trainer that a person can mend.

TrainerError             one line on the log, exit code 1, no traceback
├── DeviceError          the machine lacks what `device` asks for
├── ModelError           model or tokenizer missing, unreadable, or of an unknown shape
├── DataError            dataset missing, unreadable, or without what training needs
├── ScheduleError        learning-rate schedule that does not fit `max_steps`
├── BroadcastError       new weights do not reach the inference servers
├── CheckpointError      nothing, or something else, at the step to resume from
└── DivergedError        the loss is no longer a finite number

Everything else is a defect of ours: it is logged with its traceback.
"""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from errno import EDQUOT, ENOSPC

from prime_rl.utils.logger import get_logger


class TrainerError(Exception):
    """A fault that the message alone explains: what, where, and what to do."""


class DeviceError(TrainerError):
    pass


class ModelError(TrainerError):
    pass


class DataError(TrainerError):
    pass


class ScheduleError(TrainerError):
    pass


class BroadcastError(TrainerError):
    pass


class CheckpointError(TrainerError):
    pass


class DivergedError(TrainerError):
    pass


@contextmanager
def exit_on_error() -> Iterator[None]:
    """Turn what the block raises into a log entry and exit code 1."""
    try:
        yield
    except TrainerError as error:
        get_logger().error(str(error))
        raise SystemExit(1) from None
    except Exception as error:  # noqa: BLE001 - the last handler: what got here belongs in the log file as well
        if _is_full_disk(error):
            get_logger().error(f"the disk is full: {error}")
        elif _is_lost_peer(error):
            get_logger().error("lost the connection to another rank of the trainer; its log tells why")
        else:
            get_logger().exception("the trainer failed")
        raise SystemExit(1) from None


def _is_full_disk(error: Exception) -> bool:
    # Writers in other languages have exceptions of their own, with the system's words in them.
    return getattr(error, "errno", None) in (ENOSPC, EDQUOT) or os.strerror(ENOSPC) in str(error)


def _is_lost_peer(error: Exception) -> bool:
    # gloo has no exception class of its own.
    text = str(error)
    return "gloo/transport" in text and any(words in text for words in ("Connection reset", "Connection closed"))


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
