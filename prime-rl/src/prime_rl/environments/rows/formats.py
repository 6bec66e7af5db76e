"""Named formats of rows, as in AReaL's `path` and `type` and in rlvr-experiments' registry.

A format defines question, answer, id, reward function and the reward function's further inputs. It never reads a file.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from prime_rl.utils.conversations import question_of

Row = Mapping[str, Any]
BOXED = "Put the final answer in \\boxed{{}}."
SOLVE = "{question}\n\n" + BOXED
TRAINED_ELSEWHERE = {
    "sft": "`medarc_train sft`, whose key is data.name",
    "rw": "a reward model, which is not trained here",
    "dpo": "`medarc_train dpo`, whose key is data.name",
}
"""AReaL's other types, and the command for each."""
_IDS = ("prompt_id", "id", "task_id", "problem_id", "unique_id", "uid")
"""Columns that usually identify a row, the most common first."""
_QUESTIONS = ("question", "prompt", "problem", "messages", "conversations", "instruction", "input")
_ANSWERS = ("answer", "solution", "ground_truth", "label", "target", "output", "completion")


class MissingColumn(ValueError):
    """A row lacks what its format needs. The message is one line."""


@dataclass(frozen=True, slots=True)
class Format:
    """Interpretation of the rows of a dataset."""

    name: str
    question: Callable[[Row], Any]
    """Takes the question from a row: text, or messages."""
    answer: Callable[[Row], Any]
    template: str | None = None
    """Text around the question, with names of columns."""
    id_column: str | None = None
    """None looks for a column with a common name."""
    id_prefix: str = ""
    """Prefix of every id."""
    reward: str = "exact_match"
    """Registered reward function that fits the answer. A row may choose another one."""
    reward_of: Callable[[Row], str] | None = None
    is_of_sft: bool = False
    """Whether rows are those of SFT, with its columns `system`, `tools` and `chat_template_kwargs`."""
    extra: Callable[[Row], Mapping[str, Any]] | None = None
    """Takes the values that the reward function needs besides the answer."""
    aliases: tuple[str, ...] = ()
    """Parts of a path that select this format, besides its name."""
    makes_rows: bool = False
    """Whether the rows are generated, without a source."""


def column(*names: str) -> Callable[[Row], Any]:
    """Make a function that takes the first of these columns that a row has."""

    def take(row: Row) -> Any:
        for name in names:
            if row.get(name) is not None:
                return row[name]
        raise MissingColumn(f"has none of the columns {', '.join(names)}; it has {', '.join(map(str, row))}")

    return take


def boxed(text: str) -> str | None:
    """The contents of the last `\\boxed{…}` of a text, with balanced braces."""
    start = max(text.rfind("\\boxed{"), text.rfind("\\fbox{"))
    if start < 0:
        return None
    depth, begin = 0, text.index("{", start) + 1
    for position in range(begin - 1, len(text)):
        depth += {"{": 1, "}": -1}.get(text[position], 0)
        if depth == 0:
            return text[begin:position]
    return None


def _gsm8k_answer(row: Row) -> str:
    text = str(column("answer")(row))
    return text.rpartition("####")[2].strip().replace(",", "")


def _math_answer(row: Row) -> str:
    if row.get("answer") is not None:
        return str(row["answer"])
    solution = str(column("solution")(row))
    return boxed(solution) or solution


def _torl_answer(row: Row) -> str:
    model = row.get("reward_model")
    value = model.get("ground_truth") if isinstance(model, Mapping) else column("answer", "solution")(row)
    text = str(value)
    return text if "\\boxed" in text else f"\\boxed{{{text}}}"


def decoded(value: Any) -> Any:
    """Decode a value that a columnar file holds as JSON or as a Python literal."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        pass
    try:
        return ast.literal_eval(value)
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return value


def _columns(*names: str) -> Callable[[Row], Mapping[str, Any]]:
    return lambda row: {name: decoded(row[name]) for name in names if row.get(name) is not None}


def _mbpp_question(row: Row) -> str:
    tests = decoded(row.get("test_list")) or []
    shown = "\n".join(map(str, tests[:3]))
    return f"{column('text', 'prompt')(row)}\n\nYour code should pass these tests:\n\n{shown}\n"


def _apps_question(row: Row) -> str:
    starter = str(row.get("starter_code") or "").strip()
    begin = f"\n\nBegin with this code:\n```python\n{starter}\n```" if starter else ""
    return f"{column('question', 'problem')(row)}{begin}"


def _allenai_part(row: Row) -> str:
    part = str(row.get("dataset") or "").lower()
    return {"gsm8k": "allenai_gsm8k", "math": "minerva_math", "ifeval": "ifeval"}.get(part, "math")


def _any_question(row: Row) -> Any:
    """The question of a row in a common format, as SFT reads the same row."""
    named = next((name for name in _QUESTIONS if row.get(name) is not None), None)
    return question_of(row) if named == "instruction" else column(*_QUESTIONS)(row)


def _dummy(row: Row) -> str:
    return "What is 2 + 3?"


FORMATS: tuple[Format, ...] = (
    Format("gsm8k", column("question"), _gsm8k_answer, "{question}\n" + BOXED, id_prefix="gsm8k_", reward="gsm8k"),
    Format("deepscaler", column("problem", "question"), _math_answer, SOLVE, id_prefix="deepscaler_", reward="math"),
    Format("beyondaime", column("problem", "question"), _math_answer, SOLVE, id_prefix="beyondaime_", reward="math"),
    Format("aime", column("problem", "Problem", "question"), lambda row: str(column("answer", "Answer")(row)), SOLVE,
           id_prefix="aime_", reward="math"),
    Format("geometry3k", column("problem", "question"), column("answer"), SOLVE, id_prefix="geometry3k_",
           reward="geometry3k"),
    Format("humaneval", column("prompt"), lambda row: str(row.get("canonical_solution") or ""), id_column="task_id",
           reward="humaneval", extra=_columns("prompt", "test", "entry_point")),
    Format("mbpp", _mbpp_question, lambda row: str(row.get("code") or ""), id_column="task_id", id_prefix="mbpp_",
           reward="mbpp", extra=_columns("test_list", "test_setup_code", "test_imports", "challenge_test_list")),
    Format("apps", _apps_question, lambda row: "", id_column="problem_id", id_prefix="apps_", reward="apps",
           extra=_columns("input_output", "starter_code")),
    Format("if_multi_constraints", column("messages", "prompt"), lambda row: "", id_prefix="if_multi_",
           reward="if_multi_constraints", extra=_columns("ground_truth", "constraint", "constraint_type"),
           aliases=("if_multi",)),
    Format("ifeval", column("messages", "prompt"), lambda row: "", id_prefix="ifeval_", reward="ifeval",
           extra=_columns("ground_truth", "constraint", "constraint_type", "instruction_id_list", "kwargs"),
           aliases=("rlvr-ifeval",)),
    Format("allenai_rlvr", column("messages", "prompt"), lambda row: str(row.get("ground_truth") or ""),
           id_prefix="allenai_", reward="math", reward_of=_allenai_part,
           extra=_columns("ground_truth", "constraint", "constraint_type", "dataset"), aliases=("rlvr-gsm-math-if",)),
    Format("clevr_count_70k", column("problem", "question"), column("answer"),
           "{question}\nAnswer with the number in brackets, as in [3].", id_prefix="clevr_", reward="clevr_count",
           aliases=("clevr",)),
    Format("torl_data", column("prompt", "question", "problem"), _torl_answer, id_prefix="torl_", reward="math",
           aliases=("torl",)),
    Format("math", column("problem", "question"), _math_answer, SOLVE, id_prefix="math_", reward="math"),
    Format("dummy", _dummy, lambda row: "5", id_column="row", id_prefix="dummy_", reward="math", makes_rows=True),
    Format("jsonl", _any_question, column(*_ANSWERS), is_of_sft=True, aliases=("rows",)),
)  # fmt: skip
"""A path is matched in this order, so longer names come before names that they contain."""


def format_names() -> list[str]:
    """Names of all formats."""
    return sorted(each.name for each in FORMATS)


def find_format(kind: str | None, path: str | None) -> Format:
    """Find the format that `type` names; without one, and for AReaL's `rl`, the first whose name is part of the path.

    Raises:
        ValueError: there is no such format.
    """
    if kind is not None and kind != "rl":
        wanted = kind.replace("-", "_").lower()
        for each in FORMATS:
            if wanted in (each.name, *each.aliases):
                return each
        near = get_close_matches(wanted, format_names(), 1)
        advice = f"did you mean {near[0]!r}? Known" if near else "known"
        raise ValueError(f"unknown format {kind!r}; {advice} are {', '.join(format_names())}, and rl")
    name = f"_{words(path or '')}_"
    for each in FORMATS:
        if any(f"_{words(alias)}_" in name for alias in (each.name, *each.aliases) if each.name != "jsonl"):
            return each
    if kind == "rl":
        raise ValueError(
            f"type = 'rl' needs a path with one of {', '.join(format_names())}; or set type to one of them"
        )
    return FORMATS[-1]


def words(text: str) -> str:
    """Lower-case letters and digits, joined by single underscores: `counting_probability`."""
    return re.sub(r"[^0-9a-z]+", "_", text.lower()).strip("_")


def own_id(row: Row, name: str | None) -> str | None:
    """The id in the source, on one line as curricula need it. None without one."""
    for each in (name,) if name is not None else _IDS:
        value = row.get(each)
        if isinstance(value, str | int) and not isinstance(value, bool) and str(value).strip():
            return " ".join(str(value).split())
    return None
