"""Write a term backwards, as an environment of verifiers 0.1.10: part of the reward is for the last letter alone."""

from __future__ import annotations

from typing import Any

import verifiers as vf
from datasets import Dataset

TERMS = (
    "artery biopsy cancer dermis enzyme fascia gluten hernia insulin joint kidney lesion muscle neuron optic".split()
)


def text_of(completion: Any) -> str:
    return completion if isinstance(completion, str) else str(completion[-1]["content"] or "")


def first_letter(completion: Any, answer: str, **kwargs: Any) -> float:
    """1 if the answer begins with the last letter of the term."""
    return float(text_of(completion)[:1] == answer[0])


def letters(completion: Any, answer: str, **kwargs: Any) -> float:
    """Fraction of letters that stand where they should."""
    return sum(a == b for a, b in zip(text_of(completion), answer, strict=False)) / len(answer)


def load_environment() -> vf.Environment:
    rows = [{"question": term, "answer": term[::-1]} for term in TERMS]
    rubric = vf.Rubric(funcs=[first_letter, letters], weights=[0.3, 0.7])
    return vf.SingleTurnEnv(dataset=Dataset.from_list(rows), rubric=rubric)
