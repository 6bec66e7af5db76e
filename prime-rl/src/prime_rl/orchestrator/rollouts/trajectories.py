"""From the turns of a rollout to the token sequences that are trained on."""

from __future__ import annotations

from prime_rl.orchestrator.rollouts.rollout import Rollout, Turn
from prime_rl.transport.messages import TrainingSample


def to_samples(rollout: Rollout) -> list[TrainingSample]:
    """One sample for each line of conversation in the rollout, in the order in which the lines began.

    A turn whose prompt begins with all tokens of an open line continues it; what the prompt adds after them was
    written by the environment and is not trained. Any other turn opens a line. So a plain conversation is one sample,
    and agents that take turns, or a template that rewrites history, give several.

    Every completion token carries the rollout's temperature. A rollout that does not train keeps its tokens, masked.
    """
    lines: list[tuple[list[int], TrainingSample]] = []
    for turn in rollout.turns:
        tokens = turn.prompt_ids + turn.completion_ids
        for index, (prefix, sample) in enumerate(lines):
            if turn.prompt_ids[: len(prefix)] == prefix:
                _append(sample, turn, turn.prompt_ids[len(prefix) :])
                lines[index] = (tokens, sample)
                break
        else:
            lines.append((tokens, _open(turn)))
    samples = [sample for _, sample in lines]
    for sample in samples:
        if not rollout.trains:
            sample.completion_mask = [False] * len(sample.completion_mask)
        sample.completion_temperatures = [rollout.temperature] * len(sample.completion_ids)
        sample.advantage = rollout.advantage
        sample.reward = rollout.reward
        sample.version = rollout.version
    return samples


def _open(turn: Turn) -> TrainingSample:
    return TrainingSample(
        prompt_ids=list(turn.prompt_ids),
        prompt_mask=list(turn.prompt_mask),
        completion_ids=list(turn.completion_ids),
        completion_mask=list(turn.completion_mask),
        completion_logprobs=list(turn.completion_logprobs),
        completion_temperatures=[],
    )


def _append(sample: TrainingSample, turn: Turn, environment_ids: list[int]) -> None:
    sample.completion_ids += environment_ids + turn.completion_ids
    sample.completion_mask += [False] * len(environment_ids) + turn.completion_mask
    sample.completion_logprobs += [0.0] * len(environment_ids) + turn.completion_logprobs
