from __future__ import annotations

import json
import re
import socket
from pathlib import Path

import pytest
from httpx import ConnectError
from huggingface_hub.utils import http_backoff

from prime_rl.utils.logger import SUCCESS, readable, setup_logger


def test_a_line_has_time_level_and_message(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    log_file = tmp_path / "logs" / "trainer.log"
    logger = setup_logger("info", log_file)
    logger.log(SUCCESS, "Step 3 | Loss: 0.1234")
    logger.debug("not at this level")
    assert re.fullmatch(r"\d\d:\d\d:\d\d SUCCESS Step 3 \| Loss: 0\.1234\n", log_file.read_text())
    assert capsys.readouterr().out == log_file.read_text()


def test_retries_of_the_hub_are_one_line(capfd: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        for _ in range(2):
            setup_logger("warning")
            with pytest.raises(ConnectError):
                http_backoff("GET", f"http://127.0.0.1:{nobody.getsockname()[1]}", max_retries=3, base_wait_time=0)
            out, err = capfd.readouterr()
            (line,) = out.splitlines()
            assert re.search(r"WARNING 127\.0\.0\.1 is not reachable \(.*Connection refused\): trying again$", line)
            assert err == ""


def test_a_second_start_adds_to_the_log(tmp_path: Path) -> None:
    log_file = tmp_path / "trainer.log"
    for attempt in ("first", "second"):
        setup_logger("info", log_file).info(attempt)
    assert [line.split()[-1] for line in log_file.read_text().splitlines()] == ["first", "second"]


def test_json_lines_carry_the_exception(tmp_path: Path) -> None:
    log_file = tmp_path / "trainer.log"
    logger = setup_logger("debug", log_file, json_logging=True)
    try:
        raise ValueError("broken")
    except ValueError:
        logger.exception("it failed")
    entry = json.loads(log_file.read_text())
    assert (entry["level"], entry["message"]) == ("ERROR", "it failed")
    assert "ValueError: broken" in entry["exception"]
    assert entry["process"]


def test_a_json_line_is_readable_and_hides_no_escape_sequence(tmp_path: Path) -> None:
    log_file = tmp_path / "trainer.log"
    setup_logger("info", log_file, json_logging=True).warning("two\x1b[2J lines\nof \u00e9")
    setup_logger("info")
    line = readable(log_file.read_text().rstrip())
    assert re.fullmatch(r"\d\d:\d\d:\d\d WARNING two\\x1b\[2J lines\nof \u00e9", line)


@pytest.mark.parametrize(
    "line", ["", "plain", "{", "{}", '{"level": 1}', '{"timestamp": "x", "level": "", "message": ""}']
)
def test_a_line_that_is_not_ours_stays_as_it_is(line: str) -> None:
    assert readable(line) == line
