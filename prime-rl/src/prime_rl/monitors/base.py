"""Monitors of metrics: their interface, the file `metrics.jsonl`, and the heartbeat to a URL."""

from __future__ import annotations

import json
import math
import os
import threading
import time
import urllib.request
from collections.abc import Mapping, Sequence
from http.client import HTTPException
from pathlib import Path
from typing import Protocol

from prime_rl.utils.errors import RunError
from prime_rl.utils.logger import get_logger

Metrics = Mapping[str, float | int | str]


class Monitor(Protocol):
    """Receives a component's metrics once per step."""

    def log(self, metrics: Metrics, step: int) -> None: ...

    def close(self, exit_code: int = 0) -> None:
        """Flush, and record the run's exit code."""


class MultiMonitor:
    """Forwards every call to several monitors."""

    def __init__(self, monitors: Sequence[Monitor]) -> None:
        self.monitors = tuple(monitors)

    def log(self, metrics: Metrics, step: int) -> None:
        for monitor in self.monitors:
            monitor.log(metrics, step)

    def close(self, exit_code: int = 0) -> None:
        for monitor in self.monitors:
            monitor.close(exit_code)


class JsonlMonitor:
    """Appends `{"time", "source", "step", <metric>: <value>, …}` lines to a file that several processes share.

    Each line is one `write` to a descriptor in append mode, so lines of different processes do not interleave. NaN and
    infinities become null, because JSON cannot represent them. If a line cannot be written (for example, the disk is
    full), training continues: the first failure is logged as a warning, and `close` logs the number of lost lines.
    """

    def __init__(self, path: Path, source: str) -> None:
        """
        Raises:
            RunError: the file cannot be written, as one of another user.
        """
        self.path = path
        self.source = source
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        except OSError as error:
            raise RunError(f"{path} cannot be written: {error.strerror or error}") from error
        self._lost_lines = 0
        self._is_mid_line = False

    def log(self, metrics: Metrics, step: int) -> None:
        record = {"time": time.time(), "source": self.source, "step": step}
        for name, value in metrics.items():
            record[name] = None if isinstance(value, float) and not math.isfinite(value) else value
        line = (json.dumps(record) + "\n").encode()
        start = b"\n" if self._is_mid_line else b""
        try:
            written = os.write(self._descriptor, start + line)
        except OSError as error:
            self._count_lost(error.strerror or str(error))
            return
        self._is_mid_line = written < len(start + line)
        if self._is_mid_line:
            self._count_lost("the disk is full")

    def close(self, exit_code: int = 0) -> None:
        if self._lost_lines:
            get_logger().warning(f"{self._lost_lines} lines could not be written to {self.path}")
        os.close(self._descriptor)

    def _count_lost(self, reason: str) -> None:
        self._lost_lines += 1
        if self._lost_lines == 1:
            get_logger().warning(f"Cannot write to {self.path} ({reason}); training continues, but metrics are lost")


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
