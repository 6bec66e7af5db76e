"""Real processes write their stacks, and the launcher shows those that matter."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from prime_rl.launch import LocalHost, ProcessSpec
from prime_rl.launch.stalling import MAX_LINES, condensed

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

PRELUDE = """
import asyncio, os, signal, threading
from prime_rl.run.process import own_beats
from prime_rl.utils.signals import write_stacks_on_signal
write_stacks_on_signal()
def ready():
    os.write(os.open(os.environ["READY"], os.O_WRONLY), b".")
"""
HUNG_IN_A_LOCK = (
    PRELUDE
    + """
def hang_in_a_lock():
    lock = threading.Lock()
    lock.acquire()
    ready()
    lock.acquire()
hang_in_a_lock()
"""
)
HUNG_IN_A_TASK = (
    PRELUDE
    + """
async def wait_for_nobody():
    await asyncio.Event().wait()
async def main():
    tasks = [asyncio.create_task(wait_for_nobody()) for _ in range(3)]
    asyncio.get_running_loop().call_soon(ready)
    await asyncio.gather(*tasks)
asyncio.run(main())
"""
)
SILENT = "import os, signal; os.write(os.open(os.environ['READY'], os.O_WRONLY), b'.'); signal.pause()"


@pytest.fixture
def host() -> Iterator[LocalHost]:
    with LocalHost() as host:
        yield host


def started(host: LocalHost, directory: Path, code: str) -> ProcessSpec:
    """A child that runs `code`, once it is ready."""
    ready = directory / "ready"
    os.mkfifo(ready)
    spec = ProcessSpec("child", (sys.executable, "-c", code), directory / "child.log", {"READY": str(ready)})
    host.start(spec)
    with ready.open("rb") as pipe:
        assert pipe.read(1)
    return spec


def test_a_thread_that_hangs_shows_where(host: LocalHost, tmp_path: Path) -> None:
    started(host, tmp_path, HUNG_IN_A_LOCK)
    stack = host.stacks(["child"])["child"]
    assert any(line.endswith(" in hang_in_a_lock") for line in stack)
    assert "in hang_in_a_lock" in (tmp_path / "child.log").read_text()


def test_tasks_that_hang_show_where_and_how_many_they_are(host: LocalHost, tmp_path: Path) -> None:
    started(host, tmp_path, HUNG_IN_A_TASK)
    stack = host.stacks(["child"])["child"]
    heading = stack.index("3 tasks (most recent call last):")
    assert stack[heading + 1].endswith(" in wait_for_nobody")


def test_a_stopped_process_is_continued_to_write_its_stack(host: LocalHost, tmp_path: Path) -> None:
    spec = started(host, tmp_path, HUNG_IN_A_LOCK)
    (pid,) = [child.pid for child in host._children.values()]
    os.kill(pid, signal.SIGSTOP)
    while host.observe(spec).stopped != (pid,):
        pass
    assert any("hang_in_a_lock" in line for line in host.stacks(["child"])["child"])
    assert host.observe(spec).stopped == ()


def test_a_process_that_does_not_listen_survives_and_has_no_stack(host: LocalHost, tmp_path: Path) -> None:
    started(host, tmp_path, SILENT)
    assert host.stacks(["child"]) == {}
    assert host.next_event(0) is None


def test_a_long_dump_is_cut_to_the_threads_that_work() -> None:
    idle = ["Thread 0x01 (most recent call first):", '  File "/lib/threading.py", line 320 in wait', '  File "x.py"']
    busy = ["Current thread 0x02 (most recent call first):", *(f'  File "a.py", line {n} in f' for n in range(50))]
    tasks = ["9 tasks (most recent call last):", *(f'  File "b.py", line {n} in g' for n in range(50))]
    lines = condensed([*idle, "", *busy, "12:00:00 INFO Step 3", *tasks] * 2)
    assert lines[0] == busy[0]
    assert lines[1] == busy[1], "threads begin with the innermost call"
    assert tasks[-1] in lines, "tasks end with the innermost call"
    assert idle[0] not in lines
    assert len(lines) == MAX_LINES
