"""Make the demonstrations of `sft_cpu.toml`, and the right answers of `sft_eval_cpu.toml`.

    uv run python examples/med_calc/make_inputs.py

Both files are committed, and come out the same on every machine; a test compares them.

Each demonstration shows its working. One in four is right. The others make a mistake that people make: an anion gap
without bicarbonate, a mean arterial pressure that counts systolic instead of diastolic pressure twice. A model that
imitates them is right about as often; to prefer what is right is left to reinforcement learning, or to right answers.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

from med_calc.questions import Question, make_questions

NUM_DEMONSTRATIONS = 8000
NUM_RIGHT = 800
SHARE_RIGHT = 0.25
SEED = 7
"""Not the environment's own, so that its questions are other ones, as far as there are others."""


def working(question: Question, right: bool) -> str:
    """The steps of a calculation, as `140-104=36 36-24=12`: one operation each, the result last."""
    values = [int(measurement.shown) for measurement in question.measurements.values()]
    if question.calculator == "anion_gap":
        sodium, chloride, bicarbonate = values
        first = f"{sodium}-{chloride}={sodium - chloride}"
        return f"{first} {sodium - chloride}-{bicarbonate}={sodium - chloride - bicarbonate}" if right else first
    once, twice = values if right else reversed(values)
    total = once + 2 * twice
    return f"2*{twice}={2 * twice} {2 * twice}+{once}={total} {total}/3={round(total / 3)}"


def demonstrations(count: int, share_right: float) -> list[dict[str, list[dict[str, str]]]]:
    """Rows of `prompt` and `completion` messages, about questions that the environment never evaluates on."""
    rng = random.Random(SEED)
    rows = []
    for question in make_questions(["anion_gap", "map"], count, SEED, "easy", "compact", "train"):
        reply = working(question, right=rng.random() < share_right)
        prompt = [{"role": "user", "content": question.text}]
        rows.append({"prompt": prompt, "completion": [{"role": "assistant", "content": reply}]})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--to", type=Path, default=Path(__file__).parent, help="folder to write to (default: here)")
    folder: Path = parser.parse_args().to
    files = {"demonstrations": (NUM_DEMONSTRATIONS, SHARE_RIGHT), "right_answers": (NUM_RIGHT, 1.0)}
    for name, (count, share_right) in files.items():
        lines = (json.dumps(row) for row in demonstrations(count, share_right))
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
