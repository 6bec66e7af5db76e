"""Code of an environment that blocks an event loop is named, wherever it runs, and the remedies help."""

from __future__ import annotations

import inspect
import json
import re
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from prime_rl.orchestrator.workers.blocked import BlockedLoops
from prime_rl.orchestrator.workers.inside.frames import BadFrame
from prime_rl.orchestrator.workers.inside.reward_records import leaves
from prime_rl.orchestrator.workers.inside.verifiers_api import use_threads

BLOCKER = """
import os
import time
import uuid
from pathlib import Path

import verifiers as vf
from datasets import Dataset


def pause(seconds):
    time.sleep(seconds)


def waits(completion):
    pause(0.7)
    return 1.0


def computes(completion):
    end = time.monotonic() + 0.7
    while time.monotonic() < end:
        pass
    return 1.0


def together(completion, info):
    folder = Path(info["directory"]) / "calls"
    folder.mkdir(exist_ok=True)
    (folder / f"{os.getpid()}-{uuid.uuid4()}").touch()
    end = time.monotonic() + 30
    while len(list(folder.iterdir())) < info["count"]:
        if time.monotonic() > end:
            return 0.0
        pause(0.01)
    return 1.0


def quick(completion):
    return 1.0


class Turns(vf.MultiTurnEnv):
    async def env_response(self, messages, state, **kwargs):
        pause(1.5)
        return [{"role": "user", "content": "again"}]


def load_environment(function="waits", turns=False, **info):
    rows = Dataset.from_list([{"question": text, "answer": text, "info": {"count": 0, **info}} for text in "abcd"])
    rubric = vf.Rubric(funcs=[globals()[function]])
    if turns:
        return Turns(dataset=rows, rubric=rubric, max_turns=2)
    return vf.SingleTurnEnv(dataset=rows, rubric=rubric)
"""


@pytest.fixture
def blocker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the environment `blocker`, which processes and this one can import."""
    (tmp_path / "blocker.py").write_text(BLOCKER)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "blocker", raising=False)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return tmp_path


@pytest.fixture
def own_python(blocker: Path) -> str:
    program = blocker / "python"
    program.write_text(f'#!/bin/sh\nPYTHONPATH="{blocker}" exec "{sys.executable}" "$@"\n')
    program.chmod(0o755)
    return str(program)


PLACES = {"here": {}, "in a server": {"num_workers": 2}, "in another interpreter": {"python": True}}
KINDS = {
    "waits": ({}, "waits", "it waits: threads = 32 in its table"),
    "computes": ({"function": "computes"}, "computes", "it computes: num_workers = 8 in its table"),
    "turns": ({"function": "quick", "turns": True}, "Turns.env_response", "it waits without `await`"),
}


@pytest.mark.parametrize(
    ("place", "kind"),
    [*((place, "waits") for place in PLACES), ("here", "computes"), ("in a server", "turns")],
)
def test_the_function_is_named_once_with_its_environment_and_what_helps(
    place: str, kind: str, orchestrate, own_python: str, tmp_path: Path
) -> None:
    keys = {**PLACES[place]}
    if "python" in keys:
        keys["python"] = own_python
    args, function, remedy = KINDS[kind]
    code, log = orchestrate(env=[{"id": "blocker", "name": "slow one", "args": args, **keys}])
    assert code == 0, log
    (line,) = [each for each in log.splitlines() if "blocks the event loop" in each]
    assert re.search(rf"environment 'slow one': {function} \(\S+blocker.py:\d+\) blocks the event loop", line)
    assert remedy in line
    (record, *_) = map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())
    assert record["event_loop_blocked/slow one"] > 1
    assert record["event_loop_lag/max" if place == "here" else "event_loop_lag/slow one/max"] > 1


@pytest.mark.parametrize(
    "keys",
    [{"threads": 4}, {"num_workers": 2}, {"threads": 4, "python": True}, {"num_workers": 2, "python": True}],
    ids=["threads", "processes", "threads of another interpreter", "processes of another interpreter"],
)
def test_the_remedies_run_at_once_what_the_loop_runs_one_after_the_other(
    keys: dict, orchestrate, own_python: str, tmp_path: Path
) -> None:
    """Each call of the reward function waits for another one: two groups of two rollouts in all."""
    own = {"python": own_python} if "python" in keys else {}
    args = {"function": "together", "directory": str(tmp_path), "count": 4 if "threads" in keys else 2}
    code, log = orchestrate(env=[{"id": "blocker", "args": args, **keys, **own}])
    assert code == 0, log
    (record, *_) = map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())
    assert record["reward/mean"] == 1.0


async def test_threads_run_tools_and_leave_a_rubric_that_calls_its_functions_itself(blocker: Path) -> None:
    import verifiers as vf

    class Own(vf.Rubric):
        async def score_group(self, states):
            """Call the functions directly."""

    here = threading.get_ident()

    def thread() -> float:
        """Where it runs."""
        return float(threading.get_ident() != here)

    rows = vf.load_environment("blocker").dataset
    env = vf.ToolEnv(tools=[thread], dataset=rows, rubric=vf.RubricGroup([vf.Rubric(funcs=[thread]), Own([thread])]))
    with ThreadPoolExecutor(1) as threads:
        use_threads(env, threads)
        assert (await env.call_tool("thread", {}, "1")).content == "1.0"
    functions = {type(part): each for part in leaves(env.rubric) for each in part.funcs if each.__name__ == "thread"}
    assert inspect.iscoroutinefunction(functions[vf.Rubric])
    assert functions[Own] is thread


def test_a_report_that_is_none_is_refused() -> None:
    blocks = {"function": "f", "place": "p", "seconds": float("nan"), "count": 1, "waits": True, "is_plain": True}
    for report in (
        None,
        {"lag_s": "x", "blocks": []},
        {"lag_s": 0.0, "blocks": [blocks]},
        {"lag_s": 0.0, "blocks": [1]},
    ):
        with pytest.raises(BadFrame):
            BlockedLoops().add_report("letters", report)
