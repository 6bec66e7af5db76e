"""Logs keep every attempt, and can be read while they grow."""

from pathlib import Path

import pytest

from prime_rl.launch import Follower, ProcessSpec, logs


def attempt(log: Path, text: str) -> int:
    with logs.opened_for_attempt(ProcessSpec("trainer", ("trainer", "@", "a b.toml"), log)) as (file, offset):
        file.write(text.encode())
    return offset


def test_a_second_attempt_keeps_the_first_and_is_headed_by_its_command(tmp_path: Path) -> None:
    log = tmp_path / "logs" / "trainer.log"
    attempt(log, "one\n")
    attempt(log, "two\n")
    lines = log.read_text().splitlines()
    assert [lines[1], lines[3]] == ["one", "two"]
    assert lines[2].startswith("==== trainer started 2")
    assert lines[2].endswith("trainer @ 'a b.toml'")


def test_the_tail_is_of_this_attempt_only(tmp_path: Path) -> None:
    log = tmp_path / "trainer.log"
    attempt(log, "old\n" * 30)
    offset = attempt(log, "".join(f"line {i}\n" for i in range(30)) + "\nlast, without an end")
    assert logs.tail(log, 3, offset) == ["line 28", "line 29", "last, without an end"]
    assert len(logs.tail(log, 100, offset)) == 31


def test_of_a_progress_bar_the_tail_has_what_stood_there_last(tmp_path: Path) -> None:
    log = tmp_path / "trainer.log"
    log.write_bytes(b"  0%|\r 50%|\r100%|\ndone\n")
    assert logs.tail(log, 5) == ["100%|", "done"]


@pytest.mark.parametrize(
    ("lines", "reason"),
    [
        (["12:30:05    INFO fine", "12:30:06   ERROR rows.jsonl:12: faulty", "bye"], "rows.jsonl:12: faulty"),
        (["12:30:05   ERROR first", "12:30:06   ERROR last"], "last"),
        (["error: model.name: no such directory"], "model.name: no such directory"),
        (
            ["12:30:06   ERROR the trainer failed\nTraceback:", "  File x", "a.b.SomeError: row text"],
            "the trainer failed: a.b.SomeError",
        ),
        (["Traceback (most recent call last):", "ValueError: row text"], "ValueError"),
        (["12:30:05 WARNING hot", "it broke"], None),
        ([], None),
        (["12:30:06   ERROR " + "a" * 500 + "b" * 500], "a" * 298 + " … " + "b" * 299),
        (["12:30:06   ERROR the key k-12345 is refused"], "the key *** is refused"),
    ],
)
def test_the_reason_is_the_last_error_on_one_short_line(lines: list[str], reason: str | None) -> None:
    assert logs.reason_in(lines, ["", "k-12345"]) == reason


def test_a_log_that_was_never_written_has_no_tail(tmp_path: Path) -> None:
    assert logs.tail(tmp_path / "absent.log", 5) == []


def test_a_follower_waits_for_the_file_and_for_the_end_of_a_line(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    follower = Follower(path)
    assert follower.lines() == []
    path.write_text("one\ntw")
    assert follower.lines() == ["one"]
    with path.open("a") as file:
        file.write("o\n")
    assert follower.lines() == ["two"]


def test_a_follower_can_start_at_the_present_end(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text("old\n")
    follower = Follower.at_end(path)
    with path.open("a") as file:
        file.write("new\n")
    assert follower.lines() == ["new"]


def test_control_characters_of_a_log_reach_no_terminal(tmp_path: Path, capfdbinary) -> None:
    log = tmp_path / "trainer.log"
    written = b"\x1b[32mgreen\x1b[0m \x1b]0;title\x07 \x1b[2J\ttab \x9b1m\xc2\x9b\r\nreward \xc3\xa9\x08"
    with logs.shown(log):
        attempt(log, "")
        with log.open("ab") as file:
            file.write(written)
    safe = ["green \\x1b]0;title\\x07 \\x1b[2J\ttab \ufffd1m\\x9b", "reward é\\x08"]
    assert capfdbinary.readouterr().out.decode().splitlines() == safe
    assert logs.tail(log, 2) == safe


def test_a_shown_log_leaves_out_headings_and_keeps_a_last_line_without_an_end(tmp_path: Path, capfdbinary) -> None:
    log = tmp_path / "trainer.log"
    attempt(log, "old\n")
    with logs.shown(log):
        attempt(log, "new\ncut off")
    assert capfdbinary.readouterr().out == b"new\ncut off\n"
