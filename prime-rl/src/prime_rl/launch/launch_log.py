"""The launcher's own log, `OUT/logs/<command>.log`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from datetime import datetime
from pathlib import Path


class LaunchLog:
    """Appends lines to a file and shows them."""

    def __init__(self, path: Path, show: Callable[[str], None]) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        self._show = show

    def note(self, text: str) -> None:
        """Log without showing."""
        # On a full disk the children will fail. The launcher must survive to stop them in order.
        with contextlib.suppress(OSError), self._path.open("a", encoding="utf-8") as log:
            log.writelines(f"{datetime.now():%Y-%m-%d %H:%M:%S} {line}\n" for line in text.splitlines())

    def say(self, text: str) -> None:
        """Log and show."""
        self.note(text)
        self._show(text)
