"""Packs kept rollouts for the page: an index that it loads at once, and blocks of texts that it unpacks when needed."""

from __future__ import annotations

import base64
import gzip
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from prime_rl.history.kept_rollout import Conversation, KeptRollout
from prime_rl.history.rollouts import KeptRollouts
from prime_rl.history.run import RunHistory

MAX_ROLLOUTS = 10_000
"""Largest number of rollouts on a page. With more, every second one is left out until they fit."""
MAX_BYTES = 128 * 2**20
"""Largest size of the rollouts as JSON. gzip then compresses them to about a fifth."""
BLOCK_ROLLOUTS = 64
MAX_TOKENS = 4096
"""Tokens of a rollout whose log-probabilities are shown."""
MAX_TEXT_CHARS = 100_000
PREVIEW_CHARS = 120
_MILLI = 1000


@dataclass(slots=True)
class PackedRollouts:
    """Rollouts as the page embeds them: base64 of gzip of JSON, so that no character of a rollout reaches the HTML."""

    index: str = ""
    blocks: list[str] = field(default_factory=list)
    count: int = 0
    left_out: int = 0
    notes: list[str] = field(default_factory=list)
    answers: dict[int, dict[int, list[tuple[object, str]]]] = field(default_factory=dict)
    """By number of the run and step: problem and text of each completion that was kept by chance."""


@dataclass(slots=True)
class _Thinning:
    """Collects the rollouts of one run, and drops every second one whenever there are too many."""

    limit: int
    max_bytes: int
    kept: list[tuple[list[Any], str]] = field(default_factory=list)
    """Rows of the list, and details as JSON, which takes less memory than objects."""
    seen: int = 0
    _stride: int = 1
    _bytes: int = 0

    def add(self, run: int, rollout: KeptRollout, text: str) -> None:
        place, self.seen = self.seen, self.seen + 1
        if place % self._stride:
            return
        detail = _json(_detail(rollout))
        self.kept.append((_entry(run, rollout, text), detail))
        self._bytes += len(detail)
        while len(self.kept) > 1 and (len(self.kept) > self.limit or self._bytes > self.max_bytes):
            self.kept = self.kept[::2]
            self._stride *= 2
            self._bytes = sum(len(each) for _, each in self.kept)


def pack_rollouts(
    runs: Sequence[RunHistory], names: Sequence[str], limit: int = MAX_ROLLOUTS, max_bytes: int = MAX_BYTES
) -> PackedRollouts:
    """Read the kept rollouts of some runs, and pack those that fit on the page."""
    packed = PackedRollouts()
    rows: list[tuple[list[Any], str]] = []
    for number, run in enumerate(runs):
        kept = KeptRollouts(run.paths)
        thinning = _Thinning(max(1, limit // len(runs)), max_bytes // len(runs))
        answers = packed.answers.setdefault(number, {})
        for rollout in kept.all():
            text = final_text(rollout)
            if rollout.step is not None and rollout.is_unbiased:
                answers.setdefault(rollout.step, []).append(((rollout.env, rollout.row), text))
            thinning.add(number, rollout, text)
        rows += thinning.kept
        packed.left_out += thinning.seen - len(thinning.kept)
        packed.notes += kept.faults
    packed.count = len(rows)
    packed.index = _packed(_json({"runs": list(names), "block": BLOCK_ROLLOUTS, "rows": [entry for entry, _ in rows]}))
    for start in range(0, len(rows), BLOCK_ROLLOUTS):
        details = ",".join(detail for _, detail in rows[start : start + BLOCK_ROLLOUTS])
        packed.blocks.append(_packed(f"[{details}]"))
    return packed


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)


def _packed(text: str) -> str:
    """Base64 of gzip. An unpaired surrogate, which JSON can hold, becomes a question mark."""
    return base64.b64encode(gzip.compress(text.encode(errors="replace"), 6, mtime=0)).decode()


def _entry(run: int, rollout: KeptRollout, text: str) -> list[Any]:
    """A row of the list. `browser.js` names the columns in the same order."""
    preview = " ".join(text[: 4 * PREVIEW_CHARS].split())[:PREVIEW_CHARS]
    return [
        run,
        rollout.step,
        rollout.eval_version,
        rollout.env,
        _number(rollout.reward),
        _number(rollout.advantage),
        int(rollout.is_truncated),
        int(rollout.error is not None),
        rollout.completion_tokens,
        preview,
    ]


def _detail(rollout: KeptRollout) -> dict[str, Any]:
    facts = {
        "problem": rollout.row,
        "group": rollout.group,
        "rollout": rollout.rollout,
        "policy version": rollout.policy_version,
        "lag": rollout.lag,
        "stopped by": rollout.stop_condition,
        "masked by": rollout.masked_by,
        "kept as": ", ".join(rollout.kept),
        "characters cut": rollout.cut_chars or None,
        "tokens cut": rollout.cut_tokens or None,
    }
    return {
        "prompt": [_message(message) for message in rollout.prompt],
        "completion": [_message(message) for message in rollout.completion],
        "metrics": {name: _number(value) for name, value in rollout.metrics.items()},
        "weights": {name: _number(value) for name, value in rollout.weights.items()},
        "facts": {name: value for name, value in facts.items() if value is not None},
        "error": rollout.error,
        "lines": list(_lines(rollout.conversations)),
    }


def _message(message: Mapping[str, Any]) -> dict[str, Any]:
    """Role, text and tool calls of a message."""
    found: dict[str, Any] = {"role": str(message.get("role", "?")), "text": _cut(content_text(message.get("content")))}
    if thoughts := message.get("reasoning_content"):
        found["thoughts"] = _cut(str(thoughts))
    if calls := [_call(each) for each in message.get("tool_calls") or () if each]:
        found["calls"] = calls
    return found


def _call(call: object) -> dict[str, str]:
    """A tool call is a dictionary in the format of OpenAI's API, or that dictionary as JSON text."""
    if isinstance(call, str):
        try:
            call = json.loads(call)
        except (ValueError, RecursionError):
            return {"name": "?", "arguments": _cut(str(call))}
    if not isinstance(call, dict):
        return {"name": "?", "arguments": _cut(str(call))}
    function = call.get("function")
    source = function if isinstance(function, dict) else call
    arguments = source.get("arguments", "")
    return {"name": str(source.get("name", "?")), "arguments": _cut(content_text(arguments))}


def content_text(content: object) -> str:
    """The text of a message's content: itself, or the texts of its parts."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        parts = [part.get("text") if isinstance(part, dict) else part for part in content]
        return "\n".join(part if isinstance(part, str) else "[no text]" for part in parts)
    return json.dumps(content, ensure_ascii=False, default=str)


def final_text(rollout: KeptRollout) -> str:
    """The last message that the model wrote, or else the error."""
    own = [message for message in rollout.completion if message.get("role") in ("assistant", "text")]
    texts = [text for message in own if (text := content_text(message.get("content")))]
    return texts[-1] if texts else rollout.error or ""


def _lines(conversations: Sequence[Conversation]) -> Iterator[dict[str, Any]]:
    """Tokens of each line of conversation, log-probabilities in thousandths."""
    room = MAX_TOKENS
    for each in conversations:
        tokens = [*each.prompt, *each.completion][:room]
        room -= len(tokens)
        if tokens and any(token.text is not None for token in tokens):
            yield {
                "prompt": min(len(each.prompt), len(tokens)),
                "texts": [f"[{token.id}]" if token.text is None else token.text for token in tokens],
                "engine": [_thousandths(token.engine_logprob) for token in tokens],
                "trainer": [_thousandths(token.trainer_logprob) for token in tokens],
                "entropy": [_thousandths(token.entropy) for token in tokens],
            }


def _thousandths(value: float | None) -> int | None:
    return None if value is None else round(_MILLI * value)


def _number(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.6g}")


def _cut(text: str) -> str:
    if len(text) <= MAX_TEXT_CHARS:
        return text
    return f"{text[:MAX_TEXT_CHARS]}\n[… {len(text) - MAX_TEXT_CHARS:,} characters are left out here]"
