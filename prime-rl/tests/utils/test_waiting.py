"""Every wait for another process says what it waits for, and ends."""

from __future__ import annotations

import ast
import logging
from collections.abc import Iterator
from logging.handlers import BufferingHandler
from pathlib import Path

import pytest

from prime_rl.utils.logger import get_logger
from prime_rl.utils.pydantic_config.environment import LAUNCH_VARIABLE
from prime_rl.utils.waiting import REMIND_EVERY_S, Wait, advice_on

REPOSITORY = Path(__file__).resolve().parents[3]
PACKAGES = (REPOSITORY / "prime-rl" / "src" / "prime_rl", REPOSITORY / "medarc_rl")
PAUSES = {"sleep", "wait_for", "poll", "select"}
"""Calls that make a loop a poll."""

NOT_WAITS = {
    "orchestrator/env_server.py:_parent_exit": "runs next to the server, and ends with its parent",
    "orchestrator/servers/channel.py:ChatChannel._post_with_retries": "retries a limited number of times",
    "orchestrator/scheduling/lag.py:LoopLag.measure": "runs next to the steps",
    "orchestrator/servers/elastic.py:ElasticPool._discover": "its limit is in `_check_not_empty`",
    "orchestrator/servers/policy.py:Policy.follow": "runs next to the steps, which wait in `require_version`",
    "orchestrator/servers/pool.py:InferencePool._watch": "runs next to the steps",
    "orchestrator/servers/pool.py:InferencePool._readmit": "runs next to the steps, which have other servers",
    "orchestrator/servers/server.py:InferenceServer._update": "retries a limited number of times",
    "environments/adapters/games/openenv_client.py:OpenEnvServer.open": "waits for a session of its own to end",
    "environments/checking.py:_follow": "each step of a check has a limit",
    "environments/judging/judge.py:Judge._with_retries": "retries a limited number of times, within `timeout_s`",
    "environments/rewards/wire.py:_exactly": "has a deadline; without one, a worker waits for its next call",
    "environments/sandbox/inside/zygote.py:_run": "ends with the program or with the connection, which kills it",
    "environments/sandbox/sandbox.py:Sandbox._collected": "has a deadline",
    "environments/sandbox/zygotes.py:Zygote._line": "has a deadline",
    "eval/run.py:Evaluation._follow": "logs what it waits for, and ends with the run",
    "inference/vllm/plugin.py:PrimeRoutes._watch": "runs next to the server, and ends with it",
    "jobs/command.py:wait_for": "the user's own wait: `--timeout` is its limit",
    "lm_eval/worker.py:_await_server": "the server is starting; the launcher ends it if the server ends",
    "lm_eval/worker.py:new_steps": "says what it waits for, and ends with the run",
    "launch/nodes/agent.py:orders_from": "carries out orders, and ends with the head of the launch",
    "launch/reaper.py:_wait_gone": "has a limit of seconds",
    "launch/stalls/dumps.py:new_stacks": "has a limit of seconds",
    "run/clearance.py:_wait": "logs what it waits for; the launcher ends it if that process ends",
    "run/lock.py:_await_silence": "says what it waits for; half a minute at most",
    "storage/s3.py:S3.read_into": "retries a limited number of times",
    "transport/sockets.py:ZMQMicroBatchSender._await_subscriptions": "each poll has a limit, and fails by name",
}
"""Polls that are no waits of a user, with the reason."""


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


def functions(tree: ast.AST, prefix: str = "") -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.ClassDef):
            yield from functions(node, f"{node.name}.")
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield f"{prefix}{node.name}", node


def calls(node: ast.AST) -> set[str]:
    called = (each.func for each in ast.walk(node) if isinstance(each, ast.Call))
    return {each.attr if isinstance(each, ast.Attribute) else getattr(each, "id", "") for each in called}


def polls() -> Iterator[tuple[str, ast.AST]]:
    """Every loop of the code that pauses, and the function that it is in."""
    for package in PACKAGES:
        for file in sorted(package.rglob("*.py")):
            for name, function in functions(ast.parse(file.read_text())):
                loops = [each for each in ast.walk(function) if isinstance(each, ast.While | ast.For | ast.AsyncFor)]
                if any(calls(loop) & PAUSES for loop in loops):
                    yield f"{file.relative_to(package)}:{name}", function


def test_every_poll_in_the_code_is_a_wait_with_a_limit() -> None:
    unlimited = [place for place, function in polls() if "Wait" not in calls(function)]
    assert sorted(unlimited) == sorted(NOT_WAITS)


def test_only_a_program_that_was_started_by_hand_is_told_to_start_another() -> None:
    advice = [advice_on("trainer", Path("out"), Path("out/logs"), environ) for environ in ({}, {LAUNCH_VARIABLE: "/x"})]
    assert advice == [
        "start it with `trainer --output-dir out`, or see why it does not go on in out/logs",
        "see why it does not go on in out/logs",
    ]
