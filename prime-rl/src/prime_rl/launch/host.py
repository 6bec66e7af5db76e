"""Runs children: on this machine, or as a scripted fake for tests."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from contextvars import ContextVar
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Event as Flag
from threading import Thread
from types import FrameType, TracebackType
from typing import Any, Protocol, Self

from prime_rl.launch import logs, reaper
from prime_rl.launch.spec import Event, Exited, NodeLost, ProcessSpec, Signalled
from prime_rl.launch.stalling import Observed, new_stacks
from prime_rl.run.process import (
    COMPLETION_VARIABLE,
    HEARTBEAT_VARIABLE,
    clear_completion,
    clear_heartbeats,
    read_heartbeats,
    start_guard,
)
from prime_rl.utils.engine_keys import direct_loopback
from prime_rl.utils.errors import CannotStart
from prime_rl.utils.logger import PROCESS_VARIABLE
from prime_rl.utils.private import runtime_directory, without_service_keys
from prime_rl.utils.scratch import LAUNCH_KIND, abandoned_launches, owned_directory
from prime_rl.utils.signals import STACKS_SIGNAL

Handler = Callable[[int, FrameType | None], Any] | signal.Handlers | int | None
"""Argument and result of `signal.signal`."""

CAUGHT = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
"""Signals to the launcher that become events."""

TAIL_LINES = 20
_GUARD_PAUSE_S = 0.1
"""Before a guard that was killed is replaced; doubled each time, in case guards cannot run here."""


_noted: ContextVar[list[signal.Signals] | None] = ContextVar("noted", default=None)


@contextlib.contextmanager
def noted_signals() -> Iterator[list[signal.Signals]]:
    """Collect the signals that end a launch, from all hosts of the block, also those that came after its failure."""
    found: list[signal.Signals] = []
    token = _noted.set(found)
    try:
        yield found
    finally:
        _noted.reset(token)


class Host(Protocol):
    """Starts children, reports events, and stops the children."""

    def start(self, spec: ProcessSpec) -> None:
        """Raises CannotStart."""

    def next_event(self, timeout_s: float | None) -> Event | None:
        """Wait for the next event; None after the timeout."""

    def stop(self, name: str) -> None:
        """Ask a child and its process group to stop."""

    def relay(self, name: str, signum: signal.Signals) -> bool:
        """Forward a signal to the processes of a child that handle it; False if none does."""

    def end_all(self, grace_s: float) -> None:
        """Stop everything that is left of any child, including daemons; kill it after the grace period."""

    def has_completed(self, spec: ProcessSpec) -> bool:
        """Whether a child that has ended with 0 had done its work."""

    def give_up(self, spec: ProcessSpec) -> None:
        """Leave a sign that the run goes on without a child."""

    def lost_node(self) -> NodeLost | None:
        """After a child has failed: the first node that is lost. Waits until each has spoken since, or is lost."""

    def tail(self, name: str) -> list[str]:
        """The last log lines of a child in this attempt."""

    def observe(self, spec: ProcessSpec) -> Observed:
        """Progress that a running child has reported, and whether a signal has stopped it."""

    def stacks(self, names: Iterable[str]) -> dict[str, list[str]]:
        """Make the Python processes of children write their stacks to their logs. Continues those that are stopped.

        Returns the most important lines, by name.
        """


class LocalHost:
    """Runs children of this process, each in its own session.

    A context manager for the main thread. Inside it, signals to this process become events. If this process is killed,
    a guard process stops the children (`launch/reaper.py`). No process is left on exit.
    """

    def __init__(self, held_by_guard: tuple[int, ...] = ()) -> None:
        """`held_by_guard` are file descriptors that the guard keeps open, such as a lock, until no process is left."""
        self._held_by_guard = held_by_guard
        self._closing = ExitStack()
        self._is_ended = Flag()
        self._events: SimpleQueue[Event] = SimpleQueue()
        self._children: dict[str, subprocess.Popen[bytes]] = {}
        self._logs: dict[str, tuple[Path, int]] = {}
        self._previous_handlers: dict[signal.Signals, Handler] = {}

    def __enter__(self) -> Self:
        end_abandoned()
        self.directory, self._lock = self._closing.enter_context(owned_directory(LAUNCH_KIND))
        for signum in CAUGHT:
            # nohup ignores SIGHUP, so that the run survives its terminal.
            if signum is not signal.SIGHUP or signal.getsignal(signum) is not signal.SIG_IGN:
                self._previous_handlers[signum] = signal.signal(signum, self._on_signal)
        for descriptor in self._held_by_guard:
            # A guard that a child starts opens the file by its name.
            with contextlib.suppress(OSError):
                reaper.note(self.directory, lock=str(Path(f"/proc/self/fd/{descriptor}").readlink()))
        self._guard = self._started_guard()
        self._keeper = Thread(target=self._keep_guard, name="guard's keeper", daemon=True)
        self._keeper.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end_all(grace_s=0)
        # Without its directory, a guard has nothing to do.
        self._closing.close()
        self._is_ended.set()
        _dismiss(self._guard)
        self._keeper.join()
        for signum, handler in self._previous_handlers.items():
            signal.signal(signum, handler)

    def _started_guard(self) -> subprocess.Popen[bytes]:
        return start_guard(self.directory, self._lock, *self._held_by_guard, stdin=subprocess.PIPE)

    def _keep_guard(self) -> None:
        """Replace a guard that is killed."""
        pause_s = _GUARD_PAUSE_S
        while True:
            self._guard.wait()
            if self._is_ended.wait(pause_s):
                return
            pause_s *= 2
            self._guard = self._started_guard()
            if self._is_ended.is_set():
                _dismiss(self._guard)

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        if (noted := _noted.get()) is not None and signum != signal.SIGUSR1:
            noted.append(signal.Signals(signum))
        # Only SimpleQueue.put may interrupt a get in the same thread.
        self._events.put(Signalled(signal.Signals(signum)))

    def report(self, event: Event) -> None:
        """Have `next_event` return this event, too."""
        self._events.put(event)

    def start(self, spec: ProcessSpec) -> None:
        inherited = os.environ if spec.gets_service_keys else without_service_keys(os.environ)
        env = {
            **inherited,
            **direct_loopback(inherited),
            **spec.env,
            **spec.secrets,
            reaper.MARK_VARIABLE: str(self.directory),
        }
        env[PROCESS_VARIABLE] = spec.name
        if spec.if_lost is not None:
            clear_completion(spec.if_lost)
        if spec.completion is not None:
            clear_completion(spec.completion)
            env[COMPLETION_VARIABLE] = str(spec.completion)
        if spec.heartbeat is not None:
            clear_heartbeats(spec.heartbeat)
            env[HEARTBEAT_VARIABLE] = str(spec.heartbeat)
        with logs.opened_for_attempt(spec) as (log, offset):
            self._logs[spec.name] = (spec.log, offset)
            try:
                child = subprocess.Popen(
                    spec.argv,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env=env,
                    start_new_session=True,
                )
            except OSError as error:
                raise CannotStart(f"{spec.name} cannot be started: {spec.argv[0]}: {error.strerror}") from error
        self._children[spec.name] = child
        reaper.note(self.directory, leader=reaper.Leader.of(child.pid))
        Thread(target=self._report_exit, args=(spec.name, child), name=f"wait-{spec.name}", daemon=True).start()

    def _report_exit(self, name: str, child: subprocess.Popen[bytes]) -> None:
        self._events.put(Exited(name, child.wait()))

    def next_event(self, timeout_s: float | None) -> Event | None:
        try:
            return self._events.get(timeout=timeout_s)
        except Empty:
            return None

    def stop(self, name: str) -> None:
        reaper.send_group(self._children[name].pid, signal.SIGTERM)
        # A stopped process receives the signal when it is continued.
        reaper.send_group(self._children[name].pid, signal.SIGCONT)

    def relay(self, name: str, signum: signal.Signals) -> bool:
        listeners = reaper.listeners(self._children[name].pid, signum)
        for pid in listeners:
            reaper.send(pid, signum)
        return bool(listeners)

    def end_all(self, grace_s: float) -> None:
        # An agent starts children in another thread.
        children = list(self._children.values())
        reaper.end(str(self.directory), [child.pid for child in children], grace_s)

    def has_completed(self, spec: ProcessSpec) -> bool:
        return spec.completion is None or spec.completion.is_file()

    def give_up(self, spec: ProcessSpec) -> None:
        note_loss(spec)

    def lost_node(self) -> None:
        """There is one node, this one."""

    def tail(self, name: str) -> list[str]:
        log, offset = self._logs[name]
        return logs.tail(log, TAIL_LINES, offset)

    def observe(self, spec: ProcessSpec) -> Observed:
        heartbeats = () if spec.heartbeat is None else tuple(read_heartbeats(spec.heartbeat))
        pids = {self._children[spec.name].pid}.union(*(each.pids for each in heartbeats))
        return Observed(heartbeats, tuple(sorted(filter(reaper.is_stopped, pids))))

    def stacks(self, names: Iterable[str]) -> dict[str, list[str]]:
        followers = {name: logs.Follower.at_end(self._logs[name][0]) for name in names}
        asked = {name: follower for name, follower in followers.items() if self.relay(name, STACKS_SIGNAL)}
        for leader in (self._children[name].pid for name in asked):
            reaper.send_group(leader, signal.SIGCONT)
            # Servers of environments have groups of their own.
            for pid in reaper.listeners(leader, STACKS_SIGNAL):
                reaper.send(pid, signal.SIGCONT)
        return new_stacks(asked)


def note_loss(spec: ProcessSpec) -> None:
    """Make the file that tells the others that the run goes on without a child."""
    # A full disk must not end the run here, either.
    with contextlib.suppress(OSError):
        if spec.if_lost is not None:
            spec.if_lost.touch()


def end_abandoned() -> None:
    """End what is left of this user's launches on this machine that were killed together with their guards."""
    for directory, _ in abandoned_launches(runtime_directory()):
        if ended := reaper.clean_up(directory, at_once=False):
            sys.stderr.write(f"ended {len(ended)} processes of a launch that was killed earlier\n")


def _dismiss(guard: subprocess.Popen[bytes]) -> None:
    assert guard.stdin is not None, "a pipe was asked for"
    guard.stdin.close()


class FakeHost:
    """Starts nothing: replays a script of events and records the calls.

    `None` in the script is a timeout; so is the end of the script, for a caller with a timeout. Children that are
    `incomplete` leave no sign that their work was done. Every look at the children finds what `observed` says.
    """

    def __init__(
        self,
        events: Iterable[Event | None],
        cannot_start: Iterable[str] = (),
        listening: bool = True,
        incomplete: Iterable[str] = (),
        observed: Mapping[str, Observed] | None = None,
        lost_node: NodeLost | None = None,
    ) -> None:
        self._lost_node = lost_node
        self._script = list(events)
        self._cannot_start = frozenset(cannot_start)
        self._listening = listening
        self._incomplete = frozenset(incomplete)
        self._observed = observed or {}
        self.started: list[str] = []
        self.stopped: list[str] = []
        self.given_up: list[str] = []
        self.relayed: list[tuple[str, signal.Signals]] = []
        self.waits_s: list[float | None] = []
        self.grace_of_end_s: float | None = None

    def start(self, spec: ProcessSpec) -> None:
        if spec.name in self._cannot_start:
            raise CannotStart(f"{spec.name} cannot be started: {spec.argv[0]}: No such file or directory")
        self.started.append(spec.name)

    def next_event(self, timeout_s: float | None) -> Event | None:
        self.waits_s.append(timeout_s)
        if self._script:
            return self._script.pop(0)
        if timeout_s is None:
            raise AssertionError("the supervisor waits for an event that the script does not have")
        return None

    def stop(self, name: str) -> None:
        self.stopped.append(name)

    def relay(self, name: str, signum: signal.Signals) -> bool:
        self.relayed.append((name, signum))
        return self._listening

    def end_all(self, grace_s: float) -> None:
        self.grace_of_end_s = grace_s

    def has_completed(self, spec: ProcessSpec) -> bool:
        return spec.name not in self._incomplete

    def give_up(self, spec: ProcessSpec) -> None:
        self.given_up.append(spec.name)

    def lost_node(self) -> NodeLost | None:
        return self._lost_node

    def tail(self, name: str) -> list[str]:
        return [f"last words of {name}"]

    def observe(self, spec: ProcessSpec) -> Observed:
        return self._observed.get(spec.name, Observed())

    def stacks(self, names: Iterable[str]) -> dict[str, list[str]]:
        return {name: [f"stack of {name}"] for name in names}
