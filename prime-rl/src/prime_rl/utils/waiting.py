"""Waits for something that another process provides: each says what it waits for, and ends at a limit."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from prime_rl.utils.logger import get_logger

REMIND_EVERY_S = 60.0


@dataclass(slots=True)
class Wait:
    """One wait, which starts when it is created. Ask `is_over` at every poll: it also logs that the wait goes on."""

    what: str
    """What is waited for."""
    advice: str
    """What the user can do if it does not come."""
    limit_s: float
    limit_key: str
    """The config key that sets the limit."""
    quiet_s: float = 0.0
    """Seconds before the first log line. Then there is one each minute."""
    now_s: Callable[[], float] = time.monotonic
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
            get_logger().info(f"Waiting for {self.what} since {self._since} ({self._limit}): {self.advice}")
        return False

    @property
    def fault(self) -> str:
        """Why the wait has ended, in one line."""
        return f"waited for {self.what} since {self._since} and gave up ({self._limit}): {self.advice}"

    @property
    def _limit(self) -> str:
        return f"limit: {self.limit_key} = {self.limit_s:g} s"
