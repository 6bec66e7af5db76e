"""Rewards of particular datasets: geometry3k, CLEVR counting, countdown."""

from __future__ import annotations

import ast
import operator
import re
from collections import Counter
from collections.abc import Callable
from fractions import Fraction
from typing import Any

from prime_rl.environments.rewards.answers.math_equality import equal, warm_up
from prime_rl.environments.rewards.text import last_number, without_thinking

__all__ = ["clevr_count", "countdown", "geometry3k", "warm_up"]

WRONG_ATTEMPT = 0.1
_OPERATORS: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


def geometry3k(completion_text: str, answer: Any) -> float:
    """1 if the last `[…]` of the completion, else its last number, equals `answer` mathematically."""
    text = without_thinking(completion_text)
    found = _bracketed(text) or last_number(text)
    return float(found is not None and equal(f"\\boxed{{{found}}}", _bracketed(str(answer)) or answer))


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
    try:
        value = _value(ast.parse(found[-1].split("=")[0].strip()[:1000], mode="eval").body, used)
    except (SyntaxError, ValueError, ArithmeticError, RecursionError, MemoryError):
        return WRONG_ATTEMPT
    return 1.0 if used == given and value == Fraction(str(target)) else WRONG_ATTEMPT


def _bracketed(text: str) -> str | None:
    found = re.findall(r"\[([^\[\]]*)\]", text)
    return found[-1].strip() if found else None


def _value(node: ast.expr, used: Counter[Fraction]) -> Fraction:
    """The value of an expression of numbers, + - * / and brackets. Raises ValueError for anything else."""
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        number = Fraction(str(node.value))
        used[number] += 1
        return number
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        return _OPERATORS[type(node.op)](_value(node.left, used), _value(node.right, used))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_value(node.operand, used)
    raise ValueError("not arithmetic")
