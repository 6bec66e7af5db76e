"""Verdicts per second of reward functions: `uv run benchmarks/environments/verdicts.py [--workers 2] [--seconds 5]`."""

from __future__ import annotations

import argparse
import asyncio
import itertools
import time
from collections.abc import Sequence
from typing import Any

from prime_rl.environments.rewards.building import Rewards, build
from prime_rl.environments.rewards.pool import RewardPool

MATH = (
    (r"so it is \boxed{\frac{1}{2}}", "0.5"),
    (r"\boxed{(x+1)^2}", "x^2 + 2x + 1"),
    ("the answer is 42", "42"),
    (r"\boxed{[1, 2)}", "(1, 2]"),
    (r"\boxed{3\sqrt{2}}", r"\sqrt{18}"),
)
INSTRUCTIONS = {
    "instruction_id_list": [
        "punctuation:no_comma",
        "length_constraints:number_words",
        "keywords:existence",
        "language:response_language",
    ],
    "kwargs": [{}, {"num_words": 50, "relation": "at least"}, {"keywords": ["dose"]}, {"language": "en"}],
}
PROGRAM = "```python\ndef double(x):\n    return 2 * x\n```"
TESTS = [f"assert double({number}) == {2 * number}" for number in (0, 1, -5)]
CASES = {"inputs": ["1 2\n", "3 4\n", "5 6\n"], "outputs": ["3\n", "7\n", "11\n"]}
ADDER = "```python\nprint(sum(map(int, input().split())))\n```"
TASKS: dict[str, Sequence[tuple[str, dict[str, Any]]]] = {
    "math": [(text, {"answer": answer}) for text, answer in MATH],
    "numeric": [("It is 5.5 mmol/L", {"answer": "99 mg/dL", "substance": "glucose"})],
    "ifeval": [("The dose is small and the pain is gone. " * 30, INSTRUCTIONS)],
    "mbpp": [(PROGRAM, {"test_list": TESTS})],
    "apps": [(ADDER, {"input_output": CASES})],
}


async def measured(rewards: Rewards, rows: Sequence[tuple[str, dict[str, Any]]], seconds: float, at_once: int) -> float:
    """Verdicts per second with so many calls waiting."""
    cases, count = itertools.cycle(rows), 0
    start = time.perf_counter()

    async def caller() -> None:
        nonlocal count
        while time.perf_counter() - start < seconds:
            text, row = next(cases)
            await rewards.score("", [{"role": "assistant", "content": text}], row)
            count += 1

    await asyncio.gather(*(caller() for _ in range(at_once)))
    return count / (time.perf_counter() - start)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=5.0)
    options = parser.parse_args()
    pool = RewardPool(options.workers)
    try:
        for name, rows in TASKS.items():
            rewards = build([name], pool=pool)
            asyncio.run(measured(rewards, rows, 1.0, 4 * options.workers))
            speed = asyncio.run(measured(rewards, rows, options.seconds, 4 * options.workers))
            print(f"{name:10} {speed:8.0f} verdicts/s with {options.workers} workers")
    finally:
        pool.close()


if __name__ == "__main__":
    main()
