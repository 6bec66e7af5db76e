"""Joins the hosts of a training job to one Ray cluster, which the first host leads.

The first host writes Ray's token to the directory that all share, starts Ray's head, and then listens at the
rendezvous. Each other host connects there, starts Ray, sends its name with a proof that it knows the token, and keeps
the connection until it receives the job's exit code. A closed connection therefore means a lost host, on either side.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from threading import Condition, Thread, Timer
from types import FrameType

from medarc_rl.errors import MedarcError
from prime_rl.utils.files import replacing_file
from prime_rl.utils.gpus import masked_gpus, usable_gpus
from prime_rl.utils.private import private_directory
from prime_rl.utils.scratch import scratch_directory
from prime_rl.utils.waiting import Wait

RAY_PORT = 6379
_STARTS = 4
"""Ray gives a node 30 seconds to start, which a busy machine may exceed."""
_STARTED = "Ray runtime started"
_STOP_LIMIT_S = 115.0
"""Seconds after SIGTERM that a host waits for the first one, which saves the run."""
JOIN_LIMIT_S = 600.0
"""Seconds for all hosts to join. Each unpacks its sources and loads Ray first."""
_PROOF_LIMIT_S = 30.0
"""Seconds for a connection to prove that it is a host of the job. Others are closed then."""
_LOOK_S = 1.0
_LONGEST_LINE = 256
"""Bytes of a greeting. Whoever sends more without a line's end is not a host of the job."""


@dataclass(slots=True)
class Hosts:
    """The hosts of a job, as one host knows them."""

    names: Sequence[str]
    """The first leads."""
    own: str
    directory: Path
    """Shared by all; this user's alone."""
    env: Mapping[str, str]
    """Environment of Ray's processes, without the run's secrets."""
    port: int = RAY_PORT
    """Port of Ray's head on the first host. The rendezvous listens on the next one."""
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
        """The environment of every process that talks to this cluster."""
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
        """On the first host: lead the cluster, once all hosts have joined. Yields a function that sends the exit code.

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
                rendezvous = Rendezvous(server, token, self.names[1:], self.lost, say, on_loss)
                rendezvous.open()
                try:
                    rendezvous.await_all()
                    yield rendezvous.close
                except SystemExit as ended:
                    rendezvous.close(ended.code if isinstance(ended.code, int) else 1)
                    raise
                finally:
                    rendezvous.close(1)
        finally:
            self.token_file.unlink(missing_ok=True)

    def follow(self) -> int:
        """On every other host: be a node of the cluster until the first host says how the job ended.

        Returns its exit code. Call it in the main thread.

        Raises:
            MedarcError: the first host cannot be reached or is lost, or Ray ends here.
        """
        signal.signal(signal.SIGTERM, end)
        with connect(self.names[0], self.port + 1) as rendezvous:
            # The rendezvous opens after the token is written. One of an earlier attempt cannot be read here.
            token = self.token_file.read_text(encoding="ascii")
            own = resolved_address(self.own)
            with _ray_node((f"--address={self.ray_address}",), own, self.ray_env()) as ray:
                ended = Thread(target=_close_after, args=(ray, rendezvous), daemon=True)
                ended.start()
                signal.signal(signal.SIGTERM, _wait_for_the_first)
                rendezvous.sendall(f"{self.own} {proof_of(token, self.own)}\n".encode())
                answer = read_line(rendezvous)
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
    """Read until Ray reports its start, then drain the rest in a thread. Returns the last line if Ray ends before."""
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


# The rendezvous on the first host: the other hosts report there, and receive the exit code of the job.


class Rendezvous:
    """Accepts the other hosts. Each keeps its connection until the job's end."""

    def __init__(
        self,
        server: socket.socket,
        token: str,
        names: Sequence[str],
        lost: list[str],
        say: Callable[[str], None],
        on_loss: Callable[[], None],
    ) -> None:
        self._server = server
        self._token = token
        self._names = names
        self._lost = lost
        self._say = say
        self._on_loss = on_loss
        self._joined: dict[str, socket.socket] = {}
        self._changed = Condition()
        self._is_closed = False

    def open(self) -> None:
        Thread(target=self._accept, name="rendezvous", daemon=True).start()

    def await_all(self) -> None:
        """Raises MedarcError: hosts have not joined in time, or one was lost."""
        advice = "see their lines in the job's log; the security group must allow all traffic between its members"
        with self._changed:
            self._changed.wait_for(lambda: self._lost or len(self._joined) == len(self._names), JOIN_LIMIT_S)
            missing = [name for name in self._names if name not in self._joined]
        if self._lost:
            raise MedarcError(f"host {self._lost[0]} is gone")
        if missing:
            raise MedarcError(f"not joined within {JOIN_LIMIT_S:g} s: {', '.join(missing)}: {advice}")

    def close(self, code: int) -> None:
        """Tell every host the exit code. Only the first call counts."""
        with self._changed:
            if self._is_closed:
                return
            self._is_closed = True
            connections = list(self._joined.values())
        for connection in connections:
            with suppress(OSError):
                connection.sendall(f"{code}\n".encode())
                connection.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        while True:
            try:
                connection, (address, *_) = self._server.accept()
            except OSError:  # the server is closed
                return
            Thread(target=self._serve, args=(connection, address), name=f"rendezvous to {address}", daemon=True).start()

    def _serve(self, connection: socket.socket, address: str) -> None:
        with connection:
            _keep_alive(connection)
            connection.settimeout(_PROOF_LIMIT_S)
            name, _, proof = read_line(connection).partition(" ")
            if name not in self._names or not hmac.compare_digest(proof.encode(), proof_of(self._token, name).encode()):
                return
            connection.settimeout(None)
            with self._changed:
                self._joined[name] = connection
                self._changed.notify_all()
            self._say(f"{name} ({address}) has joined")
            read_line(connection)
            with self._changed:
                if self._is_closed:
                    return
                self._lost.append(name)
                self._changed.notify_all()
        self._say(f"error: host {name} ({address}) is gone")
        self._on_loss()


def resolved_address(host: str) -> str:
    """The IPv4 address of a host, whose name may be known a while after this host has started. Raises MedarcError."""
    waiting = Wait(f"the address of {host}", "SageMaker names hosts when they start", JOIN_LIMIT_S, "join", 10.0)
    while True:
        try:
            return socket.gethostbyname(host)
        except OSError as error:
            if waiting.is_over():
                raise MedarcError(f"host {host}: {error.strerror or error}") from error
        time.sleep(_LOOK_S)


def connect(host: str, port: int) -> socket.socket:
    """Connect to the rendezvous, which may open only a while later. Raises MedarcError."""
    address = resolved_address(host)
    waiting = Wait(f"{host} at {address}:{port}", "it starts Ray first", JOIN_LIMIT_S, "join", 30.0)
    while True:
        try:
            connection = socket.create_connection((address, port), 10.0)
        except OSError as error:
            if waiting.is_over():
                raise MedarcError(f"host {host} ({address}:{port}): {error.strerror or error}") from error
        else:
            connection.settimeout(None)
            _keep_alive(connection)
            return connection
        time.sleep(_LOOK_S)


def _keep_alive(connection: socket.socket) -> None:
    """A host that answers no longer is lost after 20 seconds, although nothing closes its connection."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in ((socket.TCP_KEEPIDLE, 10), (socket.TCP_KEEPINTVL, 2), (socket.TCP_KEEPCNT, 5)):
        connection.setsockopt(socket.IPPROTO_TCP, option, value)


def read_line(connection: socket.socket) -> str:
    """A line without its end. Empty if the connection ends first."""
    found = b""
    with suppress(OSError):
        while not found.endswith(b"\n") and len(found) < _LONGEST_LINE:
            if not (byte := connection.recv(1)):
                return ""
            found += byte
    return found.decode(errors="replace").strip()


def proof_of(token: str, name: str) -> str:
    """Shows that a host knows the token."""
    return hmac.new(token.encode(), name.encode(), hashlib.sha256).hexdigest()
