"""The gate on the first host of a training job: where the other hosts report, and hear how the job ended.

A host keeps its connection until the job's end. A closed connection therefore means a lost host, on either side.
"""

from __future__ import annotations

import hashlib
import hmac
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from threading import Condition, Thread

from medarc_rl.errors import MedarcError
from prime_rl.utils.waiting import Wait

JOIN_LIMIT_S = 600.0
"""Seconds for all hosts to join. Each unpacks its sources and loads Ray first."""
_PROOF_LIMIT_S = 30.0
"""Seconds for a connection to prove that it is a host of the job. Others are closed then."""
_LOOK_S = 1.0
_LONGEST_LINE = 256


class Gate:
    """Where the other hosts report. Each keeps its connection until the job's end."""

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
        Thread(target=self._accept, name="gate", daemon=True).start()

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
            Thread(target=self._serve, args=(connection, address), name=f"gate to {address}", daemon=True).start()

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
    """Connect to a gate, which may open only a while later. Raises MedarcError."""
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
