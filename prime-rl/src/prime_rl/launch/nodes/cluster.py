"""A host whose children run on several nodes, each under an agent."""

from __future__ import annotations

import itertools
import os
import signal
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue
from threading import Event as Flag
from threading import Lock, Thread
from types import TracebackType
from typing import Self

from prime_rl.launch import logs
from prime_rl.launch.host import TAIL_LINES, LocalHost, note_loss
from prime_rl.launch.nodes.channels import Channel
from prime_rl.launch.nodes.facts import NodeFacts
from prime_rl.launch.nodes.messages import (
    PING_EVERY_S,
    PROTOCOL,
    Answer,
    BadMessage,
    Caught,
    EndAll,
    Ended,
    Hello,
    Order,
    Ping,
    Refusal,
    Relay,
    Report,
    SeeLock,
    Stacks,
    Start,
    Status,
    Stop,
    Tail,
    encoded,
    report_of,
)
from prime_rl.launch.spec import CannotStart, Event, Exited, NodeLost, ProcessSpec, Signalled, StoppedEarly
from prime_rl.launch.stalls.watchdog import Observed

JOIN_LIMIT_S = 300.0
"""Seconds for all agents to start. A node may have to load Python over a slow network first."""

NODE_SILENT_S = 20.0
"""A node whose agent says nothing for so long is gone, although the connection has not ended."""

_REMIND_EVERY_S = 30.0
_LOOK_EVERY_S = 0.1


@dataclass(slots=True)
class _Node:
    """The head's view of one node."""

    index: int
    channel: Channel
    facts: NodeFacts | None = None
    answers: SimpleQueue[Answer | None] = field(default_factory=SimpleQueue)
    """None: the node is gone."""
    observed: dict[str, Observed] = field(default_factory=dict)
    silent_s: float = 0.0
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
    ) -> None:
        self._local = local
        self._nodes = [_Node(index, channel) for index, channel in enumerate(channels)]
        self._say = say
        self._join_limit_s = join_limit_s
        self._silent_limit_s = silent_s
        self._numbers = itertools.count(1)
        self._specs: dict[str, ProcessSpec] = {}
        self._ended: dict[str, Ended] = {}
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
        closing = [Thread(target=node.channel.close, daemon=True) for node in self._nodes]
        for thread in closing:
            thread.start()
        for thread in closing:
            thread.join()

    def _receive(self, node: _Node) -> None:
        """Read the reports of one node until it is gone."""
        while (line := node.channel.receive()) is not None:
            node.silent_s = 0.0
            try:
                self._take(node, report_of(line))
            except BadMessage as error:
                self._lose(node, f"its agent sent a line that is no message: {error}")
                return
        self._lose(node, "its agent ended")

    def _take(self, node: _Node, report: Report) -> None:
        match report:
            case Hello(facts, protocol):
                if protocol != PROTOCOL:
                    self._lose(node, f"its agent speaks version {protocol} of the protocol, not {PROTOCOL}")
                    return
                node.facts = facts
                node.joined.set()
            case Refusal(fault):
                self._lose(node, fault)
            case Answer():
                node.answers.put(report)
            case Status(observed):
                node.observed = dict(observed)
            case Caught(signum):
                # `scancel -s INT` reaches every agent, but a second Ctrl-C would mean to stop at once.
                self._local.report(Signalled(signal.SIGTERM if signum is signal.SIGINT else signum))
            case Ended(name, code):
                self._ended[name] = report
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
        ping = encoded(Ping())
        looked_s = time.monotonic()
        while not self._is_closing.wait(PING_EVERY_S):
            now_s = time.monotonic()
            # Time in which this process was stopped does not count.
            gap_s, looked_s = min(now_s - looked_s, 2 * PING_EVERY_S), now_s
            for node in self._nodes:
                node.channel.send(ping)
                node.silent_s += gap_s
                if node.facts is not None and node.silent_s >= self._silent_limit_s:
                    self._lose(node, f"its agent said nothing for {self._silent_limit_s:g} s")

    def _tell(self, node: _Node, order: Order) -> None:
        if node.fault is None:
            node.channel.send(encoded(order))

    def _answer(self, node: _Node, number: int) -> Answer | None:
        """The answer to an order; None if the node is gone. One thread gives orders, one at a time to each node."""
        while node.fault is None:
            answer = node.answers.get()
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
        self._tell(node, Start(number, spec=spec, umask=umask))
        answer = self._answer(node, number)
        if answer is None:
            raise CannotStart(f"{spec.name} cannot be started: {node.fault}")
        if answer.fault is not None:
            raise CannotStart(f"on {self._name(node)}: {answer.fault}")

    def all_see_lock(self, file: Path) -> bool:
        """Whether every node sees the lock that this process holds on a file."""
        number = next(self._numbers)
        for node in self._nodes:
            self._tell(node, SeeLock(number, file=file))
        answers = [self._answer(node, number) for node in self._nodes]
        return all(answer is not None and answer.heard for answer in answers)

    def next_event(self, timeout_s: float | None) -> Event | None:
        return self._local.next_event(timeout_s)

    def stop(self, name: str) -> None:
        self._tell(self._node_of(name), Stop(name=name))

    def relay(self, name: str, signum: signal.Signals) -> bool:
        node, number = self._node_of(name), next(self._numbers)
        self._tell(node, Relay(number, name=name, signum=signum))
        answer = self._answer(node, number)
        return answer is not None and answer.heard

    def end_all(self, grace_s: float) -> None:
        number = next(self._numbers)
        for node in self._nodes:
            self._tell(node, EndAll(number, grace_s=grace_s))
        for node in self._nodes:
            self._answer(node, number)

    def give_up(self, spec: ProcessSpec) -> None:
        note_loss(spec)

    def has_completed(self, spec: ProcessSpec) -> bool:
        return spec.name in self._ended and self._ended[spec.name].is_complete

    def exit_code(self, name: str) -> int | None:
        """As a child's agent reported it. None: the child has not ended, or its node is lost."""
        return self._ended[name].code if name in self._ended else None

    def tail(self, name: str) -> list[str]:
        if name in self._ended:
            return self._ended[name].tail
        node, number = self._node_of(name), next(self._numbers)
        self._tell(node, Tail(number, name=name))
        answer = self._answer(node, number)
        if answer is not None:
            return answer.lines.get(name, [])
        # The directory is shared: the log of a lost node is there, as far as it was written.
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
            self._tell(self._nodes[index], Stacks(number, names=tuple(there)))
        found: dict[str, list[str]] = {}
        for index in asked:
            answer = self._answer(self._nodes[index], number)
            found |= {} if answer is None else answer.lines
        return found
