"""Joins the hosts of a training job to one Ray cluster, which the first host leads.

The first host writes Ray's token to the directory that all share, starts Ray's head, and then listens at the gate. Each
other host connects there, starts Ray, says its name, and stays until the gate tells it the job's exit code. A closed
connection therefore means a lost host, on either side.
"""

from __future__ import annotations

import os
import secrets
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from threading import Thread, Timer
from types import FrameType

from medarc_rl.backends.sagemaker.job.gate import Gate, connect, proof_of, read_line, resolved_address
from medarc_rl.errors import MedarcError
from prime_rl.utils.files import replacing_file
from prime_rl.utils.gpus import masked_gpus, usable_gpus
from prime_rl.utils.private import private_directory
from prime_rl.utils.scratch import scratch_directory

RAY_PORT = 6379
_STARTS = 4
"""Ray gives a node 30 seconds to start, which a busy machine may exceed."""
_STARTED = "Ray runtime started"
_STOP_LIMIT_S = 115.0
"""Seconds after SIGTERM that a host waits for the first one, which saves the run."""


@dataclass(slots=True)
class Hosts:
    """The hosts of a job, as one host knows them."""

    names: Sequence[str]
    """The first leads."""
    own: str
    directory: Path
    """Shared by all; this user's alone."""
    env: Mapping[str, str]
    """Of Ray's processes. No secrets of the run."""
    port: int = RAY_PORT
    """Of Ray's head on the first host; the gate is at the next one."""
    lost: list[str] = field(default_factory=list)

    @property
    def leads(self) -> bool:
        return self.own == self.names[0]

    @property
    def token_file(self) -> Path:
        return self.directory / "token"

    @property
    def ray_address(self) -> str:
        return f"{resolved_address(self.names[0])}:{self.port}"

    def ray_env(self) -> dict[str, str]:
        """What every process needs that talks to this cluster."""
        kept = {name: value for name, value in self.env.items() if name not in ("RAY_ADDRESS", "RAY_AUTH_TOKEN")}
        return {
            **kept,
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(self.token_file),
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
            "RAY_prestart_worker_first_driver": "0",
            # Workers that ask for no GPU see none.
            "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "1",
            "PYTHONUNBUFFERED": "1",
        }

    @contextmanager
    def led(self, say: Callable[[str], None], on_loss: Callable[[], None]) -> Iterator[Callable[[int], None]]:
        """On the first host: the cluster, once all hosts have joined. Yields what tells them the exit code.

        `on_loss` is called from a thread when a host is lost. Call it in the main thread.

        Raises:
            MedarcError: Ray does not start, or a host does not join.
        """
        private_directory(self.directory)
        token = secrets.token_hex(32)
        with replacing_file(self.token_file) as scratch:
            scratch.touch(0o600)
            scratch.write_text(token, encoding="ascii")
        own = resolved_address(self.own)
        head = ("--head", f"--port={self.port}", "--include-dashboard=false")
        try:
            with (
                _ray_node(head, own, self.ray_env()),
                socket.create_server((own, self.port + 1), backlog=len(self.names)) as server,
            ):
                gate = Gate(server, token, self.names[1:], self.lost, say, on_loss)
                gate.open()
                try:
                    gate.await_all()
                    yield gate.close
                except SystemExit as ended:
                    gate.close(ended.code if isinstance(ended.code, int) else 1)
                    raise
                finally:
                    gate.close(1)
        finally:
            self.token_file.unlink(missing_ok=True)

    def follow(self) -> int:
        """On every other host: be a node of the cluster until the first host says how the job ended.

        Returns its exit code. Call it in the main thread.

        Raises:
            MedarcError: the first host cannot be reached or is lost, or Ray ends here.
        """
        signal.signal(signal.SIGTERM, end)
        with connect(self.names[0], self.port + 1) as gate:
            # The gate opens after the token is written. One of an earlier attempt cannot be read here.
            token = self.token_file.read_text(encoding="ascii")
            own = resolved_address(self.own)
            with _ray_node((f"--address={self.ray_address}",), own, self.ray_env()) as ray:
                ended = Thread(target=_close_after, args=(ray, gate), daemon=True)
                ended.start()
                signal.signal(signal.SIGTERM, _wait_for_the_first)
                gate.sendall(f"{self.own} {proof_of(token, self.own)}\n".encode())
                answer = read_line(gate)
                if not answer and ray.poll() is not None:
                    raise MedarcError(f"Ray on {self.own} has ended")
        if not answer.isdecimal():
            raise MedarcError(f"host {self.names[0]} is gone: its connection to {self.own} has ended")
        return int(answer)


@contextmanager
def _ray_node(words: Sequence[str], address: str, env: Mapping[str, str]) -> Iterator[subprocess.Popen[str]]:
    """Ray on this host. Raises MedarcError if it does not start."""
    gpus = len(masked_gpus(env) or usable_gpus(env))
    with scratch_directory("ray") as scratch:
        flags = (
            "--block",
            "--disable-usage-stats",
            "--include-log-monitor=false",
            f"--node-ip-address={address}",
            f"--num-gpus={gpus}",
        )
        argv = (sys.executable, "-m", "ray.scripts.scripts", "start", *flags, f"--temp-dir={scratch}", *words)
        for left in reversed(range(_STARTS)):
            process = subprocess.Popen(
                argv,
                env=dict(env),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                start_new_session=True,
            )
            try:
                if (last := _until_started(process)) is None:
                    yield process
                    return
            finally:
                # All of Ray's processes on this host are in this group.
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            if not left:
                raise MedarcError(f"Ray does not start at {address}: {last}")


def _until_started(process: subprocess.Popen[str]) -> str | None:
    """Read to the line that says so, and drain the rest in a thread. Returns the last line if it ends before."""
    assert process.stdout is not None
    last = "it says nothing"
    for line in process.stdout:
        if _STARTED in line:
            Thread(target=process.stdout.read, name="ray's lines", daemon=True).start()
            return None
        last = line.strip() or last
    return last


def _close_after(process: subprocess.Popen[str], connection: socket.socket) -> None:
    process.wait()
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


def end(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


def _wait_for_the_first(number: int, frame: FrameType | None) -> None:
    """The first host got SIGTERM, too, and ends the run, which needs this host to save."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    limit = Timer(_STOP_LIMIT_S, os.kill, (os.getpid(), signal.SIGKILL))
    limit.daemon = True
    limit.start()
