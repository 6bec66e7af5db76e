"""Addresses of ZeroMQ sockets that no other user can reach.

On one machine, sockets are Unix sockets in a directory that only this user can enter. Between machines they are TCP
sockets with CurveZMQ: everything is encrypted, and a peer without the shared key cannot connect.
"""

from __future__ import annotations

import errno
import hashlib
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import zmq
from zmq.utils import z85

from prime_rl.utils.engine_keys import TRANSPORT_KEY_VARIABLE, is_loopback
from prime_rl.utils.errors import RunError
from prime_rl.utils.private import NotPrivate, runtime_directory


class TransportError(RunError):
    """A transport failure; the message alone explains it, without a traceback."""


_MIN_KEY_LENGTH = 16


@dataclass(frozen=True, slots=True)
class Endpoint:
    """An address, and for TCP the key of both ends."""

    address: str
    key: str | None = field(default=None, repr=False)

    @classmethod
    def of_run(cls, host: str, port: int, root: Path, channel: str, environ: Mapping[str, str] = os.environ) -> Self:
        """The endpoint of a run's channel: a Unix socket if `host` is this machine's loopback address, else TCP.

        Args:
            root: directory of the run, which tells runs on one machine apart.
            channel: name of the channel among those of the run.

        Raises:
            TransportError: TCP without a key, or the directory of Unix sockets is not this user's alone.
        """
        if not is_loopback(host):
            return cls(f"tcp://{host}:{port}", _shared_key(host, environ))
        # A hash, because the path of a Unix socket has at most 107 bytes.
        name = hashlib.sha256(str(root.resolve()).encode()).hexdigest()[:16]
        return cls(_unix_address(f"{channel}-{name}"))

    @classmethod
    def of_address(cls, address: str, environ: Mapping[str, str] = os.environ) -> Self:
        """The endpoint of an address that a user chose. TCP on the loopback address becomes a Unix socket.

        Raises:
            TransportError: as `of_run`.
        """
        host, _, port = address.removeprefix("tcp://").rpartition(":")
        if not address.startswith("tcp://"):
            return cls(address)
        if is_loopback(host):
            return cls(_unix_address(f"port-{port}"))
        return cls(address, _shared_key(host, environ))

    @property
    def is_local(self) -> bool:
        return self.key is None

    def bind(self, socket_: zmq.Socket[Any]) -> None:
        """Listen, on the address of the host only.

        Raises:
            TransportError: the host has no address here, or the port is in use.
        """
        address = self.address
        try:
            if self.key is not None:
                socket_.curve_server = True
                socket_.curve_publickey, socket_.curve_secretkey = _curve_pair(self.key)
                host, _, port = address.removeprefix("tcp://").rpartition(":")
                address = f"tcp://{host if host == '*' else socket.gethostbyname(host)}:{port}"
            _refuse_taken(address)
            socket_.bind(address)
        except (OSError, zmq.ZMQError) as error:
            raise TransportError(f"cannot listen on {self.address}: {error.strerror}") from error

    def connect(self, socket_: zmq.Socket[Any]) -> None:
        if self.key is not None:
            public, secret = _curve_pair(self.key)
            socket_.curve_publickey, socket_.curve_secretkey, socket_.curve_serverkey = public, secret, public
        socket_.connect(self.address)


def _refuse_taken(address: str) -> None:
    """Raise OSError if a process listens on a Unix socket. ZeroMQ would take the address away from it."""
    if not address.startswith("ipc://"):
        return
    with socket.socket(socket.AF_UNIX) as probe:
        if probe.connect_ex(address.removeprefix("ipc://")) == 0:
            raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))


def _shared_key(host: str, environ: Mapping[str, str]) -> str:
    key = environ.get(TRANSPORT_KEY_VARIABLE, "")
    if len(key) < _MIN_KEY_LENGTH:
        raise TransportError(
            f"{host} is another machine, or an address that other machines reach: set {TRANSPORT_KEY_VARIABLE} to the "
            f"same random text of at least {_MIN_KEY_LENGTH} characters on all of them, such as `openssl rand -hex 32`"
        )
    return key


def _unix_address(name: str) -> str:
    try:
        return f"ipc://{runtime_directory()}/{name}"
    except NotPrivate as error:
        raise TransportError(str(error)) from error


def _curve_pair(key: str) -> tuple[bytes, bytes]:
    """Public and secret key (Z85) that both ends derive from the shared one.

    A server never sends its public key, so that a peer which knows it also knows the shared key.
    """
    secret = z85.encode(hashlib.sha256(b"prime-rl zmq " + key.encode()).digest())
    return zmq.curve_public(secret), secret
