"""Monitors of metrics: their interface, `metrics.jsonl`, the heartbeat to a URL, the benchmark table and the relay."""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
import statistics
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from typing import Any, Protocol

from prime_rl.run.paths import RunPaths
from prime_rl.utils.errors import RunError
from prime_rl.utils.files import replacing_file
from prime_rl.utils.logger import SUCCESS, get_logger

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


# Benchmark table: collects the metrics of each step and logs their statistics at the end.


_WIDTH = 132
"""Table width in characters; fits five columns with their summaries."""

Measured = Mapping[str, Sequence[float]]
"""Values of the measured steps by metric name."""


class BenchTable:
    """A monitor that logs a table of all steps at the end, except the first one, which is a warm-up.

    `columns` maps metric names to column titles. Metrics that are missing from a step get no column.
    """

    def __init__(self, columns: Mapping[str, str], write: Callable[[Measured], None] = lambda measured: None) -> None:
        """`write` is also called with the measured values at the end."""
        self.columns = columns
        self._write = write
        self._steps: dict[int, Metrics] = {}

    def log(self, metrics: Metrics, step: int) -> None:
        # Only training steps have this metric; validation, for example, does not.
        if "time/step" in metrics:
            self._steps[step] = dict(metrics)

    def close(self, exit_code: int = 0) -> None:
        steps = sorted(self._steps)[1:]
        if exit_code != 0 or not steps:
            return
        measured = {
            name: [float(self._steps[step][name]) for step in steps]
            for name in self.columns
            if all(name in self._steps[step] for step in steps)
        }
        get_logger().log(SUCCESS, f"Benchmark\n{self._table(steps, measured)}")
        self._write(measured)

    def _table(self, steps: Sequence[int], measured: Measured) -> str:
        from rich import box
        from rich.console import Console
        from rich.table import Table

        table = Table(box=box.SIMPLE_HEAD, show_footer=True)
        table.add_column("Step", footer="Overall")
        for name, values in measured.items():
            stats = summary(values)
            footer = f"{stats['mean']:.2f} ± {stats['std']:.2f} [{stats['min']:.2f}, {stats['max']:.2f}]"
            table.add_column(self.columns[name], footer=footer, justify="right")
        for index, step in enumerate(steps):
            table.add_row(str(step), *(f"{values[index]:.2f}" for values in measured.values()))
        text = io.StringIO()
        Console(file=text, width=_WIDTH).print(table)
        return "\n".join(line.rstrip() for line in text.getvalue().splitlines() if line.strip())


def summary(values: Sequence[float]) -> dict[str, float]:
    """Mean, population standard deviation, minimum and maximum."""
    return {
        "mean": statistics.fmean(values),
        "std": statistics.pstdev(values),
        "min": min(values),
        "max": max(values),
    }


# Brings the metrics of an evaluation next to SFT to the trainer's sinks, so that a run has one curve in each.
#
# The evaluator writes to `OUT/metrics.jsonl` alone. As long as the trainer runs, it sends what it finds there with its
# own next step: W&B takes steps in order, and an evaluation may end long after its step. The evaluator sends the rest.


SOURCE = "eval"
_FIELDS = ("time", "source", "step")


@dataclass(slots=True)
class Relay:
    """Reads evaluations from `metrics.jsonl`, each once, over all attempts."""

    paths: RunPaths
    _offset: int = 0

    @classmethod
    def of(cls, paths: RunPaths, resumes: bool) -> Relay:
        """Continue where an earlier reader of the same run stopped."""
        offset = 0
        with contextlib.suppress(OSError, ValueError):
            offset = int(paths.relayed.read_text(encoding="utf-8")) if resumes else 0
        return cls(paths, _offset=offset)

    def take(self) -> dict[str, float] | None:
        """The next evaluation; None if there is none yet."""
        for record in self._records():
            if record.get("source") == SOURCE:
                self.note()
                return {name: value for name, value in record.items() if name not in _FIELDS and value is not None}
        return None

    def last_step(self) -> int:
        """The highest step that the trainer has written; -1 before the first."""
        every = Relay(self.paths)._records()
        steps = (record.get("step") for record in every if record.get("source") != SOURCE)
        return max((step for step in steps if isinstance(step, int)), default=-1)

    def note(self) -> None:
        """Remember for a later reader what was read."""
        with contextlib.suppress(OSError), replacing_file(self.paths.relayed) as scratch:
            scratch.write_text(f"{self._offset}\n", encoding="utf-8")

    def _records(self) -> Iterator[dict[str, Any]]:
        """Whole lines that were not read yet. A damaged one is left out."""
        for record, end in records_after(self.paths.metrics, self._offset):
            self._offset = end
            if record is not None:
                yield record


def records_after(path: Path, offset: int) -> Iterator[tuple[dict[str, Any] | None, int]]:
    """Each whole line of a `metrics.jsonl` from `offset` on, and the offset of its end. None for a damaged line."""
    try:
        file = path.open("rb")
    except OSError:
        return
    with file:
        file.seek(offset)
        for line in file:
            if not line.endswith(b"\n"):
                return
            offset += len(line)
            record = None
            with contextlib.suppress(ValueError, RecursionError):
                record = json.loads(line)
            yield record if isinstance(record, dict) else None, offset


@dataclass(frozen=True, slots=True)
class WithEvaluations:
    """Sinks of a trainer that get one evaluation with each step, if one has ended."""

    sinks: Monitor
    relay: Relay

    def log(self, metrics: Metrics, step: int) -> None:
        self.sinks.log({**metrics, **(self.relay.take() or {})}, step)

    def close(self, exit_code: int = 0) -> None:
        self.relay.note()
        self.sinks.close(exit_code)
