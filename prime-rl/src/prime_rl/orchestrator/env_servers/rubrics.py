"""Reads which reward functions make up an environment's reward."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

import verifiers as vf


def reward_functions(rubric: vf.Rubric | None) -> dict[str, float]:
    """Weight of each reward function in the sum that is the reward, by name.

    A function of weight 0 is only measured. What verifiers itself measures, such as the number of turns, is left out.
    """
    weights: dict[str, float] = {}
    for part in leaves(rubric):
        for function, weight in zip(part.funcs, part.weights, strict=True):
            if weight or not str(getattr(function, "__module__", "")).startswith("verifiers."):
                weights[getattr(function, "__name__", repr(function))] = weight
    return weights


def leaves(rubric: vf.Rubric | None) -> Iterator[vf.Rubric]:
    """A rubric and all of its members."""
    if rubric is None:
        return
    members = list(getattr(rubric, "rubrics", []))
    members += [env.rubric for env in getattr(rubric, "env_map", {}).values()]
    yield rubric
    yield from chain.from_iterable(map(leaves, members))
