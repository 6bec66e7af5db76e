"""Starts and watches processes on several nodes, through an agent on each that a channel of lines leads to."""

from __future__ import annotations

import contextlib
import itertools
import os
import shlex
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Event as Flag
from threading import Lock, Thread
from types import TracebackType
from typing import Protocol, Self

from prime_rl.launch import logs
from prime_rl.launch.host import TAIL_LINES, LocalHost, note_loss
from prime_rl.launch.nodes import messages
from prime_rl.launch.nodes.messages import MAX_LINE_BYTES, NodeFacts
from prime_rl.launch.spec import Event, Exited, NodeLost, ProcessSpec, Signalled
from prime_rl.launch.stalling import Observed
from prime_rl.utils.errors import CannotStart, RunError, StoppedEarly
from prime_rl.utils.logger import readable

# Channels: lines between the head of a launch and the agent of one node.


AGENT = "prime_rl.launch.nodes.agent"

_STDERR_LINES = 20
CLOSING_S = 30.0
"""An agent needs less to end what is left on its node."""
LOST_CLOSING_S = 1.0
"""The same for a lost node. Nothing more comes from there, and until its command ends, the job holds all GPUs."""


def agent_argv(python: str = sys.executable) -> tuple[str, ...]:
    """The command that starts an agent on the node where it runs."""
    return (python, "-m", AGENT)


class Channel(Protocol):
    """The head's side of the connection to one agent."""

    @property
    def name(self) -> str:
        """The node, as the user knows it."""

    def send(self, message: bytes) -> None:
        """Send one line. Never blocks. After the agent's end it does nothing."""

    def receive(self) -> bytes | None:
        """Wait for the next line; None: the agent is gone."""

    def close(self, limit_s: float = CLOSING_S) -> None:
        """Tell the agent that the launch is over, wait for its end, and end it if it stays for `limit_s`."""

    def describe(self) -> str:
        """Command of the agent, its end, and its last lines on stderr."""


class PipeChannel:
    """An agent that a command starts, such as `srun --nodelist=n2 python -m prime_rl.launch.nodes.agent`."""

    def __init__(self, name: str, argv: Sequence[str], env: Mapping[str, str] = os.environ) -> None:
        """Raises OSError: the program cannot be started."""
        self.name = name
        self._argv = tuple(argv)
        self._process = subprocess.Popen(
            argv,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=dict(env),
            # Ctrl-C is for the launcher alone.
            start_new_session=True,
        )
        self._outbox: SimpleQueue[bytes | None] = SimpleQueue()
        self._errors: deque[str] = deque(maxlen=_STDERR_LINES)
        self._threads = [
            Thread(target=work, name=f"{what} {name}", daemon=True)
            for what, work in (("to", self._write), ("stderr of", self._collect_errors))
        ]
        for thread in self._threads:
            thread.start()

    @property
    def pid(self) -> int:
        """Process id of the command."""
        return self._process.pid

    def send(self, message: bytes) -> None:
        self._outbox.put(message)

    def receive(self) -> bytes | None:
        assert self._process.stdout is not None, "a pipe was asked for"
        line = self._process.stdout.readline(MAX_LINE_BYTES)
        return line or None

    def close(self, limit_s: float = CLOSING_S) -> None:
        self._outbox.put(None)
        # First without a signal: its stdin has ended.
        for signum in (None, signal.SIGTERM, signal.SIGKILL):
            if signum is not None:
                self._process.send_signal(signum)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(limit_s)
                break
        for thread in self._threads:
            thread.join(CLOSING_S)

    def describe(self) -> str:
        with contextlib.suppress(subprocess.TimeoutExpired):
            # It has closed its stdout and is about to end.
            self._process.wait(1.0)
            self._threads[-1].join(1.0)
        code = self._process.poll()
        state = "still runs" if code is None else f"ended by signal {-code}" if code < 0 else f"exit code {code}"
        return "\n".join([f"{shlex.join(self._argv)}: {state}", *(f"  | {line}" for line in list(self._errors))])

    def _write(self) -> None:
        pipe = self._process.stdin
        assert pipe is not None, "a pipe was asked for"
        # The agent may have ended; its end is received as such.
        with contextlib.suppress(BrokenPipeError), pipe:
            while (message := self._outbox.get()) is not None:
                pipe.write(message)
                pipe.flush()

    def _collect_errors(self) -> None:
        assert self._process.stderr is not None, "a pipe was asked for"
        for line in self._process.stderr:
            self._errors.append(readable(line.decode(errors="replace").rstrip()))


JOIN_LIMIT_S = 300.0
"""Seconds for all agents to start. A node may have to load Python over a slow network first."""

NODE_SILENT_S = 20.0
"""A node whose agent says nothing for so long is gone, although the connection has not ended."""

ANSWER_LIMIT_S = 120.0
"""Seconds for a node that is alive to carry out an order. Its file system may hang."""

_REMIND_EVERY_S = 30.0
_LOOK_EVERY_S = 0.1


@dataclass(slots=True)
class _Node:
    """The head's view of one node."""

    index: int
    channel: Channel
    facts: NodeFacts | None = None
    answers: SimpleQueue[messages.Answer | None] = field(default_factory=SimpleQueue)
    """None: the node is gone."""
    observed: dict[str, Observed] = field(default_factory=dict)
    silent_s: float = 0.0
    has_spoken: bool = False
    """Since a child has failed."""
    is_silent: bool = False
    """It has said nothing for too long, and counts as gone."""
    fault: str | None = None
    """Why it is gone."""
    joined: Flag = field(default_factory=Flag)
    """Set when its agent has reported, or is gone."""
    losing: Lock = field(default_factory=Lock)


class ClusterHost:
    """Runs children on the nodes that channels lead to: a `ProcessSpec` goes to the node of its index.

    A context manager. Entering it waits for all agents. No process is left on any node on exit. Signals to this process
    become events through `local`, which starts nothing itself.
    """

    def __init__(
        self,
        local: LocalHost,
        channels: Sequence[Channel],
        say: Callable[[str], None] = lambda line: None,
        join_limit_s: float = JOIN_LIMIT_S,
        silent_s: float = NODE_SILENT_S,
        answer_limit_s: float = ANSWER_LIMIT_S,
    ) -> None:
        self._local = local
        self._nodes = [_Node(index, channel) for index, channel in enumerate(channels)]
        self._say = say
        self._join_limit_s = join_limit_s
        self._silent_limit_s = silent_s
        self._answer_limit_s = answer_limit_s
        self._clock_s = 0.0
        """Counts only while this process runs."""
        self._numbers = itertools.count(1)
        self._specs: dict[str, ProcessSpec] = {}
        self._ended: dict[str, messages.Ended] = {}
        self._is_closing = Flag()

    def __enter__(self) -> Self:
        """Raises CannotStart: an agent does not start, or refuses, or a signal ends the wait (StoppedEarly)."""
        for node in self._nodes:
            Thread(target=self._receive, args=(node,), name=f"from {node.channel.name}", daemon=True).start()
        Thread(target=self._ping_all, name="pings", daemon=True).start()
        try:
            self._await_agents()
        except BaseException:
            self._close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end_all(grace_s=0)
        self._close()

    @property
    def facts(self) -> tuple[NodeFacts, ...]:
        """The facts of each node, in the order of the channels."""
        return tuple(node.facts for node in self._nodes if node.facts is not None)

    def _await_agents(self) -> None:
        deadline_s = time.monotonic() + self._join_limit_s
        reminder_s = time.monotonic() + _REMIND_EVERY_S
        while missing := [node for node in self._nodes if not node.joined.is_set()]:
            now_s = time.monotonic()
            names = ", ".join(node.channel.name for node in missing)
            if now_s >= deadline_s:
                how = "\n".join(node.channel.describe() for node in missing)
                raise CannotStart(f"no agent reported from {names} within {self._join_limit_s:g} s\n{how}")
            if now_s >= reminder_s:
                reminder_s = now_s + _REMIND_EVERY_S
                self._say(f"waiting for the agents of {names}")
            self._refuse_faults()
            event = self._local.next_event(_LOOK_EVERY_S)
            if isinstance(event, Signalled) and event.signal is not signal.SIGUSR1:
                raise StoppedEarly(event.signal, f"the agents of {names} started")
        self._refuse_faults()

    def _refuse_faults(self) -> None:
        if faults := [node.fault for node in self._nodes if node.fault is not None]:
            raise CannotStart("\n".join(faults))

    def _close(self) -> None:
        self._is_closing.set()
        limits_s = [CLOSING_S if node.fault is None else LOST_CLOSING_S for node in self._nodes]
        closing = [
            Thread(target=node.channel.close, args=(limit_s,), daemon=True)
            for node, limit_s in zip(self._nodes, limits_s, strict=True)
        ]
        for thread in closing:
            thread.start()
        for thread in closing:
            thread.join()

    def _receive(self, node: _Node) -> None:
        """Read the reports of one node until it is gone."""
        while (line := node.channel.receive()) is not None:
            node.silent_s, node.has_spoken = 0.0, True
            try:
                self._take(node, messages.report_of(line))
            except RunError as error:
                self._lose(node, f"its agent sent a line that is not a message: {error}")
                return
        self._lose(node, "its agent ended")

    def _take(self, node: _Node, report: messages.Report) -> None:
        match report:
            case messages.Hello(facts, protocol):
                if protocol != messages.PROTOCOL:
                    self._lose(node, f"its agent uses version {protocol} of the protocol, not {messages.PROTOCOL}")
                    return
                node.facts = facts
                node.joined.set()
            case messages.Refusal(fault):
                self._lose(node, fault)
            case messages.Answer():
                node.answers.put(report)
            case messages.Status(observed):
                node.observed = dict(observed)
            case messages.Caught(signum):
                # `scancel -s INT` reaches every agent, but a second Ctrl-C would mean to stop at once.
                self._local.report(Signalled(signal.SIGTERM if signum is signal.SIGINT else signum))
            case messages.Ended(name, code):
                self._ended[name] = report
                if code:
                    for each in self._nodes:
                        each.has_spoken = False
                self._local.report(Exited(name, code, node=self._name(node)))

    def _name(self, node: _Node) -> str:
        return node.facts.name if node.facts is not None else node.channel.name

    def _lose(self, node: _Node, why: str) -> None:
        with node.losing:
            if node.fault is not None:
                return
            how, *lines = node.channel.describe().splitlines()
            what = "cannot be used" if node.facts is None else "is gone"
            node.fault = "\n".join([f"node {self._name(node)} {what}: {why} ({how})", *lines])
            node.answers.put(None)
            node.joined.set()
            if not self._is_closing.is_set() and node.facts is not None:
                self._local.report(NodeLost(node.index, node.fault))

    def _ping_all(self) -> None:
        ping = messages.encoded(messages.Ping())
        looked_s = time.monotonic()
        while not self._is_closing.wait(messages.PING_EVERY_S):
            now_s = time.monotonic()
            # Time in which this process was stopped does not count.
            gap_s, looked_s = min(now_s - looked_s, 2 * messages.PING_EVERY_S), now_s
            self._clock_s += gap_s
            for node in self._nodes:
                node.channel.send(ping)
                node.silent_s += gap_s
                if node.facts is not None and node.silent_s >= self._silent_limit_s and not node.is_silent:
                    node.is_silent = True
                    why = (
                        f"no message from its agent for {self._silent_limit_s:g} s (the machine, its network or one "
                        "of its file systems may hang)"
                    )
                    # To describe a node that does not answer takes seconds, in which others need their pings.
                    Thread(target=self._lose, args=(node, why), name=f"lost {node.channel.name}", daemon=True).start()

    def _tell(self, node: _Node, order: messages.Order) -> None:
        if node.fault is None:
            node.channel.send(messages.encoded(order))

    def _answers(self, nodes: Sequence[_Node], number: int, more_s: float = 0.0) -> list[messages.Answer | None]:
        """The answer of each node to an order. None: the node is gone, or does not answer in time.

        One thread gives orders, one at a time to each node. `more_s`: seconds that carrying out the order may take.
        """
        deadline_s = self._clock_s + self._answer_limit_s + more_s
        return [self._answer(node, number, deadline_s) for node in nodes]

    def _answer(self, node: _Node, number: int, deadline_s: float) -> messages.Answer | None:
        while node.fault is None:
            try:
                answer = node.answers.get(timeout=_LOOK_EVERY_S)
            except Empty:
                if self._clock_s >= deadline_s:
                    self._say(
                        f"{self._name(node)} is alive, but did not carry out an order within "
                        f"{self._answer_limit_s:g} s: its file system may hang"
                    )
                    return None
                continue
            # Others are late answers to earlier orders.
            if answer is None or answer.number == number:
                return answer
        return None

    def _node_of(self, name: str) -> _Node:
        return self._nodes[self._specs[name].node]

    def start(self, spec: ProcessSpec) -> None:
        node, number = self._nodes[spec.node], next(self._numbers)
        self._specs[spec.name] = spec
        # There is no other way to read it.
        umask = os.umask(0o077)
        os.umask(umask)
        self._tell(node, messages.Start(number, spec=spec, umask=umask))
        (answer,) = self._answers([node], number)
        if answer is None:
            why = node.fault or f"{self._name(node)} did not answer within {self._answer_limit_s:g} s"
            raise CannotStart(f"{spec.name} cannot be started: {why}")
        if answer.fault is not None:
            raise CannotStart(f"on {self._name(node)}: {answer.fault}")

    def all_see_lock(self, file: Path) -> bool:
        """Whether every node sees the lock that this process holds on a file."""
        number = next(self._numbers)
        for node in self._nodes:
            self._tell(node, messages.SeeLock(number, file=file))
        answers = self._answers(self._nodes, number)
        return all(answer is not None and answer.heard for answer in answers)

    def next_event(self, timeout_s: float | None) -> Event | None:
        return self._local.next_event(timeout_s)

    def stop(self, name: str) -> None:
        self._tell(self._node_of(name), messages.Stop(name=name))

    def relay(self, name: str, signum: signal.Signals) -> bool:
        node, number = self._node_of(name), next(self._numbers)
        self._tell(node, messages.Relay(number, name=name, signum=signum))
        (answer,) = self._answers([node], number)
        return answer is not None and answer.heard

    def end_all(self, grace_s: float) -> None:
        number = next(self._numbers)
        for node in self._nodes:
            self._tell(node, messages.EndAll(number, grace_s=grace_s))
        self._answers(self._nodes, number, grace_s)

    def give_up(self, spec: ProcessSpec) -> None:
        note_loss(spec)

    def has_completed(self, spec: ProcessSpec) -> bool:
        return spec.name in self._ended and self._ended[spec.name].is_complete

    def exit_code(self, name: str) -> int | None:
        """As a child's agent reported it. None: the child has not ended, or its node is lost."""
        return self._ended[name].code if name in self._ended else None

    def lost_node(self) -> NodeLost | None:
        deadline_s = self._clock_s + self._silent_limit_s + 2 * messages.PING_EVERY_S
        while self._clock_s < deadline_s:
            for node in self._nodes:
                if node.fault is not None:
                    return NodeLost(node.index, node.fault)
            if all(node.has_spoken for node in self._nodes):
                return None
            time.sleep(_LOOK_EVERY_S)
        return None

    def tail(self, name: str) -> list[str]:
        if name in self._ended:
            return self._ended[name].tail
        node, number = self._node_of(name), next(self._numbers)
        self._tell(node, messages.Tail(number, name=name))
        (answer,) = self._answers([node], number)
        if answer is not None:
            return answer.lines.get(name, [])
        # The directory is shared: the log is there, as far as it was written.
        lines = logs.tail(self._specs[name].log, TAIL_LINES)
        starts = [index for index, line in enumerate(lines) if line.startswith(logs.HEAD)]
        return lines[starts[-1] + 1 :] if starts else lines

    def observe(self, spec: ProcessSpec) -> Observed:
        return self._nodes[spec.node].observed.get(spec.name, Observed())

    def stacks(self, names: Iterable[str]) -> dict[str, list[str]]:
        asked: dict[int, list[str]] = {}
        for name in names:
            asked.setdefault(self._specs[name].node, []).append(name)
        number = next(self._numbers)
        for index, there in asked.items():
            self._tell(self._nodes[index], messages.Stacks(number, names=tuple(there)))
        found: dict[str, list[str]] = {}
        for answer in self._answers([self._nodes[index] for index in asked], number):
            found |= {} if answer is None else answer.lines
        return found
