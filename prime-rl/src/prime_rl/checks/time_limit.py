"""Ends Python code that takes too long, such as a chat template that loops."""

from __future__ import annotations

import ctypes
import signal
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from types import FrameType

MAX_RENDER_S = 60.0
"""Time to render and tokenize a conversation."""


class OutOfTime(BaseException):
    """The block takes too long. No Exception, so that no handler in the block takes it for an error of its own."""


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
    raise_in = ctypes.pythonapi.PyThreadState_SetAsyncExc
    lock, is_over = threading.Lock(), False

    def end() -> None:
        with lock:
            if not is_over:
                raise_in(here, ctypes.py_object(OutOfTime))

    watch = threading.Timer(seconds, end)
    watch.daemon = True
    watch.start()
    try:
        yield
    finally:
        with lock:
            is_over = True
            # Takes back one that has not arrived yet.
            raise_in(here, None)
        watch.cancel()
