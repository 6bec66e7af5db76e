"""The scores in lm-eval's results, with their standard errors, next to those of the base model."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from medarc_rl.lm_eval.published import Published, published_score
from medarc_rl.lm_eval.results import Result

SIGNIFICANT = 2.0
"""A difference of more standard errors than this is marked."""


@dataclass(frozen=True, slots=True)
class Metric:
    """One score of one task, group or subtask."""

    task: str
    name: str
    filter: str
    """How answers were extracted; `none` if they were not."""
    value: float
    stderr: float | None

    @property
    def metric(self) -> str:
        return self.name if self.filter == "none" else f"{self.name} ({self.filter})"


@dataclass(frozen=True, slots=True)
class Difference:
    """A score minus that of the base model."""

    value: float
    stderr: float | None
    is_paired: bool
    """The standard error is that of the differences question by question."""

    @property
    def is_significant(self) -> bool:
        return self.stderr is not None and abs(self.value) > SIGNIFICANT * self.stderr


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table."""

    task: str
    shots: int | None
    metric: str
    candidate: str
    is_base: bool
    chat_template: bool
    n: int | None
    """Number of questions."""
    value: float
    stderr: float | None
    difference: Difference | None
    published: Published | None
    notes: tuple[str, ...]

    def as_json(self) -> dict[str, Any]:
        return asdict(self) | {"significant": self.difference is not None and self.difference.is_significant}


def metrics_of(content: Mapping[str, Any], asked: str) -> list[Metric]:
    """The scores of the task or group that was asked for; of a group that has none of its own, those of its tasks."""
    results: Mapping[str, Any] = {**content["results"], **(content.get("groups") or {})}
    own = list(_metrics(asked, results[asked])) if asked in results else []
    return own or [metric for task, scores in results.items() for metric in _metrics(task, scores)]


def _metrics(task: str, scores: Mapping[str, Any]) -> Iterator[Metric]:
    for key, value in scores.items():
        name, comma, filter_name = key.partition(",")
        if not comma or name.endswith("_stderr") or isinstance(value, bool) or not isinstance(value, int | float):
            continue
        stderr = scores.get(f"{name}_stderr,{filter_name}")
        known = float(stderr) if isinstance(stderr, int | float) and math.isfinite(stderr) else None
        yield Metric(task, name, filter_name, float(value), known)


def rows_of(results: Sequence[Result]) -> list[Row]:
    """One row for each score: by task and metric, the base model first, then by step."""
    rows = []
    bases = {_setting(result): result for result in results if result.facts["is_base"]}
    for result in results:
        base = bases.get(_setting(result))
        for metric in metrics_of(result.content, result.facts["task"]):
            compared = None if base is None or base is result else _difference(metric, result, base)
            rows.append(_row(metric, result, compared))
    order = {name: place for place, name in enumerate(dict.fromkeys(row.metric for row in rows))}
    return sorted(rows, key=lambda row: (row.task, row.shots or 0, order[row.metric], not row.is_base, _place(row)))


def _setting(result: Result) -> tuple[Any, ...]:
    return result.facts["task"], result.facts["shots"]


def _place(row: Row) -> tuple[int, str]:
    step = row.candidate.removeprefix("step_")
    return (int(step), "") if step.isdigit() else (-1, row.candidate)


def _row(metric: Metric, result: Result, difference: Difference | None) -> Row:
    content, facts = result.content, result.facts
    samples = (content.get("n-samples") or {}).get(metric.task) or {}
    shots = (content.get("n-shot") or {}).get(metric.task, facts["shots"])
    return Row(
        task=metric.task,
        shots=shots,
        metric=metric.metric,
        candidate=facts["candidate"],
        is_base=facts["is_base"],
        chat_template=facts["chat_template"],
        n=samples.get("effective"),
        value=metric.value,
        stderr=metric.stderr,
        difference=difference,
        published=published_score(metric.task, metric.name, metric.filter, shots, facts),
        notes=tuple(facts.get("notes", ())),
    )


def _difference(metric: Metric, result: Result, base: Result) -> Difference | None:
    others = {(each.task, each.metric): each for each in metrics_of(base.content, base.facts["task"])}
    other = others.get((metric.task, metric.metric))
    if other is None:
        return None
    value = metric.value - other.value
    if (stderr := _paired_stderr(metric, other, result, base)) is not None:
        return Difference(value, stderr, is_paired=True)
    known = metric.stderr is not None and other.stderr is not None
    independent = math.hypot(metric.stderr or 0.0, other.stderr or 0.0) if known else None
    return Difference(value, independent, is_paired=False)


def _paired_stderr(metric: Metric, other: Metric, result: Result, base: Result) -> float | None:
    """The standard error of the mean difference over the same questions.

    None unless both scores are means over samples that are kept.
    """
    mine, theirs = _by_question(metric, result), _by_question(other, base)
    if mine.keys() != theirs.keys() or len(mine) < 2:
        return None
    is_mean = (_is_mean(metric.value, mine), _is_mean(other.value, theirs))
    if not all(is_mean):
        return None
    differences = [mine[question] - theirs[question] for question in mine]
    mean = sum(differences) / len(differences)
    variance = sum((each - mean) ** 2 for each in differences) / (len(differences) - 1)
    return math.sqrt(variance / len(differences))


def _by_question(metric: Metric, result: Result) -> dict[tuple[int, str], float]:
    scores = {}
    for sample in result.samples():
        value = sample.get(metric.name)
        if sample["task"] == metric.task and sample["filter"] == metric.filter and isinstance(value, int | float):
            scores[sample["doc_id"], sample["doc_hash"]] = float(value)
    return scores


def _is_mean(value: float, samples: Mapping[Any, float]) -> bool:
    return bool(samples) and math.isclose(value, sum(samples.values()) / len(samples), rel_tol=1e-6, abs_tol=1e-9)
