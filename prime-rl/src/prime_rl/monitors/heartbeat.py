"""Heartbeat: sends a GET request to a watchdog URL after every step."""

from __future__ import annotations

import threading
import urllib.request
from http.client import HTTPException

from prime_rl.utils.logger import get_logger

TIMEOUT_S = 1.0


class Heartbeat:
    """Sends one GET request per step from a background thread, with a timeout of `TIMEOUT_S` seconds.

    A beat is skipped while the previous request is pending. Failures are logged as warnings. If the URL is None, no
    request is sent.
    """

    def __init__(self, url: str | None) -> None:
        self.url = url
        self._pending: threading.Thread | None = None

    def beat(self) -> None:
        if self.url is not None and (self._pending is None or not self._pending.is_alive()):
            self._pending = threading.Thread(target=self._call, args=(self.url,), name="heartbeat", daemon=True)
            self._pending.start()

    def close(self) -> None:
        """Wait for the last request to finish or time out."""
        if self._pending is not None:
            self._pending.join(2 * TIMEOUT_S)

    def _call(self, url: str) -> None:
        try:
            with urllib.request.urlopen(url, timeout=TIMEOUT_S):
                return
        except (OSError, HTTPException, ValueError) as error:
            reason = getattr(error, "code", None) or getattr(error, "reason", None) or error
            get_logger().warning(f"Heartbeat request to {url} failed: {reason}")
