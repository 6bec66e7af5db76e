"""Three versions of verifiers that exclude each other, each in an interpreter of its own, in one run."""

from __future__ import annotations

import asyncio
import gzip
import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from prime_rl.configs.orchestrator import BufferConfig, EnvConfig
from prime_rl.configs.shared import ClientConfig, LogConfig
from prime_rl.interpreters import VENVS_VARIABLE, python_of, venv_of_packages
from prime_rl.orchestrator.errors import EnvironmentFault
from prime_rl.orchestrator.rollouts.rollout import ExampleRef, Group
from prime_rl.orchestrator.rollouts.sampling import SamplingConfig, train_sampling_args
from prime_rl.orchestrator.scheduling.buffer import Buffer
from prime_rl.orchestrator.servers.pool import InferencePool
from prime_rl.orchestrator.workers.environment import Environment
from prime_rl.orchestrator.workers.failures import GroupTimeout
from prime_rl.orchestrator.workers.inside import verifiers_v1
from prime_rl.orchestrator.workers.loading import load_environments
from prime_rl.orchestrator.workers.process import SHOWN_ROWS, ProcessWorker
from prime_rl.run.paths import RunPaths
from prime_rl.transport.batches import FileSystemBatchReceiver
from prime_rl.utils.errors import RunError

OLD = """
import verifiers as vf
from datasets import Dataset


def reversed_text(completion, answer, **kwargs):
    return float(completion[-1]["content"] == answer)


def load_environment():
    rows = [{"question": text, "answer": text[::-1]} for text in ["abc", "hello"]]
    return vf.SingleTurnEnv(dataset=Dataset.from_list(rows), rubric=vf.Rubric(funcs=[reversed_text]))
"""

NEW = """
import itertools
import verifiers.v1 as vf


class Data(vf.TaskData):
    answer: str = ""


class Reverse(vf.Task[Data, vf.State]):
    @vf.reward(weight=0.75)
    async def reversed_text(self, trace: vf.Trace) -> float:
        return float(trace.branches[-1].messages[-1].content == self.data.answer)

    @vf.reward(weight=0.25)
    async def length(self, trace) -> float:
        if self.data.idx == 1:
            raise SystemExit("the second task is broken")
        return 1.0


class Config(vf.TasksetConfig):
    prefix: str = ""


class Letters(vf.Taskset[Reverse, Config]):
    INFINITE = True

    def load(self):
        for number in itertools.count():
            text = f"{self.config.prefix}{number}"
            yield Reverse(Data(prompt=text, answer=text[::-1]), self.config.task)


__all__ = ["Letters"]
"""
FAILING = """
import asyncio
import sys
import verifiers.v1 as vf


class Data(vf.TaskData):
    way: str = ""


class Failing(vf.Task[Data, vf.State]):
    async def setup(self, trace, runtime):
        if self.data.way == "setup raises":
            raise OSError("the database is down")
        if self.data.way == "it hangs":
            await asyncio.Event().wait()

    @vf.reward
    async def scored(self, trace) -> float:
        if self.data.way == "a reward leaves":
            sys.exit(0)
        return float("nan")


class Config(vf.TasksetConfig):
    ways: list[str] = []


class Ways(vf.Taskset[Failing, Config]):
    def load(self):
        return [Failing(Data(prompt=f"{row}", way=way), self.config.task) for row, way in enumerate(self.config.ways)]


__all__ = ["Ways"]
"""
WAYS = {
    "setup raises": "TaskError",
    "a reward leaves": "reward.scored",
    "a reward is NaN": "reward.scored",
    "it hangs": "GroupTimeout",
}
UNREACHABLE = ("fetch", "connect", "dns", "timed out", "offline")


@pytest.fixture(scope="session")
def venvs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("venvs") / "cache"


def with_verifiers(version: str, venvs: Path, **modules: str) -> Path:
    """An interpreter with a version of verifiers and these modules."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(VENVS_VARIABLE, str(venvs))
        try:
            venv = venv_of_packages([f"verifiers=={version}"], print)
        except RunError as error:
            if any(word in str(error).lower() for word in UNREACHABLE):
                pytest.skip(f"needs a package index with verifiers {version}: {error}")
            raise
    (packages,) = venv.glob("lib/python*/site-packages")
    for name, text in modules.items():
        (packages / f"{name}.py").write_text(text)
    return python_of(venv)


@pytest.fixture(scope="session")
def newest(venvs: Path) -> Path:
    """An interpreter with verifiers 0.4.0."""
    return with_verifiers("0.4.0", venvs, new_letters=NEW, failing_ways=FAILING)


@pytest.mark.slow
@pytest.mark.usefixtures("importable_environments")
@pytest.mark.skipif(sys.version_info < (3, 11), reason="verifiers 0.4 needs Python 3.11")
def test_three_incompatible_versions_train_in_one_run(
    orchestrate, policy_server, newest: Path, venvs: Path, tmp_path: Path
) -> None:
    policy_server.reply = lambda messages, _: messages[-1]["content"][::-1]
    old = {"id": "old-letters", "python": str(with_verifiers("0.1.10", venvs, old_letters=OLD))}
    new = {"id": "new-letters", "python": str(newest)}
    code, log = orchestrate(
        env=[{"id": "letters-env"}, old, {**new, "taskset": {"prefix": "task "}}],
        buffer={"env_ratios": [1, 1, 1], "seed": 9},
        batch_size=10,
        max_concurrent=2,  # one group at a time, so that the batch has the first groups that were drawn
        save_rollouts=True,
    )
    assert code == 0, log
    assert "Environment 'old-letters' runs in" in log
    assert "(verifiers 0.1.10, Python " in log
    assert "(verifiers 0.4.0, Python " in log
    assert "new-letters (endless)" in log
    kept = gzip.decompress((tmp_path / "run_default" / "samples" / "step_0.jsonl.gz").read_bytes())
    lines = [json.loads(line) for line in kept.splitlines()]
    assert Counter(line["env"] for line in lines).keys() == {"letters-env", "old-letters", "new-letters"}
    by_prompt = {line["prompt"][-1]["content"]: line for line in lines if line["env"] == "new-letters"}
    # In the order of the taskset. The second task's reward function ends with sys.exit, which costs its group.
    assert {"task 0", "task 2"} <= set(by_prompt)
    assert "task 1" not in by_prompt
    assert by_prompt["task 0"]["completion"] == [{"role": "assistant", "content": "0 ksat"}]
    assert by_prompt["task 0"]["metrics"].items() >= {("reversed_text", 1.0), ("length", 1.0)}
    assert {line["reward"] for line in by_prompt.values()} == {1.0}
    assert "the second task is broken" in log
    # The trainer gets the sampled tokens of all of them, with the versions that sampled them.
    batch = FileSystemBatchReceiver(RunPaths(tmp_path).orchestrator).receive(0)
    assert batch is not None
    trained = [bytes(sample.completion_ids) for sample in batch.examples]
    assert b"0 ksat\x03" in trained
    assert {logprob for sample in batch.examples for logprob in sample.inference_logprobs} == {-0.5}


@pytest.mark.skipif(sys.version_info < (3, 11), reason="verifiers 0.4 needs Python 3.11")
async def test_a_task_of_v1_that_fails_fails_its_group_by_name(newest: Path, policy_server) -> None:
    config = EnvConfig(id="failing-ways", python=newest, taskset={"ways": list(WAYS)})
    (environment,) = load_environments([config], LogConfig(level="warning", vf_level="error")).values()
    pool = InferencePool(ClientConfig(base_url=[policy_server.url]), "letters")
    sampling = train_sampling_args(SamplingConfig(max_tokens=20), 1.0)
    try:
        await pool.wait_ready(use_token_client=True)
        await environment.connect()
        (server,) = pool.servers
        groups = [environment.run_group(ExampleRef("failing-ways", row), 1, server, sampling, 0) for row in range(3)]
        failed = await asyncio.gather(*groups, return_exceptions=True)
        assert [getattr(each, "reason", each) for each in failed] == list(WAYS.values())[:3]
        environment.timeout_s = 1.0
        with pytest.raises(GroupTimeout, match="row 3"):
            await environment.run_group(ExampleRef("failing-ways", 3), 1, server, sampling, 0)
    finally:
        await environment.close()
        await pool.close()


def endless(config: BufferConfig | None = None) -> Buffer:
    return Buffer({"stream": None, "table": 5}, config or BufferConfig(env_ratios=[1, 1]), seed=4)


def test_rows_of_an_endless_environment_are_drawn_in_order_and_a_resume_skips_them() -> None:
    buffer = endless()
    drawn = [buffer.sample() for _ in range(20)]
    rows = [example.row for example in drawn if example.env == "stream"]
    assert rows == list(range(len(rows)))
    assert 0 < len(rows) < 20
    state = json.loads(json.dumps(buffer.state(drawn[-2:])))
    resumed = endless()
    resumed.restore(state)
    assert [resumed.sample() for _ in range(2)] == drawn[-2:]
    after = [resumed.sample() for _ in range(20)]
    assert after == [buffer.sample() for _ in range(20)]
    assert min(example.row for example in after if example.env == "stream") == len(rows)


@pytest.mark.parametrize("value", [float("nan"), {"one": 1.0, "other": float("inf")}, None])
async def test_a_reward_of_v1_that_is_no_finite_number_is_named(value: object) -> None:
    errors: list[dict[str, str]] = []
    verifiers_v1._ERRORS.set(errors)

    async def correct() -> object:
        return value

    with pytest.raises(ValueError, match="instead of a finite number"):
        await verifiers_v1._contained(correct, True)()
    assert [error["function"] for error in errors] == ["correct"]
    assert await verifiers_v1._contained(correct, False)() is value


class EndlessProcess:
    """Answers as the process of an endless taskset does."""

    spec = None

    def ask_now(self, do: str, split: str, start: int = 0, stop: int = 0) -> Any:
        if do == "describe":
            return {"rows": None, "functions": {}, "tools": []}
        return [{"prompt": [{"role": "user", "content": str(row)}]} for row in range(start, stop)]


def test_every_row_of_an_endless_environment_has_a_prompt_id() -> None:
    environment = Environment("stream", ProcessWorker("stream", EndlessProcess(), proxy=None))
    ids = [environment.prompt_id(row) for row in range(2 * SHOWN_ROWS)]
    assert len(set(ids)) == len(ids)


def test_an_endless_environment_is_in_no_pool_and_with_others_needs_a_ratio(rollout) -> None:
    alone = Buffer({"stream": None}, BufferConfig(easy_threshold=0.9), seed=0)
    assert [alone.sample().row for _ in range(3)] == [0, 1, 2]
    group = Group([rollout(reward=1.0, env="stream")])
    assert alone.accepts(group)
    assert alone.sample().row == 3
    assert alone.take_metrics()["evicted_examples/easy"] == 0
    with pytest.raises(EnvironmentFault, match=r"'stream' has endless rows.*: set buffer\.env_ratios"):
        endless(BufferConfig())
