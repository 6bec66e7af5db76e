"""Multiple choice: the letter that a completion settles on."""

from __future__ import annotations

import re
import string
from collections.abc import Mapping, Sequence
from typing import Any

from prime_rl.environments.rewards.text import last_answer_tag, last_boxed, without_thinking

_LETTER = r"\(?\[?\*{0,2}([A-Z])\*{0,2}\]?\)?(?![A-Za-z'])"
_STATED = re.compile(
    rf"(?i:answer|choice|option)(?:\s+(?i:is|would be))?\s*(?:(?i:option|choice))?\s*[:=]?\s*\*{{0,2}}\s*{_LETTER}"
)
_BRACKETED = re.compile(r"[(\[]([A-Z])[)\]]")


def multiple_choice(completion_text: str, answer: Any, choices: Any = None) -> float:
    """1 if the completion chooses `answer`: a letter, a number from 0, or the text of one of `choices`.

    The choice is read from `<answer>`, `\\boxed{}`, "the answer is (B)", a single letter, the last bracketed letter, or
    the text of a choice, in this order.
    """
    options = _options(choices)
    return float((letter := _letter_of(answer, options)) is not None and letter == chosen(completion_text, options))


def chosen(completion: str, options: Sequence[str] = ()) -> str | None:
    """The letter that a completion settles on."""
    text = without_thinking(completion)
    for part in (last_answer_tag(text), last_boxed(text)):
        if part is not None:
            plain = re.sub(r"\\text(?:bf|rm)?\{([^{}]*)\}", r"\1", part).strip()
            return _only_letter(plain) or _by_text(plain, options)
    for pattern in (_STATED, _BRACKETED):
        if pattern is _BRACKETED and (only := _only_letter(text)):
            return only
        letters = string.ascii_uppercase[: len(options) or None]  # in "Answer: I think B", I is no choice
        if found := [letter for letter in pattern.findall(text) if letter in letters]:
            return str(found[-1])
    return _by_text(text, options)


def _only_letter(text: str) -> str | None:
    match = re.match(rf"{_LETTER}\s*(?:$|[.:)])", text.strip(), re.IGNORECASE)
    return match[1].upper() if match else None


def _by_text(text: str, options: Sequence[str]) -> str | None:
    """The letter of the only choice whose text is the whole text, or else is in it."""
    plain = text.strip().strip(".").casefold()
    for test in (lambda option: option == plain, lambda option: re.search(rf"\b{re.escape(option)}\b", plain)):
        matching = [index for index, option in enumerate(options) if option and test(option.strip().casefold())]
        if len(matching) == 1:
            return string.ascii_uppercase[matching[0]]
    return None


def _options(choices: Any) -> list[str]:
    """Texts of the choices in the order of their letters."""
    if isinstance(choices, Mapping):  # {"A": "…", "B": "…"}, or {"text": […], "label": […]} as in ARC
        choices = choices["text"] if "text" in choices else [choices[key] for key in sorted(choices)]
    return [str(each) for each in choices or ()]


def _letter_of(answer: Any, options: Sequence[str]) -> str | None:
    if isinstance(answer, int) and not isinstance(answer, bool):
        return string.ascii_uppercase[answer] if 0 <= answer < 26 else None
    text = str(answer).strip()
    if re.fullmatch(r"\(?[A-Za-z][).]?", text):
        return text.strip("().").upper()
    if text.isdigit() and text not in options:
        return string.ascii_uppercase[int(text)] if int(text) < 26 else None
    return _by_text(text, options)
