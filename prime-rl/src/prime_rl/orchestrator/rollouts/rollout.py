"""Rollouts and groups: read from what an environment returns and the proxy recorded, and made into training samples."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from prime_rl.orchestrator.errors import MalformedRollout
from prime_rl.orchestrator.rollouts.trace import ModelCall, Prompt, TokenTrace
from prime_rl.orchestrator.workers.inside.reward_records import KEY as REWARD_ERRORS
from prime_rl.orchestrator.workers.inside.reward_records import OVERLONG_PROMPT
from prime_rl.transport.messages import LikeliestTokens, RoutedExperts, TrainingSample
from prime_rl.utils.errors import one_line

MAX_REWARD = 1e15
"""The square of a larger one overflows float32, in which the trainer computes."""
_MALFORMED = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError, msgspec.MsgspecError)
"""What reading the dictionaries of an environment raises, if they hold anything else than verifiers promises."""
Recorded = Sequence[tuple[str, ModelCall]]
"""The model calls of a session in the order of their answers, each with the id of its completion."""


@dataclass(frozen=True, slots=True, order=True)
class ExampleRef:
    """One row of one environment's dataset."""

    env: str
    row: int
    draw: int | None = field(default=None, compare=False)
    """Number of draws before this one in the run. None if the training buffer did not draw it."""


@dataclass(slots=True)
class Rollout:
    """One rollout of an example, with its reward."""

    example: ExampleRef
    reward: float
    trace: TokenTrace
    temperature: float
    version: int
    """Oldest policy version that sampled any of its tokens; the version at submission if servers do not report it."""
    num_turns: int = 1
    """Number of model calls, with or without tokens."""
    error: str | None = None
    """Name of the error that ended the rollout early. The reward counts, but the tokens are not trained on."""
    error_detail: str | None = None
    is_truncated: bool = False
    stop_condition: str | None = None
    generation_ms: float = 0.0
    scoring_ms: float = 0.0
    usage_output_tokens: int = 0
    metrics: dict[str, float] | None = None
    reward_errors: dict[str, str] = field(default_factory=dict)
    """The traceback of each reward function that failed, by name. verifiers counts it as 0; no group with one is
    trained on."""
    prompt: Any = None
    completion: Any = None
    call_rewards: list[float] | None = None
    """What each call of the trace is worth: its own reward, or its discounted return. None: `reward`, for each."""
    separate_calls: bool = False
    """Whether each call is a sample of its own, even if it continues another."""
    is_rejected: bool = False
    """Whether it has no reward: it is neither trained on nor compared with."""
    advantage: float | None = None
    """The mean over the calls, if they have rewards of their own."""
    prompt_id: str = ""
    """Identifies the prompt wherever its row is: the dataset's own id, or a hash of prompt and answer."""
    call_advantages: list[float] | None = None
    """Advantage of each call of the trace. None: `advantage`, for all of them."""
    masked_by: str | None = None
    """Name of the enforced filter that excludes its tokens from training."""

    @property
    def trains(self) -> bool:
        return self.error is None and self.masked_by is None and not self.is_rejected

    @property
    def rendering(self) -> dict[str, Any]:
        """What its first prompt was rendered with besides its messages: `tools`, `chat_template_kwargs`."""
        return self.trace.calls[0].details.rendering if self.trace.calls else {}

    @property
    def completion_tokens(self) -> int:
        """Tokens that were sampled, and those that the environment wrote between turns."""
        return self.trace.completion_tokens if self.trace else self.usage_output_tokens

    @property
    def total_tokens(self) -> int:
        """Tokens in the prompt and completion of the last model call."""
        return self.trace.total_tokens if self.trace else self.usage_output_tokens


@dataclass(slots=True)
class Group:
    """The rollouts of one example: the unit of scheduling, scoring, acceptance and advantages."""

    rollouts: list[Rollout]
    off_policy_level: int = 0
    """Weight updates that happened while the group was in flight."""
    scored_samples: asyncio.Task[list[list[TrainingSample]]] | None = field(default=None, compare=False, repr=False)
    """The samples of each rollout with the teacher's scores, which the teacher computes beside later rollouts."""

    @property
    def example(self) -> ExampleRef:
        return self.rollouts[0].example

    @property
    def scored(self) -> list[Rollout]:
        """The rollouts that have a reward."""
        return [rollout for rollout in self.rollouts if not rollout.is_rejected]

    @property
    def mean_reward(self) -> float:
        rewards = [rollout.reward for rollout in self.scored]
        return sum(rewards) / len(rewards) if rewards else 0.0

    def every_reward_is(self, reward: float) -> bool:
        """Whether all scored rollouts have this reward. Rewards that differ may have a mean of 0 or 1, too."""
        return bool(self.scored) and all(rollout.reward == reward for rollout in self.scored)

    @property
    def has_call_rewards(self) -> bool:
        """Whether the calls of a rollout have rewards of their own."""
        return any(rollout.call_rewards is not None for rollout in self.scored)

    @property
    def compared_rewards(self) -> list[float]:
        """The rewards that advantages compare: those of the calls, if they have their own."""
        if not self.has_call_rewards:
            return [rollout.reward for rollout in self.scored]
        return [
            reward
            for rollout in self.scored
            for reward in rollout.call_rewards or [rollout.reward] * len(rollout.trace.calls)
        ]


def read_rollout(
    output: Mapping[str, Any],
    recorded: Recorded,
    example: ExampleRef,
    temperature: float,
    version: int,
    vocab_size: int | None = None,
) -> Rollout:
    """Read a rollout: its scores from the environment's `output`, its tokens from what the proxy recorded.

    The environment may keep only some answers, and mask or cut their tokens, which `turns` of the output lists. It may
    also change the `temperature` that was asked for, in `sampling_args`. `vocab_size` is that of the trained model, if
    it is known.

    Raises:
        MalformedRollout: the reward is not a finite number, the model has no such token, or anything else that the
            environment or the engine gave is not what they promise.
    """
    try:
        rollout = _read_rollout(output, recorded, example, temperature, version)
    except _MALFORMED as error:
        reason = one_line(f"{type(error).__name__}: {error}")
        raise MalformedRollout(f"environment {example.env!r} gave a malformed rollout: {reason}") from error
    if vocab_size is not None:
        _check_token_ids(rollout.trace, example, vocab_size)
    return rollout


def _check_token_ids(trace: TokenTrace, example: ExampleRef, vocab_size: int) -> None:
    """Raises MalformedRollout: an embedding that does not exist ends the trainer."""
    highest = max(
        (max(ids) for call in trace.calls for ids in (call.prompt.added, call.completion_ids) if ids), default=0
    )
    if highest >= vocab_size:
        raise MalformedRollout(
            f"environment {example.env!r}, row {example.row}: the token id {highest}, and the model has embeddings for "
            f"0..{vocab_size - 1}"
        )


def _read_rollout(
    output: Mapping[str, Any], recorded: Recorded, example: ExampleRef, temperature: float, version: int
) -> Rollout:
    reward = output.get("reward")
    if not isinstance(reward, int | float) or not abs(reward) <= MAX_REWARD:
        shown = one_line(f"{reward!r}")
        raise MalformedRollout(
            f"environment {example.env!r} gave the reward {shown}, not a finite number (at most {MAX_REWARD:g})"
        )
    turns = output.get("turns")
    trace = _checked(_kept(recorded, turns))
    oldest = trace.oldest_version
    error = output.get("error") or {}
    if not turns and (overlong := output.get(OVERLONG_PROMPT)):
        error = {"error": "OverlongPromptError", "error_chain_repr": overlong}
    timing = output.get("timing") or {}
    changed = (output.get("sampling_args") or {}).get("temperature")
    is_cut_off = any(call.details.finish_reason == "length" for call in trace.calls)
    return Rollout(
        example=example,
        reward=float(reward),
        trace=trace,
        temperature=temperature if changed is None else _finite([msgspec.convert(changed, float)])[0],
        version=version if oldest is None else oldest,
        num_turns=len(trace.calls) if turns is None else len(turns),
        error=_text(error.get("error")),
        error_detail=_text(error.get("error_chain_repr")),
        is_truncated=bool(output.get("is_truncated")) or is_cut_off,
        stop_condition=_text(output.get("stop_condition")),
        generation_ms=_phase_ms(timing, "generation"),
        scoring_ms=_phase_ms(timing, "scoring"),
        usage_output_tokens=int((output.get("token_usage") or {}).get("output_tokens", 0)),
        metrics={
            name: float(value)
            for name, value in (output.get("metrics") or {}).items()
            if isinstance(value, int | float) and math.isfinite(value)
        },
        reward_errors={
            str(each["function"]): str(each["traceback"]) or "no traceback" for each in output.get(REWARD_ERRORS) or ()
        },
        prompt=output.get("prompt"),
        completion=output.get("completion"),
    )


def check_trainable(rollouts: Iterable[Rollout]) -> None:
    """Refuse a group that failed because of an environment or a server, rather than because of its answers.

    Raises:
        MalformedRollout: every rollout ended with an error, or none has token ids.
    """
    rollouts = list(rollouts)
    if all(rollout.error for rollout in rollouts):
        last = rollouts[-1]
        message = f"every rollout of the group failed: {last.error_detail or last.error}"
        raise MalformedRollout(message, last.error or "", is_of_environment=False)
    if not any(rollout.trace for rollout in rollouts):
        message = "no rollout of the group has token ids and log-probabilities"
        raise MalformedRollout(message, "NoTokens", is_of_environment=False)


def _kept(recorded: Recorded, turns: Sequence[Mapping[str, Any]] | None) -> TokenTrace:
    """The recorded calls whose answers the environment kept, as it kept them. All of them if `turns` is None."""
    if turns is None:
        return TokenTrace([call for _, call in recorded])
    by_id = dict(recorded)
    trace = TokenTrace()
    for turn in turns:
        # An answer of another client was not recorded. Its tokens are none of the trained model's.
        if (call := by_id.get(turn["id"])) is None:
            continue
        changed = _as_kept(call, turn)
        if changed is not None:
            earlier = changed.prompt.earlier
            is_shared = earlier is None or any(earlier is each for each in trace.calls)
            trace.calls.append(changed) if is_shared else trace.append(changed)
    return trace


def _as_kept(call: ModelCall, turn: Mapping[str, Any]) -> ModelCall | None:
    """A call with the masks of the environment, and without the tokens that it cut off. None if it kept no token."""
    masks = [turn.get(name) for name in ("prompt_mask", "completion_mask")]
    cut = turn.get("cut") or [len(call.prompt), len(call.completion_ids)]
    if masks == [None, None] and cut == [len(call.prompt), len(call.completion_ids)]:
        return call
    prompt, count = call.prompt, cut[1]
    # Of a prompt that is cut, nothing is trained. The cut may be inside of an image, which trainers refuse.
    if cut == [0, 0] or (call.images and cut[0] < len(call.prompt)):
        return None
    routes = call.routed_experts
    if cut[0] < len(prompt):
        prompt = Prompt.of(prompt.ids[: cut[0]])
        routes = call.routes  # of an earlier call, too
    if routes is not None:
        routes = routes.tokens(end=max(len(prompt) + len(call.completion_ids[:count]) - max(prompt.shared, 1), 0))
    prompt_mask, completion_mask = masks
    for mask, tokens in ((prompt_mask, len(prompt)), (completion_mask, len(call.completion_ids[:count]))):
        if mask is not None and len(mask) != tokens:
            raise ValueError(f"{tokens} tokens and {len(mask)} mask entries")
    if prompt_mask is not None:
        prompt = replace(prompt, mask=list(map(bool, prompt_mask)))
    return replace(
        call,
        prompt=prompt,
        completion_ids=call.completion_ids[:count],
        inference_logprobs=call.inference_logprobs[:count],
        completion_mask=call.completion_mask[:count] if completion_mask is None else list(map(bool, completion_mask)),
        routed_experts=routes,
        top=None if call.top is None else call.top.places(count),
    )


def _checked(trace: TokenTrace) -> TokenTrace:
    """Raises ValueError: a server may answer with anything."""
    for call in trace.calls:
        _finite(call.inference_logprobs)
        for ids in (call.prompt.added, call.completion_ids):
            if ids and not 0 <= min(ids) <= max(ids) < 2**31:
                raise ValueError(f"the token id {min(ids)} or {max(ids)}")
    return trace


def _finite(values: list[float]) -> list[float]:
    if not all(map(math.isfinite, values)):
        raise ValueError("a log-probability or the temperature is not a finite number")
    return values


def _text(value: Any) -> str | None:
    return None if value is None else str(value)


def _phase_ms(timing: Mapping[str, Any], phase: str) -> float:
    """Duration of a rollout phase in ms. verifiers reports `<phase>_ms` before 0.1.13, and seconds since."""
    if f"{phase}_ms" in timing:
        return float(timing[f"{phase}_ms"])
    return 1e3 * float((timing.get(phase) or {}).get("duration", 0.0))


# From the model calls of a rollout to the token sequences that are trained on.


@dataclass(frozen=True, slots=True)
class Line:
    """A line of conversation in a rollout, and the sample that it becomes."""

    sample: TrainingSample
    rollout: Rollout | None = None
    opens: bool = False
    """Whether it begins with the rollout's first prompt."""
    calls: list[tuple[int, int]] = field(default_factory=list)
    """Number of each call in the rollout's trace, and where its answer begins among the sample's completion tokens."""


def to_samples(rollout: Rollout) -> list[TrainingSample]:
    """The sample of each line of `to_lines`."""
    return [line.sample for line in to_lines(rollout)]


def to_lines(rollout: Rollout) -> list[Line]:
    """One sample for each line of conversation in the rollout, in the order in which the lines began.

    A call whose prompt starts with all tokens of an open line continues that line. The environment wrote what the
    prompt adds after them, and it is not trained. Any other call opens a line. A plain conversation is therefore one
    sample; agents that take turns, or a template that rewrites history, give several.

    With `separate_calls`, each call is a sample of its own. Completion tokens carry the advantage of their call, if the
    rollout's calls have one each.

    Each completion token carries the rollout's temperature. If the rollout is not trained on, its tokens are masked.
    """
    lines: list[tuple[list[int], Line]] = []
    for number, call in enumerate(rollout.trace.calls):
        prompt = call.prompt_ids
        tokens = prompt + call.completion_ids
        for index, (prefix, line) in enumerate(() if rollout.separate_calls else lines):
            last = rollout.trace.calls[line.calls[-1][0]]
            if prompt[: len(prefix)] == prefix and call.shows_what(last.images):
                _append(line.sample, call, prompt[len(prefix) :])
                lines[index] = (tokens, line)
                break
        else:
            line = Line(_open(call), rollout, opens=not lines)
            lines.append((tokens, line))
        sample = line.sample
        sample.images = [each.digest for each in call.images] or None
        line.calls.append((number, len(sample.completion_ids) - len(call.completion_ids)))
        if rollout.call_advantages is not None:
            known = sample.completion_advantages or []
            # The tokens that the environment wrote before the call are not trained on.
            added = len(sample.completion_ids) - len(known)
            sample.completion_advantages = known + [rollout.call_advantages[number]] * added
    for _, line in lines:
        sample = line.sample
        if not rollout.trains:
            sample.completion_mask = [False] * len(sample.completion_mask)
        sample.completion_temperatures = [rollout.temperature] * len(sample.completion_ids)
        sample.advantage = rollout.advantage
        sample.reward = rollout.reward
        sample.version = rollout.version
        if sample.routed_experts is not None:
            # The last token was never routed. Nothing depends on it, but the trainer computes it.
            routes = sample.routed_experts
            sample.routed_experts = RoutedExperts.joined([routes, routes.tokens(len(routes) - 1)])
    return [line for _, line in lines]


def _open(call: ModelCall) -> TrainingSample:
    return TrainingSample(
        prompt_ids=call.prompt_ids,
        prompt_mask=call.prompt_mask,
        completion_ids=list(call.completion_ids),
        completion_mask=list(call.completion_mask),
        inference_logprobs=list(call.inference_logprobs),
        completion_temperatures=[],
        routed_experts=call.routes,
        sampler_top=call.top,
    )


def _append(sample: TrainingSample, call: ModelCall, environment_ids: list[int]) -> None:
    if sample.routed_experts is not None:
        known, routes = sample.routed_experts, call.routes
        rest = None if routes is None else routes.tokens(len(known))
        sample.routed_experts = RoutedExperts.joined([known, rest])
    if sample.sampler_top is not None and call.top is not None:
        nothing = call.top.chosen([-1] * len(environment_ids))
        sample.sampler_top = LikeliestTokens.joined([sample.sampler_top, nothing, call.top])
    else:
        sample.sampler_top = None
    sample.completion_ids += environment_ids + call.completion_ids
    sample.completion_mask += [False] * len(environment_ids) + call.completion_mask
    sample.inference_logprobs += [0.0] * len(environment_ids) + call.inference_logprobs
