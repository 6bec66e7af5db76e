"""`OUT/STATUS.md` tells how a run stands, and never ends the run."""

import json
from pathlib import Path

import pytest
from run_folders import START_S, RunFolder

from prime_rl.run.directory import prepare_run_dir
from prime_rl.run.paths import EvalPaths
from prime_rl.watch.status import REFRESH_EVERY_S, StatusFile, kept


class Clock:
    now_s = START_S + 20


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    folder = RunFolder(tmp_path / "demo")
    folder.attempt()
    folder.lock()
    folder.rl_step(0, 0.25)
    folder.beat("trainer", "step 1: waiting for a batch | `x`", "orchestrator")
    folder.log("trainer", ["12:00:01 WARNING a `quoted` word"])
    return folder


def status_of(folder: RunFolder, how_to_continue: str = "continue with\n  rl @ x.toml --resume latest") -> StatusFile:
    return StatusFile(folder.paths, lambda: how_to_continue, lambda: Clock.now_s)


def test_the_page_of_an_evaluation_does_not_call_the_base_model_a_step(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "scores", "eval", max_steps=None)
    results = EvalPaths(folder.paths.root).results
    results.parent.mkdir()
    results.write_text("".join(json.dumps({"step": step, "env": "a"}) + "\n" for step in (0, 4)))
    status_of(folder).look()
    page = folder.paths.status.read_text()
    assert "| `a` | base or step 0 | 1 |" in page
    assert "| `a` | step 4 | 1 |" in page


def test_the_page_of_a_running_run_says_where_it_is_and_what_can_be_done(run: RunFolder) -> None:
    status_of(run).look()
    page = run.paths.status.read_text()
    assert page.startswith("# `demo`: rl, running, step 0 (1/10)\n\nWritten 2026-11-22 ")
    for part in (
        "If that was more than two minutes ago, the launcher was killed.",
        "| `reward` | 0.250 | 0.250 |",
        "- `trainer`: `step 1: waiting for a batch / 'x'`, since ",
        "(waits for `orchestrator`)",
        "warning in `",
        "`a 'quoted' word`",
        f"medarc_train watch {run.paths.root}",
        f"touch {run.paths.save_request}",
        "kill -INT ",
        f"- `{run.paths.metrics}`",
    ):
        assert part in page
    assert "--resume" not in page


def page_of_ended(run: RunFolder, result: str, message: str) -> str:
    run.attempt(result, message)
    (run.paths.root / "run.lock").unlink()
    status_of(run).look()
    page = run.paths.status.read_text()
    assert f"Why it ended: `{message}`" in page
    return page


def test_the_page_of_a_stopped_run_says_how_to_continue(run: RunFolder) -> None:
    page = page_of_ended(run, "stopped", "stopped by Ctrl-C")
    assert page.startswith("# `demo`: rl, stopped, step 0 (1/10)\n")
    assert "```bash\nrl @ x.toml --resume latest\n```" in page
    assert "kill" not in page


def test_the_page_of_a_refused_run_advises_nothing_that_would_be_refused_again(run: RunFolder) -> None:
    page = page_of_ended(run, "refused", "trainer: the data changed")
    assert page.startswith("# `demo`: rl, failed, step 0 (1/10)\n")
    assert "--resume" not in page


def test_the_page_is_written_when_something_changed_and_once_a_minute(
    run: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    status = status_of(run)
    status.look()
    run.paths.status.unlink()
    monkeypatch.setattr(Clock, "now_s", Clock.now_s + REFRESH_EVERY_S / 2)
    status.look()
    assert not run.paths.status.exists()
    run.rl_step(1, 0.5)
    status.look()
    assert "step 1 (2/10)" in run.paths.status.read_text()
    run.paths.status.unlink()
    monkeypatch.setattr(Clock, "now_s", Clock.now_s + REFRESH_EVERY_S)
    status.look()
    assert run.paths.status.exists()


def test_the_last_page_is_that_of_the_end(run: RunFolder) -> None:
    with kept(status_of(run)):
        run.attempt("complete")
    assert run.paths.status.read_text().startswith("# `demo`: rl, complete, ")


def test_a_place_that_cannot_be_written_does_not_end_the_run(run: RunFolder) -> None:
    run.paths.status.mkdir()
    with kept(status_of(run)):
        pass
    assert list(run.paths.root.glob("*.tmp")) == []


def test_a_directory_without_a_config_has_no_page(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "demo")
    folder.paths.config("rl").unlink()
    status_of(folder).look()
    assert not folder.paths.status.exists()


def test_a_new_run_does_not_start_with_the_page_of_the_one_before(run: RunFolder) -> None:
    status_of(run).look()
    prepare_run_dir(run.paths, resume_step=None)
    assert not run.paths.status.exists()
