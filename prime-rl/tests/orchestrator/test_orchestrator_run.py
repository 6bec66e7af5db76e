"""The whole orchestrator in this process, for what needs no second one."""

from __future__ import annotations

import gzip
import json
import re
import sys
from pathlib import Path

import pytest

from prime_rl.history.rollouts import KeptRollouts
from prime_rl.run.paths import OrchestratorPaths, RunPaths
from prime_rl.transport.batches import FileSystemBatchReceiver

pytestmark = pytest.mark.usefixtures("importable_environments")


def test_when_every_group_fails_the_log_has_the_reason_and_where_it_was(orchestrate) -> None:
    code, log = orchestrate(env=[{"id": "letters-env", "args": {"kind": "crashing"}}])
    assert code == 1
    assert "environment 'letters-env': 8 of the last 8 groups failed" in log
    assert "RuntimeError: the database is down" in log
    assert "letters_env.py" in log


def test_conversations_are_shipped_whole_and_counted(orchestrate, policy_server) -> None:
    code, log = orchestrate(env=[{"id": "letters-env", "args": {"kind": "twice"}}], max_steps=2)
    assert code == 0
    assert {request["path"] for request in policy_server.requests} == {
        "/v1/chat/completions",
        "/v1/chat/completions/tokens",
    }
    assert "Orchestrator finished." in log


def test_a_filter_that_masks_everything_leaves_nothing_to_train(orchestrate) -> None:
    code, log = orchestrate(filters=[{"type": "repetition", "window": 1, "prob_threshold": 1e-6, "enforce": True}])
    assert code == 1
    assert "step 0: 5 batches in a row had no token to train on" in log


def test_a_directory_with_another_runs_checkpoints_is_refused(orchestrate, tmp_path: Path) -> None:
    (tmp_path / "checkpoints" / "step_5").mkdir(parents=True)
    code, log = orchestrate()
    assert code == 1
    assert "holds the checkpoints of another run" in log


def test_a_server_that_cannot_be_trained_with_is_one_line(orchestrate, policy_server) -> None:
    policy_server.drops = ("token_ids",)
    code, log = orchestrate()
    assert code == 1
    assert len(log.splitlines()) == 2
    assert "answers without choices[0].token_ids" in log


def test_validation_runs_beside_a_batch_and_is_reported_with_it(orchestrate, policy_server, tmp_path: Path) -> None:
    policy_server.version = 0
    code, log = orchestrate(val={"num_examples": 3, "interval": 2}, max_steps=2)
    assert code == 0
    first, second = (json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines())
    assert {name for name in first if name.startswith("val_")} == {
        "val_failed/count",
        "val_trained_prompts/mean",
        *(f"val_reward/{name}" for name in ("mean", "std", "min", "max", "median", "errors")),
    }
    assert not any(name.startswith("val_") for name in second)
    assert len(policy_server.requests) == 2 * 4 + 3 + 1
    assert re.search(r"Step 0 \| Time: .* \| Reward: \d\.\d{4} \| Val\. Reward: \d\.\d{4} \|", log)


def test_a_validation_that_fails_does_not_end_the_run(orchestrate, tmp_path: Path) -> None:
    failing = [{"id": "letters-env", "args": {"kind": "eval fails"}}]
    code, log = orchestrate(env=failing, val={"num_examples": 3})
    assert code == 0
    assert "Step 0: 3 validation rollouts failed; first error: RuntimeError: no such database" in log


def test_every_rollout_of_a_batch_can_be_kept_as_a_line(orchestrate, tmp_path: Path) -> None:
    code, _ = orchestrate(save_rollouts=True, env=[{"id": "letters-env", "args": {"kind": "twice"}}], max_steps=2)
    assert code == 0
    samples = tmp_path / "run_default" / "samples"
    assert sorted(path.name for path in samples.iterdir()) == ["step_0.jsonl.gz", "step_1.jsonl.gz"]
    lines = [json.loads(line) for line in gzip.decompress((samples / "step_0.jsonl.gz").read_bytes()).splitlines()]
    assert [line["group"] for line in lines] == [0, 0, 1, 1]
    assert {tuple(line["kept"]) for line in lines} == {("all",)}
    line = lines[0]
    assert [message["role"] for message in line["prompt"] + line["completion"]] == ["user", "assistant"] * 2
    assert (line["env"], line["num_turns"], line["policy_version"], line["error"]) == ("letters-env", 2, 0, None)
    assert line["advantage"] == line["reward"] - (lines[0]["reward"] + lines[1]["reward"]) / 2
    assert line["completion_tokens"] > line["prompt_tokens"] > 0


def test_some_rollouts_of_a_step_are_kept_by_default_and_marked_for_the_trainer(orchestrate, tmp_path: Path) -> None:
    orchestrate(keep_rollouts={"per_step": 2}, env=[{"id": "letters-env", "args": {"kind": "two parts"}}])
    paths = RunPaths(tmp_path)
    first, second = KeptRollouts(paths).of_step(0)
    assert (first.group, second.group) == (first.group, first.group), "one whole group"
    assert (first.kept, first.in_batch, first.lag) == (("random",), 4, 0)
    assert first.weights == {"reversed_text": 1.0, "one_letter": 0.2, "characters": 0.0}
    assert first.metrics["reversed_text"] == 0.0
    (line,) = first.conversations
    assert [chr(token.id) for token in line.completion] == [*first.completion[0]["content"], chr(3)]
    assert {token.engine_logprob for token in line.completion} == {-0.5}
    assert {token.engine_logprob for token in line.prompt} == {None}
    assert {token.text for token in line.completion} == {None}, "this model has no tokenizer"
    sent = FileSystemBatchReceiver(paths.orchestrator).receive(0)
    assert sent is not None
    marked = {tuple(sample.kept_as): sample.completion_ids for sample in sent.examples if sample.kept_as is not None}
    assert marked == {
        (each.group, each.rollout, 0): [token.id for token in each.conversations[0].completion]
        for each in (first, second)
    }


def test_servers_free_their_memory_before_the_trainer_gets_the_batch(orchestrate, policy_server, tmp_path) -> None:
    batches_then: list[bool] = []

    def sleep() -> bool:
        batches_then.append(OrchestratorPaths(tmp_path / "run_default").batch(0).exists())
        return True

    policy_server.on_sleep = sleep
    code, _ = orchestrate(servers_sleep=True, max_async_level=0)
    assert (code, batches_then) == (0, [False])
    assert OrchestratorPaths(tmp_path / "run_default").batch(0).exists()


def test_a_server_that_cannot_sleep_ends_the_run_with_its_reason(orchestrate) -> None:
    code, log = orchestrate(servers_sleep=True, max_async_level=0)
    assert code == 1
    assert "did not go to sleep: " in log
    assert "it has no sleep mode" in log


def test_no_rollouts_are_kept_if_that_is_asked_for(orchestrate, tmp_path: Path) -> None:
    orchestrate(keep_rollouts=None)
    assert not (tmp_path / "run_default" / "samples").exists()


def test_a_watchdog_is_called_after_each_step_and_may_fail(orchestrate, policy_server) -> None:
    root = policy_server.url.removesuffix("/v1")
    code, log = orchestrate(heartbeat={"url": f"{root}/health"})
    assert code == 0
    assert "heartbeat" not in log
    code, log = orchestrate(heartbeat={"url": f"{root}/nowhere"})
    assert code == 0
    assert f"Heartbeat request to {root}/nowhere failed: 404" in log


def test_a_benchmark_runs_four_steps_without_a_trainer_and_ends_with_a_table(orchestrate) -> None:
    code, log = orchestrate(bench=True)
    assert code == 0
    assert re.search(r"Step +Step time \(s\) +Throughput \(tokens/s\)\n", log)
    assert re.findall(r"^ +([123]|Overall) +\d+\.\d\d", log, re.MULTILINE) == ["1", "2", "3", "Overall"]


@pytest.mark.skipif(sys.platform != "linux", reason="has no /dev/full")
def test_a_ledger_that_the_disk_has_no_room_for_ends_the_run_in_one_line(orchestrate, tmp_path: Path) -> None:
    ledger = OrchestratorPaths(tmp_path / "run_default").ledger
    ledger.parent.mkdir()
    ledger.symlink_to("/dev/full")
    exit_code, log = orchestrate()
    assert exit_code == 1
    assert log.splitlines()[-1].endswith(f"ERROR the disk is full: [Errno 28] No space left on device: '{ledger}'")
    assert "Traceback" not in log
