"""`[judge.NAME]`: planned with the run, asked by its environments, and a run that ends by the judge's name."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from prime_rl.configs.rl import RLConfig
from prime_rl.launch.devices import assign_gpus
from prime_rl.launch.plan import rl_request
from prime_rl.run.paths import RunPaths
from prime_rl.utils.errors import DeviceError
from prime_rl.utils.pydantic_config import ConfigError, load_config

REPOSITORY = Path(__file__).resolve().parents[3]
MODEL = REPOSITORY / "examples" / "reverse_text" / "checkpoint"
ENVIRONMENT = '''
import verifiers as vf
from datasets import Dataset


def load_environment(judge_client, judge_model, judge_base_url, judge_api_key_var):
    """Rewards what the judge writes: its letters, added."""
    rubric = vf.JudgeRubric(judge_client=judge_client, judge_model=judge_model, judge_sampling_args={"max_tokens": 4})

    async def judged(prompt, completion, answer, state, judge):
        return sum(map(ord, await judge(prompt, completion, answer, state))) % 7 / 6

    rubric.add_reward_func(judged)
    rows = {"question": ["abc"[: 1 + at % 3] for at in range(16)], "answer": ["cba"] * 16}
    return vf.SingleTurnEnv(dataset=Dataset.from_dict(rows), rubric=rubric)
'''
CONFIG = f"""
device = "cpu"
seq_len = 128
model.name = "{MODEL}"
judge.grader = {{ model = "{MODEL}", prompt_price = 2.0 }}

[orchestrator]
batch_size = 4
rollouts_per_example = 2
sampling.max_tokens = 8
env = [{{ id = "judged_letters", judge = "grader" }}]
"""


def rl_config(*words: str) -> RLConfig:
    return load_config(RLConfig, overrides=["--judge.grader.model", "x/y", *words])


def test_a_judge_gets_gpus_of_its_own_and_a_config_that_cannot_have_them_is_refused() -> None:
    config = rl_config("--judge.grader.gpus", "2", "--judge.grader.engine.tp", "2", "--judge.small.model", "s")
    assert rl_request(config).frozen == (2, 1)
    gpus = assign_gpus(tuple("012345"), 1, 1, frozen=(2, 1))
    assert (gpus.inference, gpus.trainer, gpus.frozen) == (("0",), ("1",), (("2", "3"), ("4",)))
    with pytest.raises(
        DeviceError,
        match="1 inference \\+ 1 training \\+ 3 GPUs of judges and teacher are more than can be used: 0,1,2",
    ):
        assign_gpus(tuple("012"), 1, 1, frozen=(2, 1))
    assert rl_request(rl_config("--judge.grader.device", "cpu")).frozen == (0,)
    assert rl_request(rl_config("--judge.grader.base-url", "https://judge.example/v1")).frozen == ()
    for words, named in (
        (["--judge.grader.gpus", "8"], "1 train \\+ 1 infer \\+ 8 judge.grader = 10 GPUs"),
        (["--judge.grader.gpus", "3", "--judge.grader.engine.tp", "2"], "gpus \\(3\\) is not a multiple of engine.tp"),
        (["--judge.grader.base-url", "http://j/v1", "--judge.grader.gpus", "2"], "base_url names a running server"),
        (["--orchestrator.env.0.judge", "grade"], "no \\[judge.grade\\]; there is grader"),
        (["--judge.grader.max-concurent", "3"], "max_concurrent|max-concurrent"),
        (["--judge.grader.sampling", '{"stream": true}'], "each request sets stream itself: remove it"),
        (["--judge", '{"A B": {"model": "m"}}'], "is not a valid name for a judge"),
    ):
        with pytest.raises(ConfigError, match=named):
            rl_config(*words)


def test_a_process_of_the_run_loads_a_judge_elsewhere_with_every_key_written_out() -> None:
    orchestrator = rl_config("--judge.grader.base-url", "http://j/v1").orchestrator
    written = orchestrator.model_dump()
    assert {"gpus", "device", "engine"} <= written["judge"]["grader"].keys()
    assert type(orchestrator).model_validate(written).judge == orchestrator.judge


def test_a_run_trains_on_its_judge_and_ends_by_its_name_when_it_is_killed(tmp_path: Path) -> None:
    (tmp_path / "judged_letters.py").write_text(ENVIRONMENT)
    (tmp_path / "rl.toml").write_text(CONFIG)
    run = RunPaths(tmp_path / "run")
    command = [Path(sys.executable).with_name("medarc_train"), "rl", tmp_path / "rl.toml", "--output-dir", run.root]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    process = subprocess.Popen(
        list(map(str, command)), env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert process.stdout is not None
    lines = []
    # A step is reported once the trainer has trained on it.
    for line in process.stdout:
        lines.append(line)
        if line.startswith("step 1 "):
            os.kill(_pid_of("judge_grader", run), signal.SIGKILL)
            break
    lines += process.stdout
    output = "".join(lines)
    assert process.wait() == 1, output
    assert re.search(r"judge_grader was ended by SIGKILL|judge 'grader' does not answer", output), output
    records = [json.loads(line) for line in run.metrics.read_text().splitlines()]
    first = next(record for record in records if "judge/grader/calls" in record)
    assert first["judge/grader/calls"] >= 4
    assert first["judge/grader/cost"] == pytest.approx(first["judge/grader/prompt_tokens"] * 2e-6)
    assert first["judge/grader/failed_calls"] == 0
    assert run.judge_cache("grader").stat().st_mode & 0o777 == 0o600
    _assert_no_key_in_files(run)


def _pid_of(name: str, run: RunPaths) -> int:
    """The first process in the heartbeats of a child: itself."""
    return int(json.loads(run.heartbeat(name).read_bytes().partition(b"\n")[0])[5][0])


def _assert_no_key_in_files(run: RunPaths) -> None:
    """Engine and gateway keys are 43 URL-safe letters, which nothing else in a run's text files is."""
    for file in (*run.configs.rglob("*.toml"), *run.logs.rglob("*.log"), run.metrics, run.status):
        assert not re.search(r"(?<![\w/-])[\w-]{43}(?![\w/-])", file.read_text()), file
