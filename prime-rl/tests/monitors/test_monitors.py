from __future__ import annotations

import json
import multiprocessing
from pathlib import Path

import pytest

from prime_rl.monitors import JsonlMonitor, MultiMonitor
from prime_rl.utils.errors import RunError


def _log_many(path: Path, source: str) -> None:
    monitor = JsonlMonitor(path, source)
    for step in range(200):
        monitor.log({"text": source * 500}, step)
    monitor.close()


def test_lines_of_several_processes_do_not_interleave(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    context = multiprocessing.get_context("spawn")
    writers = [context.Process(target=_log_many, args=(path, source)) for source in "ab"]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    records = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(records) == 400
    assert all(record["text"] == record["source"] * 500 for record in records)


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=f"{tmp_path} cannot be written: Is a directory"):
        JsonlMonitor(tmp_path, "sft")


def test_nan_and_infinities_become_null(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    monitor = MultiMonitor([JsonlMonitor(path, "trainer")])
    monitor.log({"loss/mean": float("nan"), "optim/lr": 0.1}, step=3)
    monitor.close()
    (record,) = map(json.loads, path.read_text().splitlines())
    assert record["loss/mean"] is None
    assert (record["optim/lr"], record["source"], record["step"]) == (0.1, "trainer", 3)
