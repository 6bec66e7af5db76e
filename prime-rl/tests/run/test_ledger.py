from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from prime_rl.run.ledger import Ledger, check_ledger, read_ledger
from prime_rl.run.paths import OrchestratorPaths, RunPaths
from prime_rl.utils.files import replacing_directory


@pytest.fixture
def paths(tmp_path: Path) -> OrchestratorPaths:
    return RunPaths(tmp_path).orchestrator


def draw(ledger: Ledger, *numbers: int) -> None:
    for number in numbers:
        ledger.drawn(number, "letters", number % 4, "f" * 64)


def begun(path: Path) -> Ledger:
    ledger = Ledger(path)
    ledger.start(0, 0, 0)
    return ledger


def save(paths: OrchestratorPaths, ledger: Ledger, step: int, *in_flight: int) -> int:
    """Save a checkpoint as the orchestrator does, and return the size of the ledger that it holds."""
    size_bytes = ledger.save(step)
    with replacing_directory(paths.checkpoint(step).parent) as scratch:
        (scratch / "orchestrator").mkdir()
        waiting = [{"env": "letters", "row": number % 4, "draw": number} for number in in_flight]
        (scratch / "orchestrator" / "progress.json").write_text(json.dumps({"ledger_bytes": size_bytes}))
        (scratch / "orchestrator" / "buffer.json").write_text(json.dumps({"waiting": waiting}))
    return size_bytes


def test_each_draw_is_trained_on_once_or_dropped_with_a_reason_or_in_flight(paths: OrchestratorPaths) -> None:
    ledger = begun(paths.ledger)
    draw(ledger, 0, 1, 2, 3)
    ledger.requeued(1, "its server was lost")
    for number in (0, 1, 2):
        ledger.finished(number, 0.5)
    ledger.dropped(2, "equal rewards")
    ledger.trained([0, 1], 0)
    save(paths, ledger, 1, 3)

    account, faults = check_ledger(paths)
    assert faults == []
    assert account.draws[0].steps == account.draws[1].steps == [0]
    assert account.draws[2].drop_reason == "equal rewards"
    assert account.open == {3}
    assert (account.requeued, account.dropped) == ({"its server was lost": 1}, {"equal rewards": 1})


def test_what_came_after_the_checkpoint_of_a_resume_does_not_count(paths: OrchestratorPaths) -> None:
    ledger = begun(paths.ledger)
    draw(ledger, 0, 1)
    size_bytes = save(paths, ledger, 1, 0, 1)
    for attempt in (2, 3, 4):
        draw(ledger, 2, 3)
        ledger.trained([0, 2], 1)
        ledger.dropped(3, "equal rewards")
        ledger.start(1, size_bytes, 2)
        assert read_ledger(paths.ledger).starts == attempt
        assert read_ledger(paths.ledger).open == {0, 1}
    ledger.trained([0, 1], 1)
    account, faults = check_ledger(paths)
    assert faults == []
    assert (account.num_drawn, account.num_trained, account.dropped) == (2, 2, {})


def test_a_resume_may_go_back_to_any_attempt(paths: OrchestratorPaths) -> None:
    ledger = begun(paths.ledger)
    draw(ledger, 0, 1, 2)
    first = save(paths, ledger, 1, 0, 1, 2)
    ledger.trained([0], 1)
    second = save(paths, ledger, 2, 1, 2)
    ledger.start(1, first, 3)
    ledger.trained([1], 1)
    assert read_ledger(paths.ledger).open == {0, 2}
    third = save(paths, ledger, 2, 0, 2)
    for size_bytes, in_flight in ((second, {1, 2}), (first, {0, 1, 2}), (third, {0, 2}), (second, {1, 2})):
        ledger.start(2, size_bytes, 3)
        account, _ = check_ledger(paths)
        assert (account.open, account.faults) == (in_flight, [])
        ledger.dropped(2, "equal rewards")


@pytest.mark.parametrize("cut_bytes", [1, 5, 40])
def test_a_line_that_a_crash_cut_off_is_skipped(cut_bytes: int, paths: OrchestratorPaths) -> None:
    ledger = begun(paths.ledger)
    draw(ledger, 0)
    size_bytes = save(paths, ledger, 1, 0)
    draw(ledger, 1)
    ledger.close()
    paths.ledger.write_bytes(paths.ledger.read_bytes()[:-cut_bytes])
    assert read_ledger(paths.ledger).open == {0}

    again = Ledger(paths.ledger)
    again.start(1, size_bytes, 1)
    draw(again, 1)
    account, faults = check_ledger(paths)
    assert (faults, account.open) == ([], {0, 1})


def test_a_fresh_start_in_the_same_directory_undoes_everything(paths: OrchestratorPaths) -> None:
    draw(begun(paths.ledger), 0, 1, 2)
    draw(begun(paths.ledger), 0)
    account, faults = check_ledger(paths)
    assert (faults, account.open) == ([], {0})


def test_a_new_buffer_begins_with_draw_0_and_drops_what_was_in_flight(paths: OrchestratorPaths) -> None:
    ledger = begun(paths.ledger)
    draw(ledger, 0, 1)
    ledger.trained([0], 0)
    ledger.start(1, save(paths, ledger, 1, 1), 0)
    draw(ledger, 0)
    ledger.trained([0], 1)
    account, faults = check_ledger(paths)
    assert faults == []
    assert (account.num_drawn, account.num_trained, account.dropped) == (3, 2, {"a new buffer": 1})


def skips(ledger: Ledger, paths: OrchestratorPaths) -> None:
    draw(ledger, 0, 2)


def trains_twice(ledger: Ledger, paths: OrchestratorPaths) -> None:
    draw(ledger, 0)
    ledger.trained([0], 0)
    ledger.trained([0], 1)


def trains_what_it_dropped(ledger: Ledger, paths: OrchestratorPaths) -> None:
    draw(ledger, 0)
    ledger.dropped(0, "equal rewards")
    ledger.trained([0], 1)


def draws_twice(ledger: Ledger, paths: OrchestratorPaths) -> None:
    draw(ledger, 0, 0)


def loses_one_in_the_checkpoint(ledger: Ledger, paths: OrchestratorPaths) -> None:
    draw(ledger, 0, 1)
    save(paths, ledger, 1, 1)


def repeats_one_from_the_checkpoint(ledger: Ledger, paths: OrchestratorPaths) -> None:
    draw(ledger, 0)
    ledger.trained([0], 0)
    save(paths, ledger, 1, 0)


def resumes_with_the_wrong_draw(ledger: Ledger, paths: OrchestratorPaths) -> None:
    draw(ledger, 0, 1)
    ledger.start(1, save(paths, ledger, 1, 0, 1), 1)


def is_damaged(ledger: Ledger, paths: OrchestratorPaths) -> None:
    with paths.ledger.open("a") as file:
        file.write('{"trained": 5}\n')


@pytest.mark.parametrize(
    ("goes_wrong", "fault"),
    [
        (skips, "skipped: 1"),
        (trains_twice, "used twice: 0"),
        (trains_what_it_dropped, "used twice: 0"),
        (draws_twice, "draw 0 was drawn twice"),
        (loses_one_in_the_checkpoint, "lost draws: 0"),
        (repeats_one_from_the_checkpoint, "would repeat draws: 0"),
        (resumes_with_the_wrong_draw, "with draw 1 as the next, not 2"),
        (is_damaged, "cannot be read"),
    ],
)
def test_every_way_to_lose_or_repeat_a_draw_is_a_fault(goes_wrong: Any, fault: str, paths: OrchestratorPaths) -> None:
    goes_wrong(begun(paths.ledger), paths)
    _, (only,) = check_ledger(paths)
    assert fault in only


def run_command(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "prime_rl.run.ledger", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_the_command_says_what_became_of_the_draws(paths: OrchestratorPaths, tmp_path: Path) -> None:
    missing = run_command(tmp_path)
    assert missing.returncode == 2
    assert f"{paths.ledger} cannot be read: No such file or directory" in missing.stderr

    ledger = begun(paths.ledger)
    draw(ledger, 0, 1)
    ledger.trained([0], 0)
    fine = run_command(tmp_path)
    assert fine.returncode == 0
    assert "2 draws: 1 trained on, 0 dropped, 1 in flight\n0 skipped, 0 used twice" in fine.stdout
    draw(ledger, 3)
    wrong = run_command(tmp_path)
    assert wrong.returncode == 1
    assert "fault: draws that were skipped: 2" in wrong.stdout
