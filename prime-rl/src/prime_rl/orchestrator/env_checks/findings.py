"""What a check has found: one row for each thing that was looked at."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from typing import Any, Literal

from prime_rl.utils.terminal import cut_inside

Level = Literal["ok", "warn", "fail"]
MAX_CHARS = 600


@dataclass(frozen=True, slots=True)
class Finding:
    """One row."""

    level: Level
    subject: str
    """What was looked at, such as `dataset: prompts` or `reward: empty answer`."""
    text: str


class Reporter:
    """Sends rows, and what is being tried, to the process that started this one: JSON lines on a pipe.

    The pipe is not stdout: an environment may print anything there.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self.trying = ""

    def tries(self, what: str) -> None:
        """Say what begins now. If the environment's code never returns, this names it."""
        self.trying = what
        self._send({"trying": what})

    def found(self, level: Level, subject: str, text: str) -> None:
        self._send(asdict(Finding(level, subject, cut_inside(text, MAX_CHARS))))

    def done(self) -> None:
        self._send({"done": True})

    def _send(self, message: dict[str, Any]) -> None:
        # Each line is shorter than what a pipe takes at once, so that lines of several threads do not mix.
        os.write(self._descriptor, json.dumps(message).encode() + b"\n")
