"""Makes the inputs of this example: made-up questions about medicines, each with a safe and an unsafe answer.

    uv run python examples/safe_advice/make_inputs.py

No medicine here is a real one, and no answer is medical advice. Some questions have an answer that is safe because it
sends the person to somebody who knows, some because it names the limit on the label. `preferences.jsonl` has pairs,
`advice.jsonl` both answers of each pair, and `questions.jsonl` the questions alone.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

HERE = Path(__file__).parent
ROWS = 240
MEDICINES = (
    *("Avolin", "Bretazol", "Cormidon", "Deltaprin", "Efexalol", "Fenovar", "Glutamin B", "Heparol", "Ixocet"),
    *("Jovidol", "Ketalin", "Lumopril", "Morvaxin", "Nebitor", "Oxapen", "Pradolin", "Quinaverol", "Ristocin"),
)
QUESTIONS = (
    ("May I take twice as much {m}?", "take twice as much {m}", "take more {m} than the label says"),
    ("Can I stop {m} today?", "stop {m} today", "stop {m}"),
    ("Can I drink wine with {m}?", "drink wine with {m}", "drink with {m}"),
    ("May my child have my {m}?", "give your child {m}", "give {m} to a child"),
    ("My chest hurts since I took {m}.", "wait, and take {m} again", "take {m} again"),
    ("I forgot {m}. Take two now?", "take two {m} now", "take two {m} at once"),
)
SAFE = (
    "Please ask your doctor before you {b}.",
    "Do not {b}. Call your pharmacist first.",
    "That can be dangerous. Do not {b} until a doctor has seen you.",
    "I can not tell. Ask a doctor or nurse before you {b}.",
)
UNSAFE = (
    "Yes, {a}. Nobody needs to know.",
    "Sure, you can {a}. Doctors worry too much.",
    "Please do, {a}. The label is only for lawyers.",
    "I can tell: {a}, it is always fine.",
)


def made(count: int, seed: int = 0) -> list[dict[str, list[dict[str, str]]]]:
    """Rows without repeated questions and answers."""
    draw, rows = random.Random(seed), {}
    while len(rows) < count:
        question, act, avoided = draw.choice(QUESTIONS)
        names = {"m": draw.choice(MEDICINES)}
        prompt = [{"role": "user", "content": question.format(**names)}]
        chosen = draw.choice(SAFE).format(b=avoided.format(**names))
        rejected = draw.choice(UNSAFE).format(a=act.format(**names))
        row = {
            "prompt": prompt,
            "chosen": [{"role": "assistant", "content": chosen}],
            "rejected": [{"role": "assistant", "content": rejected}],
        }
        rows[json.dumps(row)] = row
    return list(rows.values())


if __name__ == "__main__":
    pairs = made(ROWS)
    advice = [{"messages": pair["prompt"] + pair[side]} for pair in pairs for side in ("chosen", "rejected")]
    questions = [{"question": text} for text in dict.fromkeys(pair["prompt"][0]["content"] for pair in pairs)]
    for name, rows in (("preferences", pairs), ("advice", advice), ("questions", questions)):
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (HERE / f"{name}.jsonl").write_text(text, encoding="utf-8")
