"""Reward functions that raise, leave or return no number: seen, shown, and the end of a run if they mostly do."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

FAILING = """
import sys
import verifiers as vf
from datasets import Dataset


def raises(completion):
    return {}["no such key"]


async def raises_later(completion, **rest):
    raise RuntimeError("the judge is down")


def gives_none(completion, state):
    return None


def gives_nan(completion):
    return float("nan")


def leaves(completion):
    sys.exit(0)


def scores_groups(completions):
    raise ValueError("no group score")


def gives_none_for_groups(states):
    return None


def is_long(completion):
    return float(len(completion[-1]["content"]) > 3)


CALLS = iter(range(1_000_000))


def fails_every_other_time(completion):
    if next(CALLS) % 2:
        raise ValueError("every other time")
    return 1.0


def load_environment(function):
    data = Dataset.from_list([{"question": text, "answer": ""} for text in ("ab", "cd", "ef", "ghij")])
    return vf.SingleTurnEnv(dataset=data, rubric=vf.Rubric(funcs=[is_long, globals()[function]]))
"""

LAST_LINES = {
    "raises": "KeyError: 'no such key'",
    "raises_later": "RuntimeError: the judge is down",
    "gives_none": "it returned None instead of a number",
    "gives_nan": "it returned nan instead of a finite number",
    "leaves": "SystemExit: 0",
    "scores_groups": "ValueError: no group score",
    "gives_none_for_groups": "it returned None instead of 2 numbers",
}


@pytest.fixture(autouse=True)
def failing_env(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "failing_env.py").write_text(FAILING)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    sys.modules.pop("failing_env", None)


def ends_with_the_traceback(log: str, function: str) -> bool:
    assert "reward functions failed in 8 of the last 8 rollouts (limit: max_reward_errors = 0.5" in log
    assert f"the first was '{function}'" in log
    return LAST_LINES[function] in log.rstrip().splitlines()[-1]


@pytest.mark.parametrize("function", LAST_LINES)
def test_a_function_that_always_fails_ends_the_run_with_its_traceback(orchestrate, function: str) -> None:
    code, log = orchestrate(env=[{"id": "failing-env", "args": {"function": function}}], batch_size=8)
    assert code == 1
    assert ends_with_the_traceback(log, function)


def test_a_run_of_fewer_rollouts_fails_too(orchestrate) -> None:
    code, log = orchestrate(env=[{"id": "failing-env", "args": {"function": "raises"}}], batch_size=2)
    assert code == 1
    assert "rollouts (limit: max_reward_errors = 0.5" in log
    assert "Orchestrator finished" not in log


@pytest.mark.parametrize("function", ["raises", "gives_none_for_groups"])
def test_it_ends_the_run_from_an_environment_server_too(orchestrate, function: str) -> None:
    code, log = orchestrate(env=[{"id": "failing-env", "args": {"function": function}}], batch_size=8, env_servers=True)
    assert code == 1
    assert ends_with_the_traceback(log, function)


def test_it_ends_an_evaluation_too(orchestrate) -> None:
    env = {"id": "failing-env", "args": {"function": "raises"}, "rollouts_per_example": 2}
    code, log = orchestrate(env=[{"id": "failing-env", "args": {"function": "is_long"}}], eval={"env": [env]})
    assert code == 1
    assert ends_with_the_traceback(log, "raises")


@pytest.mark.parametrize(("function", "share", "errors"), [("fails_every_other_time", 0.5, 0.5), ("raises", 1.0, 1.0)])
def test_failures_within_the_share_are_one_warning_and_a_metric(
    orchestrate, tmp_path: Path, function: str, share: float, errors: float
) -> None:
    env = {"id": "failing-env", "args": {"function": function}, "max_reward_errors": share}
    code, log = orchestrate(env=[env], batch_size=8)
    assert code == 0, log
    (warning,) = [line for line in log.splitlines() if "the reward function" in line]
    assert f"the reward function '{function}' failed and counts as 0" in warning
    (record,) = map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())
    assert record["reward/errors"] == errors
