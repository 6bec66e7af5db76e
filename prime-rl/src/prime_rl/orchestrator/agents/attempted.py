"""Turns a finished session into a rollout."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

from prime_rl.configs.rollouts.agents import AgentKeys
from prime_rl.environments.agents.returns import call_rewards
from prime_rl.environments.agents.tensors import UNKNOWN_VERSION
from prime_rl.orchestrator.errors import MalformedRollout
from prime_rl.orchestrator.proxy.continuation import Message
from prime_rl.orchestrator.proxy.recording import Session
from prime_rl.orchestrator.rollouts.rollout import ExampleRef, Rollout, read_rollout
from prime_rl.orchestrator.rollouts.trace import CallDetails, ModelCall, Prompt

REJECTED = "Rejected"
"""The error of a rollout that its agent gave no reward."""
NOTHING = {"prompt": None, "completion": None}


def rollout_of(
    session: Session,
    outcome: Mapping[str, Any],
    keys: AgentKeys,
    example: ExampleRef,
    sampled: tuple[float, int],
    vocab_size: int | None,
) -> Rollout:
    """The rollout of a session. `sampled` are temperature and policy version of its requests.

    Each call is worth its reward and the discounted ones of the calls after it. A workflow's own sequences replace what
    the session recorded, and each has its own reward.

    Raises:
        MalformedRollout: a token or a log-probability is none.
    """
    sequences: Sequence[Mapping[str, Any]] | None = outcome.get("sequences")
    rewards: list[float | None]
    if sequences is None:
        calls, rewards = session.trace.calls, session.rewards
        worth = call_rewards(rewards, keys.turn_discount)
        total = math.fsum(reward or 0.0 for reward in rewards) if rewards else session.reward or 0.0
    else:
        calls, rewards = [_call_of(each) for each in sequences], [each["reward"] for each in sequences]
        worth = [each["reward"] for each in sequences] if len(sequences) > 1 else None
        total = math.fsum(each["reward"] for each in sequences) / len(sequences)
    error, detail = outcome.get("error"), outcome.get("detail")
    if outcome.get("is_rejected"):
        error, detail = REJECTED, "the agent returned no reward"
    output = {
        "reward": total,
        "trajectory": list(_steps(calls)),
        "error": {"error": error, "error_chain_repr": f"{error}: {detail}"} if error else None,
        "is_truncated": session.is_cut_off,
        **_shown(session),
    }
    temperature, version = sampled
    rollout = read_rollout(output, example, temperature, version, vocab_size)
    rollout.call_rewards = worth
    rollout.separate_calls = keys.samples == "separate" or sequences is not None
    rollout.is_rejected = error is not None
    return rollout


def _steps(calls: Sequence[ModelCall]) -> Iterator[dict[str, Any]]:
    """Calls in the form of a verifiers trajectory."""
    names = ("prompt_ids", "completion_ids", "completion_logprobs", "completion_mask", "prompt_mask")
    for call in calls:
        tokens = {name: getattr(call, name) for name in names}
        yield {"tokens": tokens, "response": {"call": call.details.to_builtins()}}


def _call_of(sequence: Mapping[str, Any]) -> ModelCall:
    """A workflow's sequence as one call: the prompt ends where the first trained token begins."""
    mask = sequence["loss_mask"]
    if True not in mask:
        raise MalformedRollout("a sequence of a workflow has no token to train on: its loss_mask is empty")
    start = mask.index(True)
    spans = _spans(sequence["versions"][start:])
    return ModelCall(
        prompt=Prompt.of(sequence["ids"][:start]),
        completion_ids=sequence["ids"][start:],
        completion_logprobs=sequence["logprobs"][start:],
        completion_mask=mask[start:],
        details=CallDetails.from_builtins({"version_spans": spans}),
    )


def _spans(versions: Sequence[int]) -> list[dict[str, int]]:
    spans, at = [], 0
    for version, run in groupby(versions):
        end = at + len(list(run))
        if version != UNKNOWN_VERSION:
            spans.append({"version": version, "start": at, "end": end})
        at = end
    return spans


def _shown(session: Session) -> dict[str, Any]:
    """The last conversation as messages: what was asked first, and what followed."""
    conversations = [call.conversation for call in session.calls if call.conversation]
    if not conversations:
        return NOTHING
    last = conversations[-1]
    start = next((at for at, message in enumerate(last) if message.role == "assistant"), len(last))
    messages = [_message(message) for message in last]
    return {"prompt": messages[:start], "completion": messages[start:]}


def _message(message: Message) -> dict[str, Any]:
    shown: dict[str, Any] = {"role": message.role, "content": message.text}
    if message.calls:
        shown["tool_calls"] = [
            {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
            for call_id, name, arguments in message.calls
        ]
    if message.answers_call:
        shown["tool_call_id"] = message.answers_call
    return shown
