"""Runs and watches the processes of a launch on one node: `python -m prime_rl.launch.nodes.agent`.

The head of the launch gives orders on stdin and receives reports on stdout (`launch/nodes/messages.py`). If stdin ends,
or the head says nothing for `HEAD_SILENT_S`, the agent ends all of its processes. If the agent itself is killed, the
guard of its `LocalHost` does so. There is no socket.
"""

from __future__ import annotations

import fcntl
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from queue import SimpleQueue
from threading import Event as Flag
from threading import Lock, Thread

from prime_rl.launch.caches import bytecode_env, compile_caches, made_for, packages_are_compiled
from prime_rl.launch.devices import gpu_names
from prime_rl.launch.host import LocalHost
from prime_rl.launch.nodes.facts import gathered_facts
from prime_rl.launch.nodes.messages import (
    MAX_LINE_BYTES,
    PING_EVERY_S,
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
    order_of,
)
from prime_rl.launch.ports import reserved_ports
from prime_rl.launch.reaper import GUARD_GRACE_S
from prime_rl.launch.spec import CannotStart, Exited, ProcessSpec, Signalled
from prime_rl.utils.gpus import DeviceError, usable_gpus

HEAD_SILENT_S = 60.0
"""A head that says nothing for so long is gone, although the connection has not ended."""

PORTS = 3
"""Ports that an agent holds for the processes of its node."""

STOPPING = frozenset({signal.SIGINT, signal.SIGTERM, signal.SIGUSR2})
"""Signals to an agent that it reports to the head."""


class Agent:
    """Carries out the orders of the head on this node."""

    def __init__(self, host: LocalHost, say: Callable[[Report], None]) -> None:
        self._host = host
        self._say = say
        self._specs: dict[str, ProcessSpec] = {}
        self._running: set[str] = set()
        self._changing = Lock()
        self._is_over = Flag()

    def serve(self, orders: Iterator[Order]) -> None:
        """Carry out orders until they end. Then no process is left."""
        reporters = [Thread(target=work, daemon=True) for work in (self._report_events, self._report_status)]
        for thread in reporters:
            thread.start()
        for order in orders:
            self._carry_out(order)
        self._is_over.set()
        self._host.end_all(GUARD_GRACE_S)

    def _carry_out(self, order: Order) -> None:
        answer = Answer(order.number)
        match order:
            case Start():
                answer = Answer(order.number, fault=self._start(order))
            case Stop():
                self._host.stop(order.name)
            case Relay():
                answer = Answer(order.number, heard=self._host.relay(order.name, order.signum))
            case Tail():
                answer = Answer(order.number, lines={order.name: self._host.tail(order.name)})
            case Stacks():
                answer = Answer(order.number, lines=self._host.stacks(order.names))
            case SeeLock():
                answer = Answer(order.number, heard=_is_locked_elsewhere(order.file))
            case EndAll():
                self._host.end_all(order.grace_s)
        if order.number:
            self._say(answer)

    def _start(self, order: Start) -> str | None:
        os.umask(order.umask)
        with self._changing:
            self._specs[order.spec.name] = order.spec
            try:
                self._host.start(order.spec)
            except (CannotStart, OSError) as error:
                return str(error)
            self._running.add(order.spec.name)
        return None

    def _report_events(self) -> None:
        while True:
            match self._host.next_event(None):
                case Exited(name, code):
                    with self._changing:
                        self._running.discard(name)
                        spec = self._specs[name]
                    self._say(Ended(name, code, self._host.has_completed(spec), self._host.tail(name)))
                case Signalled(signum) if signum in STOPPING:
                    self._say(Caught(signum))

    def _report_status(self) -> None:
        while not self._is_over.wait(PING_EVERY_S):
            with self._changing:
                specs = [self._specs[name] for name in self._running]
            self._say(Status({spec.name: self._host.observe(spec) for spec in specs}))


def _is_locked_elsewhere(file: Path) -> bool:
    """Whether locks of other nodes are seen here. Some shared file systems keep them to one node."""
    try:
        with file.open("r+b") as opened:
            fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def orders_from(descriptor: int, silent_s: float = HEAD_SILENT_S) -> Iterator[Order]:
    """Orders of the head until the stream ends, or nothing comes for `silent_s` seconds while this process runs."""
    partial = b""
    waited_s = 0.0
    while waited_s < silent_s:
        began_s = time.monotonic()
        if not select.select([descriptor], [], [], PING_EVERY_S)[0]:
            # Time in which this process was stopped does not count.
            waited_s += min(time.monotonic() - began_s, 2 * PING_EVERY_S)
            continue
        waited_s = 0.0
        data = os.read(descriptor, 1 << 20)
        *lines, partial = (partial + data).split(b"\n")
        if not data or len(partial) > MAX_LINE_BYTES:
            return
        yield from (order for line in lines if not isinstance(order := order_of(line), Ping))
    sys.stderr.write(f"the head of the launch said nothing for {silent_s:g} s: ending all processes\n")


class Sender:
    """Writes reports to the head, from any thread. Never blocks: the head may be slow, or gone."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._outbox: SimpleQueue[bytes | None] = SimpleQueue()
        self._thread = Thread(target=self._write, name="reports", daemon=True)
        self._thread.start()

    def __call__(self, report: Report) -> None:
        self._outbox.put(encoded(report))

    def close(self, timeout_s: float) -> None:
        """Send what is left."""
        self._outbox.put(None)
        self._thread.join(timeout_s)

    def _write(self) -> None:
        while (line := self._outbox.get()) is not None:
            left = memoryview(line)
            try:
                while left:
                    left = left[os.write(self._descriptor, left) :]
            except OSError:  # the head is gone; stdin ends, too
                return


def _end_if_a_thread_fails() -> None:
    """The head would wait for the reports of that thread. Without this process, the guard ends the node's processes."""
    show = threading.excepthook

    def fail(error: threading.ExceptHookArgs) -> None:
        show(error)
        os._exit(1)

    threading.excepthook = fail


def main() -> int:
    _end_if_a_thread_fails()
    # Whatever prints to stdout must not disturb the messages.
    reports = os.dup(1)
    os.dup2(2, 1)
    say = Sender(reports)
    env = dict(os.environ)
    try:
        with ExitStack() as held:
            host = held.enter_context(LocalHost())
            combination = made_for(gpu_names(usable_gpus(env)), env)
            caches = held.enter_context(compile_caches(env, combination, host.directory / "caches"))
            ports = held.enter_context(reserved_ports(PORTS))
            bytecode = bytecode_env(env, packages_are_compiled())
            say(Hello(gathered_facts(env, ports, caches, bytecode)))
            Agent(host, say).serve(orders_from(0))
    except (DeviceError, OSError, BadMessage) as error:
        say(Refusal(str(error)))
        sys.stderr.write(f"error: {error}\n")
        return 1
    finally:
        say.close(timeout_s=5.0)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
