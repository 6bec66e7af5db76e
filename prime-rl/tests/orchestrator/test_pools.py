"""Easy and hard examples leave the normal pool, and a resumed run restores the pools."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from prime_rl.configs.orchestrator import BufferConfig, EnvConfig
from prime_rl.configs.shared import LogConfig
from prime_rl.orchestrator.errors import OrchestratorError
from prime_rl.orchestrator.rollouts.rollout import ExampleRef, Group, Rollout
from prime_rl.orchestrator.scheduling.buffer import Buffer, fingerprint
from prime_rl.orchestrator.workers.loading import load_environments

THRESHOLDS = BufferConfig(easy_threshold=0.9, hard_threshold=0.1)
Finish = Callable[[Buffer, ExampleRef, float], bool]


@pytest.fixture
def finish() -> Finish:
    """Returns whether the buffer accepts a group of one example with this mean reward."""

    def offer(buffer: Buffer, example: ExampleRef, reward: float) -> bool:
        return buffer.accepts(Group([Rollout(example, reward, [], temperature=1.0, version=0)]))

    return offer


def drawn(buffer: Buffer, count: int = 300) -> set[ExampleRef]:
    return {buffer.sample() for _ in range(count)}


def refs(env: str, *rows: int) -> set[ExampleRef]:
    return {ExampleRef(env, row) for row in rows}


def saved(buffer: Buffer) -> dict:
    return json.loads(json.dumps(buffer.state([])))


def test_an_example_has_the_documented_hash() -> None:
    row = {"prompt": [{"role": "user", "content": "hi"}], "answer": "x"}
    expected = "b9a1cd5a6146ab253857e49ca9a239a1fa6df5fc3c97110ccd02119bcb567fa3"
    assert fingerprint("env_a", row, ["task", "prompt"]) == expected
    assert fingerprint("env_a", row, ["task", "no such column", "prompt"]) == expected
    assert fingerprint("env_b", row, ["task", "prompt"]) != expected


@pytest.mark.usefixtures("importable_environments")
def test_the_hash_of_an_environments_row_is_that_of_its_prompt() -> None:
    (environment,) = load_environments([EnvConfig(id="letters-env")], LogConfig(vf_level="warning")).values()
    prompt = {"prompt": [{"role": "user", "content": "hello"}]}
    assert environment.fingerprint(1, ["task", "prompt"]) == fingerprint("letters-env", prompt, ["task", "prompt"])


def test_easy_and_hard_examples_are_not_sampled_again_and_their_groups_still_train(finish: Finish) -> None:
    buffer = Buffer({"a": 5}, THRESHOLDS, seed=0)
    assert finish(buffer, ExampleRef("a", 0), 0.9)
    assert finish(buffer, ExampleRef("a", 1), 0.1)
    assert finish(buffer, ExampleRef("a", 2), 0.5)
    assert finish(buffer, ExampleRef("a", 0), 1.0)
    assert drawn(buffer) == refs("a", 2, 3, 4)
    metrics = buffer.take_metrics()
    assert (metrics["evicted_examples/easy"], metrics["evicted_examples/hard"]) == (0.25, 0.25)
    assert [metrics[f"pool/{name}"] for name in ("easy", "normal", "hard")] == [0.2, 0.6, 0.2]
    assert buffer.take_metrics()["evicted_examples/easy"] == 0.0


def test_without_thresholds_nothing_moves(finish: Finish) -> None:
    buffer = Buffer({"a": 2}, BufferConfig(), seed=0)
    assert finish(buffer, ExampleRef("a", 0), 1.0)
    assert drawn(buffer) == refs("a", 0, 1)


def test_an_environment_without_normal_examples_is_not_sampled(finish: Finish) -> None:
    buffer = Buffer({"a": 1, "b": 1}, THRESHOLDS, seed=0)
    finish(buffer, ExampleRef("a", 0), 1.0)
    assert drawn(buffer) == refs("b", 0)
    finish(buffer, ExampleRef("b", 0), 0.0)
    with pytest.raises(OrchestratorError, match="no example is left to train on"):
        buffer.sample()


def test_a_resumed_run_has_the_same_pools_and_draws_the_same_examples(finish: Finish) -> None:
    buffer = Buffer({"a": 9, "b": 9}, THRESHOLDS, seed=3)
    for row, reward in ((4, 1.0), (0, 1.0), (7, 0.0)):
        finish(buffer, ExampleRef("a", row), reward)
    drawn(buffer, 10)
    resumed = Buffer({"a": 9, "b": 9}, THRESHOLDS, seed=99)
    resumed.restore(saved(buffer))
    assert resumed.state([]) == buffer.state([])
    assert [resumed.sample() for _ in range(50)] == [buffer.sample() for _ in range(50)]


def test_in_a_changed_dataset_examples_are_found_by_their_hash(finish: Finish) -> None:
    texts = ["zero", "one", "two", "three"]
    buffer = Buffer({"a": 4}, THRESHOLDS, seed=0, fingerprint=lambda example: texts[example.row])
    finish(buffer, ExampleRef("a", 1), 1.0)
    finish(buffer, ExampleRef("a", 2), 0.0)

    changed = ["new", "zero", "one", "three"]
    resumed = Buffer({"a": 4}, THRESHOLDS, seed=0, fingerprint=lambda example: changed[example.row])
    resumed.restore(saved(buffer))
    assert drawn(resumed) == refs("a", 0, 1, 3)
    assert resumed.pools.shares()["pool/hard"] == 0.0


def test_a_resume_returns_a_fraction_of_each_pool(finish: Finish) -> None:
    buffer = Buffer({"a": 20}, THRESHOLDS, seed=0)
    for row in range(8):
        finish(buffer, ExampleRef("a", row), float(row < 4))
    config = THRESHOLDS.model_copy(update={"easy_fraction": 0.5, "hard_fraction": 1.0})
    resumed = Buffer({"a": 20}, config, seed=0)
    resumed.restore(saved(buffer))
    shares = resumed.pools.shares()
    assert (shares["pool/easy"], shares["pool/hard"], shares["pool/normal"]) == (0.1, 0.0, 0.9)
    again = Buffer({"a": 20}, config, seed=0)
    again.restore(saved(buffer))
    assert again.state([]) == resumed.state([])
