"""An agent that writes a text backwards, as a plain function: no environment library, only the OpenAI client.

A second call lets the model correct its first answer. Each call is rewarded by itself.
"""

from __future__ import annotations

import random
from difflib import SequenceMatcher
from typing import Any

TERMS = ("acid", "artery", "biopsy", "bone", "breath", "chronic", "colon", "cough", "fever", "graft", "kidney", "liver")


def texts(count: int = 200, seed: int = 0) -> list[dict[str, Any]]:
    """Rows of one or two terms."""
    rng = random.Random(seed)
    return [{"text": " ".join(rng.sample(TERMS, rng.randint(1, 2)))} for _ in range(count)]


async def agent(task: dict[str, Any], client: Any, model: str) -> dict[str, float]:
    """The reward of each completion by its id: how similar it is to the reversed text, 0 to 1."""
    rewards: dict[str, float] = {}
    messages = [{"role": "user", "content": task["text"]}]
    for _ in range(2):
        completion = await client.chat.completions.create(model=model, messages=messages)
        answer = completion.choices[0].message.content or ""
        rewards[completion.id] = SequenceMatcher(None, answer, task["text"][::-1]).ratio()
        if rewards[completion.id] == 1:
            break
        messages = [*messages, {"role": "assistant", "content": answer}, {"role": "user", "content": task["text"]}]
    return rewards
