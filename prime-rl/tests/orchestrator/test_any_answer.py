"""Whatever an environment returns: a rollout that can be logged and sent to the trainer, or one line of what is wrong.

`pytest prime-rl/tests -k test_any_ --hypothesis-profile campaign --timeout 0` tries 10,000 cases.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from prime_rl.configs.algorithms import NormalizedAdvantageConfig
from prime_rl.configs.orchestrator import KeepRolloutsConfig
from prime_rl.history.rollouts import KeptRollouts
from prime_rl.orchestrator.batches.advantage import assign_advantages, setup_advantage
from prime_rl.orchestrator.batches.batch import GibberishFilter, RepetitionFilter, apply_filters, build_batch
from prime_rl.orchestrator.errors import EnvironmentFault, MalformedRollout
from prime_rl.orchestrator.reports.rollout_log import RolloutLog
from prime_rl.orchestrator.rollouts.rollout import ExampleRef, Group, Rollout, check_trainable, read_rollout
from prime_rl.orchestrator.rollouts.trace import ModelCall, Prompt
from prime_rl.orchestrator.workers.failures import Failures
from prime_rl.run.paths import RunPaths
from prime_rl.trainer.rl.batches import find_fault
from prime_rl.transport.messages import TrainingBatch
from prime_rl.utils.conversations import has_image

NUMBERS = st.one_of(
    st.integers(-2, 100), st.floats(), st.sampled_from([2**31, 2**63, -(2**63), 10**400, 1e308, -1e308, True])
)
TEXTS = st.one_of(st.text(max_size=10), st.sampled_from(["", "\0", "\ud800", "\x1b[31m", "$(id)", "{x}", "%s"]))
VALUES = st.recursive(
    st.one_of(st.none(), NUMBERS, TEXTS, st.binary(max_size=3), st.just(object()), st.complex_numbers()),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.one_of(TEXTS, NUMBERS), inner, max_size=3)),
    max_leaves=6,
)


def mostly(*usual: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.one_of(*usual, *usual, VALUES)


@st.composite
def calls(draw: st.DrawFn) -> ModelCall:
    """A call as an engine may answer it: as many of each, and any numbers."""
    prompt = draw(st.lists(st.one_of(st.integers(0, 99), st.integers()), max_size=3))
    sampled = draw(st.integers(0, 3))
    exactly = {"min_size": sampled, "max_size": sampled}
    ids = draw(st.lists(st.one_of(st.integers(0, 99), st.integers()), **exactly))
    logprobs = draw(st.lists(st.one_of(st.floats(-20, 0), st.floats()), **exactly))
    return ModelCall(Prompt.of(prompt), ids, logprobs, [True] * sampled)


RECORDED = st.lists(calls(), max_size=3).map(lambda made: [(str(at), call) for at, call in enumerate(made)])
TURNS = st.fixed_dictionaries(
    {"id": mostly(st.sampled_from(["0", "1", "2", "other"]))},
    optional={
        "cut": mostly(st.lists(st.integers(0, 4), min_size=2, max_size=2)),
        "prompt_mask": mostly(st.lists(st.integers(0, 1), max_size=3)),
        "completion_mask": mostly(st.lists(st.booleans(), max_size=3)),
    },
)
MESSAGES = st.lists(st.fixed_dictionaries({"role": TEXTS, "content": VALUES}), max_size=2)
OUTPUTS = st.fixed_dictionaries(
    {"reward": st.one_of(st.floats(0, 1), NUMBERS, VALUES)},
    optional={
        "turns": mostly(st.lists(TURNS, max_size=3)),
        "error": mostly(st.fixed_dictionaries({"error": TEXTS, "error_chain_repr": TEXTS})),
        "timing": mostly(st.fixed_dictionaries({"generation_ms": NUMBERS, "scoring_ms": NUMBERS})),
        "stop_condition": mostly(TEXTS),
        "is_truncated": VALUES,
        "token_usage": mostly(st.fixed_dictionaries({"output_tokens": NUMBERS})),
        "metrics": mostly(st.dictionaries(TEXTS, NUMBERS, max_size=3)),
        "reward_errors": mostly(st.lists(st.fixed_dictionaries({"function": TEXTS, "traceback": TEXTS}), max_size=2)),
        "prompt": mostly(MESSAGES, TEXTS),
        "completion": mostly(MESSAGES, TEXTS),
    },
)


def used(group: list[Any], log: RolloutLog) -> list[Rollout]:
    """The rollouts of a group, after everything that the orchestrator and the trainer's packer do with them."""
    example = ExampleRef("any", 0)
    rollouts = [read_rollout(output, recorded, example, 1.0, 3) for output, recorded in group]
    Failures("any", 1.0).observe_scored(rollouts)
    assert not any(has_image(part) for rollout in rollouts for part in (rollout.prompt, rollout.completion))
    check_trainable(rollouts)
    groups = [Group(rollouts)]
    apply_filters([GibberishFilter(10, -5.0, True), RepetitionFilter(2, -0.1, True)], rollouts)
    assign_advantages(groups, setup_advantage(NormalizedAdvantageConfig()))
    batch = build_batch(groups)
    sent = msgspec.msgpack.decode(msgspec.msgpack.encode(batch.message(1)), type=TrainingBatch)
    for sample in sent.examples:
        assert find_fault(sample) is None
        assert math.isfinite(sample.advantage or 0.0)
    log.write_batch(1, groups, log.choose(batch, 1))
    log.wait()
    return rollouts


def test_any_answer_of_an_environment_can_be_trained_on_or_is_malformed(
    tmp_path: Path, limited_time: Callable[[], AbstractContextManager[None]]
) -> None:
    paths = RunPaths(tmp_path).orchestrator
    log = RolloutLog(paths, KeepRolloutsConfig(max_chars=1000, max_tokens=4), keep_all=False, model="none")

    @given(st.lists(st.tuples(OUTPUTS, RECORDED), min_size=1, max_size=3))
    def answers(group: list[Any]) -> None:
        fault = ""
        with limited_time():
            try:
                rollouts = used(group, log)
            except (MalformedRollout, EnvironmentFault) as error:
                fault = str(error) or "no message"
        assert len(fault) < 5000
        if not fault:
            kept = KeptRollouts(RunPaths(tmp_path))
            found = list(kept.of_step(1))
            assert [rollout.reward for rollout in found] == [rollout.reward for rollout in rollouts]
            assert kept.faults == []
            assert all(len(each.conversations) >= 0 and each.contains("") in (True, False) for each in found)

    answers()
