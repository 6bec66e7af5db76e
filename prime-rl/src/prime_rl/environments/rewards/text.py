"""Extracts text and answers from completions: `<answer>`, `\\boxed{}`, the last number, text without thinking."""

from __future__ import annotations

import ast
import json
import re
import unicodedata
from collections.abc import Mapping, Sequence
from typing import Any

NUMBER = re.compile(
    r"(?:(?<![\w)\]])[-+]\$?)?(?<![\w^.])(?:\d[\d,]*\.?\d*|\.\d+)(?:[eE][-+]?\d+)?"
    r"(?:\s*/\s*\d+(?:\.\d+)?(?![\d/])|\s*(?:\^|\*\*)\s*\{?[-+]?\d+\}?)?"
)
"""A number, a fraction or a power. A hyphen after a letter or a digit is no sign."""


def text_of(messages: Any, role: str | None = None) -> str:
    """The text of a list of messages (of one role), joined by line breaks. A string is returned unchanged."""
    if messages is None:
        return ""
    if isinstance(messages, str):
        return messages
    if not isinstance(messages, Sequence):
        return str(messages)
    texts = [_content(each) for each in messages if role is None or _field(each, "role") == role]
    return "\n".join(filter(None, texts))


def _field(message: Any, name: str) -> Any:
    return message.get(name) if isinstance(message, Mapping) else getattr(message, name, None)


def _content(message: Any) -> str:
    content = message if isinstance(message, str) else _field(message, "content")
    if isinstance(content, str):
        return content
    return "".join(str(_field(part, "text") or "") for part in content or ())


THINKING_TAGS = ("think", "thinking", "reasoning")


def without_thinking(text: str) -> str:
    """The text after the last thinking block. Empty if a block is not closed: it has no answer."""
    for tag in THINKING_TAGS:
        _, closed, after = text.rpartition(f"</{tag}>")
        if closed:
            return after.strip()
        if f"<{tag}>" in text:
            return ""
    return text.strip()


def last_boxed(text: str) -> str | None:
    r"""The contents of the last complete `\boxed{…}` or `\fbox{…}`, with balanced braces."""
    for start in reversed([match.end() for match in re.finditer(r"\\(?:boxed|fbox)\s*\{", text)]):
        depth = 1
        for position in range(start, len(text)):
            depth += {"{": 1, "}": -1}.get(text[position], 0)
            if depth == 0:
                return text[start:position]
    return None


def last_number(text: str) -> str | None:
    """The last number, without thousands separators."""
    found = NUMBER.findall(text)
    return re.sub(r"[\d.,]+", lambda digits: decimal(digits[0].rstrip(".,")), found[-1]) if found else None


def as_number(text: str) -> float | None:
    """Parse a number that may have `$`, `%`, thousands separators or a final dot; also `3/4` and `10^5`."""
    text = plain_signs(text).strip().strip("$%").replace("-$", "-").rstrip(".")
    try:
        above, fraction, below = text.partition("/")
        base, power, exponent = text.replace("**", "^").partition("^")
        if fraction:
            return float(decimal(above)) / float(decimal(below))
        if power:
            return float(float(decimal(base)) ** int(exponent.strip(" {}")))
        return float(decimal(text))
    except (ValueError, ArithmeticError):
        return None


def decimal(digits: str) -> str:
    """Digits with one point at most: `1,200` and `1.200.000` have thousands, `5,5` and `1.200,5` a decimal comma."""
    digits = re.sub(r"[\s']", "", digits)
    if "," in digits and "." in digits:
        mark = max(",.", key=digits.rfind)  # the last one is the decimal mark
        other = "," if mark == "." else "."
        return digits.replace(other, "").replace(mark, ".")
    for mark in ",.":
        groups = digits.lstrip("+-").split(mark)
        is_grouped = all(len(each) == 3 for each in groups[1:]) and len(groups[0]) <= 3 and groups[0] not in ("", "0")
        if len(groups) > 2:
            return digits.replace(mark, "") if is_grouped else groups[-1]  # else a list: 1,2,3
        if len(groups) == 2 and mark == ",":
            return digits.replace(",", "") if is_grouped else digits.replace(",", ".")
    return digits


def last_answer_tag(text: str) -> str | None:
    """The contents of the last `<answer>…</answer>`."""
    found = re.findall(r"<answer>(.*?)</answer>", text, flags=re.DOTALL)
    return found[-1].strip() if found else None


_SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻", "0123456789+-")
_DASHES = dict.fromkeys(map(ord, "−‐‑‒–—―﹣"), "-")
_SIGNS = {**_DASHES, ord("⁄"): "/", ord("≤"): "<=", ord("≥"): ">=", ord("≠"): "!=", ord("μ"): "µ"}
_SIGNS |= {**dict.fromkeys(map(ord, "’‘ʼ′"), "'"), **dict.fromkeys(map(ord, "“”„″"), '"')}


def plain_signs(text: str) -> str:
    """Write signs in one way: NFKC, `-` for every dash, `10^5` for superscripts, `1/2` for ½, `<=` for ≤.

    NFKC alone makes 105 of 10⁵ and 21/2 of 2½.
    """
    text = re.sub(r"(?<=\d)[\u00a0\u2009\u202f](?=\d{3}(?!\d))", "", text)  # thousands separators
    text = re.sub(r"[⁰¹²³⁴-⁹]*[⁺⁻](?![⁰¹²³⁴-⁹])", lambda charge: charge[0].translate(_SUPERSCRIPTS), text)  # Ca²⁺
    text = re.sub(r"[⁺⁻]?[⁰¹²³⁴-⁹]+", lambda power: "^" + power[0].translate(_SUPERSCRIPTS), text)
    text = re.sub(r"(?<=\d)(?=[¼-¾⅐-⅞])", " ", text)
    return unicodedata.normalize("NFKC", text).translate(_SIGNS)


def accepted_answers(answer: Any) -> list[Any]:
    """The accepted answers of a row: those of a list, else the answer alone.

    A column may hold the list as JSON or as a Python literal, if one of them is text: `[1, 2]` is an interval.
    """
    if isinstance(answer, str) and re.fullmatch(r"\s*\[.*['\"].*\]\s*", answer, re.DOTALL):
        for read in (json.loads, ast.literal_eval):
            try:
                found = read(answer)
            except (ValueError, SyntaxError, RecursionError, MemoryError):
                continue
            if isinstance(found, list) and all(isinstance(each, str | int | float) for each in found):
                return found
    if hasattr(answer, "tolist"):  # an array of numpy
        answer = answer.tolist()
    return list(answer) if isinstance(answer, list | tuple | set | frozenset) else [answer]
