"""Results of an evaluation: the file of finished rollouts, the table on the terminal, and the summary file.

A second start with the same directory makes only the rollouts that the file lacks.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self, TextIO

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from prime_rl.orchestrator.rollouts.rollout import ExampleRef, Rollout
from prime_rl.orchestrator.rollouts.trace import TokenTrace
from prime_rl.orchestrator.scores import score_titles
from prime_rl.run.directory import free_name
from prime_rl.utils.files import replacing_file

PLAIN_WIDTH = 240
"""Width of the table in a file or a pipe."""


class Key(NamedTuple):
    """Identifies a rollout: its number (from 0) among those of a row, with the weights of one step."""

    step: int
    env: str
    example: int
    rollout: int


@dataclass(frozen=True, slots=True)
class Result:
    """One finished rollout, as stored in the file."""

    step: int
    env: str
    example: int
    rollout: int
    reward: float
    completion_tokens: int
    is_truncated: bool
    stop_condition: str | None
    seconds: float
    """Seconds from the first request to the score."""
    metrics: Mapping[str, float]
    """Other metrics of the environment's rubric."""
    prompt: Any
    completion: Any
    reward_errors: Mapping[str, str] = field(default_factory=dict)
    """Tracebacks of failed reward functions, by name."""
    prompt_id: str = ""
    """Id of the prompt, independent of its row. Empty in results of earlier versions."""

    @classmethod
    def from_rollout(cls, key: Key, rollout: Rollout, seconds: float) -> Self:
        return cls(
            *key,
            reward=rollout.reward,
            completion_tokens=rollout.completion_tokens,
            is_truncated=rollout.is_truncated,
            stop_condition=rollout.stop_condition,
            seconds=round(seconds, 3),
            metrics=rollout.metrics or {},
            prompt=rollout.prompt,
            completion=rollout.completion,
            reward_errors=rollout.reward_errors,
            prompt_id=rollout.prompt_id,
        )

    @property
    def key(self) -> Key:
        return Key(self.step, self.env, self.example, self.rollout)

    def as_rollout(self) -> Rollout:
        """The rollout, with the fields that scores need."""
        return Rollout(
            ExampleRef(self.env, self.example),
            self.reward,
            trace=TokenTrace(),
            temperature=1.0,
            version=self.step,
            is_truncated=self.is_truncated,
            stop_condition=self.stop_condition,
            usage_output_tokens=self.completion_tokens,
            completion=self.completion,
            metrics=dict(self.metrics),
            reward_errors=dict(self.reward_errors),
        )


class ResultsFile:
    """All results so far, in memory and in `results.jsonl`. A context manager.

    Lines are written immediately, so a crash loses at most the rollouts in flight. An incomplete last line is dropped.
    Rollouts of an earlier start whose reward functions failed do not count: they are made again.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._results: dict[Key, Result] = {}

    def __enter__(self) -> Self:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._descriptor = os.open(self._path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
        written = self._path.read_bytes()
        whole = written[: written.rfind(b"\n") + 1]
        os.ftruncate(self._descriptor, len(whole))
        found = [Result(**json.loads(line)) for line in whole.split(b"\n") if line]
        self._results = {result.key: result for result in found if not result.reward_errors}
        if len(self._results) < len(found):
            self._rewrite()  # otherwise a reader of the file would count a rollout twice
        return self

    def _rewrite(self) -> None:
        with replacing_file(self._path) as scratch:
            scratch.write_bytes(b"".join(map(_line, self._results.values())))
        os.close(self._descriptor)
        self._descriptor = os.open(self._path, os.O_RDWR | os.O_APPEND)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._descriptor)

    def __contains__(self, key: Key) -> bool:
        return key in self._results

    def __len__(self) -> int:
        return len(self._results)

    def add(self, result: Result) -> None:
        os.write(self._descriptor, _line(result))
        self._results[result.key] = result

    def set_aside(self, step: int) -> Path | None:
        """Keep a copy of the file, and forget the results of a step. Returns the copy; None if there are none."""
        if not any(key.step == step for key in self._results):
            return None
        copy = free_name(self._path)
        with replacing_file(copy) as scratch:
            scratch.write_bytes(self._path.read_bytes())
        self._results = {key: result for key, result in self._results.items() if key.step != step}
        self._rewrite()
        return copy

    def select(self, step: int, env: str) -> Iterator[Result]:
        """The results of one step in one environment."""
        return (result for result in self._results.values() if (result.step, result.env) == (step, env))


def _line(result: Result) -> bytes:
    def plain(message: Any) -> Any:  # messages may be Pydantic models
        return message.model_dump() if hasattr(message, "model_dump") else str(message)

    return (json.dumps(asdict(result), ensure_ascii=False, default=plain) + "\n").encode()


@dataclass(frozen=True, slots=True)
class CandidateScores:
    """The scores of one candidate in one environment."""

    candidate: str
    step: int
    env: str
    metrics: Mapping[str, float]
    """As in `metrics.jsonl`, without the prefix `eval/<env>/`."""


def write_summary(rows: Sequence[CandidateScores], path: Path) -> None:
    """Write all rows as a JSON list."""
    with replacing_file(path) as scratch:
        scratch.write_text(json.dumps([asdict(row) for row in rows], indent=2) + "\n", encoding="utf-8")


def print_table(rows: Sequence[CandidateScores], file: TextIO = sys.stdout) -> None:
    """Print one line per candidate and environment: with colours and rules on a terminal, otherwise plain."""
    on_terminal = file.isatty()
    scores = {name: title for row in rows for name, title in score_titles(row.metrics).items()}
    is_unscored = any(row.metrics.get("reward_errors/mean", 0) > 0 for row in rows)
    table = Table(box=SIMPLE_HEAD if on_terminal else None, pad_edge=False, header_style="bold")
    for title in ("weights", "environment"):
        table.add_column(title)
    for title in (
        *scores.values(),
        "length",
        "truncated",
        "failed",
        "seconds",
        *(["reward errors"] if is_unscored else []),
    ):
        table.add_column(title, justify="right")
    for row in rows:
        unscored = [_cell(row.metrics, "reward_errors/mean", "{:.1%}")] if is_unscored else []
        shown = (*(_cell(row.metrics, name, "{:.3f}") for name in scores), *_others(row), *unscored)
        table.add_row(row.candidate, row.env, *shown)
    Console(file=file, width=None if on_terminal else PLAIN_WIDTH, highlight=False).print(table)


def _others(row: CandidateScores) -> list[str]:
    return [
        _cell(row.metrics, "completion_len/mean", "{:.1f}"),
        _cell(row.metrics, "is_truncated/mean", "{:.1%}"),
        _cell(row.metrics, "failed/count", "{:.0f}"),
        _cell(row.metrics, "time", "{:.1f}"),
    ]


def _cell(metrics: Mapping[str, float], name: str, form: str) -> str:
    """A cell. Empty without the metric, for example `pass@k` of graded rewards."""
    return form.format(metrics[name]) if name in metrics else ""
