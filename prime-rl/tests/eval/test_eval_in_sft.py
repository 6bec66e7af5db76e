"""`[eval]` of SFT as processes: a training with an evaluator next to it, which may fail, and its continuation."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from prime_rl.history.rollouts import KeptRollouts
from prime_rl.run.paths import RunPaths, stable_steps

ENVIRONMENT = """
import os
import verifiers as vf
from datasets import Dataset


def mentions_a_vowel(completion):
    return float(any(letter in "aeiou" for letter in completion[-1]["content"]))


def load_environment():
    if "RAISING" in os.environ:
        raise ValueError("no questions today")
    data = Dataset.from_list([{"question": f"Question {number}", "answer": ""} for number in range(4)])
    return vf.SingleTurnEnv(eval_dataset=data, rubric=vf.Rubric(funcs=[mentions_a_vowel]))
"""
CONFIG = """
device = "cpu"

[model]
name = "{model}"
attn = "sdpa"

[data]
name = "{data}"
seq_len = 64
batch_size = 2

[ckpt]
interval = 4
keep_last = 1

[eval]
interval = 2
num_examples = 3

[eval.sampling]
temperature = 0.0
max_tokens = 8

[[eval.env]]
id = "consonants"
"""


class Training:
    """SFT with `[eval]` in one directory, started several times."""

    def __init__(self, directory: Path, model: Path) -> None:
        self.paths = RunPaths(directory / "out")
        (directory / "consonants.py").write_text(ENVIRONMENT)
        rows = [{"prompt": f"Question {number}", "completion": "an answer"} for number in range(8)]
        data = directory / "rows.jsonl"
        data.write_text("".join(json.dumps(row) + "\n" for row in rows))
        self.config = directory / "sft.toml"
        self.config.write_text(CONFIG.format(model=model, data=data))
        self.env = {**os.environ, "PYTHONPATH": str(directory), "PYTHONUNBUFFERED": "1"}

    def run(self, *options: object, **env: str) -> subprocess.CompletedProcess[str]:
        code = "from prime_rl.entrypoints.sft import main; main()"
        words = ["@", self.config, "--output-dir", self.paths.root, *options]
        argv = [sys.executable, "-c", code, *map(str, words)]
        return subprocess.run(argv, env={**self.env, **env}, capture_output=True, text=True, check=False)

    @property
    def evaluated(self) -> list[tuple[int, int]]:
        """Step and example of each rollout."""
        lines = (self.paths.root / "eval" / "results.jsonl").read_text().splitlines()
        return [(line["step"], line["example"]) for line in map(json.loads, lines)]

    def receipt(self, attempt: int) -> dict[str, Any]:
        receipt: dict[str, Any] = json.loads(self.paths.receipt(attempt).read_text())
        return receipt


@pytest.fixture(scope="module")
def training(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Training:
    return Training(tmp_path_factory.mktemp("sft"), tiny_model_dir)


@pytest.fixture(scope="module")
def without_evaluation(training: Training) -> subprocess.CompletedProcess[str]:
    """The first attempt: its environment raises. The directory holds weights of another run."""
    foreign = training.paths.weight(2)
    foreign.mkdir(parents=True)
    (foreign / "STABLE").touch()
    return training.run("--max-steps", 4, RAISING="1")


@pytest.fixture(scope="module")
def continued(
    training: Training, without_evaluation: subprocess.CompletedProcess[str]
) -> subprocess.CompletedProcess[str]:
    """The second attempt, of a healthy environment."""
    return training.run("--max-steps", 10, "--ckpt.resume-step", "latest")


def test_an_environment_that_raises_costs_the_evaluation_and_not_the_training(
    training: Training, without_evaluation: subprocess.CompletedProcess[str]
) -> None:
    done = without_evaluation
    assert done.returncode == 0, done.stdout + done.stderr
    named = [line for line in done.stdout.splitlines() if line.startswith("warning: evaluator exited with code 1")]
    assert len(named) == 1
    assert "no questions today" in named[0]
    assert named[0] in done.stderr
    assert f"warning: {training.receipt(1)['lost'][0]}" == named[0]
    assert training.receipt(1)["result"] == "complete"
    assert "no questions today" in (training.paths.status).read_text()
    assert stable_steps(training.paths.root / "weights.1") == [2]


def test_a_continued_run_evaluates_what_is_missing_and_keeps_only_what_ckpt_keeps(
    training: Training, continued: subprocess.CompletedProcess[str]
) -> None:
    assert continued.returncode == 0, continued.stdout + continued.stderr
    evaluated = [each for each in training.evaluated if each[0] != 2]  # exported if the first evaluator ended late
    assert sorted(evaluated) == [(step, example) for step in (0, 4, 6, 8, 10) for example in range(3)]
    assert stable_steps(training.paths.weights) == [10]
    assert training.paths.completion("evaluator").is_file()
    assert "lost" not in training.receipt(2)
    records = map(json.loads, training.paths.metrics.read_text().splitlines())
    evals = [record for record in records if record["source"] == "eval"]
    assert [(each["step"], each["progress/ckpt_step"]) for each in evals if each["step"] != 2] == [
        (step, step) for step in (0, 4, 6, 8, 10)
    ]
    assert all(0 <= each["eval/consonants/avg@1"] <= 1 for each in evals)
    kept = KeptRollouts(training.paths)
    assert sorted(rollout.row for rollout in kept.of_evaluation(6)) == [0, 1, 2]
    assert "`consonants/avg@1`" in training.paths.status.read_text()


def test_a_finished_evaluation_is_not_repeated_and_a_repeated_step_is(
    training: Training, continued: subprocess.CompletedProcess[str]
) -> None:
    done = training.run("--max-steps", 10, "--ckpt.resume-step", "latest")
    assert done.returncode == 2
    assert "is finished" in done.stderr
    assert len(training.evaluated) == len(set(training.evaluated))
