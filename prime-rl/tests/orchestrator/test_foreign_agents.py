"""`workflow = "external"`: whole runs of the orchestrator whose attempts foreign processes make."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from prime_rl.history.rollouts import KeptRollouts
from prime_rl.run.paths import RunPaths
from prime_rl.utils.private import RUNTIME_VARIABLE

PLAY = Path(__file__).parents[3] / "examples" / "agents" / "play.py"
NOTHING_ENDS_IT_S = 86_400
"""Limit for an attempt in tests in which every session is ended."""

DIES = """
import asyncio, json, os, sys
from pathlib import Path
from openai import APIConnectionError, AsyncOpenAI, BadRequestError

async def main(base_url, key_file):
    while True:
        try:
            key = Path(key_file).read_text()
            starter = AsyncOpenAI(base_url=base_url, api_key=key, max_retries=0)
            started = await starter.post("/rl/start_session", body={"wait_s": 60}, cast_to=dict)
            break
        except (OSError, APIConnectionError):
            await asyncio.sleep(0.05)
    agent = AsyncOpenAI(base_url=started["base_url"], api_key=started["api_key"], max_retries=0)
    for wrong in ("1.0", None, float(1e300), [1], {"chatcmpl-x": 1.0}):
        path = "/rl/end_session" if isinstance(wrong, dict) else "/rl/set_reward"
        try:
            await agent.post(path, body={"reward": wrong}, cast_to=object)
        except BadRequestError as error:
            print(error.code, flush=True)
    os._exit(9)

asyncio.run(main(*sys.argv[1:]))
"""
"""Takes one session, posts wrong rewards, and dies without an end."""

LOOK_S = 0.05


@pytest.fixture
def port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


@pytest.fixture
def env(port: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The environment's table in the config, and the directory in which its key will lie."""
    monkeypatch.setenv(RUNTIME_VARIABLE, str(tmp_path / "runtime"))
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"text": text}) + "\n" for text in ("abc", "hello", "verifiers", "noon")))
    named = {"name": "foreign", "workflow": "external", "agent_dataset": str(rows), "agent_port": port}
    return {**named, "agent_timeout_s": NOTHING_ENDS_IT_S}


@contextmanager
def started(*words: object) -> Iterator[subprocess.Popen[str]]:
    """A foreign process, which is killed at the end."""
    argv = [sys.executable, *map(str, words)]
    with subprocess.Popen(argv, env=dict(os.environ), stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def test_a_foreign_process_that_came_before_the_run_makes_all_of_its_attempts(
    orchestrate, policy_server, env: dict[str, Any], port: int, tmp_path: Path
) -> None:
    policy_server.reply = lambda messages, _: messages[-1]["content"]
    with started(PLAY, "--port", port, "--sessions", 4, "--patience-s", NOTHING_ENDS_IT_S):
        code, log = orchestrate(env=[env], max_steps=2, max_async_level=9, keep_rollouts={"per_step": 4})
    assert code == 0, log
    key_file = tmp_path / "runtime" / f"agents-{port}.key"
    assert f"start sessions at http://127.0.0.1:{port}/v1 with the key in {key_file}" in log
    assert not key_file.exists(), "a run that has ended leaves no key"
    kept = KeptRollouts(RunPaths(tmp_path)).of_step(1)
    palindrome = {"noon": 1.0}
    for rollout in kept:
        said = rollout.completion[0]["content"]
        assert said == rollout.prompt[0]["content"]
        assert (rollout.reward == 1.0) == (said in palindrome)


def test_an_agent_that_posts_wrong_rewards_and_dies_costs_its_attempt_alone(
    policy_server, env: dict[str, Any], port: int, tmp_path: Path
) -> None:
    config = {
        "output_dir": str(tmp_path / "run_default"),
        "max_steps": 99,
        "max_async_level": 99,
        "batch_size": 4,
        "rollouts_per_example": 2,
        "model": {"name": "letters"},
        "client": {"base_url": [policy_server.url]},
        "env": [env],
        "filters": [{"type": "repetition"}],
    }
    (tmp_path / "orchestrator.toml").write_text(tomli_w.dumps(config))
    command = [Path(sys.executable).with_name("orchestrator"), "@", tmp_path / "orchestrator.toml"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as run:
        dying = started("-c", DIES, f"http://127.0.0.1:{port}/v1", tmp_path / "runtime" / f"agents-{port}.key")
        with dying as process:
            assert process.communicate()[0].splitlines() == ["invalid_reward"] * 5
            assert process.returncode == 9
        with started(PLAY, "--port", port, "--sessions", 2, "--patience-s", NOTHING_ENDS_IT_S):
            # Three steps, in which nobody ended the first session.
            while not lines_of(tmp_path / "metrics.jsonl")[2:]:
                with suppress(subprocess.TimeoutExpired):
                    pytest.fail(f"ended with {run.wait(LOOK_S)}:\n{run.communicate()[0]}")
        run.terminate()
        assert "Step 2 | " in run.communicate()[0]
    assert run.returncode == 128 + signal.SIGTERM


def lines_of(file: Path) -> list[str]:
    return file.read_text().splitlines() if file.exists() else []


def test_a_run_to_which_no_agent_comes_ends_and_says_so(orchestrate, env: dict[str, Any], port: int) -> None:
    code, log = orchestrate(env=[env | {"agent_timeout_s": 0.2}])
    assert code == 1
    last = log.splitlines()[-1]
    assert "foreign" in last, log
    assert "no agent ended it within 0.2 s" in last
