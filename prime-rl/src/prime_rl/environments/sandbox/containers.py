"""A container in which Python starts, by docker or podman. Its image holds nothing; Python's files are mounted."""

from __future__ import annotations

import contextlib
import io
import os
import secrets
import select
import socket
import subprocess
import tarfile
import time
from collections.abc import Sequence
from pathlib import Path

from prime_rl.environments.sandbox.layers import NOBODY, SandboxFault, linked_folders, python_folders
from prime_rl.environments.sandbox.limits import Limits
from prime_rl.utils.private import RUNTIME_VARIABLE
from prime_rl.utils.scratch import scratch_directory

IMAGE = "localhost/medarc-sandbox:1"
SOCKET = "/control/socket"
"""Where a process in the container finds the socket to this one."""
OWN_MEMORY_MB = 128
"""What a container may use besides the memory of a program: the process that forks programs, and the kernel's share."""
OWN_TASKS = 2
"""Tasks of a container besides the threads of a program."""
_PROCESSES = 32_768
"""Limit of the user. podman would ask for more, and fail where root may not raise limits. --pids-limit is lower."""
COMMAND_LIMIT_S = 120.0
STOP_LIMIT_S = 20.0
"""For a container whose connection has closed to end by itself."""


class Container:
    """One container, which lives as long as the connection to the process in it."""

    def __init__(self, engine: str, limits: Limits, environment: dict[str, str]) -> None:
        """`engine` is the path of docker or podman, `environment` all variables of the process.

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
            *("--security-opt", "label=disable"),  # SELinux would keep the process from the socket
            *("--user", f"{NOBODY}:{NOBODY}"),
            *("--memory", memory, "--memory-swap", memory, "--cpus", "1"),
            *("--pids-limit", str(limits.threads + OWN_TASKS)),
            *("--ulimit", "nofile=256:256", "--ulimit", "core=0:0", "--ulimit", f"nproc={_PROCESSES}:{_PROCESSES}"),
            *_mount(str(shared), "/control"),
            *python_mounts,
            *(IMAGE, "/usr/bin/env", "-i"),  # engines add variables, such as a proxy with its password
            *(f"{name}={value}" for name, value in environment.items()),
        )

    def connection(self, process: subprocess.Popen[bytes], deadline: float) -> socket.socket:
        """The connection that the process in the container opens. `process` is the engine's command.

        Raises:
            TimeoutError: there is none at the deadline (`time.monotonic()`), or the command ended.
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
        """Wait until the container is gone, after its connection has closed. One that stays is killed."""
        self._forget_socket()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(STOP_LIMIT_S)
        if process.returncode is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                _command(self._engine, "rm", "--force", self.name)

    def _listen(self) -> Path:
        """Open the socket, and return its folder, which every user of the container may enter."""
        with contextlib.ExitStack() as files:
            try:
                # Nobody else enters the outer folder. If this process is killed, the next one removes it.
                shared = files.enter_context(scratch_directory("sandbox")) / "control"
                shared.mkdir()
                shared.chmod(0o755)  # whatever the umask is
                self._listener = files.enter_context(socket.socket(socket.AF_UNIX))
                self._listener.bind(str(shared / "socket"))
                (shared / "socket").chmod(0o777)
                self._listener.listen(1)
            except OSError as error:
                where = f"{RUNTIME_VARIABLE} names the folder for it, whose path must be short"
                raise SandboxFault(f"a container gets no socket: {error}; {where}") from error
            self._files = files.pop_all()
            return shared

    def _forget_socket(self) -> None:
        self._files.close()


def _ensure_image(engine: str) -> None:
    """Make the image, unless it is there: links to mounted folders, and nothing else."""
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
        raise SandboxFault(f"a container cannot get the folder {source!r}: its name has a comma or a quotation mark")
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
