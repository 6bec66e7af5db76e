"""Runs and watches the processes of a launch on one node: `python -m prime_rl.launch.nodes.agent`.

The head of the launch gives orders on stdin and receives reports on stdout (`launch/nodes/messages.py`). If stdin ends,
or the head says nothing for `HEAD_SILENT_S`, the agent ends all of its processes. If the agent itself is killed, the
guard of its `LocalHost` does so. There is no socket.

A shared file system may hang for a while. Only threads of their own touch its files, so that the agent still says that
it is alive, hears signals, and ends its processes.
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

from prime_rl.launch.caches import (
    bytecode_env,
    compile_caches,
    made_for,
    packages_are_compiled,
)
from prime_rl.launch.devices import gpu_names
from prime_rl.launch.host import LocalHost
from prime_rl.launch.nodes import messages
from prime_rl.launch.nodes.messages import gathered_facts
from prime_rl.launch.placement import reserved_ports
from prime_rl.launch.reaper import GUARD_GRACE_S
from prime_rl.launch.spec import Exited, ProcessSpec, Signalled
from prime_rl.utils.errors import CannotStart, PrimeError
from prime_rl.utils.gpus import usable_gpus

HEAD_SILENT_S = 60.0
"""A head that says nothing for so long is gone, although the connection has not ended."""

PORTS = 3
"""Ports that an agent holds for the processes of its node."""

STUCK_S = 5.0
"""Seconds for the last order to end on a slow file system. After that it hangs, and the guard ends what it may have
started. The head waits longer for this node: `CLOSING_S`."""

LAST_REPORTS_S = 5.0

STOPPING = frozenset({signal.SIGINT, signal.SIGTERM, signal.SIGUSR2})
"""Signals to an agent that it reports to the head."""


class Agent:
    """Carries out the orders of the head on this node."""

    def __init__(self, host: LocalHost, say: Callable[[messages.Report], None], stuck_s: float = STUCK_S) -> None:
        self._host = host
        self._say = say
        self._stuck_s = stuck_s
        self._specs: dict[str, ProcessSpec] = {}
        self._running: set[str] = set()
        self._changing = Lock()
        self._is_over = Flag()
        self._slow_orders: SimpleQueue[tuple[messages.Order, int] | None] = SimpleQueue()
        """With the number of ends before each."""
        self._ends = 0

    def serve(self, orders: Iterator[messages.Order]) -> bool:
        """Carry out orders until they end. Then no process is left.

        False if an order still waits for the file system. Leave without cleaning up: the guard ends what it starts.
        """
        worker = Thread(target=self._carry_out_slow_orders, daemon=True)
        reporters = [
            Thread(target=work, daemon=True) for work in (self._report_life, self._report_events, self._report_status)
        ]
        for thread in (worker, *reporters):
            thread.start()
        for order in orders:
            if isinstance(order, messages.SLOW_ORDERS):
                self._slow_orders.put((order, self._ends))
            else:
                self._carry_out(order, self._ends)
        self._is_over.set()
        self._end_all(GUARD_GRACE_S)
        self._slow_orders.put(None)
        worker.join(self._stuck_s)
        return not worker.is_alive()

    def _carry_out_slow_orders(self) -> None:
        while (order := self._slow_orders.get()) is not None and not self._is_over.is_set():
            self._carry_out(*order)

    def _carry_out(self, order: messages.Order, ends: int) -> None:
        answer = messages.Answer(order.number)
        match order:
            case messages.Start():
                answer = messages.Answer(order.number, fault=self._start(order, ends))
            case messages.Stop():
                self._host.stop(order.name)
            case messages.Relay():
                answer = messages.Answer(order.number, heard=self._host.relay(order.name, order.signum))
            case messages.Tail():
                answer = messages.Answer(order.number, lines={order.name: self._host.tail(order.name)})
            case messages.Stacks():
                answer = messages.Answer(order.number, lines=self._host.stacks(order.names))
            case messages.SeeLock():
                answer = messages.Answer(order.number, heard=_is_locked_elsewhere(order.file))
            case messages.EndAll():
                self._end_all(order.grace_s)
        if order.number:
            self._say(answer)

    def _end_all(self, grace_s: float) -> None:
        self._ends += 1
        self._host.end_all(grace_s)

    def _start(self, order: messages.Start, ends: int) -> str | None:
        os.umask(order.umask)
        with self._changing:
            self._specs[order.spec.name] = order.spec
            try:
                self._host.start(order.spec)
            except (CannotStart, OSError) as error:
                return str(error)
            self._running.add(order.spec.name)
        if self._ends != ends:  # while the file system hung
            self._host.end_all(0.0)
            return f"{order.spec.name} started after the end of the launch"
        return None

    def _report_events(self) -> None:
        while True:
            match self._host.next_event(None):
                case Exited(name, code):
                    with self._changing:
                        self._running.discard(name)
                        spec = self._specs[name]
                    self._say(messages.Ended(name, code, self._host.has_completed(spec), self._host.tail(name)))
                case Signalled(signum) if signum in STOPPING:
                    self._say(messages.Caught(signum))

    def _report_life(self) -> None:
        while not self._is_over.wait(messages.PING_EVERY_S):
            self._say(messages.Alive())

    def _report_status(self) -> None:
        while not self._is_over.wait(messages.PING_EVERY_S):
            with self._changing:
                specs = [self._specs[name] for name in self._running]
            self._say(messages.Status({spec.name: self._host.observe(spec) for spec in specs}))


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


def orders_from(descriptor: int, silent_s: float = HEAD_SILENT_S) -> Iterator[messages.Order]:
    """Orders of the head until the stream ends, or nothing comes for `silent_s` seconds while this process runs."""
    partial = b""
    waited_s = 0.0
    while waited_s < silent_s:
        began_s = time.monotonic()
        if not select.select([descriptor], [], [], messages.PING_EVERY_S)[0]:
            # Time in which this process was stopped does not count.
            waited_s += min(time.monotonic() - began_s, 2 * messages.PING_EVERY_S)
            continue
        waited_s = 0.0
        data = os.read(descriptor, 1 << 20)
        *lines, partial = (partial + data).split(b"\n")
        if not data or len(partial) > messages.MAX_LINE_BYTES:
            return
        yield from (order for line in lines if not isinstance(order := messages.order_of(line), messages.Ping))
    sys.stderr.write(f"no message from the launcher for {silent_s:g} s: ending all processes\n")


class Sender:
    """Writes reports to the head, from any thread. Never blocks: the head may be slow, or gone."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._outbox: SimpleQueue[bytes | None] = SimpleQueue()
        self._thread = Thread(target=self._write, name="reports", daemon=True)
        self._thread.start()

    def __call__(self, report: messages.Report) -> None:
        self._outbox.put(messages.encoded(report))

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
            say(messages.Hello(gathered_facts(env, ports, caches, bytecode)))
            if not Agent(host, say).serve(orders_from(0)):
                sys.stderr.write("an order still waits for the file system: its guard ends what it starts\n")
                sys.stderr.flush()
                os._exit(1)
    except (PrimeError, OSError) as error:
        say(messages.Refusal(str(error)))
        sys.stderr.write(f"error: {error}\n")
        return 1
    finally:
        say.close(LAST_REPORTS_S)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
