"""Environments in processes that the orchestrator starts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytestmark = pytest.mark.usefixtures("importable_environments")


@pytest.fixture
def inherited_environments(environments_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(environments_dir))


def running_servers() -> list[int]:
    """Process ids of the environment servers that this process has started."""
    children = [
        int(pid) for task in Path("/proc/self/task").iterdir() for pid in (task / "children").read_text().split()
    ]
    return [pid for pid in children if b"env_server" in Path(f"/proc/{pid}/cmdline").read_bytes()]


@pytest.mark.usefixtures("inherited_environments")
def test_environments_run_in_processes_that_end_with_the_run(orchestrate, tmp_path: Path) -> None:
    evaluation = {"env": [{"id": "letters-env", "num_examples": 2}]}
    env = [{"id": "letters-env", "args": {"kind": "twice"}, "name": "two turns"}]
    code, log = orchestrate(env=env, eval=evaluation, env_servers=True, max_steps=0)
    assert code == 0, log
    assert running_servers() == []
    (record,) = map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())
    assert (record["eval/letters-env/avg@1"], record["eval/letters-env/failed/count"]) == (0.0, 0)
    logs = tmp_path / "run_default" / "logs"
    assert "Serving the orchestrator" in (logs / "train" / "two turns.log").read_text()
    assert (logs / "eval" / "letters-env.log").is_file()


@pytest.mark.usefixtures("inherited_environments")
def test_a_server_that_ends_during_a_validation_fails_its_rollouts_and_not_the_run(orchestrate, tmp_path: Path) -> None:
    env = [{"id": "letters-env", "args": {"kind": "eval dies", "died": str(tmp_path / "died")}}]
    code, log = orchestrate(env=env, env_servers=True, val={"num_examples": 2})
    assert code == 0, log
    assert "validation rollouts failed; first error: WorkerEnded: the server of environment 'letters-env' ended" in log


def test_a_server_that_cannot_start_ends_the_run_at_once(orchestrate, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONPATH", raising=False)
    code, log = orchestrate(env_servers=True)
    assert code == 1
    assert "ended with code 1; its log is" in log
    assert "environment 'letters-env' does not import" in log
