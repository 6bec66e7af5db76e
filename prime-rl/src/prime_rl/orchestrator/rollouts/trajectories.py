"""Turns the model calls of a rollout into the token sequences that are trained on."""

from __future__ import annotations

from prime_rl.orchestrator.rollouts.rollout import Rollout
from prime_rl.orchestrator.rollouts.trace import ModelCall
from prime_rl.transport.messages import TrainingSample


def to_samples(rollout: Rollout) -> list[TrainingSample]:
    """One sample for each line of conversation in the rollout, in the order in which the lines began.

    A call whose prompt starts with all tokens of an open line continues that line. The environment wrote what the
    prompt adds after them, and it is not trained. Any other call opens a line. A plain conversation is therefore one
    sample; agents that take turns, or a template that rewrites history, give several.

    With `separate_calls`, each call is a sample of its own. Completion tokens carry the advantage of their call, if the
    rollout's calls have one each.

    Each completion token carries the rollout's temperature. If the rollout is not trained on, its tokens are masked.
    """
    lines: list[tuple[list[int], TrainingSample]] = []
    for number, call in enumerate(rollout.trace.calls):
        prompt = call.prompt_ids
        tokens = prompt + call.completion_ids
        for index, (prefix, sample) in enumerate(() if rollout.separate_calls else lines):
            if prompt[: len(prefix)] == prefix:
                _append(sample, call, prompt[len(prefix) :])
                lines[index] = (tokens, sample)
                break
        else:
            sample = _open(call)
            lines.append((tokens, sample))
        if rollout.call_advantages is not None:
            known = sample.completion_advantages or []
            # The tokens that the environment wrote before the call are not trained on.
            added = len(sample.completion_ids) - len(known)
            sample.completion_advantages = known + [rollout.call_advantages[number]] * added
    samples = [sample for _, sample in lines]
    for sample in samples:
        if not rollout.trains:
            sample.completion_mask = [False] * len(sample.completion_mask)
        sample.completion_temperatures = [rollout.temperature] * len(sample.completion_ids)
        sample.advantage = rollout.advantage
        sample.reward = rollout.reward
        sample.version = rollout.version
    return samples


def _open(call: ModelCall) -> TrainingSample:
    return TrainingSample(
        prompt_ids=call.prompt_ids,
        prompt_mask=call.prompt_mask,
        completion_ids=list(call.completion_ids),
        completion_mask=list(call.completion_mask),
        inference_logprobs=list(call.inference_logprobs),
        completion_temperatures=[],
    )


def _append(sample: TrainingSample, call: ModelCall, environment_ids: list[int]) -> None:
    sample.completion_ids += environment_ids + call.completion_ids
    sample.completion_mask += [False] * len(environment_ids) + call.completion_mask
    sample.inference_logprobs += [0.0] * len(environment_ids) + call.inference_logprobs
