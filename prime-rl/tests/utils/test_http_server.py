"""The log of an HTTP server: a line a minute on what clients send, a traceback for our own faults."""

from __future__ import annotations

import logging

import pytest
from aiohttp import http_exceptions

from prime_rl.utils.http_server import QUIET_S, _Quiet


def test_malformed_requests_are_one_line_a_minute_and_our_faults_each_a_traceback(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("WARNING", "prime_rl")
    now_s = [0.0]
    log = logging.Logger("server", logging.WARNING)
    log.addHandler(_Quiet("server", lambda: now_s[0]))

    def refuse() -> None:
        log.error("Error handling request", exc_info=http_exceptions.BadStatusLine("x\x1b[2J\ny"))

    for _ in range(1000):
        refuse()
    log.warning("Invalid HTTP request received.")  # what uvicorn says
    now_s[0] = QUIET_S
    refuse()
    log.error("Unhandled exception", exc_info=KeyError("ours"))
    first, second, ours = caplog.records
    assert first.getMessage().startswith("server: a malformed request was refused: Error handling request: 400")
    assert not first.exc_info
    assert first.getMessage().isprintable()
    assert second.getMessage().endswith("(and 1000 more since the last line)")
    assert ours.exc_info is not None
