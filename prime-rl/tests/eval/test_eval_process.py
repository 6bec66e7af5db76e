"""The `eval` command as a process, against the embedded engine with a real model and real checkpoints."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from prime_rl.launch import reserved_ports

ENVIRONMENT = """
import asyncio, itertools, os, threading
import verifiers as vf
from datasets import Dataset


def mentions_a_vowel(completion):
    return float(any(letter in "aeiou" for letter in completion[-1]["content"]))


def raises(completion):
    raise ValueError("no score today")


def load_environment(rows=8):
    if "LEAVING" in os.environ:
        os._exit(0)
    data = Dataset.from_list([{"question": f"Question {number}", "answer": ""} for number in range(rows)])
    reward = raises if "FAILING" in os.environ else mentions_a_vowel
    environment = vf.SingleTurnEnv(eval_dataset=data, rubric=vf.Rubric(funcs=[reward]))
    first, setup_state = itertools.count(), environment.setup_state

    async def setup(state):
        if next(first) >= int(os.environ.get("ROLLOUTS", 1000)):
            await asyncio.Event().wait()
        if "STUCK" in os.environ:
            asyncio.get_running_loop().run_in_executor(None, threading.Event().wait)
        return await setup_state(state)

    environment.setup_state = setup
    return environment
"""


@pytest.fixture(scope="module")
def env(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A process environment in which the environment `vowels` imports."""
    directory = tmp_path_factory.mktemp("environments")
    (directory / "vowels.py").write_text(ENVIRONMENT)
    return {**os.environ, "PYTHONPATH": str(directory), "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}


@pytest.fixture(scope="module")
def server_url(tiny_model_dir: Path, env: dict[str, str]) -> Iterator[str]:
    with reserved_ports(1) as (port,):
        argv = [sys.executable, "-m", "prime_rl.inference.server", "--model.name", str(tiny_model_dir)]
        argv += ["--device", "cpu", "--server.host", "127.0.0.1", "--server.port", str(port)]
        process = subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=env)
        yield f"http://127.0.0.1:{port}/v1"
        process.terminate()
        process.wait()


@pytest.fixture(scope="module")
def weights_dir(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`step_1` is the base model again, `step_2` another model, and `step_3` no model at all."""
    import torch
    from safetensors.torch import load_file, save_file

    parent = tmp_path_factory.mktemp("weights")
    for step in (1, 2, 3):
        shutil.copytree(tiny_model_dir, parent / f"step_{step}")
        (parent / f"step_{step}" / "STABLE").touch()
    tensors = load_file(tiny_model_dir / "model.safetensors")
    generator = torch.Generator().manual_seed(1)
    changed = {name: each + 0.1 * torch.randn(each.shape, generator=generator) for name, each in tensors.items()}
    save_file(changed, parent / "step_2" / "model.safetensors", metadata={"format": "pt"})
    (parent / "step_3" / "model.safetensors").write_bytes(b"not a model")
    return parent


@dataclass(frozen=True)
class Command:
    """`eval` with what all tests share."""

    model: Path
    env: dict[str, str]
    out: Path

    def argv(self, *options: object) -> list[str]:
        shared = ["--model.name", self.model, "--environment-ids", "vowels", "--output-dir", self.out]
        sampling = ["--sampling.temperature", "0", "--sampling.max-tokens", "8"]
        return [sys.executable, "-m", "prime_rl.entrypoints.eval", *map(str, [*shared, *sampling, *options])]

    def run(self, *options: object) -> subprocess.CompletedProcess[str]:
        return subprocess.run(self.argv(*options), env=self.env, capture_output=True, text=True, check=False)

    @property
    def results(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.out / "eval" / "results.jsonl").read_text().splitlines()]

    def answers(self, step: int) -> dict[int, str]:
        """The last message of rollout 0 at each example."""
        mine = [each for each in self.results if each["step"] == step and each["rollout"] == 0]
        return {each["example"]: each["completion"][-1]["content"] for each in mine}


@pytest.fixture
def command(tiny_model_dir: Path, env: dict[str, str], tmp_path: Path) -> Command:
    return Command(tiny_model_dir, env, tmp_path / "out")


def test_base_and_checkpoints_are_evaluated_and_a_broken_one_stops_no_other(
    command: Command, server_url: str, weights_dir: Path
) -> None:
    options = ["--client.base-url", server_url, "--weights-dir", weights_dir, "--num-examples", 3]
    done = command.run(*options, "--rollouts-per-example", 2)
    assert done.returncode == 1, done.stdout + done.stderr
    table = [line.split()[:3] for line in done.stdout.splitlines() if line.startswith(("base ", "step "))]
    assert [row[:2] for row in table] == [["base", "vowels"], ["step", "1"], ["step", "2"]]
    assert f"Not evaluated in full: step 3: {server_url.removesuffix('/v1')} did not load the weights" in done.stdout
    assert command.answers(0) == command.answers(1)
    assert command.answers(0) != command.answers(2)
    assert len(command.results) == 3 * 3 * 2
    (summary, *_) = json.loads((command.out / "eval" / "summary.json").read_text())
    rewards = [each["reward"] for each in command.results if each["step"] == 0]
    assert summary["metrics"]["avg@2"] == pytest.approx(sum(rewards) / 6)
    assert summary["metrics"]["pass@1"] == summary["metrics"]["avg@2"]
    (record, *_) = map(json.loads, (command.out / "metrics.jsonl").read_text().splitlines())
    assert (record["source"], record["step"]) == ("eval", 0)
    assert record["eval/vowels/completion_len/mean"] <= 8


def test_scores_that_are_all_0_are_explained_in_the_last_lines(
    command: Command, server_url: str, tmp_path: Path
) -> None:
    (tmp_path / "rows.csv").write_text('question,answer\nWhich?,"[""aspirin"", ""ibuprofen""]"\nAnd?,B\n')
    arguments = json.dumps({"rows": {"datasets": [{"path": str(tmp_path / "rows.csv")}]}})
    options = ["--client.base-url", server_url, "--environment-ids", "rows", "--environment-args", arguments]
    done = command.run(*options)
    assert done.returncode == 0, done.stdout + done.stderr
    (line,) = [line for line in done.stdout.splitlines()[-5:] if "base | rows | all 2 scores are 0: " in line]
    assert "exact_match (compares the whole reply with the answer)" in line or "cut off" in line


def test_a_thread_that_environment_code_leaves_behind_does_not_keep_the_evaluation_from_ending(
    command: Command, server_url: str
) -> None:
    stuck = replace(command, env={**command.env, "STUCK": ""})
    done = stuck.run("--client.base-url", server_url, "--num-examples", 2)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(command.results) == 2


def test_what_is_there_is_not_done_again(command: Command, server_url: str, weights_dir: Path) -> None:
    options = ["--client.base-url", server_url, "--weights-dir", weights_dir, "--steps", 1]
    assert command.run(*options, "--num-examples", 2).returncode == 0
    first = (command.out / "eval" / "results.jsonl").read_bytes()
    again = command.run(*options, "--num-examples", 4)
    assert again.returncode == 0, again.stdout + again.stderr
    assert "base: 2 of 4 rollouts are there already" in again.stdout
    assert (command.out / "eval" / "results.jsonl").read_bytes().startswith(first)
    keys = [(each["step"], each["example"]) for each in command.results]
    assert sorted(keys) == [(step, example) for step in (0, 1) for example in range(4)]

    other = command.run(*options, "--sampling.top-p", 0.5)
    assert other.returncode == 2
    assert other.stderr == (
        f"error: {command.out} holds results that were made with another sampling: choose another --output-dir\n"
    )


def test_a_step_with_other_weights_than_before_is_evaluated_again(
    command: Command, server_url: str, weights_dir: Path, tmp_path: Path
) -> None:
    own = tmp_path / "weights"
    shutil.copytree(weights_dir / "step_1", own / "step_2")
    options = ["--client.base-url", server_url, "--weights-dir", own, "--num-examples", 2]
    assert command.run(*options).returncode == 0
    before = command.results
    shutil.copytree(weights_dir / "step_1", own / "step_2", dirs_exist_ok=True)  # a copy is the same
    assert "4 rollouts in" in command.run(*options).stdout
    assert command.results == before

    shutil.copytree(weights_dir / "step_2", own / "step_2", dirs_exist_ok=True)
    again = command.run(*options)
    assert again.returncode == 0, again.stdout + again.stderr
    kept = command.out / "eval" / "results.1.jsonl"
    assert "step 2: its weights have changed since it was evaluated: it is evaluated again" in again.stdout
    assert "base: 2 of 2 rollouts are there already" in again.stdout
    assert [json.loads(line) for line in kept.read_text().splitlines()] == before
    assert len(command.results) == 4
    assert command.answers(2) != command.answers(0)


def test_answers_of_a_checkpoint_end_where_its_own_generation_config_says(
    command: Command, server_url: str, weights_dir: Path, tmp_path: Path
) -> None:
    """As after SFT of a base model: the server has been started with the base, which stops at another token."""
    own = tmp_path / "weights"
    shutil.copytree(weights_dir / "step_1", own / "step_1")
    (own / "step_1" / "generation_config.json").write_text(json.dumps({"eos_token_id": list(range(128))}))
    options = ("--client.base-url", server_url, "--weights-dir", own, "--num-examples", 2)
    assert command.run(*options).returncode == 0
    lengths = {(each["step"], each["completion_tokens"]) for each in command.results}
    assert lengths == {(0, 8), (1, 1)}


def test_a_stopped_evaluation_keeps_what_it_has(command: Command, server_url: str, weights_dir: Path) -> None:
    options = ["--client.base-url", server_url, "--weights-dir", weights_dir, "--steps", 2, "--max-concurrent", 1]
    argv = command.argv(*options, "--rollouts-per-example", 2)
    # The last of the rollouts never begins: the evaluation cannot end before it is stopped.
    process = subprocess.Popen(argv, env=command.env | {"ROLLOUTS": "31"}, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    for line in process.stdout:
        if "SUCCESS base" in line:
            process.terminate()
            break
    process.communicate()
    assert process.returncode == 143
    assert len([each for each in command.results if each["step"] == 0]) == 16
    assert len(command.results) < 32


def test_scores_that_a_stopped_evaluation_did_not_report_are_reported_by_the_next(
    command: Command, server_url: str
) -> None:
    options = ["--client.base-url", server_url]
    metrics = command.out / "metrics.jsonl"
    assert command.run(*options).returncode == 0
    (first,) = metrics.read_text().splitlines()
    metrics.write_text("")  # as after a kill between the last rollout and the report
    assert command.run(*options).returncode == 0
    assert command.run(*options).returncode == 0
    (again,) = map(json.loads, metrics.read_text().splitlines())
    scores = {name: value for name, value in json.loads(first).items() if name not in ("time", "eval/vowels/time")}
    assert again == {**scores, "time": again["time"]}

    assert command.run(*options, "--num-examples", 2).returncode == 0
    (of_two,) = json.loads((command.out / "eval" / "summary.json").read_text())
    last = json.loads(metrics.read_text().splitlines()[-1])
    assert {f"eval/vowels/{name}": value for name, value in of_two["metrics"].items()}.items() <= last.items()


def test_a_server_that_cannot_load_its_model_ends_the_evaluation_by_name(command: Command, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(command.model, broken)
    (broken / "model.safetensors").write_bytes(b"not a model")
    done = command.run("--inference", "--model.name", broken, "--device", "cpu")
    assert done.returncode == 1
    assert f"error: inference: cannot load model '{broken}': Error while deserializing header" in done.stderr
    assert "Traceback" not in done.stdout + done.stderr


def test_the_short_command_starts_its_own_server(command: Command, weights_dir: Path) -> None:
    done = command.run("--weights-dir", weights_dir, "--steps", 1, "--num-examples", 1, "--device", "cpu")
    assert done.returncode == 0, done.stdout + done.stderr
    assert [(each["step"], each["example"]) for each in command.results] == [(0, 0), (1, 0)]


def test_a_named_server_that_is_not_there_is_waited_for_by_name(command: Command) -> None:
    with reserved_ports(1) as (port,):
        done = command.run("--client.base-url", f"http://127.0.0.1:{port}/v1", "--client.startup-timeout", 1)
    assert done.returncode == 1
    waiting, fault = (
        line for line in done.stdout.splitlines() if f"the inference server http://127.0.0.1:{port} " in line
    )
    assert "INFO Waiting for" in waiting
    assert "ERROR waited for the inference server" in fault
    for line in (waiting, fault):
        assert "(limit: client.startup_timeout = 1 s): start it with `inference --model.name" in line


def test_rollouts_whose_reward_function_failed_end_the_evaluation_and_are_made_again(
    command: Command, server_url: str
) -> None:
    words = ("--client.base-url", server_url)
    done = replace(command, env=command.env | {"FAILING": "1"}).run(*words)
    assert done.returncode == 1, done.stdout
    assert "ValueError: no score today" in done.stdout
    assert all(each["reward_errors"] for each in command.results)
    done = command.run(*words)
    assert done.returncode == 0, done.stdout + done.stderr
    assert sorted(each["example"] for each in command.results if not each["reward_errors"]) == list(range(8))


def test_an_environment_that_ends_the_evaluator_with_0_is_a_failure_by_name(command: Command, server_url: str) -> None:
    done = replace(command, env=command.env | {"LEAVING": "1"}).run("--client.base-url", server_url)
    assert done.returncode == 1, done.stdout
    assert "error: evaluator exited with code 0 before its work was done" in done.stderr


def test_an_environment_that_is_not_there_is_one_line(command: Command, server_url: str) -> None:
    done = command.run("--client.base-url", server_url, "--environment-ids", "nowhere")
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: env[1].id = 'nowhere': no module named 'nowhere'; install the environment's package")
