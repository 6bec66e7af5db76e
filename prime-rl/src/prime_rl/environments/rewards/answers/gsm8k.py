"""Grade-school answers: one number, found in one of several ways."""

from __future__ import annotations

import re
from typing import Any, Literal

from prime_rl.environments.rewards.specs import RewardFault
from prime_rl.environments.rewards.text import as_number, last_number, without_thinking

Mode = Literal["strict", "flexible", "last_number", "any"]
_STRICT = re.compile(r"(?:The answer is|####)\s*:?\s*(\$?[-+]?[\d,]*\.?\d+)", re.IGNORECASE)
_TOKEN = re.compile(r"[-+]?\$?[\d.,]*\d[\d.,]*%?")


def gsm8k(completion_text: str, answer: Any, mode: Mode = "any", format_weight: float = 0.0) -> float:
    """1 if the number that the completion gives equals `answer`, else 0. `answer` may end in `#### 42`.

    Modes: `strict` takes "The answer is 42." and "#### 42", `flexible` the last thing that looks like a number,
    `last_number` the last number, `any` the first of these that finds one. `format_weight` is the reward of a wrong
    answer in strict form.
    """
    if mode not in ("strict", "flexible", "last_number", "any"):
        raise RewardFault(f"gsm8k has no mode {mode!r}: the modes are strict, flexible, last_number and any")
    text = without_thinking(completion_text)
    gold = as_number(str(answer).rpartition("####")[2])
    strict = _last(_STRICT, text)
    found = {"strict": strict, "flexible": _last(_TOKEN, text), "last_number": last_number(text)}
    chosen = found[mode] if mode != "any" else next(filter(None, found.values()), None)
    number = None if chosen is None else as_number(chosen)
    if number is not None and number == gold:
        return 1.0
    return format_weight if strict is not None else 0.0


def allenai_gsm8k(completion_text: str, answer: Any) -> float:
    """1 if the last number of the completion equals `answer`, else 0."""
    return gsm8k(completion_text, answer, mode="last_number")


def _last(pattern: re.Pattern[str], text: str) -> str | None:
    found = pattern.findall(text)
    return found[-1] if found else None
