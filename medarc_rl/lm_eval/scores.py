"""Results of lm-eval: their files, their scores next to those of the base model, and the table that shows them."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any, TextIO

from medarc_rl.lm_eval.plan import Candidate, Facts, Job, LmEvalPaths, Settings
from prime_rl.utils.errors import one_line
from prime_rl.utils.files import replacing_file

# Results on disk: lm-eval's own, and our facts about them


FACTS = "medarc"


_OURS_ALONE = ("allow_unsafe_code", "include_path")
"""Settings that do not change a score."""


class OtherSettings(Exception):
    """Results of other settings are there, which must not be mixed with new ones. The message is one line."""


@dataclass(frozen=True, slots=True)
class Result:
    """The scores of one candidate in one task."""

    path: Path
    content: Mapping[str, Any]
    """lm-eval's results, without samples."""

    @property
    def facts(self) -> Mapping[str, Any]:
        facts = self.content[FACTS]
        assert isinstance(facts, dict)
        return facts

    def samples(self) -> list[dict[str, Any]]:
        file = self.path.with_name(self.path.name.removesuffix(".json") + ".samples.jsonl")
        if not file.is_file():
            return []
        # Lines of bytes: a text may hold U+2028, which ends a line of str.
        return [json.loads(line) for line in file.read_bytes().splitlines()]


def read_result(path: Path) -> Result | None:
    """The result in a file; None if it is missing or unreadable."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    known = isinstance(content, dict) and isinstance(content.get("results"), dict)
    return Result(path, content) if known and isinstance(content.get(FACTS), dict) else None


def read_results(paths: LmEvalPaths) -> list[Result]:
    return [result for path in paths.results() if (result := read_result(path)) is not None]


def is_done(paths: LmEvalPaths, candidate: Candidate, job: Job) -> bool:
    """Whether the candidate was evaluated with the weights that it has now."""
    result = read_result(paths.result(candidate.name, job.stem))
    return result is not None and result.facts.get("fingerprint") == candidate.fingerprint()


def check_settings(paths: LmEvalPaths, jobs: Sequence[Job], settings: Settings) -> None:
    """Raise OtherSettings if a result of these jobs was made with others."""
    stems, now = {job.stem for job in jobs}, compared(settings)
    for result in read_results(paths):
        if result.path.name.removesuffix(".json") not in stems:
            continue
        made_with = result.facts.get("settings", {})
        if changed := [key for key, value in now.items() if made_with.get(key) != value]:
            listed = ", ".join(f"{key} = {made_with.get(key)!r}, now {now[key]!r}" for key in changed)
            raise OtherSettings(f"{result.path} was made with {listed}: choose another --output-dir, or delete it")


def compared(settings: Settings) -> dict[str, Any]:
    values: dict[str, Any] = json.loads(json.dumps(asdict(settings)))
    return {key: value for key, value in values.items() if key not in _OURS_ALONE}


def write_result(paths: LmEvalPaths, job: Job, found: Mapping[str, Any], facts: Facts) -> None:
    """Write the samples, then the results: a result that is there is complete."""
    samples = [{"task": task, **sample} for task, every in (found.get("samples") or {}).items() for sample in every]
    lines = (json.dumps(sample, ensure_ascii=False, default=str) for sample in samples)
    write_private(paths.samples(facts.candidate, job.stem), "".join(f"{line}\n" for line in lines))
    kept = {key: value for key, value in found.items() if key not in ("samples", "pretty_env_info")}
    content = {**kept, FACTS: asdict(facts)}
    text = json.dumps(content, indent=2, ensure_ascii=False, default=str)
    write_private(paths.result(facts.candidate, job.stem), f"{text}\n")


def write_private(path: Path, text: str) -> None:
    """Replace a file by one that only its owner can read."""
    with replacing_file(path) as scratch:
        descriptor = os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)


# Scores in them, next to those of the base model and to published ones


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
class Published:
    """A published score."""

    value: float
    source: str


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
    """Scores of the requested task or group. A group without scores gives those of its tasks."""
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


_FILE = Path(__file__).with_name("published.json")


@cache
def _entries() -> list[dict[str, Any]]:
    content: list[dict[str, Any]] = json.loads(_FILE.read_text(encoding="utf-8"))["scores"]
    return content


def published_score(
    task: str, metric: str, filter_name: str, shots: int | None, facts: Mapping[str, Any]
) -> Published | None:
    """The published score of the same model, task, metric and number of shots; None unless the whole setting is equal.

    That is: greedy decoding without a chat template, all questions, and the same limit on new tokens.
    """
    settings = facts["settings"]
    if facts["chat_template"] or settings["limit"] is not None or settings["gen_kwargs"]:
        return None
    wanted = (facts["model"], task, metric, filter_name, shots, settings.get("used_max_gen_toks"))
    keys = ("model", "task", "metric", "filter", "shots", "max_gen_toks")
    for entry in _entries():
        if tuple(entry[key] for key in keys) == wanted:
            return Published(entry["value"], entry["source"])
    return None


# The table for people, and JSON for programs


PLAIN_WIDTH = 240
"""Width of the table in a file or a pipe."""


def write_summary(rows: Sequence[Row], path: Path) -> None:
    write_private(path, f"{as_json(rows)}\n")


def as_json(rows: Sequence[Row]) -> str:
    return json.dumps([row.as_json() for row in rows], indent=2)


def print_table(rows: Sequence[Row], file: TextIO = sys.stdout) -> None:
    """Print one line per score. `*` marks a difference of more than two standard errors."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    on_terminal = file.isatty()
    table = Table(box=SIMPLE_HEAD if on_terminal else None, pad_edge=False, header_style="bold")
    has_published = any(row.published for row in rows)
    for title in ("task", "metric", "weights"):
        table.add_column(title, overflow="fold")
    for title in ("n", "score", "± se", "vs base", *(["published"] if has_published else [])):
        table.add_column(title, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(*(Text(one_line(cell)) for cell in _cells(row, has_published)))
    console = Console(file=file, width=None if on_terminal else PLAIN_WIDTH, highlight=False)
    console.print(table)
    for line in footnotes(rows):
        console.print(Text(one_line(line)))


def _cells(row: Row, has_published: bool) -> list[str]:
    shots = "" if row.shots is None else f", {row.shots}-shot"
    weights = row.candidate.replace("step_", "step ") + (" (chat)" if row.chat_template else "")
    cells = [f"{row.task}{shots}", row.metric, weights, str(row.n or ""), f"{row.value:.4f}"]
    cells += ["" if row.stderr is None else f"{row.stderr:.4f}", _difference_text(row)]
    return [*cells, *([f"{row.published.value:.4f}" if row.published else ""] if has_published else [])]


def _difference_text(row: Row) -> str:
    found = row.difference
    if found is None:
        return ""
    spread = "" if found.stderr is None else f" ± {found.stderr:.4f}"
    return f"{found.value:+.4f}{spread}{'*' if found.is_significant else ' '}"


def footnotes(rows: Sequence[Row]) -> list[str]:
    """Notes below the table, one line each."""
    lines: list[Any] = []
    if any(row.difference for row in rows):
        lines.append("* more than two standard errors from the base model (paired by question where possible)")
    if len({row.chat_template for row in rows}) > 1:
        lines.append(
            "Some models were asked as a chat and others with plain text: to ask all in the same way, use "
            "--apply-chat-template yes or no."
        )
    lines += dict.fromkeys(f"published: {row.published.source}" for row in rows if row.published)
    lines += dict.fromkeys(
        f"warning: {row.candidate.replace('step_', 'step ')} | {row.task}: {note}" for row in rows for note in row.notes
    )
    return lines
