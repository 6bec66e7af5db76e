"""Attempts have numbers, and each leaves a receipt of what its parts report."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from prime_rl.run.attempts import PARTS, RESTORED_VARIABLE, Receipt, next_attempt, report_restored
from prime_rl.run.paths import RunPaths
from prime_rl.utils.logger import get_logger


@pytest.fixture
def paths(tmp_path: Path) -> RunPaths:
    return RunPaths(tmp_path / "out")


def receipt_of(paths: RunPaths, step: int | None, parts: tuple[str, ...] = PARTS) -> Receipt:
    return Receipt(paths, next_attempt(paths), parts, {"step": step})


def written(paths: RunPaths, number: int) -> dict[str, Any]:
    return json.loads(paths.receipt(number).read_text())


def report(paths: RunPaths, part: str, step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(RESTORED_VARIABLE, str(paths.restored(part)))
    report_restored(f"step {step}", {"step": step})


def test_attempts_are_numbered_and_keep_their_receipts(paths: RunPaths) -> None:
    for number in (1, 2, 3):
        assert receipt_of(paths, None).file.name == f"00{number}.json"
    assert [written(paths, number)["attempt"] for number in (1, 2, 3)] == [1, 2, 3]


def test_a_receipt_is_complete_when_all_parts_have_reported(paths: RunPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    receipt = receipt_of(paths, 4)
    assert list(receipt.collect()) == []
    report(paths, "orchestrator", 4, monkeypatch)
    assert list(receipt.collect()) == ["orchestrator resumed at step 4"]
    report(paths, "trainer", 4, monkeypatch)
    last = list(receipt.collect())
    assert last == [f"attempt 1 continues at step 4 in every part (trainer, orchestrator); receipt: {receipt.file}"]
    assert list(receipt.collect()) == []
    receipt.end("complete", "")
    assert written(paths, 1)["parts"]["trainer"] == {"summary": "step 4", "step": 4}
    assert written(paths, 1)["outcome"] == "complete"


def test_parts_that_stand_at_different_steps_are_a_warning(paths: RunPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    receipt = receipt_of(paths, 4)
    for part, step in (("trainer", 4), ("orchestrator", 3)):
        report(paths, part, step, monkeypatch)
    warning = list(receipt.collect())[-1]
    assert warning.startswith("warning: attempt 1 was to continue at step 4, but its parts are at these steps: ")
    assert "trainer at step 4, orchestrator at step 3; receipt: " in warning


def test_what_an_earlier_attempt_reported_does_not_count(paths: RunPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    report(paths, "trainer", 2, monkeypatch)
    assert list(receipt_of(paths, 4, ("trainer",)).collect()) == []


def test_a_report_that_cannot_be_written_is_a_warning(
    paths: RunPaths, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    paths.root.mkdir()
    paths.restored("trainer").parent.write_text("no directory")
    monkeypatch.setenv(RESTORED_VARIABLE, str(paths.restored("trainer")))
    monkeypatch.setattr(get_logger(), "handlers", [caplog.handler])
    report_restored("step 4", {"step": 4})
    assert "this part is missing from the attempt's receipt" in caplog.text


def test_a_part_that_was_started_alone_reports_nothing(paths: RunPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(RESTORED_VARIABLE, raising=False)
    report_restored("step 4", {"step": 4})
    assert not paths.root.exists()
