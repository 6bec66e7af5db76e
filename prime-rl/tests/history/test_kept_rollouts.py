"""`KeptRollouts`: reads what a run kept, whatever state the files are in."""

from __future__ import annotations

import gzip
import json
import tracemalloc
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from prime_rl.history.rollouts import KeptRollouts, RolloutFilter, as_json, token_texts
from prime_rl.run.paths import EvalPaths, RunPaths


def record(number: int, **more: Any) -> dict[str, Any]:
    return {
        "env": "letters",
        "row": number,
        "group": 0,
        "rollout": number,
        "kept": ["random"],
        "reward": number / 10,
        "prompt": [{"role": "user", "content": f"question {number}"}],
        "completion": [{"role": "assistant", "content": "Größe", "tool_calls": [{"arguments": '{"x": "a\\nb"}'}]}],
        **more,
    }


def write(path: Path, records: Sequence[dict[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    content = "".join(f"{json.dumps(each)}\n" for each in records).encode()
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return path


@pytest.fixture
def paths(tmp_path: Path) -> RunPaths:
    return RunPaths(tmp_path)


def rewards(rollouts: Any) -> list[float | None]:
    return [each.reward for each in rollouts]


def test_steps_and_evaluations_of_new_and_old_files_are_found(paths: RunPaths) -> None:
    run = paths.orchestrator
    write(run.step_samples(10), [record(1)])
    write(run.step_samples(2), [record(2), record(3)])
    write(run.samples / "step_0.jsonl", [record(4)])
    write(run.samples / "step_2.jsonl", [record(5)])
    write(run.eval_samples(20), [record(6)])
    write(EvalPaths(paths.root).results, [{**record(7), "step": 40, "example": 3}])
    (run.samples / "notes.txt").write_text("mine")
    kept = KeptRollouts(paths)
    assert (kept.steps(), kept.evaluations()) == ([0, 2, 10], [20, 40])
    assert rewards(kept.of_step(2)) == [0.2, 0.3], "the compressed file has replaced an older one"
    assert rewards(kept.of_evaluation(40)) == [0.7]
    assert rewards(kept.all()) == [0.4, 0.2, 0.3, 0.1, 0.6, 0.7]
    assert rewards(kept.of_step(5)) == []
    assert kept.faults == []


def test_rollouts_are_filtered(paths: RunPaths) -> None:
    more = [{}, {"env": "digits"}, {"is_truncated": True}, {"error": "Boom"}, {"reward_errors": {"f": "trace"}}]
    write(paths.orchestrator.step_samples(0), [record(number, **each) for number, each in enumerate(more)])
    write(paths.orchestrator.eval_samples(0), [{"env": "letters", "reward": None, "error": "no server"}])

    def rows(**wanted: Any) -> list[int | None]:
        return [each.row for each in KeptRollouts(paths).all(RolloutFilter(**wanted))]

    assert rows() == [0, 1, 2, 3, 4, None]
    assert rows(env="digits") == [1]
    assert rows(truncated=True) == [2]
    assert rows(errors=True) == [3, 4, None]
    assert rows(min_reward=0.1, max_reward=0.3) == [1, 2, 3]
    assert rows(search="QUESTION 3") == [3]
    assert rows(search="größe", min_reward=0.4) == [4]
    assert rows(search="a\nb", max_reward=0.0) == [0], "also in the arguments of a tool call"
    assert rows(search="no server") == [None]


@pytest.mark.parametrize(
    ("damage", "count", "fault"),
    [
        (lambda content: content[: len(content) // 2], None, "is damaged after"),
        (lambda content: b"", 0, None),
        (lambda content: b"not gzip", 0, "is damaged after 0 whole rollouts"),
        (lambda content: content[:-8] + b"\0" * 8, 50, "is damaged after 50 whole rollouts"),
        (lambda content: gzip.compress(b'{"reward": 1}\n[1]\n\xff\xff\n{"a": ' + b"[" * 100_000), 1, "3 damaged lines"),
    ],
    ids=["torn", "empty", "other", "checksum", "lines"],
)
def test_a_damaged_file_is_named_and_read_as_far_as_possible(paths: RunPaths, damage, count, fault) -> None:
    path = write(paths.orchestrator.step_samples(0), [record(number, x="%x" % number**99) for number in range(50)])
    path.write_bytes(damage(path.read_bytes()))
    write(paths.orchestrator.step_samples(1), [record(1)])
    kept = KeptRollouts(paths)
    found = [each for each in kept.all() if each.step == 0]
    assert len(found) == count or (count is None and 0 < len(found) < 50)
    assert rewards(kept.of_step(1)) == [0.1]
    if fault is None:
        assert kept.faults == []
    else:
        (line,) = kept.faults
        assert line.startswith(f"{path} ")
        assert fault in line


def test_a_result_that_is_being_written_is_no_damage(paths: RunPaths) -> None:
    kept = KeptRollouts(paths)
    kept.results.parent.mkdir(parents=True, exist_ok=True)
    kept.results.write_text('{"step": 0, "reward": 0.5}\n{"step": 0, "rew')
    assert (rewards(kept.all()), kept.faults) == ([0.5], [])


def test_values_of_wrong_types_read_as_absent(paths: RunPaths) -> None:
    names = (
        "env",
        "row",
        "group",
        "rollout",
        "kept",
        "reward",
        "prompt",
        "completion",
        "metrics",
        "weights",
        "versions",
    )
    names += ("sequences", "token_texts", "error", "reward_errors", "stop_condition", "lag", "cut_chars")
    values: list[Any] = [
        None,
        True,
        3,
        -1.5,
        "x",
        [],
        {},
        [[]],
        {"1": {}},
        [{"prompt_ids": ["a"], "sampled": [[0, 9e9]]}],
    ]
    write(paths.orchestrator.step_samples(0), [dict.fromkeys(names, value) for value in values])
    properties = (
        "env",
        "row",
        "kept",
        "reward",
        "prompt",
        "completion",
        "metrics",
        "weights",
        "versions",
        "error",
        "lag",
    )
    for rollout in KeptRollouts(paths).of_step(0):
        assert [getattr(rollout, name) for name in properties]
        assert rollout.contains("zzz") is False
        assert isinstance(rollout.conversations, list)
        json.dumps(as_json(rollout))


def test_log_probabilities_of_engine_and_trainer_are_joined_by_token(paths: RunPaths) -> None:
    line = {"prompt_ids": [7, 8], "completion_ids": [1, 2, 9, 3], "sampled": [[0, 2], [3, 4]]}
    line["engine_logprobs"] = [-0.1, -0.2, 0.0, -0.4]
    texts = {"7": "Q", "8": ":", "1": [0xE2, 0x82], "2": [0xAC], "9": "|", "3": "."}
    write(paths.orchestrator.step_samples(3), [record(0, sequences=[line], token_texts=texts), record(1)])
    own = {
        "kept_as": [0, 0, 0],
        "minibatch": 0,
        "scored": [[2, 4], [5, 6]],
        "logprobs": [-1, -2, -4],
        "entropy": [1, 2, 4],
    }
    write(paths.orchestrator.trainer_samples(3, 1), [own])
    write(paths.orchestrator.trainer_samples(3, 0), [{**own, "kept_as": [5, 0, 0]}, {"kept_as": "x"}])
    kept = KeptRollouts(paths)
    assert kept.steps() == [3]
    first, second = kept.of_step(3)
    (conversation,) = first.conversations
    assert [token.text for token in conversation.prompt] == ["Q", ":"]
    assert [token.text for token in conversation.completion] == ["€", "", "|", "."]
    assert [token.engine_logprob for token in conversation.completion] == [-0.1, -0.2, None, -0.4]
    assert [token.trainer_logprob for token in conversation.completion] == [-1, -2, None, -4]
    assert [token.entropy for token in conversation.completion] == [1, 2, None, 4]
    assert as_json(first)["trainer"] == [own]
    shorter = {**line, "prompt_ids": [8], "prompt_start": 1}
    write(paths.orchestrator.step_samples(3), [record(0, sequences=[shorter])])
    (rollout,) = kept.of_step(3)
    assert [token.trainer_logprob for token in rollout.conversations[0].completion] == [-1, -2, None, -4]
    assert second.conversations == []


def test_bytes_that_are_no_text_do_not_swallow_the_tokens_after_them() -> None:
    assert token_texts([1, 1, 2], {"1": [0xFF], "2": "x"}) == ["\ufffd\ufffd", "", "x"]
    assert token_texts([1, 2, 5], {"1": [0xC3], "2": [0xA9]}) == ["é", "", None]


def test_ten_thousand_rollouts_are_read_one_at_a_time(paths: RunPaths) -> None:
    text = [{"role": "assistant", "content": "x" * 20_000}]
    for step in range(10):
        write(paths.orchestrator.step_samples(step), [record(number, completion=text) for number in range(1000)])
    tracemalloc.start()
    count = sum(1 for _ in KeptRollouts(paths).all())
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert count == 10_000
    assert peak_bytes < 5e6, "their texts have 200 MB"


def test_a_step_that_is_deleted_while_it_is_read_is_skipped(paths: RunPaths) -> None:
    for step in range(3):
        write(paths.orchestrator.step_samples(step), [record(step)])
    kept = KeptRollouts(paths)
    found = kept.all()
    assert next(found).step == 0
    paths.orchestrator.step_samples(1).unlink()
    assert [each.step for each in found] == [2]
    assert kept.faults == []


def test_steps_are_in_order(paths: RunPaths) -> None:
    for step in (100, 9, 20):
        write(paths.orchestrator.step_samples(step), [record(1)])
    assert all(one < other for one, other in pairwise(KeptRollouts(paths).steps()))
