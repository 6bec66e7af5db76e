"""`prime_rl.eval.passk`: a table of pass rates and a curriculum from the results of an evaluation."""

from __future__ import annotations

import csv
import itertools
import json
import subprocess
import sys
from dataclasses import asdict, replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from prime_rl.environments.rows.curricula import read_pass_rates
from prime_rl.environments.rows.sources import RowsFault
from prime_rl.eval.passk import PassPlan, ordered, pass_rates, write
from prime_rl.run.paths import EvalPaths


def result(prompt_id: str, row: int, number: int, reward: float, **more: Any) -> dict[str, Any]:
    return {
        "step": 0,
        "env": "rows",
        "example": row,
        "rollout": number,
        "reward": reward,
        "prompt_id": prompt_id,
        **more,
    }


@pytest.fixture
def plan(tmp_path: Path) -> PassPlan:
    """Four attempts at each of five prompts, of which 0 to 4 are right, written in the order in which they ended."""
    results = EvalPaths(tmp_path).results
    results.parent.mkdir(parents=True)
    done = [
        result(f"p{row}", row, number, 0.1 + 0.2 + 0.7 if number < row else 0.5)
        for number in (2, 0, 3, 1)
        for row in (3, 0, 4, 1, 2)
    ]
    results.write_text("".join(f"{json.dumps(each)}\n" for each in done), encoding="utf-8")
    return PassPlan(str(tmp_path), str(tmp_path / "rates.jsonl"))


def by_enumeration(n: int, correct: int, k: int) -> Fraction:
    """pass@k as its definition has it: the share of all choices of k attempts in which one is right."""
    choices = list(itertools.combinations([True] * correct + [False] * (n - correct), k))
    return Fraction(sum(map(any, choices)), len(choices))


def test_the_estimate_is_the_share_of_choices_with_a_right_attempt(plan: PassPlan) -> None:
    rates = pass_rates(plan)
    assert [(rate.prompt_id, rate.n, rate.correct) for rate in rates] == [(f"p{row}", 4, row) for row in range(5)]
    for rate in rates:
        assert rate.pass_at == {k: pytest.approx(float(by_enumeration(4, rate.correct, k))) for k in (1, 2, 4)}
    assert rates[1].mean_reward == pytest.approx(0.625)


@pytest.mark.parametrize(
    ("options", "ids"),
    [
        ({"order": "easy"}, ["p4", "p3", "p2", "p1", "p0"]),
        ({"order": "hard"}, ["p0", "p1", "p2", "p3", "p4"]),
        ({"order": "easy", "min_pass_rate": 0.01, "max_pass_rate": 0.99}, ["p3", "p2", "p1"]),
        ({"order": "hard", "threshold": 0.5, "min_pass_rate": 1.0}, ["p0", "p1", "p2", "p3", "p4"]),
        ({"order": "easy", "min_pass_rate": 0.8, "max_pass_rate": 0.9}, []),
    ],
)
def test_a_curriculum_is_sorted_by_rate_within_its_band(plan: PassPlan, options: Any, ids: list[str]) -> None:
    chosen = replace(plan, **options)
    assert ordered(pass_rates(chosen), chosen) == ids


def test_the_process_writes_a_table_that_a_dataset_can_be_filtered_by(plan: PassPlan, tmp_path: Path) -> None:
    chosen = replace(plan, table=str(tmp_path / "rates.csv"), curriculum=str(tmp_path / "order.txt"), order="hard")
    argv = [sys.executable, "-m", "prime_rl.eval.passk", json.dumps(asdict(chosen))]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "5 prompts in" in done.stdout
    assert "pass@1 0.5000, pass@2 0.6667, pass@4 0.8000; 1 never right, 1 always" in done.stdout
    with (tmp_path / "rates.csv").open(encoding="utf-8", newline="") as file:
        assert next(csv.DictReader(file))["pass@2"] == "0.0"
    assert [rate.rate for rate in read_pass_rates(tmp_path / "rates.csv").values()] == [0, 0.25, 0.5, 0.75, 1]
    assert (tmp_path / "order.txt").read_text(encoding="utf-8").split() == ["p0", "p1", "p2", "p3", "p4"]
    assert (tmp_path / "rates.csv").stat().st_mode & 0o777 == 0o600


def test_results_of_an_earlier_start_with_more_rows_attempts_or_environments_do_not_count(plan: PassPlan) -> None:
    rates = pass_rates(replace(plan, asked={"rows": (1, 3, 2)}))
    assert [(rate.prompt_id, rate.n, rate.correct) for rate in rates] == [("p1", 2, 1), ("p2", 2, 2)]
    assert [rate.n for rate in pass_rates(replace(plan, asked={"rows": (3, None, 4)}))] == [4, 4]
    with pytest.raises(RowsFault, match="no scored rollout"):
        pass_rates(replace(plan, asked={"other": (0, None, 4)}))


def test_what_cannot_be_done_is_one_line(plan: PassPlan, tmp_path: Path) -> None:
    for wrong, fault in (
        (replace(plan, env="other"), "no scored rollout of environment 'other'"),
        (replace(plan, step=7), "no results of the weights of step 7"),
        (replace(plan, output_dir=str(tmp_path / "nothing")), "no results"),
        (replace(plan, curriculum=str(tmp_path / "o"), min_pass_rate=0.8, max_pass_rate=0.9), "no prompt has a pass"),
    ):
        with pytest.raises(RowsFault, match=fault) as caught:
            write(wrong)
        assert "\n" not in str(caught.value)
    with EvalPaths(tmp_path).results.open("a", encoding="utf-8") as file:
        file.write(json.dumps(result("p0", 0, 0, 1.0, step=5)) + "\n")
        file.write(json.dumps(result("", 0, 0, 1.0, step=6)) + "\n")
    with pytest.raises(
        RowsFault, match=r"--step: there are results for the weights of several steps \(0, 5, 6\): choose one"
    ):
        write(plan)
    with pytest.raises(RowsFault, match="earlier version, without prompt ids"):
        write(replace(plan, step=6))
    assert [rate.correct for rate in pass_rates(replace(plan, step=5))] == [1]
