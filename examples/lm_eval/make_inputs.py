"""Make the questions of the two tasks in this folder.

    uv run python examples/lm_eval/make_inputs.py

The files are committed, and come out the same on every machine; a test compares them.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path
from typing import Any

from med_calc.questions import Question, make_questions

NUM_QUESTIONS = 100
NUM_EXAMPLES = 8
NUM_CHOICES = 4
SEED = 11
"""Not the seed of the environment nor of the demonstrations in `examples/med_calc`."""

MEANINGS = {
    "anemia": "a lack of red blood cells",
    "anuria": "no production of urine",
    "apnea": "a pause in breathing",
    "arthritis": "inflammation of joints",
    "bradycardia": "a slow heart rate",
    "cholecystitis": "inflammation of the gallbladder",
    "conjunctivitis": "inflammation of the lining of the eye",
    "cyanosis": "a blue colour of the skin",
    "cystitis": "inflammation of the bladder",
    "dermatitis": "inflammation of the skin",
    "diplopia": "double vision",
    "dysphagia": "difficulty in swallowing",
    "dyspnea": "difficulty in breathing",
    "dysuria": "pain when passing urine",
    "edema": "swelling from fluid in tissue",
    "encephalitis": "inflammation of the brain",
    "epistaxis": "a bleeding nose",
    "erythema": "redness of the skin",
    "gastritis": "inflammation of the stomach",
    "hematuria": "blood in the urine",
    "hemoptysis": "coughing up blood",
    "hepatitis": "inflammation of the liver",
    "hyperglycemia": "a high level of sugar in the blood",
    "hyperkalemia": "a high level of potassium in the blood",
    "hypertension": "high blood pressure",
    "hypoglycemia": "a low level of sugar in the blood",
    "hyponatremia": "a low level of sodium in the blood",
    "hypotension": "low blood pressure",
    "hypothermia": "a low body temperature",
    "hypoxemia": "a low level of oxygen in the blood",
    "jaundice": "a yellow colour of the skin",
    "leukocytosis": "a high number of white blood cells",
    "meningitis": "inflammation of the membranes around the brain",
    "myalgia": "pain in muscles",
    "nephritis": "inflammation of the kidney",
    "neuralgia": "pain along a nerve",
    "osteoporosis": "loss of bone density",
    "otitis": "inflammation of the ear",
    "pancreatitis": "inflammation of the pancreas",
    "pneumonia": "infection of the lung",
    "polydipsia": "excessive thirst",
    "polyuria": "production of much urine",
    "pruritus": "itching",
    "rhinitis": "inflammation of the lining of the nose",
    "splenomegaly": "an enlarged spleen",
    "syncope": "fainting",
    "tachycardia": "a fast heart rate",
    "tachypnea": "fast breathing",
    "thrombocytopenia": "a low number of platelets",
    "tinnitus": "ringing in the ears",
}


def terms() -> list[dict[str, Any]]:
    """One row for each term: its meaning among three others."""
    rng = random.Random(SEED)
    rows = []
    for term, meaning in MEANINGS.items():
        others = rng.sample([other for other in MEANINGS.values() if other != meaning], NUM_CHOICES - 1)
        choices = [meaning, *others]
        rng.shuffle(choices)
        rows.append({"term": term, "choices": choices, "answer": choices.index(meaning)})
    return rows


def working(question: Question) -> str:
    """The steps of a calculation, as `140-104=36 36-24=12`: one operation each, the result last."""
    values = [int(measurement.shown) for measurement in question.measurements.values()]
    if question.calculator == "anion_gap":
        sodium, chloride, bicarbonate = values
        gap = sodium - chloride
        return f"{sodium}-{chloride}={gap} {gap}-{bicarbonate}={gap - bicarbonate}"
    systolic, diastolic = values
    total = systolic + 2 * diastolic
    return f"2*{diastolic}={2 * diastolic} {2 * diastolic}+{systolic}={total} {total}/3={round(total / 3)}"


def calculations(count: int, seed: int) -> list[dict[str, Any]]:
    questions = make_questions(["anion_gap", "map"], count, seed, "easy", "compact")
    return [{"question": question.text, "working": working(question)} for question in questions]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--to", type=Path, default=Path(__file__).parent, help="folder to write to (default: here)")
    folder: Path = parser.parse_args().to
    files = {
        "med_terms.jsonl": terms(),
        "med_arithmetic.jsonl": calculations(NUM_QUESTIONS, SEED),
        "med_arithmetic_examples.jsonl": calculations(NUM_EXAMPLES, SEED + 1),
    }
    for name, rows in files.items():
        (folder / name).write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")


if __name__ == "__main__":
    main()
