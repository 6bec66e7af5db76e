"""Environments whose code calls `sys.exit(0)` or `os._exit(0)`: never the success of a run."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from prime_rl.launch import LocalHost, Outcome, Supervisor
from prime_rl.launch.programs import orchestrator_process
from prime_rl.run.paths import RunPaths

LEAVING = """
import os, sys
import verifiers as vf
from datasets import Dataset


def leave(when, place, how):
    if when == place:
        sys.exit(0) if how == "sys.exit" else os._exit(0)


class Leaving(vf.MultiTurnEnv):
    def __init__(self, when, how, **rest):
        super().__init__(**rest)
        self.when, self.how = when, how

    async def setup_state(self, state):
        leave(self.when, "setup", self.how)
        return state

    async def env_response(self, messages, state):
        leave(self.when, "turn", self.how)
        return [{"role": "user", "content": "again"}]


def load_environment(when, how):
    leave(when, "load", how)

    def reward(completion):
        leave(when, "reward", how)
        return 1.0

    def rows():
        leave(when, "rows", how)
        return Dataset.from_list([{"question": text, "answer": ""} for text in "abcd"])

    rubric = vf.Rubric(funcs=[reward])
    # verifiers runs the turns in a task of their own if there is a time limit.
    timeout_s = 3600.0 if when == "turn" else None
    return Leaving(when, how, dataset=rows, rubric=rubric, max_turns=2, timeout_seconds=timeout_s)
"""


@pytest.fixture
def supervise(tmp_path: Path, policy_server, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[Outcome, str]]:
    """Runs the `orchestrator` command under a supervisor; returns the outcome and the log."""
    (tmp_path / "leaving_env.py").write_text(LEAVING)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    def finish(when: str, how: str, **settings: Any) -> tuple[Outcome, str]:
        paths = RunPaths(tmp_path / "run")
        config = {
            "output_dir": str(paths.orchestrator.root),
            "max_steps": 1,
            "batch_size": 4,
            "rollouts_per_example": 2,
            "model": {"name": "letters"},
            "client": {"base_url": [policy_server.url]},
            "env": [{"id": "leaving-env", "args": {"when": when, "how": how}}],
            "filters": [{"type": "repetition"}],
        }
        paths.configs.mkdir(parents=True)
        paths.config("orchestrator").write_text(tomli_w.dumps(config | settings))
        program = str(Path(sys.executable).with_name("orchestrator"))
        with LocalHost() as host:
            outcome = Supervisor([orchestrator_process(paths, program, {})], host, lambda line: None).run()
        return outcome, paths.log("orchestrator").read_text()

    return finish


@pytest.mark.parametrize(
    ("when", "env_servers"),
    [
        *((when, False) for when in ("load", "rows", "setup", "turn", "reward")),
        *((when, True) for when in ("load", "rows", "turn")),  # a server rolls out a whole group: one place is enough
    ],
)
def test_sys_exit_in_an_environment_fails_the_run_by_name(supervise, when: str, env_servers: bool) -> None:
    outcome, log = supervise(when, "sys.exit", env_servers=env_servers)
    assert (outcome.exit_code, outcome.failed) == (1, "orchestrator"), log
    assert "sys.exit(0)" in log


def test_an_environment_that_never_leaves_lets_the_run_complete(supervise) -> None:
    outcome, log = supervise("never", "sys.exit")
    assert outcome.succeeded, log


@pytest.mark.parametrize(("when", "env_servers"), [("load", False), ("reward", False), ("turn", True)])
def test_a_process_that_an_environment_ends_with_0_fails_the_run(supervise, when: str, env_servers: bool) -> None:
    outcome, log = supervise(when, "os._exit", env_servers=env_servers)
    assert (outcome.exit_code, outcome.failed) == (1, "orchestrator"), log
    if env_servers:
        assert "the server of environment 'leaving-env' ended with code 0" in log
        assert "starts again" in log
    else:
        assert outcome.message.startswith("orchestrator exited with code 0 before its work was done")
