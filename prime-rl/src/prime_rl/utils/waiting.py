"""Waits for something that another process provides: each says what it waits for, and ends at a limit."""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from prime_rl.utils.logger import get_logger
from prime_rl.utils.scratch import LAUNCH_VARIABLE

REMIND_EVERY_S = 60.0
TELL_EVERY_S = 20.0


def advice_on(program: str, output_dir: Path, logs: Path, environ: Mapping[str, str] = os.environ) -> str:
    """Advice if another program of the run does not continue. A launch starts it by itself."""
    if LAUNCH_VARIABLE in environ:
        return f"see in its log why it does not continue: {logs}"
    return f"start it with `{program} --output-dir {output_dir}`, or see in its log why it does not continue: {logs}"


@dataclass(slots=True)
class Wait:
    """One wait, which starts when it is created. Ask `is_over` at every poll: it also logs that the wait goes on."""

    what: str
    """Thing that is waited for, as in the log line."""
    advice: str
    """Action that the user can take if it does not come."""
    limit_s: float
    limit_key: str
    """The config key that sets the limit."""
    quiet_s: float = 0.0
    """Seconds before the first log line. Then there is one each minute."""
    now_s: Callable[[], float] = time.monotonic
    tell: Callable[[str], None] | None = None
    """What gets the lines: by default the log, which only the engine's programs show."""
    _started_s: float = field(init=False)
    _since: str = field(init=False)
    _next_line_s: float = field(init=False)

    def __post_init__(self) -> None:
        self._started_s = self.now_s()
        self._since = time.strftime("%H:%M:%S")
        self._next_line_s = self._started_s + self.quiet_s

    @property
    def waited_s(self) -> float:
        return self.now_s() - self._started_s

    def is_over(self) -> bool:
        """Whether the limit has passed."""
        now_s = self.now_s()
        if now_s - self._started_s >= self.limit_s:
            return True
        if now_s >= self._next_line_s:
            self._next_line_s = now_s + REMIND_EVERY_S
            (self.tell or get_logger().info)(f"Waiting for {self.what} since {self._since}{self._limit}: {self.advice}")
        return False

    @property
    def fault(self) -> str:
        """Why the wait has ended, in one line."""
        return f"waited for {self.what} since {self._since} and gave up{self._limit}: {self.advice}"

    @property
    def _limit(self) -> str:
        return "" if math.isinf(self.limit_s) else f" (limit: {self.limit_key} = {self.limit_s:g} s)"


@contextmanager
def telling(
    what: str,
    tell: Callable[[str], None],
    how_far: Callable[[], str] = lambda: "",
    every_s: float = TELL_EVERY_S,
) -> Iterator[None]:
    """Tell every so often that the block goes on, for how long, and how far it is. A short block tells nothing."""
    started_s, is_done = time.monotonic(), threading.Event()

    def go_on() -> None:
        while not is_done.wait(every_s):
            far = how_far()
            tell(f"{what}: {time.monotonic() - started_s:.0f} s so far{f'; {far}' if far else ''}")

    thread = threading.Thread(target=go_on, name="telling", daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_done.set()
        thread.join()
