"""A limit on time ends the block that takes longer, in any thread, and leaves no trace of itself."""

from __future__ import annotations

import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from prime_rl.checks.time_limit import OutOfTime, time_limit

TRACED_AFTER = """
import sys, threading
from prime_rl.checks.time_limit import OutOfTime, time_limit

def spin():
    while True: pass

def limited():
    try:
        with time_limit({limit_s}):
            {block}
    except OutOfTime:
        print("out of time")

thread = threading.Thread(target=limited)
thread.start()
thread.join()
sys.settrace(lambda *arguments: None)
def traced(): pass
traced()
print("traced")
"""
BLOCKS = {
    "in time": (100, "pass", ""),
    "loops": (0.05, "spin()", "out of time\n"),
    "swallows it": (
        0.05,
        "\n            try:\n                spin()\n            except BaseException: pass",
        "",
    ),
}


@pytest.mark.parametrize("case", BLOCKS)
def test_a_limit_in_a_thread_leaves_no_exception_pending(case: str) -> None:
    """A pending one makes each jump of the process slow, and hangs it under a trace function."""
    limit_s, block, said = BLOCKS[case]
    program = TRACED_AFTER.format(limit_s=limit_s, block=block)
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, f"{said}traced\n", "")


def test_an_exception_never_reaches_what_a_thread_does_next() -> None:
    """Blocks that end at the moment of their limit."""
    limit_s = 0.001

    def ends_at_the_limit() -> bool:
        until_s = time.perf_counter() + limit_s
        try:
            with time_limit(limit_s):
                while time.perf_counter() < until_s:
                    pass
        except OutOfTime:
            return True
        return False

    with ThreadPoolExecutor(1) as pool:
        outcomes = pool.submit(lambda: [ends_at_the_limit() for _ in range(300)]).result()
    assert len(outcomes) == 300
