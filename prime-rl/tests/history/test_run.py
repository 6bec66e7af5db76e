"""A run's directory tells what it is and whether somebody works on it."""

from __future__ import annotations

import json
import math
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from prime_rl.history.attempts import git_state, machine_facts
from prime_rl.history.run import RunHistory
from prime_rl.run.attempts import Receipt
from prime_rl.run.early_stop import EarlyEnd, History
from prime_rl.run.lock import STALE_S, run_lock
from prime_rl.run.paths import RunPaths
from prime_rl.run.process import HeartbeatWriter
from prime_rl.utils.errors import UserError


def run_in(directory: Path, component: str = "rl") -> RunPaths:
    paths = RunPaths(directory)
    paths.configs.mkdir(parents=True)
    paths.config(component).write_text("max_steps = 80\n")
    return paths


def receipt(paths: RunPaths, **facts: Any) -> Receipt:
    return Receipt(paths, 1, (), {"command": "rl", "step": None, **facts})


def ended_pid() -> int:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


@pytest.mark.parametrize(("component", "kind"), [("rl", "rl"), ("sft", "sft"), ("eval", "eval"), ("trainer", "sft")])
def test_the_main_config_tells_the_kind(tmp_path: Path, component: str, kind: str) -> None:
    run_in(tmp_path / "out", component)
    assert RunHistory.open(tmp_path / "out").kind == kind


def test_what_is_no_run_says_which_directory_is_one(tmp_path: Path) -> None:
    run_in(tmp_path / "runs" / "first")
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").touch()
    for name, words in {
        "runs": "give one of them: first",
        "runs/first/configs": "give that directory",
        "empty": "it has no configs",
        "file": "it is a file",
        "missing": "no such directory",
    }.items():
        with pytest.raises(UserError, match=words):
            RunHistory.open(tmp_path / name)


@pytest.mark.parametrize("result", ["complete", "stopped", "failed"])
def test_a_receipt_tells_how_an_attempt_ended(tmp_path: Path, result: str) -> None:
    paths = run_in(tmp_path)
    receipt(paths).end(result, "the reason")
    state = RunHistory.open(tmp_path).state()
    assert (state.name, state.detail) == (result, "" if result == "complete" else "the reason")
    assert state.at_s is not None


def test_a_run_that_ended_early_tells_why(tmp_path: Path) -> None:
    paths = run_in(tmp_path)
    EarlyEnd(20, "no improvement", History()).write(paths.early_end)
    receipt(paths).end("complete", "")
    state = RunHistory.open(tmp_path).state()
    assert (state.name, state.detail) == ("complete", "early end: no improvement")


def test_a_run_is_running_while_its_lock_is_held(tmp_path: Path) -> None:
    paths = run_in(tmp_path)
    with run_lock(tmp_path):
        receipt(paths)
        state = RunHistory.open(tmp_path).state()
        assert state.name == "running"
        assert f"process {os.getpid()} on {socket.gethostname()}" in state.detail


def test_a_copy_of_a_run_that_may_go_on_elsewhere_has_an_unknown_state(tmp_path: Path) -> None:
    paths = run_in(tmp_path)
    receipt(paths)
    at_s = time.time() + 60
    paths.metrics.write_text(json.dumps({"time": at_s, "source": "trainer", "step": 0, "loss/mean": 1.0}) + "\n")
    state = RunHistory.open(tmp_path).state()
    assert (state.name, state.at_s) == ("unknown", at_s)
    assert state.detail == "no end is recorded and there is no run.lock, for example because this is a copy"


def test_the_lock_of_a_process_that_is_gone_does_not_count(tmp_path: Path) -> None:
    paths = run_in(tmp_path)
    receipt(paths)
    (tmp_path / "run.lock").write_text(json.dumps({"host": socket.gethostname(), "pid": ended_pid(), "since": "now"}))
    assert RunHistory.open(tmp_path).state().name == "killed"


def test_on_another_machine_a_lock_counts_until_it_is_old(tmp_path: Path) -> None:
    paths = run_in(tmp_path)
    receipt(paths)
    (tmp_path / "run.lock").write_text(json.dumps({"host": "elsewhere", "pid": 1, "since": "now"}))
    history = RunHistory.open(tmp_path)
    assert history.state().name == "running"
    assert history.state(now_s=time.time() + 2 * STALE_S).name == "killed"


def test_damaged_files_are_left_out(tmp_path: Path) -> None:
    paths = run_in(tmp_path)
    receipt(paths).end("complete", "")
    paths.receipt(2).write_text("{")
    paths.receipt(3).write_text("[]")
    paths.receipt(4).write_bytes(b"\xff")
    whole = json.loads(paths.receipt(1).read_text())
    paths.receipt(5).write_text(json.dumps({**whole, "attempt": math.inf}))
    paths.config("rl").write_bytes(b"\xff")
    paths.heartbeat("trainer").parent.mkdir(exist_ok=True)
    paths.heartbeat("trainer").write_text("[")
    history = RunHistory.open(tmp_path)
    assert ([attempt.number for attempt in history.attempts], history.config(), history.heartbeats()) == ([1], {}, {})


@pytest.mark.parametrize("key", ["result", "slurm_job_id", "machine", "parts", "message"])
@pytest.mark.parametrize("value", [math.nan, True, {}, [], 3])
def test_a_receipt_with_values_of_other_types_is_read(key: str, value: object, tmp_path: Path) -> None:
    paths = run_in(tmp_path)
    receipt(paths).end("complete", "")
    paths.receipt(1).write_text(json.dumps({**json.loads(paths.receipt(1).read_text()), key: value}))
    history = RunHistory.open(tmp_path)
    assert history.state().name in ("complete", "unknown")
    (attempt,) = history.attempts
    assert isinstance(attempt.machine or {}, dict)
    assert isinstance(attempt.slurm_job or "", str)


def test_beats_are_read_by_process(tmp_path: Path) -> None:
    paths = run_in(tmp_path)
    paths.heartbeat("trainer").parent.mkdir()
    HeartbeatWriter(paths.heartbeat("trainer")).say("step 3: waiting for a batch", waits_for="orchestrator")
    (beat,) = RunHistory.open(tmp_path).heartbeats().values()
    assert (beat.doing, beat.waits_for) == ("step 3: waiting for a batch", "orchestrator")


def test_a_receipt_names_the_machine_and_the_commit(tmp_path: Path) -> None:
    facts = machine_facts(tmp_path)
    assert facts["git"] is None
    assert facts["cpu_count"] == os.cpu_count()
    assert facts["packages"]["torch"]
    json.dumps(facts)


def test_changed_files_are_not_hidden_by_a_commit(tmp_path: Path) -> None:
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b.c"]
    subprocess.run([*git, "init", "-q"], check=True)
    (tmp_path / "file").write_text("1")
    subprocess.run([*git, "add", "file"], check=True)
    subprocess.run([*git, "commit", "-q", "-m", "first"], check=True)
    clean = git_state(tmp_path)
    (tmp_path / "file").write_text("2")
    changed = git_state(tmp_path)
    assert clean is not None
    assert changed is not None
    assert (clean["is_changed"], changed["is_changed"], clean["commit"]) == (False, True, changed["commit"])
