"""Reads what agents return: rewards of model calls, and the token sequences of a workflow, padded to one length."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any

MAX_REWARD = 1e15
"""The square of a larger one overflows float32, in which the trainer computes."""
REQUIRED = ("input_ids", "attention_mask", "loss_mask", "logprobs", "rewards")
UNKNOWN_VERSION = -1
"""Version of tokens that no policy sampled."""


class InvalidReward(ValueError):
    """What was given as a reward is none. The message is one line."""


def checked_reward(value: Any) -> float:
    """A reward as a float: any real number, also of NumPy, and booleans.

    Raises:
        InvalidReward: it is not a finite number of at most 1e15.
    """
    try:
        number = float(value if isinstance(value, Real) else _plain_number(value))
    except (OverflowError, TypeError, ValueError):
        number = math.nan
    if not abs(number) <= MAX_REWARD:
        shown = " ".join(repr(value).split())[:100]
        raise InvalidReward(f"the reward {shown} is not a finite number (at most {MAX_REWARD:g})")
    return number


def _plain_number(value: Any) -> Any:
    """What a tensor or array of one number holds; NaN for texts and everything else."""
    item = getattr(value, "item", None)
    if isinstance(value, str | bytes) or not callable(item):
        return math.nan
    try:
        return item()
    except (RuntimeError, TypeError, ValueError):
        return math.nan


def discounted(rewards: Sequence[float | None], discount: float) -> list[float]:
    """Returns of calls in the order of their answers: R_i = r_i + discount * R_(i+1). A call without reward has 0."""
    returns: list[float] = []
    following = 0.0
    for reward in reversed(rewards):
        following = (reward or 0.0) + discount * following
        returns.append(following)
    return returns[::-1]


def call_rewards(rewards: Sequence[float | None], discount: float) -> list[float] | None:
    """What each call of a rollout is worth; None if all calls share the rollout's reward.

    They share it if only the last call has a reward, and the discount is 1.
    """
    if len(rewards) < 2 or (discount == 1 and not any(rewards[:-1])):
        return None
    return discounted(rewards, discount)


class BadTensors(ValueError):
    """What a workflow returned is no trajectory. The message is one line."""


def read_sequences(tensors: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The B sequences without their padding, as lists: `ids`, `loss_mask`, `logprobs`, `versions`, and `reward`.

    All values but `rewards` [B] have the shape [B, L]; tensors, arrays and nested lists are read. `versions` may be
    missing.

    Raises:
        BadTensors: a key is missing, shapes differ, or a value cannot be trained on.
    """
    if missing := [name for name in REQUIRED if name not in tensors]:
        raise BadTensors(f"a trajectory lacks {', '.join(missing)}")
    if "multi_modal_input" in tensors:
        raise BadTensors("multi_modal_input: RL trains on text alone, not on images")
    names = [name for name in (*REQUIRED, "versions") if name in tensors and name != "rewards"]
    tables = {name: _table(name, tensors[name]) for name in names}
    rewards = _plain(tensors["rewards"])
    rewards = rewards if isinstance(rewards, list) else [rewards]
    shape = [len(row) for row in tables["input_ids"]]
    for name, table in tables.items():
        if [len(row) for row in table] != shape:
            raise BadTensors(f"{name} and input_ids differ in shape")
    if len(rewards) != len(shape):
        raise BadTensors(f"rewards has {len(rewards)} values for {len(shape)} sequences")
    return [_sequence({name: table[at] for name, table in tables.items()}, rewards[at]) for at in range(len(shape))]


def _plain(value: Any) -> Any:
    """Tensors and arrays as nested lists."""
    convert = getattr(value, "tolist", None)
    return convert() if callable(convert) else value


def _table(name: str, value: Any) -> list[list[Any]]:
    rows = _plain(value)
    if not isinstance(rows, list) or not rows or not all(isinstance(row, list) for row in rows):
        raise BadTensors(f"{name} does not have the shape [B, L]")
    return rows


def _sequence(row: Mapping[str, list[Any]], reward: Any) -> dict[str, Any]:
    kept = [at for at, flag in enumerate(row["attention_mask"]) if flag]
    ids = [row["input_ids"][at] for at in kept]
    if not ids or not all(type(token) is int and 0 <= token < 2**31 for token in ids):
        raise BadTensors("input_ids: whole numbers from 0, at least one in each sequence")
    mask = [bool(row["loss_mask"][at]) for at in kept]
    given = [row["logprobs"][at] for at in kept]
    if not all(isinstance(value, int | float) and math.isfinite(value) for value in given):
        raise BadTensors("logprobs: finite numbers")
    versions = [int(row["versions"][at]) if "versions" in row else UNKNOWN_VERSION for at in kept]
    try:
        value = checked_reward(reward)
    except InvalidReward as error:
        raise BadTensors(str(error)) from error
    logprobs = [float(value) if flag else 0.0 for value, flag in zip(given, mask, strict=True)]
    return {"ids": ids, "loss_mask": mask, "logprobs": logprobs, "versions": versions, "reward": value}
