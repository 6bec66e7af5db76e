"""Reads which reward functions make up an environment's reward."""

from __future__ import annotations

import inspect
import math
from collections.abc import Collection, Iterator
from difflib import get_close_matches

import verifiers as vf
from verifiers.types import TASK_INPUT_FIELDS

from prime_rl.orchestrator.guests.inside.reward_records import functions_with_weights, leaves

_OF_ROLLOUT = ("prompt", "completion", "answer", "state", "task", "info")
_OF_GROUP = ("prompts", "completions", "answers", "states", "tasks", "infos")
_SCORING = ("_call_individual_reward_func", "_call_group_reward_func", "score_objects", "group_score_objects")
"""Methods of verifiers 0.1.14 that choose a reward function's arguments by their names."""


_OPTIONAL = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)


def reward_functions(rubric: vf.Rubric | None) -> dict[str, float]:
    """Weight of each reward function in the sum that is the reward, by name; 0 for one that is only measured."""
    return dict(pair for part in leaves(rubric) for pair in functions_with_weights(part))


def weight_faults(rubric: vf.Rubric | None) -> Iterator[str]:
    """One line for each weight with which no reward would be a number."""
    for part in leaves(rubric):
        for function, weight in zip(part.funcs, part.weights, strict=True):
            if not isinstance(weight, int | float) or not math.isfinite(weight):
                name = getattr(function, "__name__", repr(function))
                yield f"the weight of reward function {name!r} is {weight!r}, not a finite number"


def argument_faults(rubric: vf.Rubric | None, columns: Collection[str]) -> Iterator[str]:
    """One line for each argument that a reward function requires and never gets, so that each of its calls would fail.

    `columns` are those of the dataset, which become arguments, too. A rubric that chooses arguments itself has none.
    """
    added = [name for name in columns if name not in TASK_INPUT_FIELDS]
    for part in leaves(rubric):
        own = [name for name in _SCORING if getattr(type(part), name) is not getattr(vf.Rubric, name)]
        if own or part.score_object_providers or part.group_score_object_providers:
            continue
        for function in part.funcs:
            base = _OF_GROUP if part._is_group_func(function) else (*_OF_ROLLOUT, *added)
            known = dict.fromkeys((*base, *part.class_objects))
            for each in inspect.signature(function).parameters.values():
                if each.name not in known and each.default is each.empty and each.kind not in _OPTIONAL:
                    near = get_close_matches(each.name, known, 1)
                    meant = f" (did you mean {near[0]!r}?)" if near else ""
                    name = getattr(function, "__name__", repr(function))
                    yield f"reward function {name!r} requires {each.name!r}{meant}, and gets only {', '.join(known)}"


def without_answers(rubric: vf.Rubric | None, columns: Collection[str]) -> list[str]:
    """Reward functions that require `answer` in an environment whose rows have none, and so always get an empty one."""
    functions = [function for part in leaves(rubric) for function in part.funcs] if "answer" not in columns else []
    parameters = [(function, inspect.signature(function).parameters.get("answer")) for function in functions]
    return [
        getattr(function, "__name__", repr(function))
        for function, found in parameters
        if found is not None and found.default is found.empty
    ]
