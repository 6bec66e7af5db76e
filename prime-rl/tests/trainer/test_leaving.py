"""Exit of a trainer process, as seen by its parent."""

from __future__ import annotations

import subprocess
import sys

import pytest

ABORTS_WHEN_TORN_DOWN = """
import atexit, os
from prime_rl.trainer.process.errors import leaving_at_once

class Aborting:
    def __del__(self):
        os.abort()

left_over = Aborting()
atexit.register(print, "exit handlers ran")
with leaving_at_once():
    print("worked")
    {end}
"""


def ended(end: str) -> subprocess.CompletedProcess:
    script = ABORTS_WHEN_TORN_DOWN.format(end=end)
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)


@pytest.mark.parametrize(("end", "code"), [("pass", 0), ("raise SystemExit", 0), ("raise SystemExit(143)", 143)])
def test_teardown_errors_do_not_change_the_exit_code(end: str, code: int) -> None:
    process = ended(end)
    assert (process.returncode, process.stdout) == (code, "worked\nexit handlers ran\n")


def test_an_error_keeps_its_traceback() -> None:
    process = ended("raise ValueError('of the block')")
    assert process.returncode != 0
    assert "ValueError: of the block" in process.stderr
