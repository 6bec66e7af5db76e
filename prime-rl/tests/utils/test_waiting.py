"""Waits for another process name what they wait for and their limit."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from logging.handlers import BufferingHandler
from pathlib import Path

import pytest

from prime_rl.utils.logger import get_logger
from prime_rl.utils.scratch import LAUNCH_VARIABLE
from prime_rl.utils.waiting import REMIND_EVERY_S, Wait, advice_on, telling


@pytest.fixture
def lines() -> Iterator[list[logging.LogRecord]]:
    """What is logged during a test."""
    logger, handler, level = get_logger(), BufferingHandler(capacity=100), get_logger().level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield handler.buffer
    logger.setLevel(level)
    logger.removeHandler(handler)


def test_a_wait_says_what_and_how_once_a_minute_until_its_limit(lines: list[logging.LogRecord]) -> None:
    clock_s = [0.0]
    wait = Wait("the tide", "move the moon", 100, "sea.timeout", now_s=lambda: clock_s[0])
    over = []
    for clock_s[0] in (0.0, 1.0, REMIND_EVERY_S - 1, REMIND_EVERY_S, 99.0, 100.0):
        over.append(wait.is_over())
    assert over == [False] * 5 + [True]
    first, second = (line.getMessage() for line in lines)
    assert first == second
    assert first.startswith("Waiting for the tide since ")
    assert first.endswith(" (limit: sea.timeout = 100 s): move the moon")
    assert wait.fault.startswith("waited for the tide since ")
    assert wait.fault.endswith(" and gave up (limit: sea.timeout = 100 s): move the moon")


def test_a_short_wait_in_every_step_is_not_logged(lines: list[logging.LogRecord]) -> None:
    wait = Wait("the tide", "move the moon", 100, "sea.timeout", quiet_s=60, now_s=iter((0.0, 59.0, 60.0)).__next__)
    assert not wait.is_over()
    assert lines == []
    assert not wait.is_over()
    assert len(lines) == 1


def test_only_a_program_that_was_started_by_hand_is_told_to_start_another() -> None:
    advice = [advice_on("trainer", Path("out"), Path("out/logs"), environ) for environ in ({}, {LAUNCH_VARIABLE: "/x"})]
    assert advice == [
        "start it with `trainer --output-dir out`, or see in its log why it does not continue: out/logs",
        "see in its log why it does not continue: out/logs",
    ]


def test_a_wait_without_a_limit_names_none_and_tells_whom_it_is_given() -> None:
    told: list[str] = []
    wait = Wait("Ray to free 1 node", "1 of 8 GPUs are free", float("inf"), "", tell=told.append)
    assert not wait.is_over()
    (line,) = told
    assert line.startswith("Waiting for Ray to free 1 node since ")
    assert line.endswith(": 1 of 8 GPUs are free")
    assert "limit" not in line


def test_long_work_tells_for_how_long_and_how_far_it_is() -> None:
    told: list[str] = []
    lines = threading.Semaphore(0)

    def tell(line: str) -> None:
        told.append(line)
        lines.release()

    with telling("`uv sync`", tell, lambda: "Resolved 120 packages", every_s=0.01):
        assert lines.acquire(timeout=60)
    count = len(told)
    assert told[0] == "`uv sync`: 0 s so far; Resolved 120 packages"
    with telling("`uv venv`", tell, every_s=3600):
        pass
    assert len(told) == count
