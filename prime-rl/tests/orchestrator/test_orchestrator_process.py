"""The `orchestrator` command as a process, against an inference server and a trainer that this test plays."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from resource import RLIMIT_NOFILE, getrlimit, setrlimit
from types import MappingProxyType
from typing import Any

import pytest
import tomli_w

from prime_rl.configs.shared import FileSystemTransportConfig
from prime_rl.history.rollouts import KeptRollouts
from prime_rl.run.early_stop import EarlyEnd
from prime_rl.run.ledger import check_ledger
from prime_rl.run.paths import RunPaths, stable_steps
from prime_rl.run.process import COMPLETION_VARIABLE
from prime_rl.transport import TrainingBatch, setup_batch_receiver
from prime_rl.utils.files import replacing_directory

LOOK_S = 0.05


@dataclass
class Run:
    """An `orchestrator` process and its directory."""

    paths: RunPaths
    process: subprocess.Popen[bytes]
    output: Path
    batches: list[TrainingBatch] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.receiver = setup_batch_receiver(FileSystemTransportConfig(), self.paths.orchestrator)

    def ended(self) -> bool:
        """Whether the process ends while we look."""
        try:
            self.process.wait(LOOK_S)
        except subprocess.TimeoutExpired:
            return False
        return True

    def until(self, condition: Callable[[], Any]) -> Any:
        """Wait until something is there, and fail with the log if the process ends before."""
        while not (value := condition()):
            assert not self.ended(), self.log
        return value

    def train_step(self, step: int) -> TrainingBatch:
        """Play the trainer: take the batch of `step`, publish the version that it makes."""
        batch = self.until(lambda: self.receiver.receive(step))
        self.batches.append(batch)
        self.publish(step + 1)
        return batch

    def publish(self, version: int) -> None:
        with replacing_directory(self.paths.orchestrator.broadcast(version)) as scratch:
            (scratch / "model.safetensors").touch()

    def finish(self) -> int:
        return self.process.wait()

    @property
    def log(self) -> str:
        return self.output.read_text()

    @property
    def metrics(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.paths.metrics.read_text().splitlines()]


@pytest.fixture
def start(environments_dir: Path, tmp_path: Path, policy_server) -> Iterator[Callable[..., Run]]:
    """Starts the command with a config file, in the run directory `tmp_path/run`."""
    running: list[subprocess.Popen[bytes]] = []
    environment = {**os.environ, "PYTHONPATH": str(environments_dir), "OMP_NUM_THREADS": "1"}

    def begin(
        open_files: tuple[int, int] | None = None, also: Mapping[str, str] = MappingProxyType({}), **config: Any
    ) -> Run:
        """`open_files` are the process's limits: the one that it starts with, and the one that it may raise it to.

        `also` are more environment variables.
        """
        paths = RunPaths(tmp_path / "run")
        defaults = {
            "output_dir": str(paths.orchestrator.root),
            "batch_size": 4,
            "rollouts_per_example": 2,
            "model": {"name": "letters"},
            "client": {"base_url": [policy_server.url]},
            "env": [{"id": "letters-env"}],
            "filters": [{"type": "repetition"}],
        }
        file = tmp_path / "orchestrator.toml"
        file.write_text(tomli_w.dumps(defaults | config))
        command = [str(Path(sys.executable).with_name("orchestrator")), "@", str(file)]
        output = tmp_path / "output.log"
        with output.open("w") as stream:
            process = subprocess.Popen(
                command,
                env={**environment, **also},
                stdout=stream,
                stderr=subprocess.STDOUT,
                preexec_fn=partial(setrlimit, RLIMIT_NOFILE, open_files) if open_files else None,
            )
        running.append(process)
        return Run(paths, process, output)

    yield begin
    for process in running:
        process.kill()
        process.wait()


def of_evaluations(run: Run) -> list[dict[str, Any]]:
    return [record for record in run.metrics if any(name.startswith("eval/") for name in record)]


def rewards(run: Run) -> list[float]:
    return [record["reward/mean"] for record in run.metrics if record["source"] == "orchestrator"]


def test_a_run_sends_its_batches_follows_the_trainer_and_ends_with_exit_0(start, policy_server) -> None:
    run = start(max_steps=3, max_async_level=0, ckpt={})
    for step in range(3):
        run.train_step(step)
    assert run.finish() == 0

    assert [len(batch.examples) for batch in run.batches] == [4, 4, 4]
    assert rewards(run)[0] < 1.0
    assert rewards(run)[1:] == [1.0, 1.0]
    assert policy_server.version == 2
    assert policy_server.loaded == [str(run.paths.orchestrator.broadcast(version)) for version in (1, 2)]
    lines = re.findall(r"SUCCESS (Step \d) \| Time: \d+\.\d\ds \| Reward: \d\.\d{4} \|", run.log)
    assert lines == ["Step 0", "Step 1", "Step 2"]
    assert run.log.rstrip().endswith("Orchestrator finished.")
    assert "Orchestrator finished." in run.paths.orchestrator.log.read_text()
    assert 3 in stable_steps(run.paths.orchestrator.checkpoints)
    assert run.paths.orchestrator.resolved_config.is_file()
    assert [record["step"] for record in run.metrics] == [0, 1, 2]


def test_more_rollouts_can_be_in_flight_than_files_may_be_open_at_the_start(start, policy_server) -> None:
    def reply(messages: list[dict[str, Any]], version: int) -> str:
        if not policy_server.answers:
            policy_server.gate.clear()  # after the probe
        return messages[-1]["content"]

    policy_server.reply = reply
    run = start(open_files=(96, getrlimit(RLIMIT_NOFILE)[1]), max_steps=1, batch_size=120)
    run.until(lambda: policy_server.waiting == 120)
    policy_server.gate.set()
    assert run.finish() == 0, run.log


@pytest.mark.parametrize("env_servers", [False, True], ids=["in its process", "in a server"])
def test_calls_wait_where_the_system_allows_fewer_files_than_rollouts_in_flight(start, env_servers: bool) -> None:
    run = start(open_files=(128, 300), max_steps=1, batch_size=400, env_servers=env_servers)
    assert run.finish() == 0, run.log


def test_connections_to_many_servers_share_the_files_of_the_process(start, serve, policy_server) -> None:
    servers = [policy_server, *(serve(type(policy_server)()) for _ in range(11))]
    client = {"base_url": [server.url for server in servers]}
    run = start(open_files=(128, 300), max_steps=1, batch_size=600, client=client)
    assert run.finish() == 0, run.log
    assert "Too many open files" not in run.log
    assert all(len(server.requests) > 1 for server in servers)


def test_the_policy_is_evaluated_before_during_and_after_training(start, policy_server) -> None:
    env = {"id": "letters-env", "name": "held-out", "rollouts_per_example": 2, "skip_first": 1, "num_examples": 2}
    crashing = {"id": "letters-env", "name": "crashing", "args": {"kind": "crashing"}}
    evaluation = {"env": [env, crashing], "interval": 2, "sampling": {"seed": 5, "max_tokens": 9}}
    run = start(max_steps=3, max_async_level=0, eval=evaluation)
    for step in range(3):
        run.train_step(step)
    assert run.finish() == 0

    records = of_evaluations(run)
    assert [record["progress/ckpt_step"] for record in records] == [0, 2, 3]
    assert [record["eval/held-out/avg@2"] for record in records] == [0.0, 1.0, 1.0]
    assert [record["eval/held-out/pass@2"] for record in records] == [0.0, 1.0, 1.0]
    assert [record["eval/crashing/failed/mean"] for record in records] == [1.0, 1.0, 1.0]
    asked = [request for request in policy_server.requests if request.get("max_completion_tokens") == 9]
    assert len({(request["seed"], request["messages"][0]["content"]) for request in asked}) == 8
    assert set(Counter(request["seed"] for request in asked).values()) == {3}, "each rollout has its own seed, repeated"
    assert "exact_seed" not in asked[0]
    kept = KeptRollouts(run.paths)
    assert [rollout.reward for rollout in kept.of_evaluation(3)] == [1.0] * 4 + [None] * 4
    assert (kept.steps(), kept.evaluations(), kept.faults) == ([0, 1, 2], [0, 2, 3], [])
    assert "Evaluation on 'held-out' | Version: 3 | avg@2: 1.0000" in run.log
    assert "4 rollouts failed and are not scored; first error: RuntimeError: the database" in run.log


def test_a_version_that_is_good_enough_ends_the_run_which_continues_without_the_rule(start, policy_server) -> None:
    """Answers are right from version 1 on. Evaluations wait for the saved version, even a step ahead of the trainer."""
    evaluation = {"env": [{"id": "letters-env", "name": "held-out", "num_examples": 2}], "interval": 2}
    ckpt = {"interval": 2, "keep_best": True}
    run = start(max_steps=9, max_async_level=1, eval=evaluation, ckpt=ckpt, early_stop={"target": 1.0})
    for step in range(2):
        run.train_step(step)
    end = run.until(lambda: run.receiver.receive(2))
    assert run.finish() == 0
    why = "eval/held-out/avg@1 is 1 at step 2 (target = 1)"
    assert (end.examples, end.early_end) == ([], why)
    assert [record["progress/ckpt_step"] for record in of_evaluations(run)] == [0, 2]
    best = {"step": 2, "metric": "eval/held-out/avg@1", "value": 1.0}
    assert json.loads(run.paths.best_checkpoint.read_text()) == best
    record = EarlyEnd.read(run.paths.early_end)
    assert record is not None
    assert (record.step, record.why) == (2, why)
    assert f"The run ends early, after 2 steps: {why}" in run.log

    with replacing_directory(run.paths.checkpoint(2)):
        pass
    run.paths.orchestrator.batch(2).unlink()  # as a launcher does
    policy_server.version = 0
    resumed = start(max_steps=3, max_async_level=1, eval=evaluation, ckpt={**ckpt, "resume_step": -1})
    resumed.train_step(2)
    assert resumed.finish() == 0
    assert [record["progress/ckpt_step"] for record in of_evaluations(resumed)] == [0, 2, 3]
    assert json.loads(resumed.paths.best_checkpoint.read_text()) == best
    assert not resumed.paths.early_end.exists()


def test_the_batch_after_the_next_waits_for_the_trainer(start, policy_server) -> None:
    policy_server.version = 5
    run = start(max_steps=3, max_async_level=1)
    run.until(lambda: run.receiver.receive(0))
    run.until(lambda: run.receiver.receive(1))
    assert not run.ended()
    assert run.receiver.receive(2) is None
    run.publish(1)
    run.until(lambda: run.receiver.receive(2))
    assert run.finish() == 0
    assert policy_server.loaded == [None, str(run.paths.orchestrator.broadcast(1))]
    assert "Servers hold version 5 of an earlier run: loading the base model" in run.log


def test_a_stopped_run_continues_where_it_was(start, policy_server) -> None:
    run = start(max_steps=4, max_async_level=0, ckpt={})
    for step in range(2):
        run.train_step(step)
    policy_server.gate.clear()
    run.until(lambda: "Step 1 |" in run.log and stable_steps(run.paths.orchestrator.checkpoints)[-1] == 2)
    run.process.send_signal(signal.SIGTERM)
    assert run.finish() == 143
    assert "SIGTERM: stopping" in run.log
    with replacing_directory(run.paths.checkpoint(2)):
        pass

    policy_server.gate.set()
    policy_server.version = 0
    resumed = start(max_steps=4, max_async_level=0, ckpt={"resume_step": -1})
    for step in (2, 3):
        resumed.train_step(step)
    assert resumed.finish() == 0
    assert "Resumed at step 2, 8 rollouts" in resumed.log
    assert [record["step"] for record in resumed.metrics] == [0, 1, 2, 3]
    assert resumed.metrics[3]["progress/total_samples"] == 16
    assert policy_server.loaded[-2:] == [str(resumed.paths.orchestrator.broadcast(version)) for version in (2, 3)]
    account, faults = check_ledger(resumed.paths.orchestrator)
    assert faults == []
    assert (account.starts, account.num_trained, account.last_step, account.dropped) == (2, 8, 3, {})


def test_a_run_stopped_in_the_middle_of_a_batch_rolls_out_all_its_examples_again(start, policy_server) -> None:
    """One of the two groups of step 1 is finished when the run is stopped."""
    first_request, of_step = 1, 4

    def reply(messages: list[dict[str, Any]], version: int) -> str:
        if len(policy_server.answers) + 1 == first_request + of_step + of_step // 2:
            policy_server.gate.clear()
        return messages[-1]["content"]

    policy_server.reply = reply
    run = start(max_steps=2, max_async_level=0, ckpt={})
    run.train_step(0)
    run.until(lambda: len(policy_server.requests) == first_request + 2 * of_step)
    run.process.send_signal(signal.SIGTERM)
    assert run.finish() == 143
    with replacing_directory(run.paths.checkpoint(1)):
        pass
    asked = [request["messages"][-1]["content"] for request in policy_server.requests]

    policy_server.gate.set()
    policy_server.requests.clear()
    policy_server.reply = lambda messages, version: messages[-1]["content"]
    resumed = start(max_steps=2, max_async_level=0, ckpt={"resume_step": -1})
    resumed.train_step(1)
    assert resumed.finish() == 0
    again = [request["messages"][-1]["content"] for request in policy_server.requests]
    assert Counter(again[first_request:]) == Counter(asked[first_request + of_step :])
    account, faults = check_ledger(resumed.paths.orchestrator)
    assert faults == []
    assert (account.starts, account.num_trained, account.open) == (2, 4, set())


def test_a_run_that_trains_an_adapter_asks_for_it_from_its_first_version_on_and_after_a_resume(
    start, policy_server
) -> None:
    policy_server.version = 5
    lora = {"name": "letters", "lora": {"rank": 4, "alpha": 8.0}}
    run = start(max_steps=2, max_async_level=0, ckpt={}, model=lora)
    for step in range(2):
        run.train_step(step)
    assert run.finish() == 0
    first, second = (str(run.paths.orchestrator.broadcast(version)) for version in (1, 2))
    assert policy_server.loaded == [None, first]
    assert [request["model"] for request in policy_server.requests] == ["letters"] * (1 + 4) + ["r4-a8.0"] * 4

    with replacing_directory(run.paths.checkpoint(2)):
        pass
    policy_server.requests.clear()
    policy_server.adapters.clear()
    resumed = start(max_steps=3, max_async_level=0, ckpt={"resume_step": -1}, model=lora)
    resumed.train_step(2)
    assert resumed.finish() == 0
    assert policy_server.loaded == [None, first, second]
    assert [request["model"] for request in policy_server.requests] == ["letters"] + ["r4-a8.0"] * 4


def test_resuming_a_step_that_was_not_saved_is_refused_in_one_line(start) -> None:
    run = start(max_steps=4, ckpt={"resume_step": 3})
    assert run.finish() == 1
    assert "the trainer's checkpoint of step 3 has no matching checkpoint" in run.log
    assert len(run.log.splitlines()) == 1


def test_images_are_refused_in_one_line_before_the_server_is_asked_anything(start, policy_server) -> None:
    run = start(env=[{"id": "letters-env", "args": {"kind": "images"}}])
    assert run.finish() == 1
    assert "ERROR environment 'letters-env': the prompt of row 1 has an image" in run.log.splitlines()[-1]
    assert "Traceback" not in run.log
    assert policy_server.requests == []


STUCK = [{"id": "letters-env", "args": {"kind": "stuck threads"}}]


def test_batches_go_out_when_environment_code_keeps_every_thread_of_the_event_loop(start) -> None:
    run = start(max_steps=2, max_async_level=0, env=STUCK)
    assert [len(run.train_step(step).examples) for step in range(2)] == [4, 4]


def test_a_run_ends_with_exit_0_whatever_environment_code_leaves_running(start, tmp_path: Path) -> None:
    marker = tmp_path / "completed"
    run = start(max_steps=1, env=STUCK, also={COMPLETION_VARIABLE: str(marker)})
    assert run.finish() == 0
    assert run.log.rstrip().endswith("Orchestrator finished.")
    assert marker.is_file()


def test_a_failure_is_reported_whatever_environment_code_leaves_running(start, policy_server) -> None:
    run = start(max_steps=2, max_async_level=0, env=STUCK)
    run.until(lambda: run.receiver.receive(0))
    policy_server.close()
    assert run.finish() == 1
    assert "does not respond any more" in run.log


def test_a_dead_inference_server_ends_the_run(start, policy_server) -> None:
    run = start(max_steps=2, max_async_level=0)
    run.until(lambda: run.receiver.receive(0))
    policy_server.close()
    assert run.finish() == 1
    assert f"the inference server {policy_server.url.removesuffix('/v1')} does not respond any more" in run.log


def test_what_is_not_built_is_refused_before_anything_is_written(start) -> None:
    run = start(prime_monitor={})
    assert run.finish() == 2
    assert "prime_monitor" in run.log
    assert not run.paths.root.exists()
