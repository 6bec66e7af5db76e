"""What people look at: `medarc_train report`, and what `watch` does once a second, for runs of many steps.

A step leaves a line of the trainer, a line of the orchestrator with 40 metrics, and a file with four kept rollouts.
`watch-open` reads the run at the start; `watch-look` is one look, after one more step.

    uv run --extra report benchmarks/growth/reports.py
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from measure import Action, Cost, measure_from_command_line, tens

START_S = 1_700_000_000.0
SHOWN = ("reward/mean", "reward/std", "reward/median", "decode_len/mean", "decode_len/min", "decode_len/max")
NAMES = (*SHOWN, "is_truncated/mean", "time/step", "progress/tokens", *(f"metrics/{number}" for number in range(31)))
ROLLOUTS = 4


def lines_of(step: int) -> Iterator[str]:
    at_s = START_S + 2 * step
    metrics = dict.fromkeys(NAMES, step % 97 / 97)
    yield json.dumps({"time": at_s, "source": "orchestrator", "step": step, **metrics})
    metrics = {"loss/mean": 1 / (step + 1), "entropy/mean": 0.5, "optim/lr": 1e-5, "time/step": 2.0}
    yield json.dumps({"time": at_s + 1, "source": "trainer", "step": step, **metrics})


def rollout(step: int, number: int) -> dict[str, Any]:
    return {
        "env": "letters",
        "row": step % 1000,
        "group": step,
        "rollout": number,
        "kept": ["random"],
        "prompt": [{"role": "user", "content": f"Sort the letters of word {step}."}],
        "completion": [{"role": "assistant", "content": f"The letters of {step} are {number}."}],
        "reward": number / ROLLOUTS,
        "advantage": 0.0,
        "metrics": {"right": 1.0},
        "is_truncated": False,
        "completion_tokens": 12,
    }


def prepare(with_rollouts: bool, size: int, folder: Path) -> None:
    from prime_rl.run.paths import RunPaths

    paths = RunPaths(folder / "run")
    paths.configs.mkdir(parents=True)
    paths.config("rl").write_text(f'max_steps = {2 * size}\n[model]\nname = "m"\n[trainer]\n[orchestrator]\n')
    with paths.metrics.open("w") as file:
        file.writelines(f"{line}\n" for step in range(size) for line in lines_of(step))
    if with_rollouts:
        samples = paths.orchestrator.samples
        samples.mkdir(parents=True)
        for step in range(size):
            kept = [json.dumps(rollout(step, number)) for number in range(ROLLOUTS)]
            (samples / f"step_{step}.jsonl").write_text("\n".join(kept) + "\n")


def begin_report(size: int, folder: Path) -> Action:
    from medarc_rl.report.charts import Group
    from medarc_rl.report.write import write_report
    from prime_rl.history.run import RunHistory

    def work() -> None:
        run = RunHistory.open(folder / "run")
        written = write_report(
            [Group("run", (run,), 0)], folder / "page", None, with_rollouts=True, with_pictures=False
        )
        assert written.page.stat().st_size

    return work


def begin_watch(is_open: bool, size: int, folder: Path) -> Action:
    from prime_rl.history.run import RunHistory
    from prime_rl.watch.facts import Reader

    def opened() -> Reader:
        return Reader(RunHistory.open(folder / "run"))

    def open_and_look() -> None:
        opened().read()

    if is_open:
        return open_and_look
    reader = opened()
    reader.read()

    def look() -> None:
        # Each run of the same size adds one.
        with reader.history.paths.metrics.open("a") as file:
            file.writelines(f"{line}\n" for line in lines_of(reader.history.steps_done))
        reader.read()

    return look


COSTS = [
    Cost("report", "steps", tens(2, 6), begin_report, partial(prepare, True)),
    Cost("watch-open", "steps", tens(2, 6), partial(begin_watch, True), partial(prepare, False)),
    Cost("watch-look", "steps", tens(2, 6), partial(begin_watch, False), partial(prepare, False)),
]

if __name__ == "__main__":
    measure_from_command_line(__doc__, COSTS)
