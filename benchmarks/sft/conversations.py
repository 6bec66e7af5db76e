"""Makes the benchmark's conversations: fixed seed, lengths as in real chat data, ChatML text."""

from __future__ import annotations

import json
import random
from pathlib import Path

WORDS = (
    "the of and to in a is that for it was on are as with his they at be this from have or by one had not but what "
    "all were when we there can an your which their said if do will each about how up out them then she many some so "
    "these would other into has more her two like him see time could no make than first been its who now people my "
    "made over did down only way find use may water long little very after words called just where most know get "
    "through back much before go good new write our used me man too any day same right look think also around another "
    "came come work three word must because does part even place well such here take why things help put years "
    "different away again off went old number great tell men say small every found still between name should home big "
    "give air line set own under read last never us left end along while might next sound below saw something thought "
    "both few those always looked show large often together asked house world going want school important until form "
    "food keep children feet land side without boy once animals life enough took sometimes four head above kind began "
    "almost live page got earth patient dose blood kidney pressure heart treatment risk trial weeks symptoms history "
    "medication test result acute "
).split()
MEDIAN_WORDS, SPREAD = 120, 0.75
"""Number of words of an answer: log-normal, like lengths of human answers."""


def write_conversations(file: Path, count: int, seed: int, *, words: tuple[int, int]) -> None:
    """`count` JSONL rows with a `text` in ChatML, each with a number of words between `words`."""
    draw = random.Random(seed)
    with file.open("w") as lines:
        for _ in range(count):
            total = min(max(round(draw.lognormvariate(0, SPREAD) * MEDIAN_WORDS), words[0]), words[1])
            asked = min(max(total // 5, 4), 60)
            turns = [("user", _sentence(draw, asked)), ("assistant", _sentence(draw, total - asked))]
            text = "\n".join(f"<|im_start|>{role}\n{content}<|im_end|>" for role, content in turns)
            lines.write(json.dumps({"text": text}) + "\n")


def _sentence(draw: random.Random, words: int) -> str:
    return " ".join(draw.choices(WORDS, k=words)).capitalize() + "."
