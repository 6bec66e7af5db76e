"""Phases add up to the time of the steps; attempts are charged for their GPUs until they end or were last seen."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from prime_rl.history.run import RunHistory, phases_of, spending_of, split_hint
from prime_rl.run.paths import RunPaths

START_S = 1_700_000_000.0


def history_of(
    directory: Path, records: list[dict[str, Any]], receipts: list[dict[str, Any]], kind: str = "rl"
) -> RunHistory:
    paths = RunPaths(directory)
    paths.configs.mkdir(parents=True)
    paths.config(kind).write_text("max_steps = 80\n")
    paths.metrics.write_text("".join(json.dumps(record) + "\n" for record in records))
    paths.attempts.mkdir()
    for number, receipt in enumerate(receipts, 1):
        table = {"attempt": number, "host": "node", "started": "2023-11-14T22:13:20+00:00", "step": None, **receipt}
        paths.receipt(number).write_text(json.dumps(table))
    return RunHistory.open(directory)


def step_records(steps: int, trainer_waits_s: float, orchestrator_waits_s: float) -> list[dict[str, Any]]:
    found = []
    for step in range(steps):
        at = {"time": START_S + 20 + 10 * step, "step": step}
        waits = {"time/wait_for_batch": trainer_waits_s, "time/forward_backward": 10 - trainer_waits_s}
        collecting = {"time/generate_completions": 9.0, "time/wait_for_ckpt": orchestrator_waits_s}
        found += [
            {**at, "source": "trainer", "time/step": 10.0, "loss/mean": 1.0, **waits},
            {**at, "source": "orchestrator", "time/step": 10.0, "time/save_ckpt": 0.5, **collecting},
        ]
    return found


def test_phases_add_up_to_the_steps(tmp_path: Path) -> None:
    trainer, orchestrator = phases_of(history_of(tmp_path, step_records(4, 6.0, 2.0), []))
    assert trainer.totals_s == {"wait for a batch": 24.0, "forward and backward": 16.0}
    assert orchestrator.totals_s == {"generate and score": 28.0, "wait for weights": 8.0, "save": 2.0, "other": 4.0}


def test_the_time_of_evaluations_counts_environments_with_a_slash_and_no_function_called_time(tmp_path: Path) -> None:
    evaluation = {"eval/hub/words/time": 4.0, "eval/letters/time": 3.0, "eval/letters/metrics/time": 90.0}
    record = {"time": START_S + 60, "source": "orchestrator", "step": 4, "progress/ckpt_step": 4, **evaluation}
    _, orchestrator = phases_of(history_of(tmp_path, [*step_records(4, 6.0, 2.0), record], []))
    assert orchestrator.totals_s["evaluate"] == 4.0


@pytest.mark.parametrize(
    ("steps", "trainer_waits_s", "orchestrator_waits_s", "words"),
    [
        (20, 6.0, 0.1, "Generation limits the speed"),
        (20, 0.1, 6.0, "The trainer limits the speed"),
        (20, 4.0, 4.0, "Neither side"),
        (20, 0.5, 0.5, "Neither side"),
    ],
)
def test_the_hint_names_the_side_that_the_other_waits_for(
    steps: int, trainer_waits_s: float, orchestrator_waits_s: float, words: str, tmp_path: Path
) -> None:
    hint = split_hint(phases_of(history_of(tmp_path, step_records(steps, trainer_waits_s, orchestrator_waits_s), [])))
    assert hint is not None
    assert words in hint


def test_a_short_run_gets_no_hint(tmp_path: Path) -> None:
    assert split_hint(phases_of(history_of(tmp_path, step_records(11, 6.0, 0.1), []))) is None
    assert split_hint([]) is None


def test_gpu_hours_are_time_by_gpus_and_startup_ends_with_the_first_step(tmp_path: Path) -> None:
    receipt = {
        "ended": "2023-11-15T00:13:20+00:00",
        "outcome": "complete",
        "gpus": {"trainer": ["0", "1"], "inference": ["2"]},
    }
    (only,) = spending_of(history_of(tmp_path, step_records(3, 1, 1), [receipt]), now_s=START_S + 1e6)
    assert only.seconds == 7200
    assert only.gpu_hours == {"trainer": 4.0, "inference": 2.0}
    assert only.all_gpu_hours == 6.0
    assert only.startup_s == 10


@pytest.mark.parametrize(
    ("gpus", "hours"),
    [
        ({"trainer": ["0"], "inference": ["0"]}, 2.0),
        ({}, 0.0),
        ({"trainer": 2}, None),
        (["0"], None),
    ],
    ids=["shared", "CPU", "a number", "a list"],
)
def test_a_gpu_is_paid_for_once(gpus: object, hours: float | None, tmp_path: Path) -> None:
    receipt = {"ended": "2023-11-15T00:13:20+00:00", "outcome": "complete", "gpus": gpus}
    (only,) = spending_of(history_of(tmp_path, step_records(3, 1, 1), [receipt]), now_s=START_S + 1e6)
    assert only.all_gpu_hours == hours


def test_a_killed_attempt_ends_with_its_last_step_and_one_without_gpus_has_no_price(tmp_path: Path) -> None:
    history = history_of(tmp_path, step_records(3, 1, 1), [{}])
    (only,) = spending_of(history, now_s=START_S + 1e6)
    assert only.seconds == 40
    assert only.gpu_hours is None


def test_a_restart_ends_the_attempt_before_it(tmp_path: Path) -> None:
    later = {"started": "2023-11-14T22:14:00+00:00", "step": 2}
    first, second = spending_of(history_of(tmp_path, step_records(6, 1, 1), [{}, later]), now_s=START_S + 1e6)
    assert first.seconds == 30
    assert second.seconds == 30
    assert second.startup_s == 0


def test_no_attempts_and_no_metrics_are_no_spending(tmp_path: Path) -> None:
    history = history_of(tmp_path, [], [], "sft")
    assert spending_of(history, START_S) == []
    assert phases_of(history) == []
