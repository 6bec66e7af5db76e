"""Finds the last warnings and errors in a run's logs."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from prime_rl.launch.logs import HEAD, tail
from prime_rl.watch.overview.words import printable

_LINE = re.compile(
    r"^(?:\d{4}-\d{2}-\d{2} )?(\d{2}:\d{2}:\d{2})\s+(?:(WARNING|ERROR|CRITICAL)\s+|(warning|error): )(.*)"
)
_ANSI = re.compile(r"\x1b\[[0-9;]*m")
_TAIL_LINES = 400
MAX_CHARS = 200


@dataclass(frozen=True, slots=True)
class Notice:
    """A warning or an error."""

    log: Path
    clock: str
    """As in the log: local time of the machine that wrote it."""
    level: str
    words: str


def last_notices(logs: Iterable[Path], started_s: float | None = None, most: int = 5) -> list[Notice]:
    """The last warnings and errors of the newest attempt, oldest first, without repetitions.

    Only the first line of each, shortened: what follows it may hold text of the data.
    """
    found: dict[tuple[str, str], Notice] = {}
    for log in logs:
        for notice in _of_log(log):
            found.pop((notice.level, notice.words), None)
            found[notice.level, notice.words] = notice
    return sorted(found.values(), key=lambda notice: notice.clock)[-most:]


def _of_log(log: Path) -> Iterator[Notice]:
    lines = tail(log, _TAIL_LINES)
    heads = [index for index, line in enumerate(lines) if line.startswith(HEAD)]
    for line in lines[heads[-1] + 1 :] if heads else lines:
        notice = _of_line(log, line)
        if notice is not None:
            yield notice


def _of_line(log: Path, line: str) -> Notice | None:
    match = _LINE.match(_ANSI.sub("", line))
    if match is None:
        return None
    clock, level, launcher_level, words = match.groups()
    return Notice(log, clock, (level or launcher_level).lower(), printable(words, MAX_CHARS))
