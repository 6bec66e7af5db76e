"""Starts and controls a zygote: a warm process in the sandbox or in a container that forks a process per program."""

from __future__ import annotations

import contextlib
import io
import json
import os
import secrets
import select
import signal
import socket
import struct
import subprocess
import tarfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from prime_rl.environments.sandbox.layers import (
    INSIDE,
    NOBODY,
    Layer,
    ProgramLimits,
    SandboxFault,
    linked_folders,
    python,
    python_folders,
)
from prime_rl.utils.private import RUNTIME_VARIABLE
from prime_rl.utils.scratch import scratch_directory

IMAGE = "localhost/medarc-sandbox:1"
SOCKET = "/control/socket"
"""Path in the container of the socket to this process."""
OWN_MEMORY_MB = 128
"""Memory of a container besides a program's: the zygote, and the kernel's share."""
OWN_TASKS = 2
"""Tasks of a container besides a program's threads."""
_PROCESSES = 32_768
"""Limit of the user. podman's default is higher, and fails where root may not raise limits. --pids-limit is lower."""
COMMAND_LIMIT_S = 120.0
CONTAINER_STOP_LIMIT_S = 20.0
"""Time for a container to end by itself after its connection has closed."""
START_LIMIT_S = 60.0
STOP_LIMIT_S = 60.0
"""Time for a killed process to end: the kernel frees its memory first."""
BOOT = "import sys; sys.path.insert(0, sys.argv[1]); from inside.zygote import main; main()"
ENVIRONMENT = {"PYTHONHASHSEED": "0", "LANG": "C.UTF-8", "PATH": "/usr/bin:/bin"}
"""The whole environment: no secrets, and a fixed hash seed so that sets have a fixed order."""


class ZygoteEnded(Exception):
    """The zygote has ended, which programs cannot cause."""


class Zygote:
    """A running zygote, started by the constructor.

    Raises:
        SandboxFault: the layer cannot run here, with the reason.
    """

    def __init__(self, layer: Layer, limits: ProgramLimits) -> None:
        self.layer = layer
        settings = {
            "limits": {**limits.of_kernel(), **({} if layer.counts_threads else {"threads": None})},
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
        """Process id of the zygote, or of an ancestor of it."""
        if self._container is None:
            return self._process.pid
        credentials = self._control.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        return int(struct.unpack("3i", credentials)[0])

    def start(self, connection: socket.socket, other: int) -> None:
        """Fork a process that reads its request from a connection. `other` is its output, or its peer in a check.

        Raises:
            ZygoteEnded
        """
        try:
            socket.send_fds(self._control, [b"r"], [connection.fileno(), other])
        except OSError as error:
            raise ZygoteEnded from error

    def wait(self, deadline: float) -> int:
        """Wait for the process. Returns its exit code, negative for a signal.

        Raises:
            TimeoutError: it still runs at the deadline (`time.monotonic()`).
            ZygoteEnded
        """
        return os.waitstatus_to_exitcode(int(self._line(deadline)))

    def stop(self) -> None:
        """Kill the running process.

        Raises:
            ZygoteEnded
        """
        try:
            self._control.sendall(b"s")
            self._line(time.monotonic() + STOP_LIMIT_S)
        except (OSError, TimeoutError) as error:
            raise ZygoteEnded from error

    def ended(self) -> bool:
        """Whether the last process has ended. `wait` then returns at once."""
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
        """The end of its standard error, after it ended."""
        self._end()
        _, errors = self._process.communicate()
        lines = errors.decode(errors="replace").split("\n") if errors else []
        return " ".join(" ".join(filter(None, lines)).split())[-300:] or f"it ended with {self._process.returncode}"


class Container:
    """A docker or podman container for one zygote. It lives as long as the connection to the zygote.

    Its image is empty; Python's files are mounted.
    """

    def __init__(self, engine: str, limits: ProgramLimits, environment: dict[str, str]) -> None:
        """`engine` is the path of docker or podman, `environment` holds all variables of the zygote.

        Raises:
            SandboxFault: the engine cannot make the image, or cannot mount Python's folders; or there is no private
                folder for the socket.
        """
        python_mounts = [word for name in python_folders() for word in _mount(name, name)]
        _ensure_image(engine)
        self._engine = engine
        self.name = f"medarc-sandbox-{secrets.token_hex(8)}"
        shared = self._listen()
        memory = f"{limits.memory_mb + OWN_MEMORY_MB}m"
        self.prefix: tuple[str, ...] = (
            *(engine, "run", "--rm", "--name", self.name, "--pull", "never", "--log-driver", "none"),
            *("--network", "none", "--ipc", "none", "--hostname", "sandbox"),
            *("--read-only", "--cap-drop", "ALL", "--security-opt", "no-new-privileges"),
            *("--security-opt", "label=disable"),  # SELinux would block the socket
            *("--user", f"{NOBODY}:{NOBODY}"),
            *("--memory", memory, "--memory-swap", memory, "--cpus", "1"),
            *("--pids-limit", str(limits.threads + OWN_TASKS)),
            *("--ulimit", "nofile=256:256", "--ulimit", "core=0:0", "--ulimit", f"nproc={_PROCESSES}:{_PROCESSES}"),
            *_mount(str(shared), "/control"),
            *python_mounts,
            *(IMAGE, "/usr/bin/env", "-i"),  # engines add variables, such as a proxy with a password
            *(f"{name}={value}" for name, value in environment.items()),
        )

    def connection(self, process: subprocess.Popen[bytes], deadline: float) -> socket.socket:
        """Wait for the zygote's connection. `process` is the engine's command.

        Raises:
            TimeoutError: there is no connection at the deadline (`time.monotonic()`), or the command ended.
        """
        ends = os.pidfd_open(process.pid)
        try:
            poll = select.poll()
            poll.register(self._listener, select.POLLIN)
            poll.register(ends, select.POLLIN)
            ready = [descriptor for descriptor, _ in poll.poll(1000 * max(0.0, deadline - time.monotonic()))]
            if self._listener.fileno() not in ready:
                raise TimeoutError
            return self._listener.accept()[0]
        finally:
            os.close(ends)
            self._forget_socket()

    def remove(self, process: subprocess.Popen[bytes]) -> None:
        """Wait until the container is gone, after its connection has closed. Kill it if it stays."""
        self._forget_socket()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(CONTAINER_STOP_LIMIT_S)
        if process.returncode is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                _command(self._engine, "rm", "--force", self.name)

    def _listen(self) -> Path:
        """Open the socket. Returns its folder, which every user of the container may enter."""
        with contextlib.ExitStack() as files:
            try:
                # Only this user can enter the outer folder. If this process is killed, the next one removes it.
                shared = files.enter_context(scratch_directory("sandbox")) / "control"
                shared.mkdir()
                shared.chmod(0o755)  # whatever the umask is
                self._listener = files.enter_context(socket.socket(socket.AF_UNIX))
                self._listener.bind(str(shared / "socket"))
                (shared / "socket").chmod(0o777)
                self._listener.listen(1)
            except OSError as error:
                where = f"{RUNTIME_VARIABLE} can be set to another folder, with a short path"
                raise SandboxFault(f"cannot create the socket of a container: {error}; {where}") from error
            self._files = files.pop_all()
            return shared

    def _forget_socket(self) -> None:
        self._files.close()


def _ensure_image(engine: str) -> None:
    """Make the image unless it exists. It holds only links to the mounted folders."""
    try:
        if _command(engine, "image", "inspect", IMAGE).returncode == 0:
            return
        made = _command(engine, "import", "-", IMAGE, given=_archive())
    except subprocess.TimeoutExpired as error:
        raise SandboxFault(f"`{engine}` does not answer within {COMMAND_LIMIT_S:g} s") from error
    if made.returncode:
        raise SandboxFault(" ".join(made.stderr.decode(errors="replace").split())[-300:] or f"`{engine} import` failed")


def _archive() -> bytes:
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w") as tar:
        usr = tarfile.TarInfo("usr")
        usr.type, usr.mode = tarfile.DIRTYPE, 0o755
        tar.addfile(usr)
        for name, target in linked_folders().items():
            link = tarfile.TarInfo(name.lstrip("/"))
            link.type, link.linkname = tarfile.SYMTYPE, target
            tar.addfile(link)
    return archive.getvalue()


def _mount(source: str, target: str) -> Sequence[str]:
    if "," in source or '"' in source:
        raise SandboxFault(
            f"cannot mount the folder {source!r} in a container: its name has a comma or a quotation mark"
        )
    return ("--mount", f"type=bind,src={source},dst={target},readonly")


def _command(engine: str, *words: str, given: bytes | None = None) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [engine, *words],
        input=given,
        stdin=subprocess.DEVNULL if given is None else None,
        capture_output=True,
        timeout=COMMAND_LIMIT_S,
        check=False,
    )
