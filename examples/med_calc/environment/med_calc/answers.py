"""Read a number out of whatever a model writes, and compare it."""

from __future__ import annotations

import re

# No digit of `m2`, `10^3` or `HCO3` is a number of its own. A dash behind a digit separates: `140-104`.
_NUMBER = re.compile(
    r"(?<![\w.^])(?:(?<!\d)[-+])?(?:\d{1,3}(?:,\d{3})+(?:\.\d+)?|\d+(?:[.,]\d+)?|\.\d+)(?:[eE][-+]?\d+)?"
)
_AREA_OF_GFR = re.compile(r"1[.,]73\s*m\s*(?:\^?2|²)", re.IGNORECASE)
_THOUSANDS = re.compile(r"\d{1,3}(?:,\d{3})+(?:\.\d+)?")


def parse_number(text: str, tag: str | None = None) -> float | None:
    """The number that `text` answers with, or None.

    In `<tag>…</tag>` (the last one, if there are several) it is the first number, after the last `=` if there is one;
    without a tag it is the last number of the text. Units, thousands separators and a decimal comma are understood.
    """
    tagged = re.findall(rf"<{re.escape(tag)}>(.*?)</{re.escape(tag)}>", text, re.DOTALL | re.IGNORECASE) if tag else []
    place = tagged[-1].rpartition("=")[2] if tagged else text
    numbers = _NUMBER.findall(_AREA_OF_GFR.sub(" ", place.replace("−", "-")))
    if not numbers:
        return None
    return _as_float(numbers[0] if tagged else numbers[-1])


def closeness(value: float, expected: float, tolerance: float) -> float:
    """1 within the tolerance, and less in proportion to the relative error beyond it, down to 0."""
    error = abs(value - expected)
    if error <= tolerance:
        return 1.0
    return max(0.0, 1.0 - error / max(abs(expected), tolerance))


def _as_float(number: str) -> float:
    if _THOUSANDS.fullmatch(number.lstrip("+-")):
        return float(number.replace(",", ""))
    return float(number.replace(",", "."))
