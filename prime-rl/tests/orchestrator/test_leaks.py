"""An evaluation that uses training rows says so at the start, and reports the share of prompts that are trained on."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from prime_rl.orchestrator.leaks import _Identify

ENVIRONMENT = """
import verifiers as vf
from datasets import Dataset

def rows(*numbers, prompt="word {}"):
    asked = [{"question": prompt.format(number), "answer": f"{number}"} for number in numbers]
    return Dataset.from_list(asked)

def length(completion, **_):
    return len(completion[-1]["content"]) / 100

def load_environment(kind, **_):
    rubric = vf.Rubric(funcs=[length])
    train = rows(*range(8))
    if kind == "no eval rows":
        return vf.SingleTurnEnv(dataset=train, rubric=rubric)
    if kind == "group":
        return vf.EnvGroup([load_environment("no eval rows"), load_environment("own rows")], env_names=["a", "b"])
    if kind == "games":  # all ask the same, and hide something else
        ask = dict(prompt="guess my number")
        return vf.SingleTurnEnv(dataset=rows(*range(8), **ask), eval_dataset=rows(6, 7, 8, 9, **ask), rubric=rubric)
    held = {"own rows": rows(8, 9, 10, 11), "some leak": rows(7, 8, 9, 10), "other case": rows(7, 8, prompt="Word  {}")}
    prompt = "Be brief." if kind == "other case" else None
    return vf.SingleTurnEnv(dataset=train, eval_dataset=held[kind], rubric=rubric, system_prompt=prompt)
"""

CASES = {
    "own rows": ("own rows", "own rows", 0.0, "none of its 4 prompts is trained on"),
    "some leak": ("some leak", "some leak", 0.25, "1 of its 4 prompts (25%) are training rows too, row 0 first"),
    "another system prompt and case": ("own rows", "other case", 0.5, "1 of its 2 prompts (50%) are training rows"),
    "no eval rows": ("no eval rows", "no eval rows", 1.0, "uses training rows, because the environment has no eval_da"),
    "only rows, not trained on": ("games", "no eval rows", 0.0, "none of its 4 prompts is trained on"),
    "games": ("games", "games", 0.5, "2 of its 4 prompts (50%) are training rows too"),
}


@pytest.fixture(autouse=True)
def leaky_env(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "leaky_env.py").write_text(ENVIRONMENT)
    monkeypatch.syspath_prepend(str(tmp_path))
    sys.modules.pop("leaky_env", None)


@pytest.mark.parametrize(("train", "evaluated", "share", "line"), CASES.values(), ids=CASES)
def test_evaluated_prompts_that_are_trained_on_are_counted_at_the_start(
    orchestrate, tmp_path: Path, train: str, evaluated: str, share: float, line: str
) -> None:
    env = {"id": "leaky-env", "name": "letters", "num_examples": 4, "args": {"kind": evaluated}}
    code, log = orchestrate(
        env=[{"id": "leaky-env", "args": {"kind": train}}], eval={"env": [env], "interval": 1}, max_steps=0
    )
    assert code == 0, log
    assert f"Evaluation on 'letters'{':' if 'uses' not in line else ''} {line}" in log
    (metrics,) = (json.loads(each) for each in (tmp_path / "metrics.jsonl").read_text().splitlines())
    assert metrics["eval/letters/trained_prompts/mean"] == share


def test_a_validation_on_training_rows_says_so(orchestrate, tmp_path: Path) -> None:
    env = [{"id": "leaky-env", "args": {"kind": "no eval rows"}}]
    code, log = orchestrate(env=env, val={"num_examples": 3})
    assert code == 0, log
    assert "Validation on 'leaky-env' uses training rows, because the environment has no eval_dataset" in log
    (metrics,) = (json.loads(each) for each in (tmp_path / "metrics.jsonl").read_text().splitlines())
    assert metrics["val_trained_prompts/mean"] == 1.0


def test_a_group_of_environments_lacks_evaluation_rows_if_a_member_does() -> None:
    import leaky_env

    from prime_rl.orchestrator.workers.inside.verifiers_api import Served

    assert Served(leaky_env.load_environment("group")).describe("eval")["falls_back"]
    assert not Served(leaky_env.load_environment("group")).describe("train")["falls_back"]
    assert not Served(leaky_env.load_environment("own rows")).describe("eval")["falls_back"]


def test_prompts_that_ask_the_same_of_different_images_are_different() -> None:
    def row(image: str) -> dict[str, Any]:
        content = [{"type": "image", "image": image}, {"type": "text", "text": "A fracture?"}]
        return {"prompt": [{"role": "user", "content": content}], "answer": "yes"}

    identify = _Identify.for_rows([[row("1.png")]])
    assert identify(row("1.png")) in identify.known
    assert identify(row("2.png")) not in identify.known
