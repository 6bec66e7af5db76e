"""Rollouts as values. The dictionaries of verifiers are read once, here."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from prime_rl.orchestrator.errors import MalformedRollout


@dataclass(frozen=True, slots=True, order=True)
class ExampleRef:
    """One row of one environment's dataset."""

    env: str
    row: int


@dataclass(frozen=True, slots=True)
class Turn:
    """One model call: the tokens of its prompt, and the M tokens sampled after it."""

    prompt_ids: list[int]
    prompt_mask: list[bool]
    completion_ids: list[int]
    completion_mask: list[bool]
    completion_logprobs: list[float]
    versions: tuple[int, int] | None = None
    """Oldest and newest policy version that sampled the completion, where the server says so."""

    @property
    def total_tokens(self) -> int:
        return len(self.prompt_ids) + len(self.completion_ids)


@dataclass(slots=True)
class Rollout:
    """One scored attempt at an example."""

    example: ExampleRef
    reward: float
    turns: list[Turn]
    """Model calls whose tokens are known, in order."""
    temperature: float
    version: int
    """Oldest policy version that sampled any of its tokens; the version at submission where servers do not say."""
    num_turns: int = 1
    """All model calls, with or without tokens."""
    error: str | None = None
    """Name of the error that ended the rollout early. Its reward counts; its tokens are not trained on."""
    error_detail: str | None = None
    is_truncated: bool = False
    stop_condition: str | None = None
    generation_ms: float = 0.0
    scoring_ms: float = 0.0
    usage_output_tokens: int = 0
    metrics: dict[str, float] | None = None
    prompt: Any = None
    completion: Any = None
    advantage: float | None = None
    masked_by: str | None = None
    """The enforced filter that keeps its tokens from training."""

    @property
    def trains(self) -> bool:
        return self.error is None and self.masked_by is None

    @property
    def completion_tokens(self) -> int:
        """Tokens after the first prompt, those that the environment wrote between turns included."""
        if not self.turns:
            return self.usage_output_tokens
        return self.turns[-1].total_tokens - len(self.turns[0].prompt_ids)

    @property
    def total_tokens(self) -> int:
        """Prompt and completion of the last model call."""
        return self.turns[-1].total_tokens if self.turns else self.usage_output_tokens


@dataclass(slots=True)
class Group:
    """The rollouts of one example: the unit of scheduling, scoring, acceptance and advantages."""

    rollouts: list[Rollout]
    off_policy_level: int = 0
    """Weight updates that happened while the group was in flight."""

    @property
    def mean_reward(self) -> float:
        return sum(rollout.reward for rollout in self.rollouts) / len(self.rollouts)


def read_rollout(output: Mapping[str, Any], example: ExampleRef, temperature: float, version: int) -> Rollout:
    """The rollout in a verifiers output that has the state columns `trajectory` and `sampling_args`.

    Raises:
        MalformedRollout: the reward is no finite number, or tokens and log-probabilities do not match.
    """
    reward = output.get("reward")
    if not isinstance(reward, int | float) or not math.isfinite(reward):
        raise MalformedRollout(f"environment {example.env!r} gave the reward {reward!r}, not a finite number")
    steps = output.get("trajectory") or []
    turns = [_read_turn(step, example) for step in steps if step.get("tokens")]
    versions = [turn.versions[0] for turn in turns if turn.versions]
    error = output.get("error") or {}
    timing = output.get("timing") or {}
    return Rollout(
        example=example,
        reward=float(reward),
        turns=turns,
        temperature=temperature,
        version=min(versions, default=version),
        num_turns=len(steps),
        error=error.get("error"),
        error_detail=error.get("error_chain_repr"),
        is_truncated=bool(output.get("is_truncated")),
        stop_condition=output.get("stop_condition"),
        generation_ms=_phase_ms(timing, "generation"),
        scoring_ms=_phase_ms(timing, "scoring"),
        usage_output_tokens=int((output.get("token_usage") or {}).get("output_tokens", 0)),
        metrics={
            name: float(value)
            for name, value in (output.get("metrics") or {}).items()
            if isinstance(value, int | float)
        },
        prompt=output.get("prompt"),
        completion=output.get("completion"),
    )


def check_trainable(rollouts: Iterable[Rollout]) -> None:
    """Tell a group that an environment or a server broke from one that merely did badly.

    Raises:
        MalformedRollout: every rollout ended in an error, or none came with token ids.
    """
    rollouts = list(rollouts)
    if all(rollout.error for rollout in rollouts):
        raise MalformedRollout(f"every rollout of the group failed: {rollouts[-1].error_detail or rollouts[-1].error}")
    if not any(rollout.turns for rollout in rollouts):
        raise MalformedRollout("no rollout of the group has token ids and log-probabilities")


def _read_turn(step: Mapping[str, Any], example: ExampleRef) -> Turn:
    tokens = step["tokens"]
    ids, mask, logprobs = tokens["completion_ids"], tokens["completion_mask"], tokens["completion_logprobs"]
    if not len(ids) == len(mask) == len(logprobs):
        raise MalformedRollout(
            f"environment {example.env!r}: a completion has {len(ids)} tokens, {len(mask)} mask entries "
            f"and {len(logprobs)} log-probabilities"
        )
    return Turn(
        prompt_ids=tokens["prompt_ids"],
        prompt_mask=[bool(flag) for flag in tokens["prompt_mask"]],
        completion_ids=ids,
        completion_mask=[bool(flag) for flag in mask],
        completion_logprobs=logprobs,
        versions=_version_span(step.get("response")),
    )


def _version_span(response: Any) -> tuple[int, int] | None:
    """Oldest and newest version in a response's `weight_versions`, an extension of ours that few servers have."""
    get = getattr(response, "get", None)
    spans = get("weight_versions") if get else None
    if not spans:
        return None
    versions = [int(span["version"]) for span in spans]
    return min(versions), max(versions)


def _phase_ms(timing: Mapping[str, Any], phase: str) -> float:
    """Milliseconds of a rollout phase. verifiers before 0.1.13 reports `<phase>_ms`, later ones a span in seconds."""
    if f"{phase}_ms" in timing:
        return float(timing[f"{phase}_ms"])
    return 1e3 * float((timing.get(phase) or {}).get("duration", 0.0))
