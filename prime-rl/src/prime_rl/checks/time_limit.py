"""Ends Python code that takes too long, such as a chat template that loops."""

from __future__ import annotations

import contextlib
import ctypes
import signal
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from types import FrameType

MAX_RENDER_S = 60.0
"""Time to render and tokenize a conversation."""
_JUMPS = 10_000
"""Jumps back in a loop. An exception of another thread arrives at the first one that looks for it."""


class OutOfTime(BaseException):
    """The block takes too long. Not an Exception, so that no handler in the block takes it for its own error."""


def time_limit(seconds: float) -> AbstractContextManager[None]:
    """Raise `OutOfTime` in a block that takes longer.

    It reaches Python code only: a call into C ends first. One limit in another serves in the main thread alone; there
    the inner one counts in its block.
    """
    if threading.current_thread() is threading.main_thread():
        return _by_alarm(seconds)
    return _by_watch(seconds)


@contextmanager
def _by_alarm(seconds: float) -> Iterator[None]:
    def end(signum: int, frame: FrameType | None) -> None:
        raise OutOfTime

    handler = signal.signal(signal.SIGALRM, end)
    left_s, _ = signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, left_s)
        signal.signal(signal.SIGALRM, handler)


@contextmanager
def _by_watch(seconds: float) -> Iterator[None]:
    """Signals reach the main thread only: here another thread raises the exception in this one."""
    here = ctypes.c_ulong(threading.get_ident())
    lock, is_over, is_raised, has_arrived = threading.Lock(), False, False, False

    def end() -> None:
        nonlocal is_raised
        with lock:
            if not is_over:
                is_raised = True
                ctypes.pythonapi.PyThreadState_SetAsyncExc(here, ctypes.py_object(OutOfTime))

    watch = threading.Timer(seconds, end)
    watch.daemon = True
    watch.start()
    try:
        yield
    except OutOfTime:
        has_arrived = True
        raise
    finally:
        with lock:
            is_over = True
        watch.cancel()
        if is_raised and not has_arrived:
            _await_arrival()


def _await_arrival() -> None:
    """Catch an exception that was raised as the block ended.

    It cannot be taken back: in Python 3.11 and 3.12, `PyThreadState_SetAsyncExc(thread, None)` makes every thread look
    for an exception at each jump from then on, which never ends while a trace function is set.
    """
    with contextlib.suppress(OutOfTime):
        for _ in range(_JUMPS):
            pass
