"""The reward `numeric`: numbers with units, compared after conversion (5.5 mmol/L of glucose is 99 mg/dL)."""

from __future__ import annotations

import functools
import re
from typing import Any

from pint import UnitRegistry
from pint.errors import PintError

from prime_rl.environments.rewards.registry import RewardFault
from prime_rl.environments.rewards.text import last_answer_tag, last_boxed, without_thinking

MOLAR_MASSES = {
    "albumin": 66500.0, "bilirubin": 584.66, "bun": 28.01, "calcium": 40.08, "cholesterol": 386.65, "cortisol": 362.46,
    "creatinine": 113.12, "digoxin": 780.94, "ethanol": 46.07, "folate": 441.40, "glucose": 180.16, "hdl": 386.65,
    "iron": 55.845, "lactate": 90.08, "ldl": 386.65, "lithium": 6.94, "magnesium": 24.305, "phosphate": 30.97,
    "potassium": 39.098, "sodium": 22.990, "testosterone": 288.42, "triglycerides": 885.7, "urea": 60.06,
    "uric acid": 168.11, "vitamin d": 400.64,
}  # fmt: skip
"""Molar masses in g/mol. As in laboratories, `bun` counts nitrogen (two atoms) and `phosphate` phosphorus."""
_NUMBER = r"[-+−]?(?:\d[\d,]*\.?\d*|\.\d+)(?:\s*(?:[eE]|[x×*·]\s*10\s*\^?)\s*\{?[-+−]?\d+\}?)?"
_UNIT = r"(?:[a-zA-Zµμ°%Ωº][\w°µμ²³%]*(?:\s*(?:\^\s*[-−]?\d|[/*·]\s*[\d.]*\s*[a-zA-Zµμ°][\w²³]*))*)"
_QUANTITY = re.compile(rf"(?<![\w.])({_NUMBER})\s*({_UNIT})?")
_SPELLINGS = {"μ": "µ", "−": "-", "²": "^2", "³": "^3", "º": "°", "·": "*", "°C": "degC", "°F": "degF", "°": "degree"}
_OWN_UNITS = ("mcg = microgram", "IU = [international_unit]", "Eq = [equivalent]", "bpm = 1 / minute")


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
    """1 if the last number of the completion, converted, is within the tolerances of `answer`, else 0.

    `unit` is the answer's unit, if `answer` has none. `substance` allows mass for amount (mg/dL for mmol/L). A number
    without a unit counts as one in the answer's unit, unless `unit_required`.
    """
    gold, gold_unit = quantity(f"{answer} {unit}" if unit else str(answer)) or (None, None)
    found = quantity(_answer_part(completion_text))
    if gold is None or found is None:
        return 0.0
    value = _in_unit(*found, gold_unit, _molar_mass(substance), unit_required)
    return float(value is not None and abs(value - gold) <= max(rel_tol * abs(gold), abs_tol))


def quantity(text: str) -> tuple[float, str | None] | None:
    """The last number of a text, and the unit that follows it, if any."""
    found = _QUANTITY.findall(text)
    for number, unit in reversed(found):
        if (value := _value(number)) is not None:
            return value, _known(unit.strip())
    return None


def _answer_part(completion: str) -> str:
    text = without_thinking(completion)
    part = last_answer_tag(text) or last_boxed(text) or text
    part = re.sub(r"\\(?:text|mathrm|mathbf|textbf)\s*\{([^{}]*)\}", r" \1 ", part)
    return part.replace("\\times", "×").replace("\\cdot", "·").replace("\\%", "%").replace("\\,", " ")


def _value(number: str) -> float | None:
    plain = number.replace("−", "-").replace(",", "")
    plain = re.sub(r"\s*[x×*·]\s*10\s*\^?\s*\{?([-+]?\d+)\}?", r"e\1", plain)
    try:
        return float(re.sub(r"\s", "", plain))
    except ValueError:
        return None


@functools.cache
def _registry() -> UnitRegistry[Any]:
    registry: UnitRegistry[Any] = UnitRegistry(autoconvert_offset_to_baseunit=True)
    for definition in _OWN_UNITS:
        registry.define(definition)
    return registry


@functools.lru_cache(4096)
def _known(unit: str) -> str | None:
    """A unit in pint's spelling, or None. Of "mg daily", the first word is the unit."""
    for spelling, plain in _SPELLINGS.items():
        unit = unit.replace(spelling, plain)
    unit = re.sub(r"/\s*1\.73\s*m\^?2", "", unit.replace("%", "percent"))  # normalization of filtration rates
    for candidate in (unit, unit.split(" ")[0]):
        try:
            if candidate and len(candidate) < 50:
                _registry().parse_units(candidate)
                return candidate
        except (PintError, ValueError, TypeError, AttributeError, ArithmeticError):
            continue
    return None


def _in_unit(
    value: float, unit: str | None, wanted: str | None, molar_mass: float | None, unit_required: bool
) -> float | None:
    if unit is None or wanted is None:
        return None if unit_required and wanted is not None else value
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
