"""`medarc_train rollouts RUN --to-sft FILE`: good rollouts become a dataset for SFT."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from prime_rl.history.rollouts import KeptRollout
from prime_rl.utils.files import replacing_file
from prime_rl.utils.logger import count_of

CUT = "whose kept text was cut (orchestrator.keep_rollouts.max_chars)"
TRUNCATED = "that reached a limit on tokens"
FAILED = "with an error"
MASKED = "that a filter kept from training"
EMPTY = "without an answer"
REPEATED = "that repeat another one"
SURPLUS = "beyond --per-prompt"


@dataclass(slots=True)
class Export:
    """Rows for SFT, and why other rollouts are left out."""

    per_prompt: int | None = None
    """Most rows of one prompt: those with the highest rewards, of equal ones the earlier."""
    left_out: Counter[str] = field(default_factory=Counter)
    _rows: dict[str, dict[str, Any]] = field(default_factory=dict)
    """By a hash of the conversation."""

    def add(self, rollout: KeptRollout, run: str) -> None:
        """Take a rollout, unless a reason in `left_out` counts it."""
        if (reason := _reason(rollout)) is not None:
            self.left_out[reason] += 1
            return
        row = _row(rollout, run)
        text = json.dumps([row.get(name) for name in ("messages", "prompt", "completion")], sort_keys=True)
        key = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
        if self._rows.setdefault(key, row) is not row:
            self.left_out[REPEATED] += 1

    def rows(self) -> list[dict[str, Any]]:
        """The rows in the order of the rollouts."""
        rows = list(self._rows.values())
        if self.per_prompt is None:
            return rows
        best: dict[str, list[int]] = {}
        for index, row in enumerate(rows):
            best.setdefault(row["prompt_id"], []).append(index)
        chosen = set()
        for indices in best.values():
            chosen.update(sorted(indices, key=lambda index: (-rows[index]["reward"], index))[: self.per_prompt])
        self.left_out[SURPLUS] = len(rows) - len(chosen)
        return [row for index, row in enumerate(rows) if index in chosen]

    def reasons(self) -> Iterator[str]:
        """One line for each reason to leave rollouts out."""
        for reason, number in sorted(self.left_out.items()):
            if number:
                yield f"left out {count_of('rollout', number)} {reason}"


def write_rows(rows: Iterable[dict[str, Any]], file: Path) -> None:
    """Write a dataset that only its owner can read."""
    with replacing_file(file) as scratch:
        scratch.touch(mode=0o600)
        with scratch.open("w", encoding="utf-8", errors="backslashreplace") as out:
            out.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def _reason(rollout: KeptRollout) -> str | None:
    if rollout.cut_chars:
        return CUT
    if rollout.is_truncated:
        return TRUNCATED
    if rollout.error is not None:
        return FAILED
    if rollout.masked_by is not None:
        return MASKED
    has_answer = any(message.get("content") or message.get("tool_calls") for message in rollout.completion)
    return None if has_answer and rollout.prompt else EMPTY


def _row(rollout: KeptRollout, run: str) -> dict[str, Any]:
    prompt, completion = rollout.fields.get("prompt"), rollout.fields.get("completion")
    if isinstance(prompt, str) and isinstance(completion, str):  # a model without chat template
        texts: dict[str, Any] = {"prompt": prompt, "completion": completion}
    else:
        messages = [_message(each) for each in (*rollout.prompt, *rollout.completion)]
        texts = {"messages": messages}
    return {
        **texts,
        "run": run,
        "step": rollout.step if rollout.step is not None else rollout.eval_version,
        "is_evaluation": rollout.step is None,
        "env": rollout.env,
        "row": rollout.row,
        "prompt_id": _prompt_id(rollout),
        "reward": rollout.reward,
        "model_version": rollout.policy_version if rollout.policy_version is not None else rollout.eval_version,
    }


def _message(message: Any) -> dict[str, Any]:
    role = "user" if message.get("role") == "text" else message.get("role")
    return {"role": role, **{name: value for name, value in message.items() if value is not None and name != "role"}}


def _prompt_id(rollout: KeptRollout) -> str:
    """The id that the run kept; for runs of earlier versions, a hash of the prompt."""
    kept = rollout.fields.get("prompt_id")
    if isinstance(kept, str) and kept:
        return kept
    text = json.dumps([rollout.env, rollout.prompt], sort_keys=True, default=str)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]
