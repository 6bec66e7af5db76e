"""Waits for another process name what they wait for and their limit."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from logging.handlers import BufferingHandler
from pathlib import Path

import pytest

from prime_rl.utils.logger import get_logger
from prime_rl.utils.scratch import LAUNCH_VARIABLE
from prime_rl.utils.waiting import REMIND_EVERY_S, Wait, advice_on


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
