"""Rewards that compare a completion with the row's answer: text, GSM8K, object counts, countdown.

Multiple choice is in `choices`. Rewards that need a large library (`math_equality`, `units`, `json_schema`) have
separate modules, so that a worker imports only the libraries of the rewards that it calls.
"""

from __future__ import annotations

import ast
import operator
import re
from collections import Counter
from collections.abc import Callable
from fractions import Fraction
from typing import Any, Literal

from rapidfuzz import fuzz

from prime_rl.environments.rewards.registry import RewardFault
from prime_rl.environments.rewards.text import (
    NUMBER,
    accepted_answers,
    as_number,
    last_answer_tag,
    last_boxed,
    last_number,
    plain_signs,
    without_thinking,
)

MAX_CHARS = 20_000
"""Longest text that is compared by similarity, whose cost is the product of both lengths."""


def exact_match(completion_text: str, answer: Any, normalize: bool = True) -> float:
    """1 if the answer of the completion is `answer`, or one of them if it is a list.

    The answer is the last `<answer>` or `\\boxed{}`, else the whole text without thinking. `normalize` ignores case,
    articles, spaces and punctuation, but not signs: `-5`, `HER2+`, `<0.05`, `50%`, `3/4` and `10^5` mean what they say.
    """
    given = _given(completion_text)
    pairs = (_comparable(given, each) if normalize else (given.strip(), each.strip()) for each in _answers(answer))
    return float(any(one == other for one, other in pairs))


def fuzzy_match(completion_text: str, answer: Any, threshold: float | None = None) -> float:
    """Similarity of the answer to `answer`, 0 to 1 (indel ratio); for a list of answers, the highest.

    0 if numbers, signs or opposites differ: 5 mg for 50 mg, HER2- for HER2+, negative for positive. With `threshold`: 1
    at or above it, 0 below.
    """
    pairs = (_comparable(_given(completion_text), each) for each in _answers(answer))
    alike = [
        fuzz.ratio(one[:MAX_CHARS], other[:MAX_CHARS]) / 100 for one, other in pairs if not _contradict(one, other)
    ]
    ratio = max(alike, default=0.0)
    return ratio if threshold is None else float(ratio >= threshold)


# Normalized text. A sign keeps its place as one of these, while other hyphens and pluses become spaces.
_MINUS, _PLUS = "\u2212", "\uff0b"
_RULES = [
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"\s+", " "),
        (r"\\([%$#&_])", r"\1"),
        (r"(?<![\d.,])\d{1,3}(?:,\d{3})+(?![\d,])", lambda number: number[0].replace(",", "")),
        # Articles. `a` only at the start: vitamin A, hepatitis A, type A. Not before `and`, `or` and single letters.
        (r"(?i)(?<![\w'.+-])(?:the|an)\s+(?=\w)|^\s*a\s+(?!(?:and|or|but)\b)(?=\w{2})", ""),
        (r"(?<![\w.])\.(?=\d)", "0."),
        (r"(?<=\w)\s?\(\s*([+-])\s*\)", r"\1"),  # HER2 (+)
        (r"(?<=\w)\s+([+-])\s*$", r"\1"),
        (r"(?:(?<=^)|(?<=[(=<>/^*×]))\s*-\s*(?=\d)|(?<![\w)%\]])-(?=\d)", _MINUS),
        (r"(?<=[\w)])-(?=$|[\s,.;:!?)/+])", _MINUS),
        (r"(?:(?<=^)|(?<=[\s(=<>/^*×]))\+\s?(?=\d)", ""),
        (r"\+", _PLUS),
        (r"(?<=\w)['.](?=[^\W\d])", ""),  # Crohn's, U.S
        (r"(?<=\d)\.(?=\d)", "\u00b7"),  # a decimal point
        (r"(?<!\w)(\d+(?:\u00b7\d+)?)(?=[^\W\d_])", r"\1 "),  # 10mg
        (r"(?<=\w)\*(?=\w)", "×"),
        (r"(?<=[^\W\d])#", "♯"),  # C#
        ("&", " and "),
        ("!=", "≠"),
        (r"[-!\"#$'()*,.:;?@\[\\\]_`{|}~]", " "),
        (r"\s+", " "),
        (rf"\s*(<=|>=|[<>=≠/^%×°{_PLUS}])\s*", r"\1"),
    )
]
_INTERVAL = re.compile(r"[\[(][^\[\]()]*,[^\[\]()]*[\])]")


def normalized(text: str) -> str:
    """Lower case without articles, spaces and punctuation, but with the signs that decide what an answer means."""
    text = plain_signs(text).strip()
    if _INTERVAL.fullmatch(text) and ("[" in text or "]" in text):  # open or closed
        return text[0] + ",".join(map(normalized, text[1:-1].split(","))) + text[-1]
    for pattern, replacement in _RULES:
        text = pattern.sub(replacement, text)
    return " ".join(text.casefold().split())


_MARKS = re.compile(rf"{_MINUS}?\d+(?:\u00b7\d+)?%?|<=|>=|[<>≠]|(?<=\w)[{_MINUS}{_PLUS}](?=\s|$)")
_OPPOSITES = (
    ("positive", "negative"), ("yes", "no"), ("true", "false"), ("increase", "decrease"), ("increased", "decreased"),
    ("high", "low"), ("higher", "lower"), ("left", "right"), ("present", "absent"), ("with", "without"),
    ("benign", "malignant"), ("acute", "chronic"), ("hyper", "hypo"), ("before", "after"), ("normal", "abnormal"),
)  # fmt: skip


def _contradict(one: str, other: str) -> bool:
    """Whether two normalized texts both have numbers and signs, other ones, or words of which one denies the other."""
    marks = [sorted(_MARKS.findall(each)) for each in (one, other)]
    if all(marks) and marks[0] != marks[1]:
        return True
    found, wanted = set(one.split()), set(other.split())
    if ("not" in found) != ("not" in wanted):
        return True
    return any(
        (yes in found) != (no in found) and (yes in wanted) != (no in wanted) and (yes in found) != (yes in wanted)
        for yes, no in _OPPOSITES
    )


def _comparable(given: str, answer: str) -> tuple[str, str]:
    """Normalize both, unless that would empty the reference (`?`): then no completion could equal it."""
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
    return [str(each) for each in accepted_answers(answer)]


Mode = Literal["strict", "flexible", "last_number", "any"]
_STRICT = re.compile(rf"(?:The answer is|####)\s*:?\s*\$?({NUMBER.pattern})", re.IGNORECASE)
_TOKEN = re.compile(rf"{NUMBER.pattern}%?")


def gsm8k(completion_text: str, answer: Any, mode: Mode = "any", format_weight: float = 0.0) -> float:
    """1 if the number that the completion gives equals `answer`, else 0. `answer` may end in `#### 42`.

    Modes: `strict` takes "The answer is 42." and "#### 42", `flexible` the last thing that looks like a number,
    `last_number` the last number, `any` the first of these that finds one. `format_weight` is the reward of a wrong
    answer in strict form.
    """
    if mode not in ("strict", "flexible", "last_number", "any"):
        raise RewardFault(f"gsm8k: mode = {mode!r} does not exist; use strict, flexible, last_number or any")
    text = plain_signs(without_thinking(completion_text))
    gold = [as_number(str(each).rpartition("####")[2]) for each in accepted_answers(answer)]
    strict = _last(_STRICT, text)
    found = {"strict": strict, "flexible": _last(_TOKEN, text), "last_number": last_number(text)}
    chosen = found[mode] if mode != "any" else next(filter(None, found.values()), None)
    number = None if chosen is None else as_number(chosen)
    if number is not None and number in gold:
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
