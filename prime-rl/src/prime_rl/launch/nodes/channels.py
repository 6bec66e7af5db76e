"""Carries lines between the head of a launch and the agent of one node."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Mapping, Sequence
from queue import SimpleQueue
from threading import Thread
from typing import Protocol

from prime_rl.launch.nodes.messages import MAX_LINE_BYTES
from prime_rl.utils.logger import readable

AGENT = "prime_rl.launch.nodes.agent"

_STDERR_LINES = 20
CLOSING_S = 30.0
"""An agent needs less to end what is left on its node."""


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

    def close(self) -> None:
        """Tell the agent that the launch is over, wait for its end, and end it if it stays."""

    def describe(self) -> str:
        """How the agent was started, how it ended, and the last lines that it wrote to stderr."""


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

    def close(self) -> None:
        self._outbox.put(None)
        # First without a signal: its stdin has ended.
        for signum in (None, signal.SIGTERM, signal.SIGKILL):
            if signum is not None:
                self._process.send_signal(signum)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(CLOSING_S)
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
