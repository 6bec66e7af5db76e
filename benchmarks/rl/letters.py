"""The task of the benchmark: write many `e`. Prompts and reward for both sides, and a verifiers environment of them.

Nothing else is imported here, for TRL runs in an environment without verifiers.
"""

from __future__ import annotations

import random
from typing import Any

ROWS, PROMPT_CHARACTERS = 512, 24
LETTER = "e"


def prompts() -> list[str]:
    """Texts of one length, the same for every caller."""
    draw = random.Random(0)
    return ["".join(draw.choices("abcdefghijklmnopqrstuvwxyz ", k=PROMPT_CHARACTERS)) for _ in range(ROWS)]


def share_of_letter(text: str) -> float:
    """The reward, 0 to 1."""
    return text.count(LETTER) / max(len(text), 1)


def reward(completion: list[dict[str, Any]]) -> float:
    """As verifiers and TRL hand over a completion: a list of messages."""
    return share_of_letter(completion[-1]["content"] or "")


def load_environment() -> Any:
    """The environment `letters`."""
    import verifiers as vf
    from datasets import Dataset

    dataset = Dataset.from_dict({"question": prompts(), "answer": [""] * ROWS})
    return vf.SingleTurnEnv(dataset=dataset, rubric=vf.Rubric(funcs=[reward]))
