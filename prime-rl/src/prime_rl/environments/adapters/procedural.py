"""Makes and scores rows of reasoning-gym: `python -m` this module reads a config and writes rows.

A row keeps the package's entry as a Python literal, because JSON turns tuples into lists, which some scorers compare.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import json
import random
import sys
from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any

from prime_rl.environments.rewards.text import without_thinking
from prime_rl.utils.errors import UserError


def reasoning_gym_score(completion_text: str, gym_task: str, config: str, entry: str) -> float:
    """The package's score, 0 to 1, of the last `<answer>` after a thinking block."""
    from reasoning_gym.utils import extract_answer

    dataset = _dataset(gym_task, config)
    return float(dataset.score_answer(extract_answer(without_thinking(completion_text)), ast.literal_eval(entry)))


def warm_up() -> None:
    """Import the package before the time of a call counts."""
    import reasoning_gym  # noqa: F401


@functools.lru_cache(maxsize=64)
def _dataset(task: str, config: str) -> Any:
    import reasoning_gym

    return reasoning_gym.create_dataset(task, **json.loads(config))


def rows_of(config: Mapping[str, Any], size: int, seed: int) -> list[dict[str, str]]:
    """Make rows of all tasks, drawn by weight.

    Raises:
        UserError: a task does not exist, or refuses its settings.
    """
    tasks = config["datasets"] or [{"name": config["task"], "weight": 1.0, "config": config["config"]}]
    settings = [json.dumps({**task["config"], "seed": seed, "size": size}, sort_keys=True) for task in tasks]
    datasets = [_checked(task["name"], each) for task, each in zip(tasks, settings, strict=True)]
    weights = [task["weight"] for task in tasks]
    draw = random.Random(seed)
    counts = [0] * len(tasks)
    rows = []
    for _ in range(size):
        which = draw.choices(range(len(tasks)), weights)[0]
        entry = _plain(datasets[which][counts[which]])
        counts[which] += 1
        text = repr(entry)
        if ast.literal_eval(text) != entry:
            raise UserError(f"the task {tasks[which]['name']!r} makes rows that cannot be stored as JSON text")
        row = {"question": str(entry["question"]), "answer": str(entry["answer"]), "entry": text}
        rows.append({"gym_task": tasks[which]["name"], "config": settings[which], **row})
    return rows


def _checked(task: str, config: str) -> Any:
    from reasoning_gym.factory import DATASETS

    if task not in DATASETS:
        near = get_close_matches(task, list(DATASETS), 1)
        raise UserError(f"no task {task!r}" + (f"; did you mean {near[0]!r}?" if near else ""))
    try:
        return _dataset(task, config)
    except (AssertionError, TypeError, ValueError) as error:
        raise UserError(f"the config of task {task!r} is not valid: {error}") from error


def _plain(value: Any) -> Any:
    """Convert to Python's own types: NumPy's strings and numbers have no literals."""
    if isinstance(value, dict):
        return {_plain(key): _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple | set):
        kind = next(each for each in (list, tuple, set) if isinstance(value, each))
        return kind(_plain(each) for each in value)
    if isinstance(value, str):
        return str(value)
    return value.item() if hasattr(value, "item") else value


def main() -> int:
    """Write the rows of a config from standard input. Returns the exit code."""
    config = json.loads(sys.stdin.read())
    with contextlib.redirect_stdout(sys.stderr):  # keeps output of tasks out of the rows
        from reasoning_gym.utils import SYSTEM_PROMPTS

        try:
            train = rows_of(config, config["size"], config["seed"])
            known = {row["question"] for row in train}
            held_out = rows_of(config, config["eval_size"], config["eval_seed"]) if config["eval_size"] else []
        except (UserError, ValueError, SyntaxError) as error:
            sys.stderr.write(f"{error}\n")
            return 1
    held_out = [row for row in held_out if row["question"] not in known]
    if config["eval_size"] and not held_out:
        sys.stderr.write("every question of the evaluation is also trained on: set eval_size = 0, or a smaller size\n")
        return 1
    json.dump({"system_prompt": SYSTEM_PROMPTS["default"], "train": train, "eval": held_out}, sys.stdout)
    return 0


if __name__ == "__main__":
    sys.exit(main())
