"""The reward `numeric`: numbers with units, compared after conversion (5.5 mmol/L of glucose is 99 mg/dL).

From text to verdict: `plain` writes numbers, signs and units in one way, `quantities` reads them, `_equals` compares
two in the answer's unit.
"""

from __future__ import annotations

import functools
import math
import re
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from pint import UnitRegistry
from pint.errors import PintError

from prime_rl.environments.rewards.registry import RewardFault
from prime_rl.environments.rewards.text import (
    accepted_answers,
    decimal,
    last_answer_tag,
    last_boxed,
    plain_signs,
    without_thinking,
)

MOLAR_MASSES = {
    "albumin": 66500.0, "bilirubin": 584.66, "bun": 28.01, "calcium": 40.08, "cholesterol": 386.65, "cortisol": 362.46,
    "creatinine": 113.12, "digoxin": 780.94, "ethanol": 46.07, "folate": 441.40, "glucose": 180.16, "hdl": 386.65,
    "iron": 55.845, "lactate": 90.08, "ldl": 386.65, "lithium": 6.94, "magnesium": 24.305, "phosphate": 30.97,
    "potassium": 39.098, "sodium": 22.990, "testosterone": 288.42, "triglycerides": 885.7, "urea": 60.06,
    "uric acid": 168.11, "vitamin d": 400.64,
}  # fmt: skip
"""Molar masses in g/mol. As in laboratories, `bun` counts nitrogen (two atoms) and `phosphate` phosphorus."""


def warm_up() -> None:
    numeric("1 mg/dL", "1 mmol/L", substance="glucose")


def numeric(
    completion_text: str,
    answer: Any,
    unit: str | None = None,
    substance: str | None = None,
    rel_tol: float = 0.01,
    abs_tol: float = 0.0,
    unit_required: bool = False,
) -> float:
    """1 if the last quantity of the completion, converted, is within the tolerances of `answer`, else 0.

    A quantity is a number (`1,200`, `5,5`, `10^5`, `3/4`, `50%`), a range (`3-5`), a blood pressure (`120/80`), or a
    limit (`<0.05`), which only another one of its kind equals. `unit` is the answer's unit, if `answer` has none.
    `substance` allows mass for amount (mg/dL for mmol/L). A number without a unit counts as one in the answer's unit,
    unless `unit_required`. `answer` may be a list of accepted answers.
    """
    found = quantity(_answer_part(completion_text))
    molar_mass = _molar_mass(substance)
    for each in accepted_answers(answer):
        gold = quantity(str(each))
        if gold is not None and gold.unit is None and unit:
            gold = quantity(f"{each} {unit}")
        if found is None or gold is None or (unit_required and gold.unit is not None and found.unit is None):
            continue
        if _equals(found, gold, molar_mass, rel_tol, abs_tol):
            return 1.0
    return 0.0


# Reading.

Kind = Literal["number", "fraction", "pressure", "range"]


@dataclass(frozen=True, slots=True)
class Quantity:
    """A number, or two that belong together, with a unit."""

    values: tuple[float, ...]
    """One for a number; both for a fraction, a range or a blood pressure."""
    kind: Kind = "number"
    unit: str | None = None
    """In pint's spelling. None without one, or with a word that is none."""
    other_unit: str = ""
    """A compound that is no unit of pint, such as `mg/foo`."""
    limit: str = ""
    """`<`, `<=`, `>` or `>=`."""
    tolerance: float = 0.0
    """What follows ±."""

    @property
    def value(self) -> float:
        if self.kind != "fraction":
            return self.values[0]
        return self.values[0] / self.values[1] if self.values[1] else math.nan


_MAX_CHARACTERS = 10_000
"""Of a text without `<answer>` and box, whose last quantity counts."""
_SIGN = r"(?<![\w)\]%.])[-+]"
_DIGITS = r"(?:\d+(?:[.,']\d+)*|(?<!\d)\.\d+)"
_POWER = r"(?:[eE][-+]?\d+(?![\w.])|\s*(?:[x×*·]\s*10\s*)?\^\s*[({]?\s*[-+]?\d+\s*[)}]?)"
_NUMBER = rf"(?:{_SIGN})?(?<![\w^])(?<!\d[.,]){_DIGITS}(?:{_POWER})?"
_MIXED = rf"(?:{_SIGN})?(?<![\w.,^])\d+\s+\d+/\d+(?![\d/])"
_WORD = r"[a-zA-Zµ°%Ω‰][\w°µ%]*"
_UNIT = rf"(?:/\s*)?{_WORD}(?:\s*\^\s*-?\d+|\s*[/*·]\s*[\d.]*\s*{_WORD})*"
_JOINTS = r"\s*(?:/|:|±|-|\bto\b)\s*"
_QUANTITY = re.compile(
    rf"(?P<limit>(?<![-=])[<>]=?)?\s*(?P<one>{_MIXED}|{_NUMBER})(?:\s*(?P<first_unit>(?!to\b){_UNIT}))?"
    rf"(?:(?P<joint>{_JOINTS})(?P<two>(?<![\w^])-?{_DIGITS}(?:{_POWER})?)(?:\s*(?P<unit>{_UNIT}))?)?"
)
_NO_UNITS = frozenset("a am an and are as at by if is it of on or per pm so than that the then times to was x".split())
"""Words after a number that pint would take for a unit, such as year (`a`) and attosecond (`as`)."""
_LIMITS = (
    (r"(?:at least|no (?:less|fewer) than|not (?:less|fewer) than|minimum of)", ">="),
    (r"(?:at most|up to|no more than|not more than|maximum of)", "<="),
    (r"(?:(?:less|fewer|lower|smaller) than or equal to)", "<="),
    (r"(?:(?:more|greater|higher|larger) than or equal to)", ">="),
    (r"(?:less|fewer|lower|smaller) than|below|under", "<"),
    (r"(?:more|greater|higher|larger) than|above|exceeding", ">"),
)


def _without_spaces(number: re.Match[str]) -> str:
    return number[0].replace(" ", "")


_SPELLINGS: tuple[tuple[str, str | Callable[[re.Match[str]], str]], ...] = (
    (r"</?[a-zA-Z][^<>]*>", " "),  # tags, whose > is no comparison
    (r"\\(?:text|mathrm|mathbf|textbf|rm)\s*\{([^{}]*)\}", r" \1 "),
    (r"([-+]?)\s*\\[dt]?frac\s*\{([^{}]*)\}\s*\{([^{}]*)\}", r" \1\2/\3 "),
    (r"\\sqrt\s*(?:\[[^\]]*\])?\s*(?:\{[^{}]*\}|\d)|√\s*\d[\d.]*", " "),  # not computed: \sqrt{2} is not 2
    (r"\\(?:times|cdot)(?![a-zA-Z])", "×"),
    (r"\\pm(?![a-zA-Z])", "±"),
    (r"\\leq?(?![a-zA-Z])", "<="),
    (r"\\geq?(?![a-zA-Z])", ">="),
    (r"\\lt(?![a-zA-Z])", "<"),
    (r"\\gt(?![a-zA-Z])", ">"),
    (r"\\mu(?![a-zA-Z])", "µ"),
    (r"\^?\s*\{?\\circ\}?", "°"),
    (r"\{,\}", ","),
    (r"\\%", "%"),
    (r"\\[,;: !]", " "),
    (r"\$", ""),
    (r"(?<=\d)\*\*(?=[-+]?\d)", "^"),
    (r"\*{2,}|[`_]{1,3}(?!\w)|(?<!\w)[`_]{1,3}", ""),
    (r"(?<![\d.])10\((?=-?\d+\))", "10^("),  # x10(9)/L
    # Spaces as thousands separators, where they can be nothing else: "2 500 mg tablets" may be two tablets.
    (r"^(\s*[-+]?\d{1,3}(?: \d{3})+)(?=\D*$)", _without_spaces),
    (
        r"(?<![\w.,])(?<!\d )\d{1,3}(?: \d{3}){2,}(?![ .,]?\d)|(?<![\w.,])(?<!\d )\d{3} \d{3}(?![ .,]?\d)",
        _without_spaces,
    ),
    (r"(?i)(?<=\d)\s*thousand\b", "e3"),
    (r"(?i)(?<=\d)\s*million\b", "e6"),
    (r"(?i)(?<=\d)\s*billion\b", "e9"),
    (r"\b\d{1,4}/\d{1,2}/\d{1,4}\b", " "),  # a date
    (r"\+\s*/\s*-", "±"),
    (r"(?<=\d)\s+over\s+(?=\d)", "/"),
    (r"\s+per\s+", "/"),
    (r"(?i)\b(?:degrees?|deg)\.?\s*(fahrenheit|celsius|centigrade|[FC]\b)", r"°\1"),
    (r"(?i)°\s*(?:fahrenheit|F\b)|\bfahrenheit\b", "°F"),
    (r"(?i)°\s*(?:celsius|centigrade|C\b)|\b(?:celsius|centigrade)\b", "°C"),
    (r"(?i)\b(mm|cm)\s+(Hg|H2O)\b", r"\1\2"),
    (r"(?i)\binternational units?\b", "IU"),
    (r"\b([munkcd]?m)([23])\b", r"\1^\2"),
    (r"/\s*1\.73\s*m\^2", ""),  # normalization of filtration rates
    (r"^\s*([-+])\s+(?=[\d.,]+\s*$)", r"\1"),
    (r"([=(:<>]\s*)([-+])\s+(?=\d)", r"\1\2"),
)
_WRITTEN = [(re.compile(pattern), written) for pattern, written in _SPELLINGS]
_WRITTEN += [(re.compile(rf"(?i)\b(?:{words})\s+(?=[-+]?[\d.])"), f"{sign} ") for words, sign in _LIMITS]


def plain(text: str) -> str:
    """Write numbers, signs and units in one way, whatever Unicode, LaTeX or words they were in."""
    text = plain_signs(text)
    for pattern, replacement in _WRITTEN:
        text = pattern.sub(replacement, text)
    return text


def quantity(text: str) -> Quantity | None:
    """The last quantity of a text."""
    return next(iter(deque(quantities(text), maxlen=1)), None)


def quantities(text: str) -> Iterator[Quantity]:
    text = plain(text)
    for match in _QUANTITY.finditer(text):
        one = _value(match["one"])
        two = None if match["two"] is None else _value(match["two"])
        first_unit, unit = (_unit_of(text, match, name) for name in ("first_unit", "unit"))
        joint = (match["joint"] or "").strip()
        limit = match["limit"] or ""
        if two is None or (joint in ("/", ":") and first_unit):
            yield Quantity((one,), "number", *_known(first_unit), limit=limit)
            if two is not None:
                yield Quantity((two,), "number", *_known(unit))
        elif joint == "±":
            yield Quantity((one,), "number", *_known(unit or first_unit), limit=limit, tolerance=two)
        elif joint in ("/", ":"):
            known, other = _known(unit)
            kind: Kind = "pressure" if _is_pressure(one, two, known) and joint == "/" else "fraction"
            yield Quantity((one, two), kind, known, other, limit)
        elif one < two:
            yield Quantity((one, two), "range", *_known(unit or first_unit), limit=limit)
        else:  # 10-3, which is no range
            yield Quantity((two,), "number", *_known(unit))


def _answer_part(completion: str) -> str:
    text = without_thinking(completion)
    return last_answer_tag(text) or last_boxed(text) or text[-_MAX_CHARACTERS:]


def _unit_of(text: str, match: re.Match[str], name: str) -> str:
    unit = match[name] or ""
    is_word = unit in _NO_UNITS or (unit == "in" and re.match(r"\s+[a-zA-Z]", text[match.end(name) :]))
    return "" if is_word else unit


def _is_pressure(one: float, two: float, unit: str | None) -> bool:
    """Whether `one/two` is a blood pressure: by its unit or, without one, by its size."""
    if unit is not None:
        return _dimension(unit) == _dimension("mmHg")
    return one > two and 40 <= one <= 300 and 20 <= two <= 200 and one == int(one) and two == int(two)


def _value(number: str) -> float:
    if mixed := re.fullmatch(r"([-+]?)\s*(\d+)\s+(\d+)/(\d+)", number):
        sign, whole, above, below = mixed.groups()
        return (int(whole) + int(above) / (int(below) or 1)) * (-1 if sign == "-" else 1)
    plain_number = re.sub(r"\s*[x×*·]\s*10\s*\^\s*[({]?\s*([-+]?\d+)\s*[)}]?", r"e\1", number)
    base, _, power = plain_number.partition("^")
    mantissa, _, exponent = base.replace("E", "e").partition("e")
    try:
        value = float(decimal(mantissa) + (f"e{exponent}" if exponent else ""))
        return float(value ** int(power.strip(" (){}"))) if power else value
    except (ValueError, OverflowError, ZeroDivisionError):
        return float("nan")


# Units.

_OWN_UNITS = (
    "mcg = microgram",
    "IU = [international_unit]",
    "Eq = [equivalent]",
    "Osm = [osmole]",
    "bpm = 1 / minute",
    "thousand = 1000",
    "million = 1000000",
)
_CASED = {
    "F": "degF", "°F": "degF", "C": "degC", "°C": "degC", "°": "degree", "H": "hour", "G": "gram", "M": "molar",
    "mU": "mIU", "µU": "µIU", "uU": "µIU", "U": "IU", "%": "percent", "‰": "permille",
}  # fmt: skip
"""Units whose case decides, and those that mean something else in medicine than for pint (farad, henry, gauss)."""
_UNCASED = {
    **{each: each for each in "mg kg ng pg mmol nmol pmol mol mm cm hour minute second day week month year".split()},
    **dict.fromkeys(("mcg", "ug", "µg"), "microgram"), **dict.fromkeys(("umol", "µmol"), "micromole"),
    **dict.fromkeys(("g", "gm", "gms", "gram", "grams"), "gram"), "l": "liter", "ml": "milliliter", "cc": "milliliter",
    "dl": "deciliter", **dict.fromkeys(("ul", "µl"), "microliter"), "fl": "femtoliter", "mmhg": "mmHg",
    "cmh2o": "cmH2O", "kpa": "kPa", "meq": "mEq", "eq": "Eq", "ueq": "µEq", "osm": "Osm", "mosm": "mOsm",
    "mosmol": "mOsm", "bpm": "bpm", **dict.fromkeys(("iu", "unit", "units"), "IU"), "miu": "mIU",
    **dict.fromkeys(("uiu", "µiu"), "µIU"), **dict.fromkeys(("h", "hr", "hrs", "hours"), "hour"),
    **dict.fromkeys(("min", "mins", "minutes"), "minute"), **dict.fromkeys(("s", "sec", "secs", "seconds"), "second"),
    **dict.fromkeys(("d", "days"), "day"), **dict.fromkeys(("wk", "wks", "weeks"), "week"),
    **dict.fromkeys(("mo", "mos", "months"), "month"), **dict.fromkeys(("y", "yr", "yrs", "years", "yo"), "year"),
    **dict.fromkeys(
        "beat beats breath breaths respirations drop drops gtt cell cells copy copies cfu colonies organisms dose "
        "doses tablet tablets tab tabs capsule capsules pill pills".split(),
        "count",
    ),
}  # fmt: skip
"""Units in any case, by their lower case: pint takes MG for megagauss and ML for megaliter."""
_THOUSANDS = {"K": "thousand", "M": "million"}
"""Of cells: K/µL, M/µL."""


@functools.cache
def _registry() -> UnitRegistry[Any]:
    registry: UnitRegistry[Any] = UnitRegistry(autoconvert_offset_to_baseunit=True)
    for definition in _OWN_UNITS:
        registry.define(definition)
    return registry


@functools.lru_cache(4096)
def _known(unit: str) -> tuple[str | None, str]:
    """A unit in pint's spelling; else None and, of a compound, the text."""
    if not unit or len(unit) > 50:
        return None, ""
    spelled = re.sub(rf"{_WORD}", lambda word: _spelled(word[0], unit), unit)
    spelled = f"1{spelled}" if spelled.startswith("/") else spelled
    try:
        return str(_registry().parse_units(re.sub(r"\s*·\s*", "*", spelled))), ""
    except (PintError, ValueError, TypeError, AttributeError, ArithmeticError):
        return None, re.sub(r"\s", "", unit.casefold()) if "/" in unit else ""


def _spelled(word: str, unit: str) -> str:
    if word in _THOUSANDS and "/" in unit:
        return _THOUSANDS[word]
    return _CASED.get(word) or _UNCASED.get(word.casefold(), word)


def _dimension(unit: str) -> str:
    return str(_registry().Quantity(1, unit).dimensionality)


# Comparing.


def _equals(found: Quantity, gold: Quantity, molar_mass: float | None, rel_tol: float, abs_tol: float) -> bool:
    if not all(map(math.isfinite, (*found.values, *gold.values))):  # too many digits, or a division by 0
        return False
    if found.limit != gold.limit or found.other_unit != gold.other_unit:
        return False
    one, other = _alike(found, gold)
    if len(one) != len(other):
        return False
    tolerance = max(abs_tol, gold.tolerance)
    for factor in _factors(found, gold, other):
        in_unit = [_in_unit(value, found.unit, gold.unit, molar_mass) for value in one]
        pairs = zip(in_unit, other, strict=True)
        if all(
            value is not None and abs(value * factor - wanted) <= max(rel_tol * abs(wanted), tolerance)
            for value, wanted in pairs
        ):
            return True
    return False


def _alike(found: Quantity, gold: Quantity) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """The values to compare: both of a range or a blood pressure, one of anything else. Different kinds: no values."""
    kinds = {found.kind, gold.kind}
    if kinds == {"range"} or (kinds <= {"pressure", "fraction"} and "pressure" in kinds):
        return found.values, gold.values
    if kinds <= {"number", "fraction"}:
        return (found.value,), (gold.value,)
    return (), (0.0,)


def _factors(found: Quantity, gold: Quantity, wanted: tuple[float, ...]) -> tuple[float, ...]:
    """What a number may be multiplied by. 50% is 0.5, also where the other has no unit.

    An answer above 1 without a unit may also be in percent: 50% for 50.
    """
    if found.unit == "percent" and gold.unit is None:
        return (0.01,) if all(abs(each) <= 1 for each in wanted) else (0.01, 1.0)
    return (1.0, 100.0) if gold.unit == "percent" and found.unit is None else (1.0,)


def _in_unit(value: float, unit: str | None, wanted: str | None, molar_mass: float | None) -> float | None:
    if unit is None or wanted is None:
        return value
    measured = _registry().Quantity(value, unit)
    try:
        return float(measured.to(wanted).magnitude)
    except (PintError, ArithmeticError):
        if molar_mass is None:
            return None
    try:
        grams_per_mole = _registry().Quantity(molar_mass, "g/mol")
        return float(measured.to(wanted, "chemistry", mw=grams_per_mole).magnitude)
    except (PintError, ArithmeticError):
        return None


def _molar_mass(substance: str | None) -> float | None:
    if substance is None:
        return None
    mass = MOLAR_MASSES.get(substance.strip().lower())
    if mass is None:
        raise RewardFault(f"no molar mass of {substance!r}: the substances are {', '.join(sorted(MOLAR_MASSES))}")
    return mass
