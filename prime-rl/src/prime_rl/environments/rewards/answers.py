"""Rewards that compare a completion with the row's answer: text, choices, GSM8K, object counts, countdown.

Rewards that need a large library (`math_equality`, `units`, `json_schema`) have separate modules, so that a worker
imports only the libraries of the rewards that it calls.
"""

from __future__ import annotations

import ast
import operator
import re
import string
import unicodedata
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from typing import Any, Literal

from rapidfuzz import fuzz

from prime_rl.environments.rewards.registry import RewardFault
from prime_rl.environments.rewards.text import as_number, last_answer_tag, last_boxed, last_number, without_thinking

MAX_CHARS = 20_000
"""Longest text that is compared by similarity, whose cost is the product of both lengths."""


def exact_match(completion_text: str, answer: Any, normalize: bool = True) -> float:
    """1 if the answer of the completion is `answer`, or one of them if it is a list.

    The answer is the last `<answer>` or `\\boxed{}`, else the whole text without thinking. `normalize` ignores case,
    punctuation, articles and repeated spaces.
    """
    given = _given(completion_text)
    pairs = (_comparable(given, each) if normalize else (given.strip(), each.strip()) for each in _answers(answer))
    return float(any(one == other for one, other in pairs))


def fuzzy_match(completion_text: str, answer: Any, threshold: float | None = None) -> float:
    """Similarity of the answer to `answer`, 0 to 1 (indel ratio); for a list of answers, the highest.

    With `threshold`: 1 at or above it, 0 below.
    """
    pairs = (_comparable(_given(completion_text), each) for each in _answers(answer))
    ratio = max((fuzz.ratio(one[:MAX_CHARS], other[:MAX_CHARS]) / 100 for one, other in pairs), default=0.0)
    return ratio if threshold is None else float(ratio >= threshold)


def normalized(text: str) -> str:
    """Lower case, no punctuation, no articles, single spaces."""
    text = unicodedata.normalize("NFKC", text).casefold()
    text = "".join(" " if each in string.punctuation else each for each in text)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", text).split())


def _comparable(given: str, answer: str) -> tuple[str, str]:
    """Normalize both, unless that would empty the reference (`A`, `+`): then no completion could equal it."""
    if normal := normalized(answer):
        return normalized(given), normal
    return given.strip().casefold(), answer.strip().casefold()


def _given(completion: str) -> str:
    text = without_thinking(completion)
    for part in (last_answer_tag(text), last_boxed(text)):
        if part is not None:
            return part
    return text


def _answers(answer: Any) -> list[str]:
    return [str(each) for each in answer] if isinstance(answer, list | tuple) else [str(answer)]


# A single letter, perhaps in brackets or bold, that does not begin a word.
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
    """Find the letter that a completion chooses."""
    text = without_thinking(completion)
    for part in (last_answer_tag(text), last_boxed(text)):
        if part is not None:
            plain = re.sub(r"\\text(?:bf|rm)?\{([^{}]*)\}", r"\1", part).strip()
            return _only_letter(plain) or _by_text(plain, options)
    for pattern in (_STATED, _BRACKETED):
        if pattern is _BRACKETED and (only := _only_letter(text)):
            return only
        letters = string.ascii_uppercase[: len(options) or None]  # "Answer: I think B" does not choose I
        if found := [letter for letter in pattern.findall(text) if letter in letters]:
            return str(found[-1])
    return _by_text(text, options)


def _only_letter(text: str) -> str | None:
    match = re.match(rf"{_LETTER}\s*(?:$|[.:)])", text.strip(), re.IGNORECASE)
    return match[1].upper() if match else None


def _by_text(text: str, options: Sequence[str]) -> str | None:
    """The letter of the only choice that equals the text; else of the only choice that occurs in it."""
    plain = text.strip().strip(".").casefold()
    for test in (lambda option: option == plain, lambda option: re.search(rf"\b{re.escape(option)}\b", plain)):
        matching = [index for index, option in enumerate(options) if option and test(option.strip().casefold())]
        if len(matching) == 1:
            return string.ascii_uppercase[matching[0]]
    return None


def _options(choices: Any) -> list[str]:
    """The texts of the choices, in the order of their letters."""
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


WRONG_EXPRESSION = 0.1
"""Reward of countdown for an expression in the right place that is wrong."""
_OPERATORS: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


def clevr_count(completion_text: str, answer: Any) -> float:
    """1 if the last `[number]` of the completion is `answer`, digit for digit."""
    found = re.findall(r"\[([\d.]+)\]", without_thinking(completion_text))
    return float(bool(found) and found[-1] == str(answer).strip().strip("[]"))


def countdown(completion_text: str, target: Any, nums: Any = None, numbers: Any = None) -> float:
    """1 if the `<answer>` on the last line uses each number once and gives `target`; 0.1 if it does not; else 0."""
    lines = without_thinking(completion_text).splitlines()
    found = re.findall(r"<answer>(.*?)</answer>", lines[-1]) if lines else []
    if not found:
        return 0.0
    given = Counter(Fraction(str(each)) for each in (nums if nums is not None else numbers) or ())
    used: Counter[Fraction] = Counter()
    # Exact fractions: in floating point, 8 / (3 - 8 / 3) is not 24. Parsed, never evaluated as code.
    try:
        value = _value(ast.parse(found[-1].split("=")[0].strip()[:1000], mode="eval").body, used)
    except (SyntaxError, ValueError, ArithmeticError, RecursionError, MemoryError):
        return WRONG_EXPRESSION
    return 1.0 if used == given and value == Fraction(str(target)) else WRONG_EXPRESSION


def _value(node: ast.expr, used: Counter[Fraction]) -> Fraction:
    """Compute an expression of numbers, + - * / and brackets, and count its numbers. Raises ValueError for others."""
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        number = Fraction(str(node.value))
        used[number] += 1
        return number
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        return _OPERATORS[type(node.op)](_value(node.left, used), _value(node.right, used))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_value(node.operand, used)
    raise ValueError("not arithmetic")
