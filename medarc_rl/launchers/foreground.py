"""One child in the foreground: it hears what this process hears, ends in its own time, and leaves nothing behind."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from types import FrameType, TracebackType
from typing import Self
from uuid import uuid4

from prime_rl.launch import reaper

STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
GRACE_S = 90.0
"""How long the child may take to save and stop. Longer than what a launcher grants its own children."""
HURRIED_GRACE_S = 5.0
"""What is left of it after a second signal."""

_PR_SET_PDEATHSIG = 1
_PID_BYTES = 8


class ForegroundChild:
    """While `subprocess.run` waits for a child: signals to this process are passed on to it.

    Left alone, `subprocess.run` kills its child on Ctrl-C, and leaves it behind on SIGTERM. It keeps the child's
    process id to itself as well, so the child tells it: pass `before_exec` as `preexec_fn`, and `env` in its
    environment, by which its descendants are known.
    """

    def __init__(self, grace_s: float = GRACE_S) -> None:
        self._grace_s = grace_s
        self._mark = uuid4().hex
        self._previous_handlers: dict[signal.Signals, object] = {}
        self._pid: int | None = None
        self._stopped_by: int | None = None

    @property
    def env(self) -> dict[str, str]:
        return {reaper.MARK_VARIABLE: self._mark}

    def __enter__(self) -> Self:
        self._told, self._tell = os.pipe()
        os.set_blocking(self._told, False)
        handlers = dict.fromkeys(STOPS, self._stop) | {signal.SIGUSR1: self._relay, signal.SIGALRM: self._time_is_up}
        for signum, handler in handlers.items():
            # nohup's promise is to survive the terminal.
            if signum is not signal.SIGHUP or signal.getsignal(signum) is not signal.SIG_IGN:
                self._previous_handlers[signum] = signal.signal(signum, handler)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)
        self._end(HURRIED_GRACE_S)
        for signum, handler in self._previous_handlers.items():
            signal.signal(signum, handler)
        os.close(self._told)
        os.close(self._tell)

    def exit_code(self, returncode: int) -> int:
        """The shell's word for how the child ended: 128 + n after signal n, also where the child (torchrun) says 1."""
        if self._stopped_by is not None and returncode > 0:
            return 128 + self._stopped_by
        return returncode if returncode >= 0 else 128 - returncode

    def before_exec(self) -> None:
        """Runs in the child. Out of the terminal's foreground group, it gets one Ctrl-C, from us, and not two."""
        os.setsid()
        if sys.platform == "linux":
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        os.write(self._tell, os.getpid().to_bytes(_PID_BYTES, "big"))

    def _child(self) -> int | None:
        if self._pid is None:
            try:
                self._pid = int.from_bytes(os.read(self._told, _PID_BYTES), "big")
            except BlockingIOError:  # it has not started yet
                return None
        return self._pid

    def _stop(self, signum: int, frame: FrameType | None) -> None:
        child = self._child()
        if child is None:
            raise SystemExit(128 + signum)
        # Only the first: torchrun leaves its workers when it is signalled while it waits for them.
        if self._stopped_by is None:
            self._stopped_by = signum
            reaper.send(child, signal.Signals(signum))
            signal.setitimer(signal.ITIMER_REAL, self._grace_s)
        else:
            signal.setitimer(signal.ITIMER_REAL, HURRIED_GRACE_S)

    def _relay(self, signum: int, frame: FrameType | None) -> None:
        """To the child if it handles the signal; torchrun does not, and would die of it, but its workers do."""
        child = self._child()
        if child is not None:
            listeners = reaper.listeners(child, signal.Signals(signum))
            for pid in {child} & listeners or listeners:
                reaper.send(pid, signal.Signals(signum))

    def _time_is_up(self, signum: int, frame: FrameType | None) -> None:
        self._end(grace_s=0)

    def _end(self, grace_s: float) -> None:
        child = self._child()
        if child is not None:
            reaper.end(self._mark, [child], grace_s)
