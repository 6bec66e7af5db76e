"""When prompts join the sequences that decode. On a GPU only steps without prompts are replayed as captured graphs."""

from __future__ import annotations

import torch

from prime_rl.inference.embedded.engine.cache import KVSlots
from prime_rl.inference.embedded.engine.generation import GenerationRequest, SamplingParams, Sequence
from prime_rl.inference.embedded.engine.scheduler import EngineLimits, Scheduler


def scheduler_with(steps_without_prompts: int) -> Scheduler:
    limits = EngineLimits(max_prefill_tokens=100, steps_without_prompts=steps_without_prompts)
    return Scheduler(limits, KVSlots(1 << 30, torch.device("cpu")))


def sequence(first: int, length: int = 4) -> Sequence:
    return GenerationRequest((first, *range(1, length)), SamplingParams(max_tokens=8), seed=0).sequences[0]


def joined(scheduler: Scheduler, *arrivals: list[Sequence]) -> list[int]:
    """The number of prompts that join in each step, when these arrive before it."""
    counts = []
    for arrived in arrivals:
        scheduler.waiting.extend(arrived)
        counts.append(len(scheduler.admit().sequences))
    return counts


def test_prompts_that_arrive_while_others_decode_join_together() -> None:
    arrivals = [[sequence(number)] for number in range(8)]
    assert joined(scheduler_with(3), *arrivals) == [1, 0, 0, 0, 4, 0, 0, 0]
    assert joined(scheduler_with(0), *arrivals) == [1] * 8


def test_a_prompt_that_no_other_waits_for_joins_at_once() -> None:
    assert joined(scheduler_with(3), [sequence(0)], [], [], [], [], [sequence(1)], [sequence(2)]) == [
        1,
        0,
        0,
        0,
        0,
        1,
        0,
    ]


def test_prompts_that_are_too_long_for_one_step_join_in_steps_that_follow_each_other() -> None:
    waiting = [sequence(number, length=60) for number in range(4)]
    late = [sequence(9)]
    assert joined(scheduler_with(3), waiting, [], [], [], late, [], [], []) == [1, 1, 1, 1, 0, 0, 0, 1]


def test_no_prompt_waits_when_nothing_decodes() -> None:
    scheduler = scheduler_with(3)
    first = sequence(0)
    assert joined(scheduler, [first]) == [1]
    first.request.result.cancel()
    scheduler.has_aborted = True
    scheduler.drop_aborted()
    assert joined(scheduler, [sequence(1)]) == [1]
