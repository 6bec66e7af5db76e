"""Explains why every score is 0, and finds the built-in reward that fits the replies."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from prime_rl.environments.rewards.text import accepted_answers, last_answer_tag, last_boxed, without_thinking
from prime_rl.utils.errors import one_line

MAX_REPLIES = 100
"""Number of replies that other rewards score. Enough to choose one, and done in a second."""
_SHOWN_CHARACTERS = 60
_TRIED_CHARACTERS = 8_000
_READS = {
    "exact_match": "compares the whole reply with the answer",
    "multiple_choice": "reads a letter",
    "numeric": "reads the last number with its unit",
    "math": "reads \\boxed{} or the last expression",
    "gsm8k": "reads the last number",
}


@dataclass(frozen=True, slots=True)
class Reply:
    """A completion that scored 0."""

    text: str
    columns: Mapping[str, Any]
    """Those of its row."""
    is_truncated: bool = False


def why_all_zero(replies: Sequence[Reply], used: Collection[str]) -> str:
    """One line: what most replies lack, or the reward that fits most of them. `used` names the rewards that scored."""
    reasons = [*_missing(replies, used), *_fitting(replies, used)] or [_unread(replies, used)]
    return f"all {len(replies)} scores are 0: {'; '.join(reasons)}"


def _missing(replies: Sequence[Reply], used: Collection[str]) -> Iterator[str]:
    """What no reward can make up for, if half of the replies or rows lack it."""
    counts = {
        "were cut off at their length limit, before an answer: raise sampling.max_tokens": [
            each.is_truncated for each in replies
        ],
        "never end their thinking (no </think>), so they have no answer": [
            bool(each.text.strip()) and not without_thinking(each.text) for each in replies
        ],
        "are empty": [not each.text.strip() for each in replies],
    }
    for what, found in counts.items():
        if 2 * sum(found) >= len(replies):
            yield f"{sum(found)} of {len(replies)} replies {what}"
    instructions = ("ground_truth", "instruction_id_list", "answer")
    given = any(each.columns.get(name) for each in replies for name in instructions)
    if set(used) & {"ifeval", "if_multi"} and not given:
        yield "the rows have no column ground_truth or instruction_id_list with instructions"


def _fitting(replies: Sequence[Reply], used: Collection[str]) -> Iterator[str]:
    """The other reward that scores most, if it scores anything."""
    tried = [each for each in replies[:MAX_REPLIES] if each.columns.get("answer") not in (None, "")]
    right = {name: [each for each in tried if score(each)] for name, score in _others().items() if name not in used}
    if not any(right.values()):
        return
    best = max(right, key=lambda name: len(right[name]))
    now = " and ".join(f"{name}{f' {_READS[name]}' if name in _READS else ''}" for name in sorted(used)) or "the reward"
    yield (
        f"{best} {_READS[best]} and would score {len(right[best])} of {len(tried)} as right, while {now}: use "
        f'rewards = ["{best}"]; for example, {_shown(right[best][0])}'
    )


def _others() -> dict[str, Callable[[Reply], float]]:
    # Imported here: pint takes a second, and most evaluations never need it.
    from prime_rl.environments.rewards.answers import exact_match, gsm8k
    from prime_rl.environments.rewards.choices import multiple_choice
    from prime_rl.environments.rewards.units import numeric

    def of(score: Callable[..., float], *names: str) -> Callable[[Reply], float]:
        def tried(reply: Reply) -> float:
            given = {name: reply.columns[name] for name in ("answer", *names) if reply.columns.get(name) is not None}
            return score(reply.text[-_TRIED_CHARACTERS:], **given)

        return tried

    return {
        "multiple_choice": of(multiple_choice, "choices"),
        "numeric": of(numeric, "unit"),
        "gsm8k": of(gsm8k),
        "exact_match": of(exact_match),
    }


def _unread(replies: Sequence[Reply], used: Collection[str]) -> str:
    """What the replies look like, if no other reward fits either."""
    tags = sum(last_answer_tag(each.text) is not None for each in replies)
    boxes = sum(last_boxed(each.text) is not None for each in replies)
    named = ", ".join(f"{name} ({_READS[name]})" if name in _READS else name for name in sorted(used))
    return (
        f"no answer is right or in the form that {named or 'the reward functions'} can read. {tags} of {len(replies)} "
        f"replies have <answer>…</answer>, {boxes} have \\boxed{{…}}; the first: {_shown(replies[0])}. Ask for a form "
        "in the prompt (template, system_prompt), or choose a reward that reads this one (docs/rewards.md)"
    )


def _shown(reply: Reply) -> str:
    text = one_line(without_thinking(reply.text))
    short = text if len(text) <= _SHOWN_CHARACTERS else f"…{text[-_SHOWN_CHARACTERS:]}"
    answers = [one_line(str(each)) for each in accepted_answers(reply.columns.get("answer"))]
    return f"the answer {' or '.join(map(repr, answers[:3]))}, the reply {short!r}"
