"""One child in the foreground, that outlives no end of this process and is killed by none that it can handle."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from types import FrameType, TracebackType
from typing import Self

PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
GRACE_S = 90.0
"""How long the child may take to save and stop. Longer than what a launcher grants its own children."""

_PR_SET_PDEATHSIG = 1
_PID_BYTES = 8


class ForegroundChild:
    """While `subprocess.run` waits for a child: SIGINT, SIGTERM and SIGHUP to this process are passed on to the child.

    Left alone, `subprocess.run` kills its child on Ctrl-C, and leaves it behind on SIGTERM. It keeps the child's
    process id to itself as well, so the child tells it: pass `before_exec` as `preexec_fn`.
    """

    def __init__(self, grace_s: float = GRACE_S) -> None:
        self._grace_s = grace_s
        self._previous_handlers: dict[signal.Signals, object] = {}
        self._pid: int | None = None

    def __enter__(self) -> Self:
        self._told, self._tell = os.pipe()
        os.set_blocking(self._told, False)
        for signum in PASSED_ON:
            # nohup's promise is to survive the terminal.
            if signum is not signal.SIGHUP or signal.getsignal(signum) is not signal.SIG_IGN:
                self._previous_handlers[signum] = signal.signal(signum, self._pass_on)
        self._previous_handlers[signal.SIGALRM] = signal.signal(signal.SIGALRM, self._kill)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)
        for signum, handler in self._previous_handlers.items():
            signal.signal(signum, handler)
        os.close(self._told)
        os.close(self._tell)

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
            except BlockingIOError:
                return None
        return self._pid

    def _pass_on(self, signum: int, frame: FrameType | None) -> None:
        child = self._child()
        if child is None:
            raise SystemExit(128 + signum)
        os.kill(child, signum)
        signal.setitimer(signal.ITIMER_REAL, self._grace_s)

    def _kill(self, signum: int, frame: FrameType | None) -> None:
        os.killpg(self._pid, signal.SIGKILL)
