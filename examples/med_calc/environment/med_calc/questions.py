"""Questions: a calculator, measurements, and the words around them."""

from __future__ import annotations

import random
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from med_calc import quantities
from med_calc.calculators import CALCULATORS, Calculator
from med_calc.formulas import round_half_up
from med_calc.quantities import Measurement, Quantity, measure

Difficulty = Literal["easy", "medium", "hard"]
Style = Literal["text", "compact"]
Split = Literal["train", "eval"]

OTHER_UNIT_PROBABILITY = 0.5
HELD_OUT = 10
DISTRACTORS: Sequence[Quantity] = (
    Quantity("potassium", "K", 3.2, 5.5, (quantities.Unit("mEq/L", 1, 1),)),
    Quantity("temperature", "T", 36.0, 39.5, (quantities.Unit("°C", 1, 1),)),
    Quantity("hemoglobin", "Hb", 7.0, 16.5, (quantities.Unit("g/dL", 1, 1),)),
    Quantity("respiratory rate", "RR", 10, 30, (quantities.Unit("breaths/min"),)),
    Quantity("platelet count", "plt", 60, 400, (quantities.Unit("×10⁹/L"),)),
    Quantity("lactate", "lac", 0.6, 6.0, (quantities.Unit("mmol/L", 1, 1),)),
)
_COMPACT_UNITS = str.maketrans({"µ": "u", "²": "2"})


@dataclass(frozen=True, slots=True)
class Question:
    """A question and what its answer may be."""

    calculator: str
    measurements: Mapping[str, Measurement]
    text: str
    expected: float
    """Not rounded."""
    tolerance: float

    @property
    def answer(self) -> str:
        """The expected value, rounded as the question asks."""
        decimals = CALCULATORS[self.calculator].decimals
        return f"{round_half_up(self.expected, decimals) + 0.0:.{decimals}f}"


def make_questions(
    names: Sequence[str],
    count: int,
    seed: int,
    difficulty: Difficulty = "medium",
    style: Style = "text",
    split: Split | None = None,
) -> list[Question]:
    """`count` questions that take turns through the calculators `names`; the same for the same arguments.

    A hash of its text decides which split a question belongs to. None takes them all.
    """
    rng = random.Random(seed)
    questions = [make_question(names[index % len(names)], rng, difficulty, style) for index in range(count)]
    # Others come from a generator of their own, so that the rest stays the same.
    spare = random.Random(f"{seed}: spare")
    for index in range(count):
        while split is not None and split_of(questions[index].text) != split:
            questions[index] = make_question(questions[index].calculator, spare, difficulty, style)
    return questions


def split_of(text: str) -> Split:
    """One question in `HELD_OUT` is for evaluation."""
    return "eval" if zlib.crc32(text.encode()) % HELD_OUT == 0 else "train"


def make_question(name: str, rng: random.Random, difficulty: Difficulty, style: Style) -> Question:
    """One question.

    `easy` has conventional units and one wording, `medium` other usual units and wordings, `hard` irrelevant findings
    as well. The compact style is one short line, `AG Na 140 Cl 104 HCO3 24`, for models of a few characters' context.
    """
    calculator = CALCULATORS[name]
    while True:
        measurements = {
            argument: measure(quantity, _unit(quantity, rng, difficulty), rng)
            for argument, quantity in calculator.inputs.items()
        }
        values = {argument: measurement.conventional for argument, measurement in measurements.items()}
        sex = {"sex": rng.choice(("female", "male"))} if calculator.needs_sex else {}
        if calculator.accepts(values | sex):
            break
    expected = calculator.formula(**values, **sex)
    if style == "compact":
        text = _compact_text(calculator, measurements, sex)
    else:
        text = _text(calculator, measurements, sex, rng, difficulty)
    return Question(name, measurements, text, expected, calculator.tolerance(expected))


def _unit(quantity: Quantity, rng: random.Random, difficulty: Difficulty) -> quantities.Unit:
    if difficulty == "easy" or len(quantity.units) == 1 or rng.random() >= OTHER_UNIT_PROBABILITY:
        return quantity.units[0]
    return rng.choice(quantity.units[1:])


def _text(
    calculator: Calculator,
    measurements: Mapping[str, Measurement],
    sex: Mapping[str, str],
    rng: random.Random,
    difficulty: Difficulty,
) -> str:
    template = calculator.templates[0] if difficulty == "easy" else rng.choice(calculator.templates)
    sentences = [template.format(**measurements, **sex)]
    if difficulty == "hard":
        irrelevant = rng.sample(DISTRACTORS, rng.randint(1, 3))
        findings = [measure(quantity, quantity.units[0], rng) for quantity in irrelevant]
        listed = ", ".join(f"{finding.quantity.name} {finding}" for finding in findings)
        sentences.insert(rng.randint(0, 1), f"Other findings: {listed}.")
    decimals = calculator.decimals
    places = "a whole number" if decimals == 0 else f"{decimals} decimal{'s' if decimals > 1 else ''}"
    sentences.append(f"Calculate the {calculator.title} in {calculator.unit}, rounded to {places}.")
    return " ".join(sentences)


def _compact_text(calculator: Calculator, measurements: Mapping[str, Measurement], sex: Mapping[str, str]) -> str:
    words = [calculator.short, *(value[0].upper() for value in sex.values())]
    for measurement in measurements.values():
        unit = "" if measurement.unit is measurement.quantity.units[0] else measurement.unit.name
        words += [measurement.quantity.short, measurement.digits + unit.translate(_COMPACT_UNITS)]
    return " ".join(words)
