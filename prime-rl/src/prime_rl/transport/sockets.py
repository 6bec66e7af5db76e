"""Messages through ZeroMQ sockets, for components without a shared filesystem.

| socket | who | carries |
|---|---|---|
| PULL at `port` | rank 0 of the trainer binds, the orchestrator pushes | name of the run, TrainingBatch |
| XPUB at `port + 1` | rank 0 of the trainer binds, the other ranks subscribe | topic of the rank, step, MicroBatch[] |

An XPUB socket hears of subscriptions, so rank 0 knows when all ranks listen and no row is published to nobody.
"""

from __future__ import annotations

import socket
from collections.abc import Iterable, Mapping

import msgspec
import zmq

from prime_rl.configs.shared import ZMQTransportConfig
from prime_rl.run.paths import OrchestratorPaths
from prime_rl.transport.errors import TransportError
from prime_rl.transport.messages import MicroBatch, TrainingBatch
from prime_rl.utils.logger import get_logger

LINGER_S = 30
"""A closing sender waits so long until its last batch has been fetched; a busy trainer's I/O thread fetches it too."""

PEER_TIMEOUT_S = 60
"""Ranks of one trainer start together and take each step together; a longer silence is a fault."""

SUBSCRIBE = b"\x01"


class ZMQBatchSender:
    """The orchestrator's end."""

    def __init__(self, config: ZMQTransportConfig, run: OrchestratorPaths) -> None:
        self._run_name = _name_of(run)
        self._encoder = msgspec.msgpack.Encoder()
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PUSH)
        self._socket.sndhwm = config.hwm
        self._socket.linger = LINGER_S * 1000
        self._socket.connect(f"tcp://{config.host}:{config.port}")

    def send(self, batch: TrainingBatch) -> None:
        self._socket.send_multipart([self._run_name, self._encoder.encode(batch)])

    def close(self) -> None:
        """Return when all batches have left, or after `LINGER_S`."""
        self._socket.close()
        self._context.term()


class ZMQBatchReceiver:
    """Rank 0's end. Keeps batches that came early, and drops those of earlier steps and of other runs."""

    def __init__(self, config: ZMQTransportConfig, run: OrchestratorPaths) -> None:
        self._run_name = _name_of(run)
        self._decoder = msgspec.msgpack.Decoder(TrainingBatch)
        self._batches: dict[int, TrainingBatch] = {}
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PULL)
        self._socket.rcvhwm = config.hwm
        _bind(self._socket, config.host, config.port)

    def receive(self, step: int) -> TrainingBatch | None:
        """The batch of `step`, or None while it has not come; of two for one step, the later one."""
        while (frames := self._next_message()) is not None:
            self._keep(frames)
        for earlier in [kept for kept in self._batches if kept < step]:
            del self._batches[earlier]
        return self._batches.get(step)

    def close(self) -> None:
        self._context.destroy(linger=0)

    def _next_message(self) -> list[bytes] | None:
        try:
            return self._socket.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return None

    def _keep(self, frames: list[bytes]) -> None:
        run_name, *payload = frames
        if run_name != self._run_name or len(payload) != 1:
            theirs, ours = (name.decode(errors="replace") for name in (run_name, self._run_name))
            get_logger().error(f"Dropped a batch of {theirs!r}, for this is {ours!r}: two runs use one port")
            return
        try:
            batch = self._decoder.decode(payload[0])
        except msgspec.DecodeError as error:
            get_logger().error(f"Dropped a message that is not a training batch: {error}")
            return
        batch.run_idx = 0
        self._batches[batch.step] = batch


class ZMQMicroBatchSender:
    """Rank 0's end towards the other ranks."""

    def __init__(self, config: ZMQTransportConfig) -> None:
        self._encoder = msgspec.msgpack.Encoder()
        self._subscribed: set[bytes] = set()
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.XPUB)
        # A publisher drops messages for a slow subscriber unless it is told to wait for it.
        self._socket.xpub_nodrop = True
        _bind(self._socket, config.host, config.port + 1)

    def send(self, step: int, rows_of_ranks: Mapping[int, list[MicroBatch]]) -> None:
        """Publish each rank's rows, once all these ranks listen.

        Raises:
            TransportError: a rank does not, for `PEER_TIMEOUT_S`.
        """
        self._await_subscriptions(rows_of_ranks)
        for rank, rows in rows_of_ranks.items():
            self._socket.send_multipart([_topic(rank), str(step).encode(), self._encoder.encode(rows)])

    def close(self) -> None:
        self._socket.close(linger=LINGER_S * 1000)
        self._context.term()

    def _await_subscriptions(self, ranks: Iterable[int]) -> None:
        while missing := [rank for rank in ranks if _topic(rank) not in self._subscribed]:
            if not self._socket.poll(PEER_TIMEOUT_S * 1000):
                raise TransportError(f"trainer ranks {missing} did not ask for their rows in {PEER_TIMEOUT_S} s")
            event = self._socket.recv()
            if event.startswith(SUBSCRIBE):
                self._subscribed.add(event.removeprefix(SUBSCRIBE))


class ZMQMicroBatchReceiver:
    """One data-parallel rank's end."""

    def __init__(self, config: ZMQTransportConfig, data_rank: int) -> None:
        self._decoder = msgspec.msgpack.Decoder(list[MicroBatch])
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.SUB)
        self._socket.connect(f"tcp://{config.host}:{config.port + 1}")
        self._socket.subscribe(_topic(data_rank))

    def receive(self, step: int) -> list[MicroBatch]:
        """This rank's rows of `step`.

        Raises:
            TransportError: they do not come for `PEER_TIMEOUT_S`, or those of another step come instead.
        """
        if not self._socket.poll(PEER_TIMEOUT_S * 1000):
            raise TransportError(f"the rows of step {step} did not come in {PEER_TIMEOUT_S} s")
        _, sent_step, payload = self._socket.recv_multipart()
        if int(sent_step) != step:
            raise TransportError(f"expected the rows of step {step}, and those of step {int(sent_step)} came")
        return self._decoder.decode(payload)

    def close(self) -> None:
        self._context.destroy(linger=0)


def _bind(socket_: zmq.Socket[bytes], host: str, port: int) -> None:
    """Listen on the address of `host` alone: whoever reaches a socket can send what is trained on."""
    try:
        socket_.bind(f"tcp://{socket.gethostbyname(host)}:{port}")
    except (OSError, zmq.ZMQError) as error:
        raise TransportError(
            f"rollout_transport: cannot listen at {host}:{port}: {error.strerror}; another run may use the port: set "
            "trainer.rollout_transport.port and orchestrator.rollout_transport.port to another one"
        ) from error


def _topic(rank: int) -> bytes:
    # The bar at the end keeps rank 1 from hearing rank 10: a subscription matches prefixes.
    return b"data_rank|%d|" % rank


def _name_of(run: OrchestratorPaths) -> bytes:
    """The last two parts of the run's directory: machines may mount it at different places."""
    return "/".join(run.root.absolute().parts[-2:]).encode()
