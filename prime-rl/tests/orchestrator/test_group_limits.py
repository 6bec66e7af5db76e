"""A group that hangs fails by name, wherever its environment runs, and a run in which all of them hang ends."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import pytest

from prime_rl.orchestrator.env_servers.group_limits import GroupTimeout, in_time

HANGING = """
import asyncio
import verifiers as vf
from datasets import Dataset


class Hangs(vf.SingleTurnEnv):
    async def setup_state(self, state, **kwargs):
        await asyncio.Event().wait()


def load_environment():
    data = Dataset.from_list([{"question": text, "answer": ""} for text in ("ab", "cd")])
    return Hangs(dataset=data, rubric=vf.Rubric(funcs=[]))
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "hanging_env.py").write_text(HANGING)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    sys.modules.pop("hanging_env", None)
    program = tmp_path / "python"
    program.write_text(f'#!/bin/sh\nPYTHONPATH="{tmp_path}" exec "{sys.executable}" "$@"\n')
    program.chmod(0o755)
    return tmp_path


@pytest.mark.parametrize("place", ["in the orchestrator", "in a server", "in its own interpreter"])
def test_groups_that_hang_fail_by_name(orchestrate, folder: Path, place: str) -> None:
    env: dict[str, Any] = {"id": "hanging-env", "timeout_s": 1}
    env |= {"python": folder / "python"} if place == "in its own interpreter" else {}
    code, log = orchestrate(env=[env], env_servers=place == "in a server", max_inflight_rollouts=16)
    assert code == 1
    assert "groups of rollouts failed in a row; the last one: environment 'hanging-env'" in log
    assert "GroupTimeout: environment 'hanging-env', row" in log
    assert "the group takes longer than timeout_s = 1 of the environment" in log


async def test_only_the_limit_itself_is_named() -> None:
    async def wait() -> None:
        async with in_time(0.001, "letters", 3):
            await asyncio.Event().wait()

    async def own() -> None:
        async with in_time(None, "letters", 3):
            raise TimeoutError("the database")

    with pytest.raises(GroupTimeout, match="environment 'letters', row 3"):
        await wait()
    with pytest.raises(TimeoutError, match="the database"):
        await own()
