"""Reads rows of preferences: a chosen and a rejected answer to one prompt, or one answer that is good or bad.

    {"prompt": "Is it safe?", "chosen": " Ask a doctor.", "rejected": " Always."}
    {"prompt": "Is it safe?", "completion": " Always.", "label": false}

Text or messages, with the prompt in a column of its own or in front of both answers, as TRL, UltraFeedback and HH-RLHF
write them. Each answer becomes a row of SFT, so both are tokenized and masked as SFT's rows are.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any

import numpy as np

from prime_rl.trainer.sft.data.conversation import TokenizedSample
from prime_rl.utils.conversations import (
    IMAGE_COLUMNS,
    WITH_EVERY_FORMAT,
    NamedRow,
    Row,
    RowFault,
    column_name,
    is_missing,
    listed,
)
from prime_rl.utils.terminal import cut_inside

SIDES = ("chosen", "rejected")
SCORES = ("score_chosen", "score_rejected")
"""Columns of UltraFeedback: how good each answer is."""
EXPECTED_PAIR = "`chosen` and `rejected`, with or without `prompt`"
LABELLED_FORMATS = (("prompt", "completion", "label"), ("prompt", "response", "label"), ("messages", "label"), SIDES)
EXPECTED_LABEL = "`prompt`, `completion` and `label`, `messages` and `label`, or `chosen` and `rejected`"
_LABELS = {"true": True, "false": False, "1": True, "0": False}
_SHOWN_CHARS = 80
_HUMAN, _ASSISTANT = "\n\nHuman:", "\n\nAssistant:"


@dataclass(frozen=True, slots=True)
class Pair:
    """A chosen and a rejected sequence. They are packed into one row."""

    chosen: TokenizedSample
    rejected: TokenizedSample
    key: int = -1
    """Index of the dataset's row, by which the reference's log-probabilities are found. -1 if rows are streamed."""
    margin: float = 0.0
    """How much better the chosen answer is, for a reward model."""
    padding_id: int | None = None
    """For a reward model: the token that pads. The last other token of a sequence is scored."""

    @property
    def sequences(self) -> tuple[TokenizedSample, ...]:
        return self.chosen, self.rejected

    @property
    def packed(self) -> tuple[TokenizedSample, ...]:
        """The sequences as a row holds them."""
        return self.sequences if self.padding_id is None else tuple(map(self._scored, self.sequences))

    def _scored(self, sequence: TokenizedSample) -> TokenizedSample:
        """The sequence with a target behind its last token, of which only that of the scored token is trained."""
        ids = sequence.token_ids
        # As Transformers' classes for sequence classification: they take what is behind for padding, also an end token.
        (others,) = np.nonzero(ids != self.padding_id)
        is_trained = np.zeros(len(ids) + 1, dtype=bool)
        is_trained[int(others[-1]) + 1 if len(others) else 1] = True
        return replace(sequence, token_ids=np.append(ids, ids.dtype.type(0)), is_trained=is_trained)

    @property
    def inputs(self) -> int:
        return sum(map(len, self.sequences)) - (2 if self.padding_id is None else 0)

    @property
    def targets(self) -> int:
        return self.chosen.targets + self.rejected.targets

    @property
    def unmarked_calls(self) -> bool:
        return self.chosen.unmarked_calls or self.rejected.unmarked_calls

    def __len__(self) -> int:
        return len(self.chosen) + len(self.rejected)


@dataclass(frozen=True, slots=True)
class Labelled:
    """An answer that is good or bad. Only `sequence` is packed."""

    sequence: TokenizedSample
    is_desirable: bool
    key: int = -1
    """Where its log-probabilities under the reference are found: 2 * the row's index, and one more for the rejected
    answer of a row of pairs."""
    mismatched: TokenizedSample | None = None
    """The prompt with another row's answer. None if the loss needs no KL."""

    @property
    def sequences(self) -> tuple[TokenizedSample, ...]:
        return (self.sequence,)

    @property
    def packed(self) -> tuple[TokenizedSample, ...]:
        """The sequences as a row holds them."""
        return (self.sequence,)

    @property
    def inputs(self) -> int:
        return self.sequence.inputs

    @property
    def targets(self) -> int:
        return self.sequence.targets

    @property
    def unmarked_calls(self) -> bool:
        return self.sequence.unmarked_calls

    def __len__(self) -> int:
        return len(self.sequence) + (0 if self.mismatched is None else len(self.mismatched))


def with_answer_of(sequence: TokenizedSample, other: TokenizedSample) -> TokenizedSample:
    """The prompt of one sequence with the answer of another. A prompt ends before the first trained token."""
    end, begin = (_prompt_end(each) for each in (sequence, other))
    return TokenizedSample(
        np.concatenate([sequence.token_ids[:end], other.token_ids[begin:]]),
        np.concatenate([sequence.is_trained[:end], other.is_trained[begin:]]),
    )


def have_equal_prompts(one: TokenizedSample, other: TokenizedSample) -> bool:
    return np.array_equal(one.token_ids[: _prompt_end(one)], other.token_ids[: _prompt_end(other)])


def _prompt_end(sequence: TokenizedSample) -> int:
    return int(np.argmax(sequence.is_trained))


def labelled_of(row: Row) -> list[tuple[Row, bool]]:
    """The answers of a row, each as a row of SFT of which only the answer is trained, and whether it is good.

    A pair is two answers.

    Raises:
        RowFault: the label or an answer is missing.
    """
    if is_missing(row.get("label")) and all(not is_missing(row.get(name)) for name in SIDES):
        chosen, rejected = sides_of(row)
        return [(chosen, True), (rejected, False)]
    label = row.get("label")
    known = label if isinstance(label, bool) else _LABELS.get(str(label).strip().lower().removesuffix(".0"))
    if known is None:
        given = "is missing" if is_missing(label) else f"must be true or false, got {_shown(label)}"
        raise RowFault(f"`{column_name(row, 'label')}` {given}")
    answer = {name: value for name, value in row.items() if name != "label"}
    theirs = row.theirs if isinstance(row, NamedRow) else {}
    messages = listed(answer["messages"]) if not is_missing(answer.get("messages")) else None
    if isinstance(messages, list) and len(messages) > 1:
        # The last message is the answer that the label is about.
        answer = {**answer, "prompt": messages[:-1], "completion": messages[-1:]}
        del answer["messages"]
        theirs = {**theirs, "completion": column_name(row, "messages")}
    elif (prompt := listed(answer.get("prompt"))) is not None:
        answer["prompt"] = prompt
        kind = "completion" if not is_missing(answer.get("completion")) else "response"
        answer[kind] = _answer(row, kind)
        if isinstance(answer[kind], list) and isinstance(prompt, str):
            answer["prompt"] = [{"role": "user", "content": prompt}]
        elif isinstance(answer[kind], str) and isinstance(prompt, list):
            answer["response"] = answer.pop(kind)
            theirs = {**theirs, "response": column_name(row, kind)}
    return [(NamedRow(answer, theirs), known)]


def sides_of(row: Row) -> tuple[Row, Row]:
    """The chosen and the rejected answer, each as a row of SFT of which only the answer is trained.

    Raises:
        RowFault: an answer is missing or empty, both are equal, or they have different formats.
    """
    answers = [_answer(row, name) for name in SIDES]
    prompt = None if is_missing(row.get("prompt")) else listed(row["prompt"])
    if prompt is None and all(isinstance(each, str) and each.startswith(_HUMAN) for each in answers):
        answers = [_turns(each) for each in answers]
    if answers[0] == answers[1]:
        raise RowFault(f"`{column_name(row, 'chosen')}` and `{column_name(row, 'rejected')}` are equal")
    if isinstance(answers[0], list) != isinstance(answers[1], list):
        names = " and ".join(f"`{column_name(row, name)}`" for name in SIDES)
        raise RowFault(f"{names} must both be message lists or both strings")
    if prompt is None or (isinstance(answers[0], list) and not isinstance(prompt, list)):
        # UltraFeedback repeats the prompt's text as the first message of both answers.
        shared = _shared_length(*answers)
        asked = [{"role": "user", "content": prompt}] if prompt and not shared else answers[0][:shared]
        prompt, answers = asked, [each[shared:] for each in answers]
    with_every = {name: row[name] for name in (*WITH_EVERY_FORMAT, *IMAGE_COLUMNS) if name in row}
    # Messages that answer with plain text: the prompt is a conversation, and so is the answer.
    kind = "response" if isinstance(prompt, list) and isinstance(answers[0], str) else "completion"
    theirs = row.theirs if isinstance(row, NamedRow) else {}
    chosen, rejected = (
        NamedRow({**with_every, "prompt": prompt, kind: answer}, {**theirs, kind: column_name(row, name)})
        for name, answer in zip(SIDES, answers, strict=True)
    )
    return chosen, rejected


def scores_are_flipped(row: Row) -> bool:
    """Whether UltraFeedback's scores of a pair say that the rejected answer is at least as good."""
    chosen, rejected = (_number(row.get(name)) for name in SCORES)
    return chosen <= rejected  # False if a score is missing


def margin_of(row: Row, score_margin: float = 0.0) -> float:
    """How much better the chosen answer is: the column `margin`. Without it or if the cell is empty, `score_margin`
    times the difference of UltraFeedback's scores.

    Raises:
        RowFault: it is not a finite number, or a score is needed and is none.
    """
    margin = row.get("margin")
    if is_missing(margin) or (isinstance(margin, str) and not margin.strip()):
        if score_margin == 0:
            return 0.0
        chosen, rejected = (_number(row.get(name)) for name in SCORES)
        number = score_margin * (chosen - rejected)
        if math.isfinite(chosen - rejected) and not _fits(number):
            raise RowFault(f"loss.score_margin = {score_margin:g} makes {chosen:g} - {rejected:g} too large a margin")
        if not math.isfinite(number):
            given = " and ".join(f"`{name}` {_shown(row.get(name))}" for name in SCORES)
            raise RowFault(f"loss.score_margin needs two finite numbers, got {given}")
        return number
    number = _number(margin)
    if not _fits(number):
        raise RowFault(f"`{column_name(row, 'margin')}` must be a finite number, got {_shown(margin)}")
    return number


_MAX_MARGIN = 1e38


def _fits(margin: float) -> bool:
    """Whether it is a finite number in float32, in which the loss computes."""
    return abs(margin) <= _MAX_MARGIN  # False if it is NaN


def _number(cell: Any) -> float:
    """The number in a cell, which is a text in a CSV file; NaN if it holds none."""
    if isinstance(cell, int | float | str) and not isinstance(cell, bool):
        with contextlib.suppress(ValueError, OverflowError):
            return float(cell)
    return math.nan


def _shown(cell: Any) -> str:
    """A cell in a message, which is one line."""
    return cut_inside(repr(cell), _SHOWN_CHARS)


def _answer(row: Row, name: str) -> Any:
    if is_missing(row.get(name)):
        raise RowFault(f"`{column_name(row, name)}` is missing")
    answer = listed(row[name])
    if not isinstance(answer, str | list):
        raise RowFault(f"`{column_name(row, name)}` must be text or a list of messages, got {_shown(answer)}")
    if not (answer.strip() if isinstance(answer, str) else answer):
        raise RowFault(f"`{column_name(row, name)}` is empty")
    return answer


def _shared_length(one: Sequence[Any], other: Sequence[Any]) -> int:
    """How many characters or messages both answers begin with. Each keeps at least one.

    A text is not cut behind a blank, because most tokenizers join a blank to the word behind it.
    """
    most = min(len(one), len(other)) - 1
    shared = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one[:most], other[:most], strict=True)))
    return shared - 1 if isinstance(one, str) and shared and one[shared - 1] == " " else shared


def _turns(text: str) -> list[dict[str, str]]:
    """The messages of a transcript of HH-RLHF."""
    messages = []
    for turn in text.split(_HUMAN)[1:]:
        asked, *answers = turn.split(_ASSISTANT)
        messages.append({"role": "user", "content": asked.strip()})
        messages += [{"role": "assistant", "content": answer.strip()} for answer in answers]
    return messages


__all__ = [
    "EXPECTED_LABEL",
    "EXPECTED_PAIR",
    "LABELLED_FORMATS",
    "SCORES",
    "SIDES",
    "Labelled",
    "Pair",
    "have_equal_prompts",
    "labelled_of",
    "margin_of",
    "scores_are_flipped",
    "sides_of",
    "with_answer_of",
]
