"""Starts the children of a run in order, watches them, and always stops all of them."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

from prime_rl.launch.host import Host
from prime_rl.launch.logs import reason_in
from prime_rl.launch.spec import Event, Exited, NodeLost, Outcome, ProcessSpec, Signalled
from prime_rl.launch.stalling import LOOK_EVERY_S, Stalled, Watchdog
from prime_rl.run.process import ANYONE, REFUSED_EXIT_CODE
from prime_rl.utils.errors import CannotStart

GRACE_S = 60.0
"""Seconds for children to save and stop after SIGTERM."""

INTERRUPT_GRACE_S = 600.0
"""The same after Ctrl-C. A step may take minutes, and the user can press the keys again."""

WARNED_GRACE_S = 3600.0
"""The same after SIGUSR2, a scheduler's warning before a time limit. The limit itself ends the wait, with SIGTERM."""

LAST_GRACE_S = 15.0
"""Seconds to save and stop if SIGTERM follows that warning. Slurm kills 30 seconds later, unless KillWait is set."""

TOGETHER_S = 2.0
"""Seconds in which a signal that ended a child also reaches the launcher, if a scheduler signals all of a job."""

STRAGGLER_GRACE_S = 5.0
"""Seconds for processes that outlive their parent, after a successful run."""

_MEMORY_HINT = (
    "This launch sent no SIGKILL. Most likely the machine or the job ran out of memory and the kernel sent it. "
    "Ask for more memory, or make the batch, the sequences or the model smaller."
)

Cause = Exited | Signalled | NodeLost | CannotStart | Stalled | None
"""Why a run ends; None is success."""


class Supervisor:
    """Runs children until the run is complete, fails or is stopped.

    The run ends with the first child that fails, that exits before its work is done or the run is complete, that the
    watchdog finds stalled, with the first node that is lost, and with SIGINT, SIGTERM, SIGHUP or SIGUSR2 to the
    launcher. `say` receives one line for each start and end, and for a signal; `stopping` is what a signal makes the
    children do. After a failure the others have `failure_grace_s` instead of `grace_s` to stop, if it is given.

    Children with `if_lost` work together, and the run can go on without them. If one of them fails or stalls, the
    others are stopped, too. The outcome tells.
    """

    def __init__(
        self,
        specs: Sequence[ProcessSpec],
        host: Host,
        say: Callable[[str], None],
        grace_s: float = GRACE_S,
        stopping: str = "stopping",
        watchdog: Watchdog | None = None,
        failure_grace_s: float | None = None,
    ) -> None:
        self._specs = {spec.name: spec for spec in specs}
        self._host = host
        self._say = say
        self._grace_s = grace_s
        self._stopping = stopping
        self._watchdog = watchdog
        self._failure_grace_s = grace_s if failure_grace_s is None else failure_grace_s
        self._stacks: dict[str, list[str]] = {}
        self._running: list[str] = []
        self._optional = {spec.name for spec in specs if spec.if_lost is not None}
        self._lost: list[str] = []
        self._lost_to_signal = False
        self._completing = {spec.name for spec in specs if spec.completes_run}
        self._finished: set[str] = set()

    def run(self) -> Outcome:
        """Start the children in order and wait for the end of the run. No process is left on return."""
        cause = self._start() or self._watch()
        if cause is None and self._lost_to_signal:
            cause = self._signal_of_all()
        signals = self._stop(cause)
        # Slurm signals every process of a job at once; a child's exit may arrive before our own signal. A server that
        # is asked to stop exits with 0.
        if isinstance(cause, Exited) and (cause.code == 0 or cause.signal is not None):
            asked = cause.signal or signal.SIGTERM
            cause = Signalled(asked) if asked in signals else cause
        if isinstance(cause, Signalled) and not self._completing - self._finished:
            cause = None  # the signal came while the last of them saved
        if isinstance(cause, Exited) and cause.code:
            # A process whose peer was on a lost node often fails before that node is known to be lost.
            cause = self._host.lost_node() or cause
        outcome = self._outcome(cause)
        # What was signalled together with the launcher is not lost.
        return outcome if outcome.was_stopped and self._lost_to_signal else replace(outcome, lost=tuple(self._lost))

    def _start(self) -> Cause:
        for spec in self._specs.values():
            try:
                self._host.start(spec)
            except CannotStart as error:
                if spec.name not in self._optional:
                    return error
                self._lose(str(error))
                continue
            self._running.append(spec.name)
            self._announce(spec.name, f"started, log {spec.log}")
        return None

    def _watch(self) -> Cause:
        while unfinished := self._completing - self._finished - (self._optional if self._lost else set()):
            event = self._next_event()
            match event:
                case Stalled():
                    if not self._optional.issuperset(event.roots):
                        return event
                    self._host.stacks([name for name in self._running if name in event.roots])
                    self._lose(f"{event.lines[0]}; the stacks are in {self._specs[event.roots[0]].log}")
                case NodeLost(node):
                    self._forget(node)
                    return event
                case Exited(name, code):
                    self._running.remove(name)
                    if self._lost and name in self._optional:
                        continue
                    if code != 0 or name not in unfinished or not self._host.has_completed(self._specs[name]):
                        if name not in self._optional:
                            return event
                        self._lost_to_signal = code == 0 or event.signal in (signal.SIGTERM, signal.SIGINT)
                        self._lose(self._end_of_optional(event))
                        continue
                    self._finished.add(name)
                    self._announce(name, "finished")
                    self._tell_what_is_left(unfinished - self._finished)
                case Signalled(signal.SIGUSR1):
                    self._relay(event.signal)
                case Signalled():
                    return event
        return None

    def _signal_of_all(self) -> Cause:
        """The signal to the launcher that also ended optional children, after all others have finished. None if there
        is none: then only the children were signalled."""
        deadline = time.monotonic() + TOGETHER_S
        while (event := self._host.next_event(max(0.0, deadline - time.monotonic()))) is not None:
            match event:
                case Exited(name) if name in self._running:
                    self._running.remove(name)
                case Signalled(signum) if signum is not signal.SIGUSR1:
                    return event
        return None

    def _next_event(self) -> Event | Stalled | None:
        if self._watchdog is None:
            return self._host.next_event(None)
        event = self._host.next_event(LOOK_EVERY_S)
        if event is not None:
            return event
        watched = [name for name in self._running if not (self._lost and name in self._optional)]
        return self._watchdog.look({name: self._host.observe(self._specs[name]) for name in watched})

    def _lose(self, why: str) -> None:
        """Go on without the optional children."""
        self._lost.append(f"{why}; the run goes on without {' and '.join(sorted(self._optional))}")
        self._say(f"warning: {self._lost[-1]}")
        for name in self._optional:
            self._host.give_up(self._specs[name])
        for name in reversed(self._running):
            if name in self._optional:
                self._host.stop(name)

    def _end_of_optional(self, end: Exited) -> str:
        # Its own last line says why it exited; a process that was killed was in the middle of something else.
        last = self._host.tail(end.name)[-1:] if end.signal is None else []
        # A log may hold text of the data, which must not reach a terminal raw.
        text = "".join(char if char.isprintable() else "?" for char in last[0].strip()) if last else ""
        words = f": {text}" if text else ""
        early = " before its work was done" if not end.code and self._specs[end.name].completes_run else ""
        return f"{end.name} {end}{early}{words} (log: {self._specs[end.name].log})"

    def _tell_what_is_left(self, unfinished: Collection[str]) -> None:
        """Once only optional children have work left, say what they do."""
        if not unfinished or not self._optional.issuperset(unfinished):
            return
        for name in sorted(unfinished):
            heartbeats = self._host.observe(self._specs[name]).heartbeats
            doing = f": {heartbeats[0].doing}" if heartbeats and heartbeats[0].waits_for != ANYONE else ""
            self._say(f"waiting for {name}{doing}; its log is {self._specs[name].log}")

    def _announce(self, name: str, words: str) -> None:
        """Report a normal start or end. Of several ranks only the first is reported."""
        if self._specs[name].rank == 0:
            self._say(f"{name} {words}")

    def _relay(self, signum: signal.Signals) -> None:
        for name in self._running:
            if signum in self._specs[name].relays:
                heard = self._host.relay(name, signum)
                self._say(
                    f"{signum.name} passed on to {name}" if heard else f"{name} does not handle {signum.name} yet"
                )

    def _stop(self, cause: Cause) -> set[signal.Signals]:
        """Stop every child; returns the signals that arrived during that time."""
        if isinstance(cause, Stalled):
            self._stacks = self._host.stacks(self._running)
            self._say(f"{cause.lines[0]}; the stacks are in the logs; stopping, within {self._grace_s:g} s")
        signals: set[signal.Signals] = set()
        grace_s = self._failure_grace_s if isinstance(cause, Exited | NodeLost) else self._grace_s
        is_warned = isinstance(cause, Signalled) and cause.signal is signal.SIGUSR2
        if isinstance(cause, Signalled) and cause.signal is signal.SIGINT:
            grace_s = INTERRUPT_GRACE_S
            self._say(f"{self._stopping}; press Ctrl-C again to stop now")
        elif is_warned:
            grace_s = WARNED_GRACE_S
            self._say(f"SIGUSR2, the time limit is near: {self._stopping}")
        elif isinstance(cause, Signalled):
            self._say(f"{cause.signal.name}: {self._stopping}, within {grace_s:g} s")
        for name in reversed(self._running):
            self._host.stop(name)
        deadline = time.monotonic() + grace_s
        while self._running:
            event = self._host.next_event(max(0.0, deadline - time.monotonic()))
            match event:
                case None:
                    self._say(f"{', '.join(self._running)} did not stop in time and will be killed")
                    break
                case Exited(name) if name in self._running:  # and not of a lost node that came back
                    self._running.remove(name)
                    if event.code == 0 and name in self._completing and self._host.has_completed(self._specs[name]):
                        self._finished.add(name)
                    asked = event.code == 0 or event.signal is signal.SIGTERM
                    self._say(f"{name} {'stopped' if asked else event}")
                case NodeLost(node):
                    self._forget(node)
                    self._say(event.fault)
                case Signalled(signum):
                    signals.add(signum)
                    # Not for SIGTERM: Slurm, and a batch script that forwards the signal, may both send it.
                    if signum is signal.SIGINT:
                        self._say("stopping now")
                        break
                    if signum is signal.SIGTERM and is_warned:
                        deadline = min(deadline, time.monotonic() + LAST_GRACE_S)
        self._host.end_all(self._straggler_grace_s(cause is None, deadline))
        return signals

    def _forget(self, node: int) -> None:
        """Drop the children of a node that is gone."""
        self._running = [name for name in self._running if self._specs[name].node != node]

    def _straggler_grace_s(self, completed: bool, deadline: float) -> float:
        if self._running:
            return 0.0
        # Processes that a child started may still be saving.
        return STRAGGLER_GRACE_S if completed else max(0.0, min(deadline - time.monotonic(), self._grace_s))

    def _outcome(self, cause: Cause) -> Outcome:
        match cause:
            case None:
                return Outcome(0, "all done")
            case Signalled(signum):
                by = "Ctrl-C" if signum is signal.SIGINT else signum.name
                return Outcome(128 + signum, f"stopped by {by}{self._what_is_left()}", was_stopped=True)
            case CannotStart():
                return Outcome(1, str(cause))
            case NodeLost():
                return self._loss(cause)
            case Stalled():
                return self._stall(cause)
            case Exited():
                return self._failure(cause)

    def _what_is_left(self) -> str:
        """After a signal: which children had finished, and which had not. Empty if none had."""
        left = sorted(name for name in self._completing - self._finished if self._specs[name].rank == 0)
        done = sorted(name for name in self._finished if self._specs[name].rank == 0)
        return f" after {' and '.join(done)} had finished; {' and '.join(left)} had not" if done and left else ""

    def _loss(self, lost: NodeLost) -> Outcome:
        there = [name for name, spec in self._specs.items() if spec.node == lost.node]
        message = f"{lost.fault}\nit ran {', '.join(there) or 'nothing'}"
        if not there:
            return Outcome(1, message)
        return Outcome(1, message, tuple(self._host.tail(there[0])), f"the last lines of {there[0]}")

    def _failure(self, end: Exited) -> Outcome:
        spec = self._specs[end.name]
        what = str(end) if end.node is None else f"{end} on {end.node}"
        if not end.code:
            what += " before its work was done" if spec.completes_run else ", although the run was not complete"
        log_tail = tuple(self._host.tail(end.name))
        # What a killed process logged last is not why it ended.
        reason = reason_in(log_tail, spec.secrets.values()) if end.code and end.signal is None else None
        if reason is None:
            message = f"{end.name} {what}; its log is {spec.log}"
        else:
            message = f"{end.name}: {reason} ({what.replace('exited with', 'exit', 1)}; log {spec.log})"
        if self._watchdog is not None:
            others = (name for name in self._specs if name != end.name)
            message = "\n".join([message, *self._watchdog.quiet(others)])
        if end.signal is signal.SIGKILL:
            message += f"\n{_MEMORY_HINT}"
        code = REFUSED_EXIT_CODE if end.code == REFUSED_EXIT_CODE else 1
        return Outcome(code, message, log_tail, failed=end.name)

    def _stall(self, stalled: Stalled) -> Outcome:
        first = stalled.roots[0]
        message = "\n".join([*stalled.lines, f"the log of {first} is {self._specs[first].log}"])
        if stack := self._stacks.get(first):
            return Outcome(1, message, tuple(stack), "its stack", failed=first)
        return Outcome(1, message, tuple(self._host.tail(first)), failed=first)
