"""Makes datasets of kept rollouts, by their rewards: good answers for SFT, pairs for DPO, labelled answers for KTO.

`medarc_train rollouts RUN --to-sft FILE`, `--to-pairs FILE` and `--to-kto FILE`.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from prime_rl.history.rollouts import KeptRollout
from prime_rl.utils.files import replacing_file
from prime_rl.utils.images import image_parts
from prime_rl.utils.logger import count_of

Row = dict[str, Any]

CUT = "whose kept text was cut (orchestrator.keep_rollouts.max_chars)"
TRUNCATED = "that reached a limit on tokens"
FAILED = "with an error"
MASKED = "that a filter kept from training"
EMPTY = "without an answer"
UNNAMED = "with images that were given as bytes, which are only in the run's data"
UNREWARDED = "without a reward"
REPEATED = "that repeat another one"
SURPLUS = "beyond --per-prompt"
UNDECIDED = "between --max-reward and --min-reward"

_RENDERING = ("tools", "chat_template_kwargs")
"""Arguments of the chat template besides the messages."""


class Export(Protocol):
    """Collects rollouts and makes rows of them."""

    left_out: Counter[str]
    """Number of rollouts that make no row, by reason."""

    def add(self, rollout: KeptRollout, run: str) -> None:
        """Take a rollout, unless a reason in `left_out` counts it."""

    def rows(self) -> list[Row]: ...


@dataclass(slots=True)
class SFTExport:
    """Each rollout is a row of messages."""

    per_prompt: int | None = None
    """Most rows of one prompt: those with the highest rewards, of equal ones the earlier."""
    left_out: Counter[str] = field(default_factory=Counter)
    _rows: dict[str, Row] = field(default_factory=dict)
    """By a hash of the conversation."""

    def add(self, rollout: KeptRollout, run: str) -> None:
        if (reason := _reason(rollout)) is not None:
            self.left_out[reason] += 1
            return
        prompt, completion = _texts(rollout)
        if isinstance(prompt, str):
            texts: Row = {"prompt": prompt, "completion": completion}
        else:
            # Answers in a prompt are examples: the run did not train on them, and SFT must not either.
            asked = [{**each, "weight": 0} if each["role"] == "assistant" else each for each in prompt]
            texts = {"messages": [*asked, *completion]}
        row = {**texts, **_rendering(rollout), **_origin(rollout, run), "reward": rollout.reward}
        if self._rows.setdefault(_hash(texts, _rendering(rollout)), row) is not row:
            self.left_out[REPEATED] += 1

    def rows(self) -> list[Row]:
        return _best_of_each(list(self._rows.values()), self.per_prompt, lambda row: row["reward"], self.left_out)


@dataclass(slots=True)
class PairsExport:
    """The best against the worst rollout of each group: those of one prompt in one step or evaluation."""

    margin: float = 0.0
    """Their rewards must differ by more than 0, and by at least this."""
    min_reward: float | None = None
    """Minimum of the chosen rollout's reward."""
    max_reward: float | None = None
    """Maximum of the rejected rollout's reward."""
    per_prompt: int | None = None
    """Most pairs of one prompt: those with the largest margins."""
    left_out: Counter[str] = field(default_factory=Counter)
    _groups: dict[str, tuple[Row, Row]] = field(default_factory=dict)
    """Best and worst rollout of each group so far: the earlier, of those with equal rewards."""

    def add(self, rollout: KeptRollout, run: str) -> None:
        reason = _reason(rollout) or (UNREWARDED if rollout.reward is None else None)
        if reason is not None:
            self.left_out[reason] += 1
            return
        prompt, completion = _texts(rollout)
        row = {"prompt": prompt, "answer": completion, **_rendering(rollout), **_origin(rollout, run)}
        row["reward"] = rollout.reward
        # A step keeps the groups of one prompt apart, if it has several.
        group = _hash(run, rollout.step, rollout.eval_version, rollout.group, row["prompt_id"], prompt)
        best, worst = self._groups.get(group, (row, row))
        self._groups[group] = (
            row if row["reward"] > best["reward"] else best,
            row if row["reward"] < worst["reward"] else worst,
        )

    def rows(self) -> list[Row]:
        pairs: dict[str, Row] = {}
        for best, worst in self._groups.values():
            difference = best["reward"] - worst["reward"]
            is_far = difference > 0 and difference >= self.margin
            is_good = self.min_reward is None or best["reward"] >= self.min_reward
            is_bad = self.max_reward is None or worst["reward"] <= self.max_reward
            if is_far and is_good and is_bad and best["answer"] != worst["answer"]:
                row = {"prompt": best["prompt"], "chosen": best["answer"], "rejected": worst["answer"]}
                row |= {"score_chosen": best["reward"], "score_rejected": worst["reward"]}
                row |= {name: value for name, value in best.items() if name not in ("prompt", "answer", "reward")}
                pairs.setdefault(_hash(row["prompt"], row["chosen"], row["rejected"]), row)
        return _best_of_each(
            list(pairs.values()), self.per_prompt, lambda row: row["score_chosen"] - row["score_rejected"]
        )


@dataclass(slots=True)
class KTOExport:
    """Each rollout is a row with a label: good from a reward on, bad below it."""

    min_reward: float
    """Minimum reward of good rollouts."""
    max_reward: float | None = None
    """Maximum reward of bad ones. None takes all that are not good."""
    per_prompt: int | None = None
    """Most rows of one prompt with the same label: the best of the good ones, the worst of the bad ones."""
    left_out: Counter[str] = field(default_factory=Counter)
    _rows: dict[str, Row] = field(default_factory=dict)

    def add(self, rollout: KeptRollout, run: str) -> None:
        reason, reward = _reason(rollout), rollout.reward
        if reason is None and reward is None:
            reason = UNREWARDED
        is_good = reward is not None and reward >= self.min_reward
        if reason is None and reward is not None and not is_good and not self._is_bad(reward):
            reason = UNDECIDED
        if reason is not None:
            self.left_out[reason] += 1
            return
        prompt, completion = _texts(rollout)
        row = {"prompt": prompt, "completion": completion, "label": is_good, **_rendering(rollout)}
        row |= {**_origin(rollout, run), "reward": reward}
        if self._rows.setdefault(_hash(prompt, completion, _rendering(rollout)), row) is not row:
            self.left_out[REPEATED] += 1

    def _is_bad(self, reward: float) -> bool:
        return self.max_reward is None or reward <= self.max_reward

    def rows(self) -> list[Row]:
        rows = list(self._rows.values())
        kept: list[Row] = []
        for label, sign in ((True, 1), (False, -1)):
            of_label = [row for row in rows if row["label"] is label]
            kept += _best_of_each(of_label, self.per_prompt, lambda row, s=sign: s * row["reward"], self.left_out)
        places = {id(row): place for place, row in enumerate(rows)}
        return sorted(kept, key=lambda row: places[id(row)])


def reasons(left_out: Counter[str]) -> Iterator[str]:
    """One line for each reason to leave rollouts out."""
    for reason, number in sorted(left_out.items()):
        if number:
            yield f"left out {count_of('rollout', number)} {reason}"


def write_rows(rows: Iterable[Row], file: Path) -> None:
    """Write a dataset that only its owner can read."""
    with replacing_file(file) as scratch:
        scratch.touch(mode=0o600)
        with scratch.open("w", encoding="utf-8", errors="backslashreplace") as out:
            out.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def _best_of_each(
    rows: Sequence[Row], per_prompt: int | None, value: Any, left_out: Counter[str] | None = None
) -> list[Row]:
    """The rows in order; of each prompt at most `per_prompt`, those with the highest values."""
    if per_prompt is None:
        return list(rows)
    of_prompt: dict[str, list[int]] = {}
    for index, row in enumerate(rows):
        of_prompt.setdefault(row["prompt_id"], []).append(index)
    chosen: set[int] = set()
    for indices in of_prompt.values():
        chosen.update(sorted(indices, key=lambda index: (-value(rows[index]), index))[:per_prompt])
    if left_out is not None:
        left_out[SURPLUS] += len(rows) - len(chosen)
    return [row for index, row in enumerate(rows) if index in chosen]


def _reason(rollout: KeptRollout) -> str | None:
    if rollout.cut_chars:
        return CUT
    if rollout.is_truncated:
        return TRUNCATED
    if rollout.error is not None:
        return FAILED
    if rollout.masked_by is not None:
        return MASKED
    shown = image_parts([*rollout.prompt, *rollout.completion])
    if any(part.source is None for part in shown):
        return UNNAMED
    has_answer = any(message.get("content") or message.get("tool_calls") for message in rollout.completion)
    return None if has_answer and rollout.prompt else EMPTY


def _texts(rollout: KeptRollout) -> tuple[Any, Any]:
    """Prompt and answer: messages, or texts of a model without chat template."""
    prompt, completion = rollout.fields.get("prompt"), rollout.fields.get("completion")
    if isinstance(prompt, str) and isinstance(completion, str):
        return prompt, completion
    return [_message(each) for each in rollout.prompt], [_message(each) for each in rollout.completion]


def _rendering(rollout: KeptRollout) -> Row:
    is_text = isinstance(rollout.fields.get("prompt"), str) and isinstance(rollout.fields.get("completion"), str)
    return {} if is_text else {name: rollout.fields[name] for name in _RENDERING if rollout.fields.get(name)}


def _origin(rollout: KeptRollout, run: str) -> Row:
    return {
        "run": run,
        "step": rollout.step if rollout.step is not None else rollout.eval_version,
        "is_evaluation": rollout.step is None,
        "env": rollout.env,
        "row": rollout.row,
        "prompt_id": _prompt_id(rollout),
        "model_version": rollout.policy_version if rollout.policy_version is not None else rollout.eval_version,
    }


def _message(message: Any) -> Row:
    role = "user" if message.get("role") == "text" else message.get("role")
    return {"role": role, **{name: value for name, value in message.items() if value is not None and name != "role"}}


def _prompt_id(rollout: KeptRollout) -> str:
    """The id that the run kept; for runs of earlier versions, a hash of the prompt."""
    kept = rollout.fields.get("prompt_id")
    return kept if isinstance(kept, str) and kept else _hash(rollout.env, rollout.prompt)[:16]


def _hash(*values: Any) -> str:
    text = json.dumps(values, sort_keys=True, default=str)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
