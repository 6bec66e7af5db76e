"""The launcher's own log, `OUT/logs/rl.log`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from datetime import datetime
from pathlib import Path


class LaunchLog:
    """Keeps each line of a launch behind those of earlier ones, and shows it as well."""

    def __init__(self, path: Path, show: Callable[[str], None]) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        self._show = show

    def note(self, text: str) -> None:
        """Log without showing."""
        # A full disk ends the children soon enough; they shall at least be stopped in order.
        with contextlib.suppress(OSError), self._path.open("a", encoding="utf-8") as log:
            log.writelines(f"{datetime.now():%Y-%m-%d %H:%M:%S} {line}\n" for line in text.splitlines())

    def say(self, text: str) -> None:
        """Log and show."""
        self.note(text)
        self._show(text)
