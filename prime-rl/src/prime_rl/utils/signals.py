"""The start of every program: Ctrl-C ends it quietly, its output is text, and a signal shows its stacks."""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
from collections import Counter
from collections.abc import Iterator
from types import FrameType
from typing import Any

from prime_rl.utils.limits import keep_threads_to_quota
from prime_rl.utils.terminal import write_text_only

STACKS_SIGNAL = signal.SIGUSR2
STDERR = 2


def start_program(launches: bool = False) -> None:
    """Call it first in a program: Ctrl-C ends it without a traceback, its output is text only, and it starts no more
    threads than a CPU quota pays for.

    Where SIGINT is ignored, it stays ignored. A handler that is set later replaces this one. A program that `launches`
    others gives each its threads.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    write_text_only()
    if not launches:
        keep_threads_to_quota(os.environ)


def write_stacks_on_signal() -> None:
    """Write all stacks to stderr at each `STACKS_SIGNAL`, as of `kill -USR2 PID`. Call it in the main thread.

    Threads are written by faulthandler, even while one of them holds the interpreter. The tasks of the main thread's
    event loop follow, if that loop runs.
    """
    signal.signal(STACKS_SIGNAL, _write_tasks)
    # `chain` calls the handler above once the threads are written.
    faulthandler.register(STACKS_SIGNAL, file=STDERR, chain=True)


def _write_tasks(signum: int, frame: FrameType | None) -> None:
    # Not imported here: a process without an event loop does not need it.
    asyncio = sys.modules.get("asyncio")
    if asyncio is None or asyncio._get_running_loop() is None:
        return
    tasks = asyncio.all_tasks()
    groups = Counter("\n".join(_frames(task.get_coro())) for task in tasks)
    for frames, count in groups.most_common():
        heading = f"{count} task{'s' * (count > 1)} (most recent call last):"
        os.write(STDERR, f"\n{heading}\n{frames}\n".encode())


def _frames(awaited: Any) -> Iterator[str]:
    """The frames of a suspended coroutine and of those that it awaits."""
    while awaited is not None:
        frame = getattr(awaited, "cr_frame", None) or getattr(awaited, "gi_frame", None)
        if frame is not None:
            yield f'  File "{frame.f_code.co_filename}", line {frame.f_lineno} in {frame.f_code.co_name}'
        awaited = getattr(awaited, "cr_await", None) or getattr(awaited, "gi_yieldfrom", None)
