"""A warm process in the sandbox that forks one process for each program."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import struct
import subprocess
import time
from typing import Any

from prime_rl.environments.sandbox.containers import SOCKET, Container
from prime_rl.environments.sandbox.layers import INSIDE, Layer, SandboxFault, python
from prime_rl.environments.sandbox.limits import Limits, inside

START_LIMIT_S = 60.0
STOP_LIMIT_S = 60.0
"""For a killed process to be gone: the kernel frees its memory first."""
BOOT = "import sys; sys.path.insert(0, sys.argv[1]); from inside.zygote import main; main()"
ENVIRONMENT = {"PYTHONHASHSEED": "0", "LANG": "C.UTF-8", "PATH": "/usr/bin:/bin"}
"""All of the environment: no secrets, and sets in the same order every time."""


class ZygoteEnded(Exception):
    """The process is gone, which programs cannot bring about."""


class Zygote:
    """Starts at once.

    Raises:
        SandboxFault: the layer cannot run here; the text says why.
    """

    def __init__(self, layer: Layer, limits: Limits) -> None:
        self.layer = layer
        settings = {
            "limits": {**inside(limits), **({} if layer.counts_threads else {"threads": None})},
            "uid": layer.uid,
            "folder": layer.folder,
        }
        self._container = Container(layer.engine, limits, ENVIRONMENT) if layer.engine else None
        self._control, child = socket.socketpair()
        prefix, address = layer.prefix, str(child.fileno())
        if self._container is not None:
            prefix, address = self._container.prefix, SOCKET
        command = [*prefix, *python(), "-c", BOOT, str(INSIDE.parent), address, json.dumps(settings)]
        with child:
            self._process = subprocess.Popen(
                command,
                # An engine's command needs our variables to find its daemon and settings. It passes on none.
                env=ENVIRONMENT if self._container is None else None,
                pass_fds=[child.fileno()] if self._container is None else [],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                start_new_session=True,
                cwd="/",
            )
        try:
            deadline = time.monotonic() + START_LIMIT_S
            if self._container is not None:
                self._control.close()
                self._control = self._container.connection(self._process, deadline)
            self.hello: dict[str, Any] = json.loads(self._line(deadline))
        except (ZygoteEnded, TimeoutError, ValueError) as error:
            self._control.close()
            raise SandboxFault(self._last_words()) from error

    @property
    def pid(self) -> int:
        """Of the process that forks programs, or of one above it."""
        if self._container is None:
            return self._process.pid
        credentials = self._control.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        return int(struct.unpack("3i", credentials)[0])

    def start(self, connection: socket.socket, other: int) -> None:
        """Fork a process that reads its request from a connection. `other` is its output, or its tests' subject.

        Raises:
            ZygoteEnded
        """
        try:
            socket.send_fds(self._control, [b"r"], [connection.fileno(), other])
        except OSError as error:
            raise ZygoteEnded from error

    def wait(self, deadline: float) -> int:
        """Exit code of the process, negative for a signal.

        Raises:
            TimeoutError: it still runs at the deadline (`time.monotonic()`).
            ZygoteEnded
        """
        return os.waitstatus_to_exitcode(int(self._line(deadline)))

    def stop(self) -> None:
        """Kill the process that runs.

        Raises:
            ZygoteEnded
        """
        try:
            self._control.sendall(b"s")
            self._line(time.monotonic() + STOP_LIMIT_S)
        except (OSError, TimeoutError) as error:
            raise ZygoteEnded from error

    def ended(self) -> bool:
        """Whether the process that was started last has ended. `wait` then returns at once."""
        return bool(select.select([self._control], [], [], 0)[0])

    def fileno(self) -> int:
        return self._control.fileno()

    def close(self) -> None:
        """End everything: the container, or the process group and with it the namespace."""
        self._control.close()
        self._end()
        self._process.wait()
        if self._process.stderr is not None:
            self._process.stderr.close()

    def _end(self) -> None:
        if self._container is not None:
            self._container.remove(self._process)
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def _line(self, deadline: float) -> bytes:
        line = bytearray()
        while not line.endswith(b"\n"):
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([self._control], [], [], left)[0]:
                raise TimeoutError
            try:
                part = self._control.recv(1 if line else 4096)
            except OSError as error:
                raise ZygoteEnded from error
            if not part:
                raise ZygoteEnded
            line += part
        return bytes(line)

    def _last_words(self) -> str:
        """What it wrote before it ended."""
        self._end()
        _, errors = self._process.communicate()
        lines = errors.decode(errors="replace").split("\n") if errors else []
        return " ".join(" ".join(filter(None, lines)).split())[-300:] or f"it ended with {self._process.returncode}"
