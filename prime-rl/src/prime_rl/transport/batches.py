"""Senders and receivers of training batches and packed rows, through files or through ZeroMQ sockets."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path

import msgspec
import zmq
from msgspec.structs import replace

from prime_rl.configs.shared import ZMQTransportConfig
from prime_rl.run.paths import OrchestratorPaths, RunPaths, step_of
from prime_rl.transport.endpoints import Endpoint, TransportError
from prime_rl.transport.messages import ImageReference, MicroBatch, TrainingBatch
from prime_rl.utils.files import replacing_file
from prime_rl.utils.logger import get_logger

# Files, written to a temporary name and renamed when complete.
#
# A batch is not needed after its step has begun, because a resumed orchestrator regenerates the batches after its
# checkpoint. So files are kept for one step only, and a sender deletes leftover files when it starts.


class FileSystemBatchSender:
    """Writes `RUN/rollouts/step_<s>/rollouts.bin`."""

    def __init__(self, run: OrchestratorPaths) -> None:
        self.run = run
        self._encoder = msgspec.msgpack.Encoder()
        for step in _steps_in(run.rollouts):
            _discard(run.batch(step))

    def send(self, batch: TrainingBatch) -> None:
        with replacing_file(self.run.batch(batch.step)) as scratch:
            scratch.write_bytes(self._encoder.encode(batch))

    def close(self) -> None:
        """Do nothing: sent batches are on disk."""


class FileSystemBatchReceiver:
    """Reads the batch file of the requested step and deletes the files of earlier steps."""

    def __init__(self, run: OrchestratorPaths) -> None:
        self.run = run
        self._decoder = msgspec.msgpack.Decoder(TrainingBatch)
        self._reported_mtime_ns = 0

    def receive(self, step: int) -> TrainingBatch | None:
        """Return the batch of `step`, or None while it is missing or unreadable. Logs each unreadable file once."""
        path = self.run.batch(step)
        try:
            batch = self._decoder.decode(path.read_bytes())
        except FileNotFoundError:
            return None
        except msgspec.DecodeError as error:  # also a ValidationError: well-formed MessagePack of another shape
            self._report(path, str(error))
            return None
        if batch.step != step:
            self._report(path, f"it contains the batch of step {batch.step}")
            return None
        for earlier in _steps_in(self.run.rollouts, before=step):
            _discard(self.run.batch(earlier))
        batch.run_idx = 0
        return batch

    def close(self) -> None:
        """Do nothing: no file stays open."""

    def _report(self, path: Path, fault: str) -> None:
        with contextlib.suppress(FileNotFoundError):  # replaced since it was read: the next poll reads the new file
            mtime_ns = path.stat().st_mtime_ns
            if mtime_ns != self._reported_mtime_ns:
                self._reported_mtime_ns = mtime_ns
                get_logger().error(f"{path} is not a valid training batch ({fault}); waiting for a valid one")


class FileSystemMicroBatchSender:
    """Writes `OUT/rollouts/step_<s>/rank_<r>.bin` for every data-parallel rank r."""

    def __init__(self, run: RunPaths) -> None:
        self.run = run
        self._encoder = msgspec.msgpack.Encoder()
        self._discard_steps()

    def send(self, step: int, rows_of_ranks: Mapping[int, list[MicroBatch]]) -> None:
        # Every rank reads its file before it joins a step's collectives, so files of earlier steps are not needed.
        self._discard_steps(before=step)
        for rank, rows in rows_of_ranks.items():
            with replacing_file(self.run.rank_batch(step, rank)) as scratch:
                scratch.write_bytes(self._encoder.encode(_images_once(rows)))

    def close(self) -> None:
        """Do nothing: no file stays open."""

    def _discard_steps(self, before: int | None = None) -> None:
        for step in _steps_in(self.run.rollouts, before):
            for file in self.run.rank_batch(step, 0).parent.glob("rank_*.bin"):
                _discard(file)


class FileSystemMicroBatchReceiver:
    """Reads the files of one data-parallel rank."""

    def __init__(self, run: RunPaths, data_rank: int) -> None:
        self.run = run
        self.data_rank = data_rank
        self._decoder = msgspec.msgpack.Decoder(list[MicroBatch])

    def receive(self, step: int) -> list[MicroBatch]:
        return _images_restored(self._decoder.decode(self.run.rank_batch(step, self.data_rank).read_bytes()))

    def close(self) -> None:
        """Do nothing: no file stays open."""


def _images_once(rows: list[MicroBatch]) -> list[MicroBatch]:
    """Rows of which only the first that shows an image says where it is: a data URL may have megabytes."""
    seen: set[str] = set()

    def once(image: ImageReference) -> ImageReference:
        if image.digest in seen:
            return replace(image, source="")
        seen.add(image.digest)
        return image

    return [
        replace(row, images=[[once(each) for each in sequence] for sequence in row.images]) if row.images else row
        for row in rows
    ]


def _images_restored(rows: list[MicroBatch]) -> list[MicroBatch]:
    shown = [each for row in rows for sequence in row.images or () for each in sequence]
    known = {each.digest: each for each in shown if each.source}
    for row in rows:
        if row.images is not None:
            row.images = [[known[each.digest] for each in sequence] for sequence in row.images]
    return rows


def _steps_in(parent: Path, before: int | None = None) -> list[int]:
    if not parent.is_dir():
        return []
    steps = (step_of(child) for child in parent.iterdir())
    return [step for step in steps if step is not None and (before is None or step < before)]


def _discard(file: Path) -> None:
    file.unlink(missing_ok=True)
    with contextlib.suppress(OSError):  # the directory is not empty, or is already deleted
        file.parent.rmdir()


# ZeroMQ, for components without a shared filesystem.
#
# On one machine the sockets are Unix sockets, and `port` has no effect; between machines they need a shared key
# (`transport/endpoints.py`).
#
# | socket | who | frames |
# |---|---|---|
# | PULL at `port` | rank 0 of the trainer binds, the orchestrator pushes | run name, TrainingBatch |
# | XPUB at `port + 1` | rank 0 of the trainer binds, the others subscribe | the data rank's topic, step, MicroBatch[] |
#
# An XPUB socket receives subscriptions, so rank 0 can wait for all processes to subscribe before it publishes.


LINGER_S = 30
"""How long a closing sender waits for unsent batches to leave. ZeroMQ's I/O thread receives even in a busy trainer."""

PEER_TIMEOUT_S = 60
"""Timeout between the ranks of a trainer, which start together and run each step together."""

SUBSCRIBE = b"\x01"


class ZMQBatchSender:
    """Pushes training batches from the orchestrator to the trainer."""

    def __init__(self, config: ZMQTransportConfig, run: OrchestratorPaths) -> None:
        self._run_name = _run_name(run)
        self._encoder = msgspec.msgpack.Encoder()
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PUSH)
        self._socket.sndhwm = config.hwm
        self._socket.linger = LINGER_S * 1000
        _batches(config, run).connect(self._socket)

    def send(self, batch: TrainingBatch) -> None:
        self._socket.send_multipart([self._run_name, self._encoder.encode(batch)])

    def close(self) -> None:
        """Block until all batches have been sent, at most `LINGER_S` seconds."""
        self._socket.close()
        self._context.term()


class ZMQBatchReceiver:
    """Pulls training batches on rank 0. Stores batches of later steps; drops those of earlier steps and other runs."""

    def __init__(self, config: ZMQTransportConfig, run: OrchestratorPaths) -> None:
        self._run_name = _run_name(run)
        self._decoder = msgspec.msgpack.Decoder(TrainingBatch)
        self._batches: dict[int, TrainingBatch] = {}
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PULL)
        self._socket.rcvhwm = config.hwm
        _bind(self._socket, _batches(config, run))

    def receive(self, step: int) -> TrainingBatch | None:
        """Return the batch of `step`, or None if it has not arrived. If a step is sent twice, the last one counts."""
        while (frames := self._next_message()) is not None:
            self._accept(frames)
        for earlier in [stored for stored in self._batches if stored < step]:
            del self._batches[earlier]
        return self._batches.get(step)

    def close(self) -> None:
        self._context.destroy(linger=0)

    def _next_message(self) -> list[bytes] | None:
        try:
            return self._socket.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return None

    def _accept(self, frames: list[bytes]) -> None:
        run_name, *payload = frames
        if run_name != self._run_name or len(payload) != 1:
            theirs, ours = (name.decode(errors="replace") for name in (run_name, self._run_name))
            get_logger().error(f"Dropped a batch of run {theirs!r}: this is run {ours!r}, and both use the same port")
            return
        try:
            batch = self._decoder.decode(payload[0])
        except msgspec.DecodeError as error:
            get_logger().error(f"Dropped a message that is not a valid training batch: {error}")
            return
        batch.run_idx = 0
        self._batches[batch.step] = batch


class ZMQMicroBatchSender:
    """Publishes packed rows from rank 0 to the other processes."""

    def __init__(self, config: ZMQTransportConfig, run: RunPaths, readers: Mapping[int, int]) -> None:
        """`readers` is the number of processes that read each data rank's rows."""
        self.readers = readers
        self._encoder = msgspec.msgpack.Encoder()
        self._subscribed: Counter[bytes] = Counter()
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.XPUB)
        # By default, a publisher drops messages for slow subscribers.
        self._socket.xpub_nodrop = True
        # By default only the first subscription to a topic is reported, and several processes may share a data rank.
        self._socket.xpub_verbose = True
        _bind(self._socket, _rows(config, run))

    def send(self, step: int, rows_of_ranks: Mapping[int, list[MicroBatch]]) -> None:
        """Publish each data rank's rows, after waiting for all of its readers to subscribe.

        Raises:
            TransportError: a reader does not subscribe within `PEER_TIMEOUT_S` seconds.
        """
        self._await_subscriptions(rows_of_ranks)
        for rank, rows in rows_of_ranks.items():
            self._socket.send_multipart([_topic(rank), str(step).encode(), self._encoder.encode(_images_once(rows))])

    def close(self) -> None:
        self._socket.close(linger=LINGER_S * 1000)
        self._context.term()

    def _await_subscriptions(self, ranks: Iterable[int]) -> None:
        while missing := [rank for rank in ranks if self._subscribed[_topic(rank)] < self.readers[rank]]:
            if not self._socket.poll(PEER_TIMEOUT_S * 1000):
                raise TransportError(f"data ranks {missing} did not subscribe to their rows in {PEER_TIMEOUT_S} s")
            event = self._socket.recv()
            if event.startswith(SUBSCRIBE):
                self._subscribed[event.removeprefix(SUBSCRIBE)] += 1


class ZMQMicroBatchReceiver:
    """Receives the packed rows of one data-parallel rank."""

    def __init__(self, config: ZMQTransportConfig, run: RunPaths, data_rank: int) -> None:
        self._decoder = msgspec.msgpack.Decoder(list[MicroBatch])
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.SUB)
        _rows(config, run).connect(self._socket)
        self._socket.subscribe(_topic(data_rank))

    def receive(self, step: int) -> list[MicroBatch]:
        """Return this rank's rows of `step`.

        Raises:
            TransportError: the rows do not arrive within `PEER_TIMEOUT_S` seconds, or rows of another step arrive.
        """
        if not self._socket.poll(PEER_TIMEOUT_S * 1000):
            raise TransportError(f"the rows of step {step} did not arrive in {PEER_TIMEOUT_S} s")
        _, sent_step, payload = self._socket.recv_multipart()
        if int(sent_step) != step:
            raise TransportError(f"expected the rows of step {step}, but received those of step {int(sent_step)}")
        return _images_restored(self._decoder.decode(payload))

    def close(self) -> None:
        self._context.destroy(linger=0)


def _batches(config: ZMQTransportConfig, run: OrchestratorPaths) -> Endpoint:
    return Endpoint.of_run(config.host, config.port, run.root, "batches")


def _rows(config: ZMQTransportConfig, run: RunPaths) -> Endpoint:
    return Endpoint.of_run(config.host, config.port + 1, run.root, "rows")


def _bind(socket: zmq.Socket[bytes], endpoint: Endpoint) -> None:
    try:
        endpoint.bind(socket)
    except TransportError as error:
        raise TransportError(
            f"rollout_transport: {error}; if another run uses the port, set trainer.rollout_transport.port and "
            "orchestrator.rollout_transport.port to a different one"
        ) from error


def _topic(data_rank: int) -> bytes:
    # Subscriptions match prefixes: without the final bar, rank 1 would also receive rank 10's rows.
    return b"data_rank|%d|" % data_rank


def _run_name(run: OrchestratorPaths) -> bytes:
    """The last two components of the run's directory, which machines may mount under different paths."""
    return "/".join(run.root.absolute().parts[-2:]).encode()
