"""Text against text: equal, or similar."""

from __future__ import annotations

import re
import string
import unicodedata
from typing import Any

from rapidfuzz import fuzz

from prime_rl.environments.rewards.text import last_answer_tag, last_boxed, without_thinking

MAX_CHARS = 20_000
"""Of each text that is compared by similarity, whose cost is the product of both lengths."""


def exact_match(completion_text: str, answer: Any, normalize: bool = True) -> float:
    """1 if the answer of the completion is `answer`, or one of them if it is a list.

    The answer is the last `<answer>` or `\\boxed{}`, else the whole text without thinking. `normalize` ignores case,
    punctuation, articles and repeated spaces.
    """
    given = _given(completion_text)
    pairs = (_comparable(given, each) if normalize else (given.strip(), each.strip()) for each in _answers(answer))
    return float(any(one == other for one, other in pairs))


def fuzzy_match(completion_text: str, answer: Any, threshold: float | None = None) -> float:
    """Similarity of the answer to `answer`, 0 to 1 (indel ratio), the best one of a list.

    With `threshold`, 1 from there on and 0 below.
    """
    pairs = (_comparable(_given(completion_text), each) for each in _answers(answer))
    ratio = max((fuzz.ratio(one[:MAX_CHARS], other[:MAX_CHARS]) / 100 for one, other in pairs), default=0.0)
    return ratio if threshold is None else float(ratio >= threshold)


def normalized(text: str) -> str:
    """Lower case, no punctuation, no articles, single spaces."""
    text = unicodedata.normalize("NFKC", text).casefold()
    text = "".join(" " if each in string.punctuation else each for each in text)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", text).split())


def _comparable(given: str, answer: str) -> tuple[str, str]:
    """Both normalized. An answer that would be empty then, such as `A` or `+`, stays: no answer would equal it."""
    if normal := normalized(answer):
        return normalized(given), normal
    return given.strip().casefold(), answer.strip().casefold()


def _given(completion: str) -> str:
    text = without_thinking(completion)
    for part in (last_answer_tag(text), last_boxed(text)):
        if part is not None:
            return part
    return text


def _answers(answer: Any) -> list[str]:
    return [str(each) for each in answer] if isinstance(answer, list | tuple) else [str(answer)]
