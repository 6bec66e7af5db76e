"""Samples and distributions every few steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from prime_rl.configs.shared import LogExtrasConfig, WandbConfig
from prime_rl.monitors.sinks import WandbMonitor
from prime_rl.orchestrator.batches.batch import build_batch
from prime_rl.orchestrator.reports.reporter import COLUMNS, MAX_SAMPLES, Extras
from prime_rl.orchestrator.rollouts.rollout import Group


class Recorder:
    """Records its calls."""

    def __init__(self) -> None:
        self.tables: list[tuple[str, Any, Any, int]] = []
        self.distributions: list[dict[str, list[float]]] = []

    def log_table(self, name, columns, rows, step) -> None:
        self.tables.append((name, columns, rows, step))

    def log_distributions(self, values, step) -> None:
        self.distributions.append(values)


@pytest.fixture
def batch(turn, rollout):
    message = [{"role": "assistant", "content": "olleh"}]
    return build_batch(
        [Group([rollout(turn([1], [2, 3]), reward=0.5, advantage=0.1, completion=message) for _ in range(20)])]
    )


def test_a_few_samples_and_all_rewards_are_sent_every_interval(batch) -> None:
    recorder = Recorder()
    extras = Extras(recorder, LogExtrasConfig(interval=2, samples=True))
    for step in range(4):
        extras.record(batch, step)
    assert [(name, step, len(rows)) for name, _, rows, step in recorder.tables] == [
        ("samples", 0, MAX_SAMPLES),
        ("samples", 2, MAX_SAMPLES),
    ]
    row = dict(zip(COLUMNS, recorder.tables[1][2][0], strict=True))
    assert (row["step"], row["task"], row["example_id"], row["input_ids"], row["reward"]) == (
        2,
        "letters",
        0,
        "[1, 2, 3]",
        0.5,
    )
    assert "olleh" in row["messages"]
    assert recorder.distributions[0] == {"distributions/rewards": [0.5] * 20, "distributions/advantages": [0.1] * 20}


def test_each_part_can_be_left_out(batch) -> None:
    recorder = Recorder()
    Extras(recorder, LogExtrasConfig()).record(batch, 0)
    assert (len(recorder.tables), len(recorder.distributions)) == (0, 1)
    recorder = Recorder()
    Extras(recorder, LogExtrasConfig(samples=True, distributions=False)).record(batch, 0)
    assert (len(recorder.tables), len(recorder.distributions)) == (1, 0)


@pytest.mark.slow
def test_wandb_takes_tables_and_distributions(batch, tmp_path: Path) -> None:
    monitor = WandbMonitor(WandbConfig(offline=True), tmp_path, {})
    Extras(monitor, LogExtrasConfig(samples=True)).record(batch, 0)
    monitor.log({"reward/mean": 0.5}, 0)
    monitor.close()
    (table,) = tmp_path.rglob("samples_*.table.json")
    assert "olleh" in table.read_text()
