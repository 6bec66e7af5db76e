"""A verifiers environment: clinical calculations, checked by tolerance.

Questions are made from published formulas (`med_calc.formulas`) and realistic values; nothing is downloaded.
For teaching and measuring models. Not for the care of patients.
"""

from __future__ import annotations

from collections.abc import Sequence

import verifiers as vf
from datasets import Dataset

from med_calc.answers import closeness, parse_number
from med_calc.calculators import CALCULATORS
from med_calc.questions import Difficulty, Question, Style, make_questions

__all__ = ["CALCULATORS", "load_environment", "make_questions", "parse_number"]

EVAL_SEED_OFFSET = 1_000_000
SYSTEM_PROMPT = (
    "Solve the clinical calculation step by step. "
    "Then give the number alone, in the requested unit, in <{tag}></{tag}> tags."
)


def load_environment(
    calculators: Sequence[str] | None = None,
    num_examples: int = 2000,
    seed: int = 0,
    difficulty: Difficulty = "medium",
    style: Style = "text",
    answer_tag: str | None = "answer",
    partial_credit: float = 0.0,
) -> vf.Environment:
    """Build the environment.

    `calculators` names some of `CALCULATORS`; None is all. `difficulty` is easy, medium or hard and `style` text or
    compact (see `make_question`). There are a tenth as many eval questions, none of which is for training, whatever the
    other arguments are. The answer is read from
    `<answer_tag>…</answer_tag>`, which a system prompt asks for, else from the last number. A right answer has
    reward 1; a wrong one `partial_credit` (0 to below 1) times its closeness, by default 0.

    Raises:
        ValueError: an argument has a value that it cannot have.
    """
    names = list(CALCULATORS if calculators is None else calculators)
    _check(names, difficulty, style, partial_credit)
    num_eval_examples = max(num_examples // 10, len(names))
    system_prompt = SYSTEM_PROMPT.format(tag=answer_tag) if answer_tag is not None and style == "text" else None
    grader = _Grader(answer_tag, partial_credit)
    return vf.SingleTurnEnv(
        dataset=_as_dataset(make_questions(names, num_examples, seed, difficulty, style, "train")),
        eval_dataset=_as_dataset(
            make_questions(names, num_eval_examples, seed + EVAL_SEED_OFFSET, difficulty, style, "eval")
        ),
        system_prompt=system_prompt,
        rubric=vf.Rubric(funcs=[grader.score, grader.correct, grader.readable], weights=[1.0, 0.0, 0.0]),
    )


class _Grader:
    """The reward functions."""

    def __init__(self, answer_tag: str | None, partial_credit: float) -> None:
        self._answer_tag = answer_tag
        self._partial_credit = partial_credit

    def score(self, completion: vf.Messages, info: dict) -> float:
        """The reward."""
        closeness = self._closeness(completion, info)
        return 1.0 if closeness == 1.0 else self._partial_credit * closeness

    def correct(self, completion: vf.Messages, info: dict) -> float:
        """1.0 for an answer within the tolerance. Counted, not rewarded."""
        return float(self._closeness(completion, info) == 1.0)

    def readable(self, completion: vf.Messages) -> float:
        """1.0 when there is a number to check. Counted, not rewarded."""
        return float(self._value(completion) is not None)

    def _closeness(self, completion: vf.Messages, info: dict) -> float:
        value = self._value(completion)
        return 0.0 if value is None else closeness(value, info["expected"], info["tolerance"])

    def _value(self, completion: vf.Messages) -> float | None:
        return parse_number(vf.Parser().parse_answer(completion) or "", self._answer_tag)


def _check(names: Sequence[str], difficulty: str, style: str, partial_credit: float) -> None:
    unknown = sorted(set(names) - set(CALCULATORS))
    if unknown or not names:
        raise ValueError(f"calculators {unknown or 'is empty'}: there are {', '.join(CALCULATORS)}")
    if difficulty not in ("easy", "medium", "hard") or style not in ("text", "compact"):
        raise ValueError(f"difficulty {difficulty!r} is easy, medium or hard; style {style!r} is text or compact")
    if not 0 <= partial_credit < 1:
        raise ValueError(f"partial_credit {partial_credit} is at least 0 and below 1")


def _as_dataset(questions: Sequence[Question]) -> Dataset:
    return Dataset.from_list(
        [
            {
                "question": question.text,
                "answer": question.answer,
                "info": {
                    "calculator": question.calculator,
                    "expected": question.expected,
                    "tolerance": question.tolerance,
                },
            }
            for question in questions
        ]
    )
