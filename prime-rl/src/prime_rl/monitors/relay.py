"""Brings the metrics of an evaluation next to SFT to the trainer's sinks, so that a run has one curve in each.

The evaluator writes to `OUT/metrics.jsonl` alone. As long as the trainer runs, it sends what it finds there with its
own next step: W&B takes steps in order, and an evaluation may end long after its step. The evaluator sends the rest.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from prime_rl.monitors.base import Metrics, Monitor
from prime_rl.run.paths import RunPaths
from prime_rl.utils.files import replacing_file

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
        try:
            file = self.paths.metrics.open("rb")
        except OSError:
            return
        with file:
            file.seek(self._offset)
            for line in file:
                if not line.endswith(b"\n"):
                    return
                self._offset += len(line)
                with contextlib.suppress(ValueError, RecursionError):
                    record = json.loads(line)
                    if isinstance(record, dict):
                        yield record


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
