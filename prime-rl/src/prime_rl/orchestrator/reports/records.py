"""A kept rollout as a JSON object."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import msgspec
import numpy as np

from prime_rl.configs.rollouts.keeping import KeepRolloutsConfig
from prime_rl.orchestrator.rollouts.rollout import Rollout
from prime_rl.orchestrator.rollouts.token_texts import TokenTexts
from prime_rl.orchestrator.rollouts.trace import ModelCall
from prime_rl.orchestrator.rollouts.trajectories import to_samples
from prime_rl.transport.messages import TrainingSample

_NOT_JSON = (ArithmeticError, AttributeError, RecursionError, TypeError, ValueError, msgspec.MsgspecError)
_DECIMALS = 5


def record(rollout: Rollout, /, **more: Any) -> dict[str, Any]:
    """A rollout without its tokens."""
    return {
        "env": rollout.example.env,
        "row": rollout.example.row,
        "prompt_id": rollout.prompt_id or None,
        **more,
        "prompt": rollout.prompt,
        "completion": rollout.completion,
        "reward": rollout.reward,
        "advantage": rollout.advantage,
        "metrics": rollout.metrics,
        "policy_version": rollout.version,
        "temperature": rollout.temperature,
        "prompt_tokens": len(rollout.trace.calls[0].prompt) if rollout.trace else None,
        "completion_tokens": rollout.completion_tokens,
        "num_turns": rollout.num_turns,
        "is_truncated": rollout.is_truncated,
        "stop_condition": rollout.stop_condition,
        "masked_by": rollout.masked_by,
        "generation_ms": rollout.generation_ms,
        "scoring_ms": rollout.scoring_ms,
        "error": rollout.error_detail or rollout.error,
        "reward_errors": rollout.reward_errors or None,
    }


def token_fields(rollout: Rollout, max_tokens: int | None, texts: TokenTexts | None) -> dict[str, Any]:
    """Model calls, and the tokens of each line of conversation, which are those that are trained on."""
    # Untrained rollouts have empty masks; here the mask says which tokens the model sampled.
    lines = to_samples(dataclasses.replace(rollout, error=None, masked_by=None))
    length = sum(len(line.prompt_ids) + len(line.completion_ids) for line in lines)
    room = length if max_tokens is None else min(length, max_tokens)
    cut = length - room
    sequences = []
    for line in lines:
        sequences.append(_sequence(line, room))
        room -= len(sequences[-1]["prompt_ids"]) + len(sequences[-1]["completion_ids"])
    ids: set[int] = set()
    for each in sequences:
        ids.update(each["prompt_ids"], each["completion_ids"])
    return {
        "is_trained": rollout.trains,
        "calls": [_call(call) for call in rollout.trace.calls],
        "versions": {str(version): n for version, n in rollout.trace.trainable_by_version(rollout.version).items()},
        "sequences": sequences,
        "token_texts": None if texts is None else texts.of(ids),
        "cut_tokens": cut,
    }


def _sequence(line: TrainingSample, room: int) -> dict[str, Any]:
    """At most `room` tokens of a line of conversation: the first of the completion, then the last of the prompt."""
    end = min(room, len(line.completion_ids))
    start = max(0, len(line.prompt_ids) - (room - end))
    return {
        "prompt_ids": line.prompt_ids[start:],
        "prompt_start": start,
        "completion_ids": line.completion_ids[:end],
        "sampled": _runs(line.completion_mask[:end]),
        "engine_logprobs": np.round(np.asarray(line.inference_logprobs[:end], np.float64), _DECIMALS).tolist(),
    }


def _runs(mask: Sequence[bool]) -> list[list[int]]:
    """Start and end of each run of true entries."""
    edges: list[int] = np.flatnonzero(np.diff(np.asarray(mask, np.int8), prepend=0, append=0)).tolist()
    return [list(pair) for pair in zip(edges[::2], edges[1::2], strict=True)]


def _call(call: ModelCall) -> dict[str, Any]:
    details = call.details
    return {
        "prompt_tokens": len(call.prompt),
        "completion_tokens": len(call.completion_ids),
        "versions": [[span.start, span.end, span.version] for span in details.weight_versions],
        "finish_reason": details.finish_reason,
        "started_s": details.started_s,
        "ended_s": details.ended_s,
    }


class RecordEncoder:
    """Encodes records as lines of JSON, with messages of at most `max_chars` characters."""

    def __init__(self, config: KeepRolloutsConfig | None) -> None:
        self.max_chars = None if config is None else config.max_chars
        # Messages may contain the environment's own objects.
        self._encoder = msgspec.json.Encoder(enc_hook=_plain)

    def lines(self, records: Iterable[dict[str, Any]]) -> bytes:
        return b"".join(self._line(each) + b"\n" for each in records)

    def _line(self, values: dict[str, Any]) -> bytes:
        """A value of the environment's that JSON cannot hold is replaced by the name of its type."""
        try:
            return self._bounded(values, self._encoder.encode(values))
        except _NOT_JSON:
            kept = {key: self._kept(value) for key, value in values.items()}
            return self._bounded(kept, self._encoder.encode(kept))

    def _kept(self, value: Any) -> Any:
        try:
            self._encoder.encode(value)
        except _NOT_JSON:
            return f"<{type(value).__name__}>"
        return value

    def _bounded(self, values: dict[str, Any], line: bytes) -> bytes:
        """The line, or one with shorter messages. `line` has at least as many bytes as the messages have characters."""
        if self.max_chars is None or len(line) <= self.max_chars:
            return line
        texts = ("prompt", "completion", "error", "reward_errors")
        plain = {key: msgspec.json.decode(self._encoder.encode(values.get(key))) for key in texts}
        lengths = [len(text) for text in _texts(plain)]
        if sum(lengths) <= self.max_chars:
            return line
        longest = longest_text(lengths, self.max_chars)
        bounded = _map_texts(plain, lambda text: shortened(text, longest))
        cut = sum(max(0, length - longest) for length in lengths)
        return self._encoder.encode({**values, **bounded, "cut_chars": cut})


def longest_text(lengths: Sequence[int], total: int) -> int:
    """The length to cut longer texts to, so that all of them have about `total` characters."""
    left = len(lengths)
    for length in sorted(lengths):
        if length * left > total:
            return total // left
        total -= length
        left -= 1
    return max(lengths, default=0)


def shortened(text: str, limit: int) -> str:
    """A text whose middle is replaced by a note of how much is missing, if it is longer than the limit."""
    if len(text) <= limit:
        return text
    head, tail = limit - limit // 3, limit // 3
    return f"{text[:head]}\n[… {len(text) - head - tail:,} characters cut …]\n{text[len(text) - tail :]}"


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, list | dict):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _texts(each)


def _map_texts(value: Any, change: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, list):
        return [_map_texts(each, change) for each in value]
    if isinstance(value, dict):
        return {key: _map_texts(each, change) for key, each in value.items()}
    return value


def _plain(value: Any) -> Any:
    dump = getattr(value, "model_dump", None)
    return dump(mode="json") if dump else str(value)
