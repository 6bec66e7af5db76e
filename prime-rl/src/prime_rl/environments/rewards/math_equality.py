"""Rewards that need mathematical equality (math-verify): fractions, intervals, sets, matrices, equations."""

from __future__ import annotations

import re
from typing import Any

from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

from prime_rl.environments.rewards.text import accepted_answers, as_number, last_boxed, last_number, without_thinking

NUMERIC_DIGITS = 6
RELATIVE_TOLERANCE = 1e-4
NO_ANSWERS = ("", "none", "null", "nan")


def math(completion_text: str, answer: Any, strict: bool = True) -> float:
    """1 if the final expression of the completion equals `answer`, else 0.

    Expressions are read from LaTeX and plain text, the last `\\boxed{}` first. `strict = False` also takes numbers
    that agree to 1e-4, and percentages for fractions.
    """
    text = without_thinking(completion_text)
    return float(any(equal(text, each, strict=strict) for each in accepted_answers(answer)))


def equal(prediction: str, reference: Any, strict: bool = True) -> bool:
    """Whether the last expression of a text equals a reference. Nothing equals a reference such as "None"."""
    prediction, reference = (
        each.replace("\u2212", "-").replace("\u00a0", " ") for each in (prediction, str(reference))
    )
    reference = reference.strip()
    if reference.lower() in NO_ANSWERS:
        return False
    boxed = last_boxed(prediction)
    if boxed is not None and _same_text(boxed, reference):
        return True
    if not strict and _numbers_agree(boxed or prediction, reference):
        return True
    gold = _parsed(f"${reference}$", reference)
    found = _parsed(prediction) if boxed is None else _parsed(f"$\\boxed{{{boxed}}}$")
    if not gold or not found:
        return False
    # Neither function's own limit is used: it needs signals, and the pool ends a worker.
    return bool(verify(gold, found, float_rounding=NUMERIC_DIGITS, strict=True, timeout_seconds=None))


def warm_up() -> None:
    """Build the grammar, and compare once what imports further modules, before the time of a call counts."""
    for prediction, reference in (("4", "3/12"), (r"\boxed{\frac{1}{2}}", "0.5"), ("(1, 2]", "[1, 2]"), ("x^2", "x x")):
        equal(prediction, reference)


def _parsed(*forms: str) -> list[Any]:
    """The expressions of the first form that has one."""
    targets = [LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig()]
    for form in forms:
        if found := parse(form, extraction_config=targets, parsing_timeout=None):
            return list(found)
    return []


def _same_text(one: str, other: str) -> bool:
    # A space between digits stays: 2 1/2 is not 21/2.
    plain = [re.sub(r"\\left|\\right|\$|(?<!\d)\s+|\s+(?!\d)|\\[,;! ]", "", each).lower() for each in (one, other)]
    return bool(plain[0]) and plain[0] == plain[1]


def _numbers_agree(prediction: str, reference: str) -> bool:
    one, other = as_number(prediction), as_number(reference)
    if one is None or other is None:
        return False
    has_percent = "%" in prediction or "%" in reference
    accepted = (other, other / 100, other * 100) if has_percent else (other,)
    return any(abs(one - each) <= RELATIVE_TOLERANCE * abs(each) for each in accepted)


def hendrycks_math(completion_text: str, answer: Any) -> float:
    r"""1 if the last `\boxed{}`, else what follows "answer is", equals `answer` as text or symbolically."""
    text = without_thinking(completion_text)
    found = last_boxed(text)
    if found is None:
        phrases = re.findall(r"answer is:?\s*(.+?)(?:\.\s|\.?$)", text, flags=re.IGNORECASE | re.MULTILINE)
        found = phrases[-1] if phrases else None
    if found is None:
        return 0.0
    return float(any(_same_text(found, str(each)) or equal(found, each) for each in accepted_answers(answer)))


def minerva_math(completion_text: str, answer: Any) -> float:
    r"""1 if `answer` is, as text, the `\boxed{}`, Minerva's final sentence, the last `$…$`, or else the whole text."""
    text = without_thinking(completion_text)
    sentences = re.findall(r"[Ff]inal [Aa]nswer:? The final answer is\s*(.*?)\.? I hope it is correct", text, re.DOTALL)
    formulas = re.findall(r"\$([^$]+)\$", text)
    candidates = [last_boxed(text), *sentences[-1:], *formulas[-1:]]
    found = [each for each in candidates if each] or [text]
    gold = [last_boxed(str(each)) or str(each) for each in accepted_answers(answer)]
    return float(any(_same_text(each, one) for each in found for one in gold))


def geometry3k(completion_text: str, answer: Any) -> float:
    """1 if the last `[…]` of the completion, else its last number, equals `answer` mathematically."""
    text = without_thinking(completion_text)
    found = _bracketed(text) or last_number(text)
    return float(found is not None and equal(f"\\boxed{{{found}}}", _bracketed(str(answer)) or answer))


def _bracketed(text: str) -> str | None:
    found = re.findall(r"\[([^\[\]]*)\]", text)
    return found[-1].strip() if found else None
