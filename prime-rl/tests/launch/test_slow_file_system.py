"""A node whose file system hangs for a while: its agent lives, hears orders, and leaves nothing behind.

A named pipe stands for a file on such a system: to open it takes until somebody opens the other end.
"""

from __future__ import annotations

import errno
import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from queue import SimpleQueue
from threading import Event as Flag

import pytest

from prime_rl.launch import LocalHost, ProcessSpec, logs
from prime_rl.launch.nodes.agent import LAST_REPORTS_S, STUCK_S, Agent
from prime_rl.launch.nodes.cluster import CLOSING_S, ClusterHost, PipeChannel, agent_argv
from prime_rl.launch.nodes.messages import (
    Alive,
    Answer,
    EndAll,
    Hello,
    Order,
    Report,
    Start,
    Status,
    Stop,
    encoded,
    report_of,
)
from prime_rl.launch.reaper import GUARD_GRACE_S
from prime_rl.utils.errors import CannotStart

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

WAITING = "import os, signal; os.mkfifo(os.environ['BEAT_FILE']); signal.pause()"
"""A child whose beats cannot be read."""


class AgentProcess:
    """An agent in a process of its own, as its head sees it."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        environ = os.environ | {"PRIME_RL_RUNTIME_DIR": str(directory / "runtime")}
        self.channel = PipeChannel("n0", agent_argv(), environ)
        self.next(Hello)

    def next(self, kind: type[Report]) -> Report:
        """The next report of a kind."""
        while (line := self.channel.receive()) is not None:
            if isinstance(report := report_of(line), kind):
                return report
        raise AssertionError(f"the agent ended: {self.channel.describe()}")

    def start(self, number: int, name: str, code: str) -> None:
        child = (sys.executable, "-c", code)
        spec = ProcessSpec(name, child, self.directory / f"{name}.log", heartbeat=self.directory / f"{name}.beat")
        self.channel.send(encoded(Start(number, spec=spec, umask=0o077)))


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[AgentProcess]:
    agent = AgentProcess(tmp_path)
    yield agent
    agent.channel.close()


def test_an_agent_says_that_it_is_alive_while_the_beats_of_a_child_cannot_be_read(agent: AgentProcess) -> None:
    agent.start(1, "trainer", WAITING)
    assert agent.next(Answer) == Answer(1)
    while not (agent.directory / "trainer.beat").exists():
        agent.next(Alive)
    with (agent.directory / "trainer.beat").open("wb") as beats:  # open once the agent reads, which then waits
        agent.next(Alive)
        beats.write(b'[1, 2.0, "training", null, true, [3]]\n')
    while not (seen := agent.next(Status).observed["trainer"].heartbeats):
        pass
    assert seen[0].doing == "training"


def test_orders_that_need_no_file_do_not_wait_for_a_start_that_does(agent: AgentProcess) -> None:
    agent.start(1, "server", WAITING)
    agent.next(Answer)
    os.mkfifo(agent.directory / "trainer.log")
    agent.start(2, "trainer", "")
    agent.channel.send(encoded(Stop(3, name="server")))
    agent.channel.send(encoded(EndAll(4, grace_s=60.0)))
    assert [agent.next(Answer) for _ in range(2)] == [Answer(3), Answer(4)]
    agent.channel.close()
    assert "exit code 1\n  | an order still waits for the file system" in agent.channel.describe()


class SlowHost(LocalHost):
    """Starts children when the gate opens."""

    gate = Flag()

    def start(self, spec: ProcessSpec) -> None:
        self.gate.wait()
        super().start(spec)


def test_a_process_that_starts_after_the_end_of_its_launch_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PRIME_RL_RUNTIME_DIR", str(tmp_path / "runtime"))
    answers: SimpleQueue[Report] = SimpleQueue()
    spec = ProcessSpec("trainer", (sys.executable, "-c", "import signal; signal.pause()"), tmp_path / "trainer.log")

    def orders(host: SlowHost) -> Iterator[Order]:
        yield Start(1, spec=spec, umask=0o077)
        yield EndAll(2, grace_s=0.0)
        assert answers.get() == Answer(2)
        host.gate.set()
        assert answers.get() == Answer(1, fault="trainer started after the end of the launch")

    def say(report: Report) -> None:
        if isinstance(report, Answer):
            answers.put(report)

    with SlowHost() as host:
        assert Agent(host, say).serve(orders(host))


class SlowUntilTheEnd(SlowHost):
    """Starts children once the launch is over, as a file system that is slow but does not hang."""

    gate = Flag()
    asked = Flag()

    def start(self, spec: ProcessSpec) -> None:
        self.asked.set()
        super().start(spec)

    def end_all(self, grace_s: float) -> None:
        super().end_all(grace_s)
        self.gate.set()


def test_an_agent_waits_for_a_slow_start_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PRIME_RL_RUNTIME_DIR", str(tmp_path / "runtime"))
    answers: SimpleQueue[Report] = SimpleQueue()
    spec = ProcessSpec("trainer", (sys.executable, "-c", "import signal; signal.pause()"), tmp_path / "trainer.log")

    def orders(host: SlowUntilTheEnd) -> Iterator[Order]:
        yield Start(1, spec=spec, umask=0o077)
        host.asked.wait()

    with SlowUntilTheEnd() as host:
        assert Agent(host, answers.put, stuck_s=600.0).serve(orders(host))
    said = []
    while not answers.empty():
        said.append(answers.get())
    assert Answer(1, fault="trainer started after the end of the launch") in said


def test_a_head_waits_longer_for_an_agent_than_the_agent_takes_to_end() -> None:
    assert GUARD_GRACE_S + STUCK_S + LAST_REPORTS_S < CLOSING_S


def test_a_head_does_not_wait_without_end_for_a_node_that_is_alive(local: LocalHost, tmp_path: Path) -> None:
    said: list[str] = []
    os.mkfifo(tmp_path / "trainer.log")
    with ClusterHost(local, [PipeChannel("n0", agent_argv())], said.append, answer_limit_s=0.1) as host:
        with pytest.raises(CannotStart, match=r"trainer cannot be started: \S+ did not answer within 0.1 s"):
            host.start(ProcessSpec("trainer", (sys.executable, "-c", ""), tmp_path / "trainer.log"))
        assert host.all_see_lock(tmp_path) is False
    assert "is alive, but did not carry out an order within 0.1 s: its file system may hang" in said[0]


@pytest.mark.parametrize(
    ("path", "fault"), [("a_file/trainer.log", "Not a directory"), ("a_directory", "Is a directory")]
)
def test_a_log_that_cannot_be_read_says_so_and_ends_nothing(tmp_path: Path, path: str, fault: str) -> None:
    (tmp_path / "a_file").touch()
    (tmp_path / "a_directory").mkdir()
    assert logs.tail(tmp_path / path, 5) == [f"({tmp_path / path} cannot be read: {fault})"]
    assert logs.Follower.at_end(tmp_path / path).read() == b""


def test_a_look_that_fails_is_not_the_last(tmp_path: Path) -> None:
    looks: SimpleQueue[str] = SimpleQueue()

    def look() -> None:
        looks.put(threading.current_thread().name)
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    with logs.polled(look, name="failing", every_s=0.01):
        assert [looks.get() for _ in range(3)] == ["failing"] * 3
