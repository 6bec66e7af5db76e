"""Sampling arguments of requests to the inference servers."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from typing import Any

from prime_rl.configs.orchestrator import EvalSamplingConfig, SamplingConfig, TemperatureSchedulerConfig
from prime_rl.configs.rollouts.sampling import FIXED_BY_TRAINING
from prime_rl.orchestrator.rollouts.rollout import ExampleRef

EXACT_SEED = "exact_seed"
"""Key in a request's body that makes the chat channel send the seed unchanged. The key itself is not sent."""


def temperature_at(config: SamplingConfig, step: int, max_steps: int | None) -> float:
    """The sampling temperature of the 0-based `step`: constant, or from the schedule."""
    if config.temp_scheduler is None:
        return 1.0 if config.temperature is None else config.temperature
    return scheduled_temperature(config.temp_scheduler, step, max_steps)


def scheduled_temperature(schedule: TemperatureSchedulerConfig, step: int, max_steps: int | None) -> float:
    """Moves from `start_temperature` at step 0 to `end_temperature` at the last of T steps, and stays there.

    With `p = clamp(step, 0, T-1) / (T-1)` the factor is `p` (linear) or `(1 - cos(pi p)) / 2` (cosine).
    """
    horizon = schedule.total_steps or max_steps or 1
    progress = min(max(step, 0), horizon - 1) / (horizon - 1) if horizon > 1 else 1.0
    factor = progress if schedule.type == "linear" else (1 - math.cos(math.pi * progress)) / 2
    return schedule.start_temperature + (schedule.end_temperature - schedule.start_temperature) * factor


def train_sampling_args(config: SamplingConfig, temperature: float) -> dict[str, Any]:
    """Sampling arguments of training requests, in verifiers' form.

    The trainer recomputes log-probabilities from the temperature and the tokens that top-k, top-p and min-p kept, so
    nothing else may change the distribution: these override `extra_body`, and `training_warnings` names what does.
    """
    extra = {name: value for name, value in config.extra_body.items() if name not in FIXED_BY_TRAINING}
    return {
        "temperature": temperature,
        "top_p": config.top_p,
        "logprobs": True,
        **_set(max_tokens=config.max_tokens, seed=config.seed),
        "extra_body": {
            **extra,
            "return_token_ids": True,
            "top_k": -1 if config.top_k is None else config.top_k,
            "min_p": config.min_p,
            "min_tokens": config.min_tokens,
            "repetition_penalty": config.repetition_penalty,
            **({"top_logprobs": config.reported, "return_tokens_as_token_ids": True} if config.reported else {}),
        },
    }


def seeded_for_group(sampling_args: dict[str, Any], example: ExampleRef) -> dict[str, Any]:
    """Training `sampling_args` for a group of rollouts of `example`, with a seed of the group's own if they have one.

    The chat channel counts up from it. Channels to other servers and of other processes count on their own, and all
    start again with the run: from one seed for all groups, they would draw the same random numbers for many of them.
    """
    if "seed" not in sampling_args:
        return sampling_args
    return {**sampling_args, "seed": _hashed(sampling_args["seed"], example.env, example.row, example.draw)}


def rollout_seed(seed: int, example: ExampleRef, attempt: int) -> int:
    """The seed of one rollout of an evaluation, from 0 to 2**31 - 1: the same in every process and on every machine.

    Every rollout has its own. With one seed for an attempt at all examples, engines would draw the same random numbers
    for all of them, and a mean over examples would vary almost as much as a single rollout.
    """
    return _hashed(seed, example.env, example.row, attempt)


def eval_sampling_args(config: EvalSamplingConfig, example: ExampleRef, attempt: int) -> dict[str, Any]:
    """Sampling arguments of the 0-based `attempt` at an example of an evaluation. Contains only keys that are set.

    With a seed, all rollouts of an evaluation differ from each other, and the next evaluation repeats them. See also
    `seeded_for_call`.
    """
    named = _set(temperature=config.temperature, max_tokens=config.max_tokens, top_p=config.top_p)
    named |= _set(reasoning_effort=config.reasoning_effort)
    extra = _set(
        top_k=config.top_k,
        min_p=config.min_p,
        min_tokens=config.min_tokens,
        repetition_penalty=config.repetition_penalty,
    )
    if config.seed is not None:
        named["seed"] = rollout_seed(config.seed, example, attempt)
        extra[EXACT_SEED] = True
    return {**named, "extra_body": {**config.extra_body, **extra}}


def seeded_for_call(sampling_args: Mapping[str, Any], number: int) -> dict[str, Any]:
    """`sampling_args` of an evaluation, nested or flat, for the 0-based call `number` of a rollout: a seed counts up.

    With one seed for all its calls, a rollout would draw the same random numbers in each turn, and an agent that asks
    the same several times would get the same answer. The seeds of training count up in the chat channel.
    """
    is_exact = {**sampling_args, **sampling_args.get("extra_body", {})}.get(EXACT_SEED)
    if not is_exact or "seed" not in sampling_args:
        return dict(sampling_args)
    return {**sampling_args, "seed": sampling_args["seed"] + number}


def _hashed(*identity: int | str | None) -> int:
    return int.from_bytes(hashlib.blake2b(json.dumps(identity).encode(), digest_size=4).digest()) >> 1


def _set(**values: Any) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}
