"""Reads rows of preferences: a chosen and a rejected answer to one prompt.

    {"prompt": "Is it safe?", "chosen": " Ask a doctor.", "rejected": " Always."}

Text or messages, with the prompt in a column of its own or in front of both answers, as TRL, UltraFeedback and HH-RLHF
write them. Each answer becomes a row of SFT, so both are tokenized and masked as SFT's rows are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from prime_rl.trainer.sft.data.conversation import TokenizedSample
from prime_rl.utils.conversations import NamedRow, Row, RowFault, column_name, is_missing, listed

SIDES = ("chosen", "rejected")
EXPECTED_PAIR = "`chosen` and `rejected`, with or without `prompt`"
_HUMAN, _ASSISTANT = "\n\nHuman:", "\n\nAssistant:"


@dataclass(frozen=True, slots=True)
class Pair:
    """A chosen and a rejected sequence. They are packed into one row."""

    chosen: TokenizedSample
    rejected: TokenizedSample
    key: int = -1
    """Index of the dataset's row, by which the reference's log-probabilities are found. -1 if rows are streamed."""

    @property
    def sequences(self) -> tuple[TokenizedSample, ...]:
        return self.chosen, self.rejected

    @property
    def inputs(self) -> int:
        return self.chosen.inputs + self.rejected.inputs

    @property
    def targets(self) -> int:
        return self.chosen.targets + self.rejected.targets

    @property
    def unmarked_calls(self) -> bool:
        return self.chosen.unmarked_calls or self.rejected.unmarked_calls

    def __len__(self) -> int:
        return len(self.chosen) + len(self.rejected)


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
    with_every = {name: row[name] for name in ("tools", "chat_template_kwargs") if name in row}
    # Messages that answer with plain text: the prompt is a conversation, and so is the answer.
    kind = "response" if isinstance(prompt, list) and isinstance(answers[0], str) else "completion"
    theirs = row.theirs if isinstance(row, NamedRow) else {}
    chosen, rejected = (
        NamedRow({**with_every, "prompt": prompt, kind: answer}, {**theirs, kind: column_name(row, name)})
        for name, answer in zip(SIDES, answers, strict=True)
    )
    return chosen, rejected


def _answer(row: Row, name: str) -> Any:
    if is_missing(row.get(name)):
        raise RowFault(f"`{column_name(row, name)}` is missing")
    answer = listed(row[name])
    if not isinstance(answer, str | list):
        raise RowFault(f"`{column_name(row, name)}` must be text or a list of messages, got {answer!r}")
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


__all__ = ["EXPECTED_PAIR", "SIDES", "Pair", "sides_of"]
