"""Metrics are read while the file grows; what an attempt does again replaces what it did before."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from prime_rl.history.attempts import Attempt
from prime_rl.history.metrics import MetricLog


@pytest.fixture
def log(tmp_path: Path) -> MetricLog:
    return MetricLog(tmp_path / "metrics.jsonl")


def append(log: MetricLog, step: int, time_s: float, source: str = "trainer", **metrics: Any) -> None:
    with log.path.open("a") as file:
        file.write(json.dumps({"time": time_s, "source": source, "step": step, **metrics}) + "\n")


def attempt(number: int, started_s: float, step: int | None = None) -> Attempt:
    return Attempt(number, started_s, "here", step)


def test_a_missing_file_has_no_metrics(log: MetricLog) -> None:
    assert not log.refresh([])
    assert (log.sources, log.series("loss/mean", "trainer"), log.last("loss/mean", "trainer")) == ([], {}, None)


def test_what_is_appended_is_read_next_time(log: MetricLog) -> None:
    append(log, 0, 1.0, loss=3.0)
    assert log.refresh([])
    assert not log.refresh([])
    append(log, 1, 2.0, loss=2.0)
    assert log.refresh([])
    assert log.series("loss", "trainer") == {0: 3.0, 1: 2.0}
    assert log.times_s("loss", "trainer") == {0: 1.0, 1: 2.0}


def test_a_line_counts_once_it_is_complete(log: MetricLog) -> None:
    line = json.dumps({"time": 1.0, "source": "trainer", "step": 0, "loss": 3.0}) + "\n"
    log.path.write_text(line[:20])
    log.refresh([])
    assert log.sources == []
    log.path.write_text(line)
    log.refresh([])
    assert log.series("loss", "trainer") == {0: 3.0}
    assert log.damaged_lines == 0


@pytest.mark.parametrize(
    "line",
    [
        "{",
        "[]",
        "3",
        '{"step": 1}',
        '{"time": "x", "source": "a", "step": 1}',
        "[" * 5000,
        '{"time": 1, "source": "a", "step": 1e400}',
        f'{{"time": 1, "source": "a", "step": {10**30}}}',
        '{"time": 1e999, "source": "a", "step": 1}',
        '{"time": 1e300, "source": "a", "step": 1}',
        "\0\0",
        "\udcff",
    ],
)
def test_a_damaged_line_is_counted_and_left_out(log: MetricLog, line: str) -> None:
    log.path.write_bytes(line.encode(errors="surrogateescape") + b"\n")
    append(log, 1, 2.0, loss=2.0)
    log.refresh([])
    assert log.damaged_lines == 1
    assert log.series("loss", "trainer") == {1: 2.0}


def test_null_is_nan_and_text_is_left_out(log: MetricLog) -> None:
    append(log, 0, 1.0, loss=None, name="a", is_late=True)
    log.refresh([])
    assert math.isnan(log.series("loss", "trainer")[0])
    assert log.names("trainer") == ["loss", "is_late"]


@pytest.mark.parametrize("value", [10**400, math.inf, -math.inf])
def test_an_infinity_and_an_integer_that_no_float_holds_are_nan(value: float, log: MetricLog) -> None:
    append(log, 0, 1.0, loss=value)
    log.refresh([])
    assert math.isnan(log.series("loss", "trainer")[0])


def test_sources_are_kept_apart(log: MetricLog) -> None:
    append(log, 0, 1.0, "trainer", **{"time/step": 1.0})
    append(log, 0, 1.0, "orchestrator", **{"time/step": 2.0})
    log.refresh([])
    assert [log.last("time/step", source) for source in log.sources] == [1.0, 2.0]


def test_a_resumed_run_replaces_the_steps_after_the_one_it_continues_from(log: MetricLog) -> None:
    attempts = [attempt(1, 10.0), attempt(2, 20.0, step=2)]
    for step in range(5):
        append(log, step, 11.0 + step, loss=float(step))
    append(log, 2, 21.0, loss=20.0)
    log.refresh(attempts)
    assert log.series("loss", "trainer") == {0: 0.0, 1: 1.0, 2: 20.0}


def test_an_evaluation_of_the_weights_that_a_run_resumes_from_is_kept(log: MetricLog) -> None:
    attempts = [attempt(1, 10.0), attempt(2, 20.0, step=2)]
    for step in range(5):
        append(log, step, 11.0 + step, **{"val/loss": float(step), "eval/med-calc/avg@4": 0.5})
    append(log, 3, 21.0, loss=1.0)
    log.refresh(attempts)
    for name in ("val/loss", "eval/med-calc/avg@4"):
        assert list(log.series(name, "trainer")) == [0, 1, 2]


def test_it_makes_no_difference_when_the_file_is_read(log: MetricLog, tmp_path: Path) -> None:
    attempts = [attempt(1, 10.0), attempt(2, 20.0, step=2), attempt(3, 30.0, step=1)]
    records = [(step, 11.0 + step) for step in range(5)] + [(2, 21.0), (3, 22.0), (1, 31.0)]
    for number, (step, time_s) in enumerate(records):
        append(log, step, time_s, loss=float(number))
        log.refresh(attempts)
    again = MetricLog(log.path)
    again.refresh(attempts)
    assert again.series("loss", "trainer") == log.series("loss", "trainer") == {0: 0.0, 1: 7.0}


def test_a_new_run_in_the_same_directory_starts_anew(log: MetricLog) -> None:
    for step in range(3):
        append(log, step, 1.0, loss=1.0)
    log.refresh([])
    log.path.unlink()
    append(log, 0, 2.0, loss=5.0)
    log.refresh([])
    assert log.series("loss", "trainer") == {0: 5.0}


def test_a_new_run_that_has_written_more_than_the_old_one_starts_anew(log: MetricLog) -> None:
    append(log, 0, 1.0, loss=1.0, lr=1.0)
    log.refresh([])
    log.path.unlink()
    for step in range(3):
        append(log, step, 2.0, loss=5.0)
    log.refresh([])
    assert log.series("loss", "trainer") == {0: 5.0, 1: 5.0, 2: 5.0}
    assert (log.series("lr", "trainer"), log.damaged_lines) == ({}, 0)


def test_of_a_step_that_was_written_twice_the_later_value_holds(log: MetricLog) -> None:
    append(log, 1, 1.0, loss=5.0)
    append(log, 0, 2.0, loss=9.0)
    append(log, 0, 3.0, loss=2.0)
    log.refresh([])
    assert list(log.series("loss", "trainer").items()) == [(0, 2.0), (1, 5.0)]


@pytest.mark.parametrize("twice", [False, True], ids=["each-step-once", "a-step-twice"])
def test_the_newest_values_and_those_of_a_step_are_those_of_the_whole_series(log: MetricLog, twice: bool) -> None:
    for step in range(5000):
        append(log, step, 2.0 * step, loss=step / 7)
    if twice:
        append(log, 4000, 9e9, loss=1.5)
    log.refresh([])
    whole, times_s = log.series("loss", "trainer"), log.times_s("loss", "trainer")
    assert log.newest("loss", "trainer", 3) == {step: whole[step] for step in (4997, 4998, 4999)}
    assert log.newest_times_s("loss", "trainer", 1) == {4999: times_s[4999]}
    assert log.last("loss", "trainer") == whole[4999]
    for step in (0, 4000, 4999):
        assert log.of_step(step, ["loss", "other"], "trainer") == {"loss": whole[step]}
        assert log.time_s(step, "loss", "trainer") == times_s[step]
    assert (log.of_step(5000, ["loss"], "trainer"), log.time_s(5000, "loss", "trainer")) == ({}, 0.0)
    course = log.course("loss", "trainer")
    assert (course[0], course[-1]) == (whole[0], whole[4999])
    assert 2000 < len(course) < 4200
    assert set(course) <= set(whole.values())


def test_a_file_is_read_whole_however_large_its_lines_are(log: MetricLog) -> None:
    for step in range(6):
        append(log, step, float(step), loss=float(step), note="x" * 3_000_000)
    log.refresh([])
    assert list(log.series("loss", "trainer")) == list(range(6))
    assert log.damaged_lines == 0


def test_scores_of_an_evaluation_are_those_of_the_version_and_a_resume_from_it_keeps_them(log: MetricLog) -> None:
    append(log, 5, 1.0, "orchestrator", **{"progress/ckpt_step": 4, "eval/a/avg@1": 0.5})
    append(log, 5, 2.0, "orchestrator", **{"progress/ckpt_step": 4, "reward/mean": 0.25})
    log.refresh([])
    assert log.series("eval/a/avg@1", "orchestrator") == {4: 0.5}
    assert log.series("reward/mean", "orchestrator") == {5: 0.25}
    append(log, 4, 4.0, "orchestrator", **{"progress/ckpt_step": 4, "reward/mean": 0.75})
    log.refresh([attempt(1, 0.0), attempt(2, 3.0, step=4)])
    assert log.series("eval/a/avg@1", "orchestrator") == {4: 0.5}
    assert log.series("reward/mean", "orchestrator") == {4: 0.75}
