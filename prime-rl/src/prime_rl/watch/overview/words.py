"""Text from a run's files, made safe for a terminal and for Markdown."""

from __future__ import annotations

import re

_ESCAPE = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|.)")


def printable(text: str, max_chars: int = 300) -> str:
    """One line without escape sequences and control characters, of bounded length."""
    return visible(text[: 4 * max_chars].replace("\t", " ").strip(), max_chars).strip()


def visible(text: str, max_chars: int) -> str:
    """As `printable`, but indentation stays."""
    cut = _ESCAPE.sub("", text[: 4 * max_chars]).expandtabs(4)
    line = "".join(char if char.isprintable() else " " if char.isspace() else "?" for char in cut)
    return line if len(line) <= max_chars else line[: max_chars - 1] + "…"


def shown_clock(seconds: float | None) -> str:
    """Local time of day, `15:02:39`; empty for None."""
    import time

    return "" if seconds is None else time.strftime("%H:%M:%S", time.localtime(seconds))


def steps_words(steps: tuple[int, ...], most: int = 3) -> str:
    """`step 10, 20, 30`; of many, the newest: `… 90, 100, 110 (11)`."""
    if not steps:
        return "none"
    listed = ", ".join(map(str, steps[-most:]))
    return f"step {listed}" if len(steps) <= most else f"step …, {listed} ({len(steps)} in all)"
