"""What `watch` and the launcher's screen show of a run: read from its files, drawn for any width."""

import io
import json
import os
import pty
import re
import termios
from contextlib import suppress
from datetime import datetime
from pathlib import Path

import pytest
from rich.console import Console
from run_folders import START_S, STEP_S, RunFolder

from prime_rl.history.run import RunHistory
from prime_rl.launch.logs import Follower
from prime_rl.run.paths import EvalPaths
from prime_rl.watch import overview as screen
from prime_rl.watch.facts import Overview, Reader, as_json, last_notices, uses_of
from prime_rl.watch.overview import drawn
from prime_rl.watch.progress import printable
from prime_rl.watch.screens import LiveDisplay, LogWatcher, PlainDisplay, display_for, watching

WIDTHS = (30, 60, 80, 160)


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    """A run of RL in its fourth step, whose launcher is this process."""
    folder = RunFolder(tmp_path / "demo")
    folder.attempt()
    folder.lock()
    for step in range(3):
        folder.rl_step(step, 0.2 + step / 10, right=0.1 + step / 10, layout=0.1)
    folder.beat("orchestrator", "step 3: waiting for 8 groups", "inference")
    folder.beat("inference", "waiting for requests", "*")
    folder.log("orchestrator", ["==== attempt 1, orchestrator", "12:00:01 WARNING Step 2: all 64 rewards are 0"])
    return folder


def overview_of(folder: RunFolder, now_s: float = START_S + 20) -> Overview:
    return Reader(RunHistory.open(folder.paths.root)).read(now_s)


def text_of(overview: Overview, width: int = 80, height: int | None = None) -> str:
    console = Console(file=io.StringIO(), width=width, color_system=None)
    console.print(drawn(overview, width, height))
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_a_running_run_shows_its_step_figures_processes_and_warnings(run: RunFolder) -> None:
    shown = text_of(overview_of(run))
    first, second, *_ = shown.splitlines()
    assert first.split() == ["demo", "rl", "running", "step", "2", "(3/10)"]
    assert "30%" in second
    assert "0:20 elapsed" in second
    assert f"0:{7 * STEP_S:02.0f} left" in second
    for part in ("reward", "0.200 → 0.400", "  right", "▁▅█", "rollouts in flight", "5,000 → 5,002"):
        assert part in re.sub(r"(?<=\S) +", " ", shown)
    assert "orchestrator     0:20  waits for inference: step 3: waiting for 8 groups" in shown
    assert "12:00:01 orchestrator warning Step 2: all 64 rewards are 0" in shown


@pytest.mark.parametrize("width", WIDTHS)
def test_no_line_is_wider_than_the_terminal(run: RunFolder, width: int) -> None:
    run.beat("trainer", "a long story " * 30)
    run.log("trainer", ["12:00:02 ERROR " + "words " * 100])
    lines = text_of(overview_of(run), width).splitlines()
    assert max(map(len, lines)) <= width
    assert lines[0].startswith("demo")


@pytest.mark.parametrize("height", [4, 8, 12, 20])
def test_a_low_terminal_keeps_the_state_and_drops_what_matters_least(run: RunFolder, height: int) -> None:
    lines = text_of(overview_of(run), 80, height).splitlines()
    assert lines[0].startswith("demo")
    assert len(lines) <= max(height, 2)


@pytest.mark.parametrize(
    ("result", "words", "code"),
    [("complete", "complete", 0), ("stopped", "stopped by Ctrl-C", 1), ("failed", "trainer exited with 1", 1)],
)
def test_a_run_that_has_ended_shows_why(run: RunFolder, result: str, words: str, code: int) -> None:
    (run.paths.root / "run.lock").unlink()
    run.attempt(result, outcome=words)
    overview = overview_of(run)
    shown = text_of(overview)
    assert (result in shown, words in shown, "1:40 elapsed" in shown) == (True, True, True)
    assert screen.exit_code_of(overview) == code
    assert ("waits for" in shown) == (result != "complete")


def test_a_killed_launcher_is_told_apart_from_one_that_runs_on_another_machine(run: RunFolder) -> None:
    run.lock(host="elsewhere")
    lock = run.paths.root / "run.lock"
    now_s = lock.stat().st_mtime
    assert overview_of(run, now_s + 5).state.name == "running"
    assert overview_of(run, now_s + 500).state.name == "killed"


def test_text_of_the_run_cannot_control_the_terminal(run: RunFolder) -> None:
    run.beat("trainer", "\x1b[2J\x1b]0;title\x07row \x07\u202e'x'\r\n", "\x1b[31mwho\x1b[0m")
    run.log("trainer", ["12:00:01 WARNING \x1b[5mblink\x1b[0m \x00 [bold]no markup[/bold]"])
    shown = text_of(overview_of(run))
    assert all(char.isprintable() or char == "\n" for char in shown)
    assert "waits for who: row ??'x'" in shown
    assert "[bold]no markup[/bold]" in shown


def test_a_loss_that_became_nan_is_shown(run: RunFolder) -> None:
    run.metrics("trainer", 3, **{"loss/mean": None, "perf/throughput": 1})
    assert "nan" in text_of(overview_of(run))
    assert json.loads(json.dumps(as_json(overview_of(run)), default=str, allow_nan=False))["learning"]["loss"] == {
        "first": 0.1,
        "last": None,
    }


def test_a_judge_shows_what_it_was_asked_and_what_that_cost(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "judged")
    folder.attempt()
    for step in range(3):
        folder.rl_step(step, 0.5)
        asked = {"calls": 64, "cache_hit_rate": step / 4, "latency_s": 1.25, "failed_calls": 0, "cost": 0.02}
        folder.metrics("orchestrator", step, **{f"judge/grader/{name}": value for name, value in asked.items()})
    overview = overview_of(folder)
    shown = text_of(overview)
    for part in (
        "grader: calls",
        "64 →   64",
        "grader: from cache",
        "0% →  50%",
        "grader: seconds a call",
        "grader: cost",
    ):
        assert part in shown, shown
    assert "failed calls" not in shown
    assert as_json(overview)["judges"]["grader: from cache"] == {"first": 0.0, "last": 0.5}


def test_sft_shows_validation_and_rows(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "tuned", "sft", max_steps=None)
    folder.attempt("complete")
    for step in range(4):
        folder.metrics("sft", step, **{"loss/mean": 3.0 - step, "data/seen": 10 * step, "data/truncated": 1})
    folder.metrics("sft", 3, **{"val/loss": 2.5})
    shown = text_of(overview_of(folder))
    for part in ("sft", "step 3 (4)", "3.0000 → 0.0000", "validation loss", "rows  seen 30  truncated 1"):
        assert part in shown


def test_an_evaluation_shows_each_environment(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "scores", "eval", max_steps=None)
    folder.attempt()
    folder.lock()
    envs = '[[env]]\nid = "a"\nname = "None"\n[[env]]\nid = "x"\nname = "b"\n'
    folder.paths.config("eval").write_text(f"num_examples = [5]\nrollouts_per_example = [2, 4]\n{envs}")
    results = EvalPaths(folder.paths.root).results
    results.parent.mkdir()
    line = json.dumps({"step": 0, "env": "a", "prompt": "text"})
    results.write_text(f"{line}\n" * 10 + "{damaged\n" + line[:9])
    folder.metrics("eval", 0, **{"eval/a/avg@2": 0.25})
    overview = overview_of(folder)
    assert overview.share_done == pytest.approx(10 / 30)
    shown = text_of(overview)
    assert "a  base or step 0  10/10 rollouts  avg@2 0.250" in shown
    assert "b  base or step 0  0/20 rollouts" in shown
    assert "step 1" not in shown


def test_an_environment_with_fewer_rows_than_asked_for_is_not_shown_as_half_done(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "scores", "eval", max_steps=None)
    folder.attempt()
    folder.lock()
    folder.paths.config("eval").write_text('num_examples = [8]\nrollouts_per_example = [1]\n[[env]]\nid = "a"\n')
    results = EvalPaths(folder.paths.root).results
    results.parent.mkdir()
    results.write_text((json.dumps({"step": 0, "env": "a"}) + "\n") * 4)
    assert "4/8 rollouts" in text_of(overview_of(folder))
    folder.metrics("eval", 0, **{"eval/a/avg@1": 0.25})
    assert "4 rollouts  avg@1 0.250" in text_of(overview_of(folder))
    folder.metrics("eval", 0, **{"eval/a/avg@1": 0.25, "eval/a/failed/count": 4})
    assert "4/8 rollouts  avg@1 0.250" in text_of(overview_of(folder))


@pytest.mark.parametrize("damage", ["", "{", "\0" * 100, "[1, 2]"])
def test_damaged_files_leave_the_rest_readable(run: RunFolder, damage: str) -> None:
    for file in (run.paths.heartbeat("inference"), run.paths.config("rl"), run.paths.log("trainer")):
        file.write_text(damage)
    with run.paths.metrics.open("a") as metrics:
        metrics.write(f"{damage}\n")
    assert "step 2 (3)" in text_of(overview_of(run))


def test_an_empty_run_can_be_drawn(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "new")
    overview = overview_of(folder)
    assert "no step yet" in text_of(overview)
    assert screen.has_not_begun(overview)


def test_notices_are_those_of_the_last_attempt_once_each(tmp_path: Path) -> None:
    log, other = tmp_path / "trainer.log", tmp_path / "rl.log"
    here = datetime(2026, 11, 22, 12, 0, 3).astimezone()
    entry = {"timestamp": here.isoformat(), "level": "ERROR", "message": "lost\nTraceback of a text"}
    log.write_text(
        "==== attempt 1\n12:00:00 WARNING old\n==== attempt 2\n12:00:01 WARNING twice\n12:00:02 \x1b[33mWARNING\x1b[0m "
        f"twice\n12:00:02    INFO fine\n{json.dumps(entry)}\n"
    )
    other.write_text("2026-11-22 12:00:01 error: orchestrator exited with 1\n")
    assert [(notice.log.stem, notice.clock, notice.level, notice.words) for notice in last_notices([log, other])] == [
        ("rl", "12:00:01", "error", "orchestrator exited with 1"),
        ("trainer", "12:00:02", "warning", "twice"),
        ("trainer", "12:00:03", "error", "lost"),
    ]


def test_lines_follow_each_new_step_until_the_end(run: RunFolder) -> None:
    stream = io.StringIO()

    def pause(seconds: float) -> None:
        if len(stream.getvalue().splitlines()) < 5:
            run.rl_step(3, 0.5, right=0.4, layout=0.1)
        else:
            run.attempt("complete")

    code = screen.follow_lines(Reader(RunHistory.open(run.paths.root)), stream, 1.0, pause)
    shown = stream.getvalue()
    assert code == 0
    assert shown.startswith("demo: rl, running, step 2 (3/10)\n")
    steps = [line for line in shown.splitlines() if line.startswith("step ")]
    assert [line.partition("reward ")[2][:5] for line in steps] == ["0.400", "0.500"]
    assert shown.count("\x1b") == 0
    assert "complete" in shown.splitlines()[shown.splitlines().index(steps[-1]) + 2]


def test_json_lines_follow_changes(run: RunFolder) -> None:
    stream = io.StringIO()
    changes = iter([lambda: None, lambda: run.rl_step(3, 0.5), lambda: run.attempt("failed", "it broke")])
    code = screen.follow_json(Reader(RunHistory.open(run.paths.root)), stream, 1.0, lambda seconds: next(changes)())
    readings = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert code == 1
    assert [(each["state"]["name"], each["last_step"]) for each in readings] == [
        ("running", 2),
        ("running", 3),
        ("failed", 3),
    ]
    assert readings[1]["parts"]["right"] == {"first": 0.1, "last": 0.30000000000000004}


def test_a_table_of_nvidia_smi_is_read() -> None:
    first, second = uses_of("0, 1024, 81559, 97\n1, 3, 81559, [N/A]\nNo devices were found\n2, [N/A], 1, 1\n")
    assert (first.index, first.used_bytes, first.busy_percent) == ("0", 2**30, 97)
    assert (second.index, second.busy_percent) == ("1", None)


def test_printable_text_has_one_line_of_bounded_length() -> None:
    assert printable("a\tb\nc\x1b[31m") == "a b c"
    assert printable("x" * 1000, max_chars=10) == "xxx … xxxx"
    assert printable("naïve 数据 🙂") == "naïve 数据 🙂"


def read_to_end(master: int) -> str:
    """What was written to a terminal whose other end is closed."""
    chunks = []
    with suppress(OSError):  # EIO: nothing is left
        while chunk := os.read(master, 65536):
            chunks.append(chunk)
    return b"".join(chunks).decode()


def test_the_launchers_terminal_has_the_overview_below_the_lines(run: RunFolder) -> None:
    master, slave = pty.openpty()
    termios.tcsetwinsize(slave, (40, 80))
    with os.fdopen(slave, "w") as terminal:
        display = display_for(terminal, Reader(RunHistory.open(run.paths.root)))
        assert isinstance(display, LiveDisplay)
        display.line("a line to keep")
        display.update()
        display.close()
    shown = read_to_end(master)
    os.close(master)
    assert shown.index("a line to keep") < shown.index("step 2 (3/10)")


def test_the_log_of_one_child_scrolls_above_the_overview(run: RunFolder) -> None:
    master, slave = pty.openpty()
    termios.tcsetwinsize(slave, (40, 80))
    with os.fdopen(slave, "w") as terminal:
        display = LiveDisplay(terminal, Reader(RunHistory.open(run.paths.root)))
        watcher = LogWatcher(Follower(run.paths.log("trainer")), display)
        with watching(watcher, display):
            watcher.say("trainer started")
            run.log("trainer", ["==== attempt 1, trainer", "12:00:01    INFO Loading"])
    shown = read_to_end(master)
    os.close(master)
    for line in ("trainer started", "12:00:01    INFO Loading", "step 2 (3/10)"):
        assert line in shown
    assert "====" not in shown


def test_a_file_gets_plain_lines(run: RunFolder, tmp_path: Path) -> None:
    with (tmp_path / "job.log").open("w") as file:
        assert isinstance(display_for(file, Reader(RunHistory.open(run.paths.root))), PlainDisplay)
