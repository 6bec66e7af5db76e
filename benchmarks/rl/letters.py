"""The benchmark's task: write many `e`. Prompts and reward for both sides, and a verifiers environment with them.

Imports verifiers only when it is needed, because TRL's environment does not have it.
"""

from __future__ import annotations

import random
from typing import Any

ROWS, PROMPT_CHARACTERS = 512, 24
LETTER = "e"


def prompts() -> list[str]:
    """Texts of one length, the same in every call."""
    draw = random.Random(0)
    return ["".join(draw.choices("abcdefghijklmnopqrstuvwxyz ", k=PROMPT_CHARACTERS)) for _ in range(ROWS)]


def share_of_letter(text: str) -> float:
    """The reward, 0 to 1."""
    return text.count(LETTER) / max(len(text), 1)


def reward(completion: list[dict[str, Any]]) -> float:
    """The reward of a completion, which verifiers and TRL pass as a list of messages."""
    return share_of_letter(completion[-1]["content"] or "")


def load_environment() -> Any:
    """The environment `letters`."""
    import verifiers as vf
    from datasets import Dataset

    dataset = Dataset.from_dict({"question": prompts(), "answer": [""] * ROWS})
    return vf.SingleTurnEnv(dataset=dataset, rubric=vf.Rubric(funcs=[reward]))
