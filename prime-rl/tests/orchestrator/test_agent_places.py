"""Agents in an interpreter of their own, with a judge, and with a time limit for the group."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from prime_rl.checks.packages import environment_faults
from prime_rl.checks.start_dir import StartDir
from prime_rl.configs.rollouts.environments import EnvConfig
from prime_rl.configs.rollouts.judges import JudgeConfig
from prime_rl.configs.shared import ClientConfig, LogConfig
from prime_rl.environments.judging.gateway import offered_in_a_trial
from prime_rl.orchestrator.errors import EnvironmentFault
from prime_rl.orchestrator.rollouts.rollout import ExampleRef, Rollout
from prime_rl.orchestrator.rollouts.sampling import SamplingConfig, train_sampling_args
from prime_rl.orchestrator.servers.pool import InferencePool
from prime_rl.orchestrator.workers.failures import GroupTimeout
from prime_rl.orchestrator.workers.loading import load_environments

MODULE = '''
import asyncio
import importlib.util
import json
import sys
import urllib.request


def foreign(task, base_url, api_key, model):
    """Uses the standard library alone. The reward says where it runs."""
    body = {"model": model, "messages": [{"role": "user", "content": task["text"]}]}
    headers = {"Authorization": f"Bearer {api_key}", "Content-Type": "application/json"}
    request = urllib.request.Request(f"{base_url}/chat/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request) as answer:
        said = json.load(answer)["choices"][0]["message"]["content"]
    return float(said == task["text"] and importlib.util.find_spec("openai") is None and "venv" in sys.prefix)


async def with_client(task, client):
    return 1.0


async def waits(task, client):
    await asyncio.Event().wait()


class Judged:
    def __init__(self, judge_base_url, judge_model, level):
        self.judge = (judge_base_url, judge_model, level)

    async def run(self, data, client, model):
        await client.chat.completions.create(model=model, messages=[{"role": "user", "content": "a"}])
        return float(self.judge == ("http://127.0.0.1:9/grader/v1", "small", 3))


async def asks_judge(task, client, model, judge_client):
    await client.chat.completions.create(model=model, messages=[{"role": "user", "content": "a"}])
    return float(str(judge_client.base_url) == "http://127.0.0.1:9/grader/v1/")
'''
Attempted = Callable[..., Coroutine[Any, Any, list[Rollout]]]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "placed_agents.py").write_text(MODULE)
    (tmp_path / "rows.jsonl").write_text('{"text": "abc"}\n')
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def attempted(folder: Path, policy_server) -> Attempted:
    """The rollouts of two attempts that the agent of a config makes at its only row."""

    async def attempt(name: str, **keys: Any) -> list[Rollout]:
        config = EnvConfig(workflow=f"placed_agents:{name}", agent_dataset="rows.jsonl", **keys)
        (environment,) = load_environments([config], LogConfig(vf_level="warning")).values()
        pool = InferencePool(ClientConfig(base_url=[policy_server.url]), "letters")
        await pool.wait_ready(use_token_client=True)
        try:
            args = train_sampling_args(SamplingConfig(max_tokens=20), 0.7)
            return await environment.evaluate(ExampleRef(name, 0), 2, pool.servers[0], args, 0)
        finally:
            await environment.close()
            await pool.close()

    return attempt


@pytest.fixture
def python(tmp_path: Path) -> Path:
    """An interpreter without packages."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv"], check=True)
    return tmp_path / "venv" / "bin" / "python"


async def test_an_agent_runs_in_its_own_interpreter_without_our_packages(attempted: Attempted, python: Path) -> None:
    assert [rollout.reward for rollout in await attempted("foreign", python=python)] == [1.0, 1.0]


async def test_an_agent_that_takes_a_client_needs_openai_in_its_interpreter(attempted: Attempted, python: Path) -> None:
    with pytest.raises(EnvironmentFault, match=r"env\[0\]: .*with_client.* does not load in .*venv.*package openai"):
        await attempted("with_client", python=python)


def test_what_an_interpreter_lacks_is_found_before_the_run(folder: Path, python: Path) -> None:
    start = StartDir(folder)

    def faults(workflow: str, python: Path) -> list[str]:
        config = EnvConfig(workflow=workflow, agent_dataset="rows.jsonl", python=python)
        return list(environment_faults("env", [config], start))

    assert faults("placed_agents:foreign", python) == []
    assert "has no module named 'openai'" in faults("openai.lib:agent", python)[0]
    assert "is not a program" in faults("placed_agents:foreign", folder / "no" / "python")[0]
    assert "has no 'nobody'" in faults("placed_agents:nobody", python)[0]


async def test_a_class_and_a_function_get_their_judge_by_name(attempted: Attempted) -> None:
    with offered_in_a_trial({"grader": JudgeConfig(model="small")}):
        assert (await attempted("Judged", judge="grader", args={"level": 3}))[0].reward == 1.0
        assert (await attempted("asks_judge", judge="grader"))[0].reward == 1.0
        with pytest.raises(EnvironmentFault, match="'placed_agents:with_client' has none of the arguments"):
            await attempted("with_client", judge="grader")
    with pytest.raises(EnvironmentFault, match="not part of a run that starts the judge"):
        await attempted("asks_judge", judge="grader")


async def test_a_group_that_takes_too_long_fails_by_name(attempted: Attempted) -> None:
    with pytest.raises(GroupTimeout, match=r"environment 'waits', row 0: .* timeout_s = 1 "):
        await attempted("waits", timeout_s=1)


def test_rows_of_a_function_are_found_from_where_the_run_starts(tmp_path: Path) -> None:
    (tmp_path / "cases.py").write_text("def rows():\n    return [{'text': 'abc'}]\n")
    # Like the program `orchestrator`, `-P` does not search the current directory.
    ask = "from prime_rl.environments.agents.datasets import read_dataset; print(read_dataset('cases:rows'))"
    done = subprocess.run([sys.executable, "-P", "-c", ask], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout == "[{'text': 'abc'}]\n"
