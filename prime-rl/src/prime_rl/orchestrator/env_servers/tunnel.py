"""Encrypts what verifiers' client sends to an environment's server on another machine."""

from __future__ import annotations

from contextlib import ExitStack
from threading import Thread

import zmq

from prime_rl.transport.endpoints import Endpoint
from prime_rl.utils.scratch import scratch_directory


class Tunnel:
    """Forwards between a Unix socket for this process and an encrypted TCP connection.

    verifiers' client opens its sockets itself and cannot encrypt. The server gets each message with one more frame in
    front, the client's identity, and returns it with the answer.
    """

    def __init__(self, endpoint: Endpoint) -> None:
        self._closing = ExitStack()
        self.address = f"ipc://{self._closing.enter_context(scratch_directory('env-tunnel'))}/socket"
        self._context = zmq.Context()
        clients, server = (self._context.socket(kind) for kind in (zmq.ROUTER, zmq.DEALER))
        for socket in (clients, server):
            # No limits, so that no message is dropped; the orchestrator limits the requests in flight.
            socket.sndhwm = socket.rcvhwm = socket.linger = 0
        clients.bind(self.address)
        endpoint.connect(server)
        self._thread = Thread(target=_forward, args=(clients, server), name="env tunnel", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._context.term()
        self._thread.join()
        self._closing.close()


def _forward(clients: zmq.Socket[bytes], server: zmq.Socket[bytes]) -> None:
    try:
        zmq.proxy(clients, server)
    except zmq.ContextTerminated:
        clients.close()
        server.close()
