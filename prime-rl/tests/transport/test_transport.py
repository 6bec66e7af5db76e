"""Contract of every transport: batches and rows arrive complete and for the requested step, including the last one."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from types import SimpleNamespace

import pytest
from msgspec.structs import replace

from prime_rl.configs.shared import FileSystemTransportConfig, TransportConfig, ZMQTransportConfig
from prime_rl.run.paths import RunPaths
from prime_rl.transport import (
    BatchReceiver,
    BatchSender,
    MicroBatch,
    MicroBatchReceiver,
    MicroBatchSender,
    TrainingBatch,
    TrainingSample,
    setup_batch_receiver,
    setup_batch_sender,
    setup_micro_batch_receiver,
    setup_micro_batch_sender,
)
from prime_rl.transport.messages import ImageReference


def sample(token: int = 5) -> TrainingSample:
    return TrainingSample([1, 2], [False, False], [token], [True], [-0.5], [1.0], advantage=0.25, version=3)


def batch(step: int, token: int = 5) -> TrainingBatch:
    return TrainingBatch([sample(token)], step=step)


def row(token: int) -> MicroBatch:
    return MicroBatch([token], [True], [0.5], [-0.1], [0], [1.0], minibatch=2)


@pytest.fixture(params=["filesystem", "zmq"])
def config(request, zmq_port: int) -> TransportConfig:
    if request.param == "filesystem":
        return FileSystemTransportConfig()
    return ZMQTransportConfig(host="127.0.0.1", port=zmq_port)


class Ends:
    """Creates senders and receivers of one transport and closes them after the test."""

    def __init__(self, config: TransportConfig, paths: RunPaths, closing: ExitStack) -> None:
        self.config = config
        self.paths = paths
        self.closing = closing

    def sender(self) -> BatchSender:
        return self._open(setup_batch_sender(self.config, self.paths.orchestrator))

    def receiver(self) -> BatchReceiver:
        return self._open(setup_batch_receiver(self.config, self.paths.orchestrator))

    def rows_sender(self, readers: dict[int, int]) -> MicroBatchSender:
        return self._open(setup_micro_batch_sender(self.config, self.paths, readers))

    def rows_receiver(self, rank: int) -> MicroBatchReceiver:
        return self._open(setup_micro_batch_receiver(self.config, self.paths, rank))

    def _open(self, end):
        self.closing.callback(end.close)
        return end


@pytest.fixture
def ends(config, tmp_path) -> Iterator[Ends]:
    with ExitStack() as closing:
        yield Ends(config, RunPaths(tmp_path / "run"), closing)


def awaited(receive: Callable[[], TrainingBatch | None]) -> TrainingBatch:
    """Poll until there is a result."""
    while (received := receive()) is None:
        continue
    return received


def test_a_batch_arrives_as_it_was_sent(ends) -> None:
    receiver, sender = ends.receiver(), ends.sender()
    assert receiver.receive(3) is None
    sender.send(batch(3))
    received = awaited(lambda: receiver.receive(3))
    assert received == TrainingBatch([sample()], step=3, run_idx=0)


def test_the_receiver_returns_only_the_requested_step(ends) -> None:
    receiver, sender = ends.receiver(), ends.sender()
    for step in (1, 2):
        sender.send(batch(step, token=10 + step))
    assert awaited(lambda: receiver.receive(2)).examples[0].completion_ids == [12]
    assert receiver.receive(1) is None, "its step is over"
    assert receiver.receive(0) is None


def test_early_batches_are_stored_for_their_step(ends) -> None:
    receiver, sender = ends.receiver(), ends.sender()
    for step in (0, 1, 2):
        sender.send(batch(step, token=step))
    tokens = [awaited(lambda step=step: receiver.receive(step)).examples[0].completion_ids for step in (0, 1, 2)]
    assert tokens == [[0], [1], [2]]


def test_the_last_batch_arrives_after_its_sender_has_exited(ends) -> None:
    sender = ends.sender()
    leaving = threading.Thread(target=lambda: (sender.send(batch(9)), sender.close()))
    leaving.start()
    receiver = ends.receiver()
    assert awaited(lambda: receiver.receive(9)).step == 9
    leaving.join()


def test_each_rank_gets_its_own_rows_of_each_step(ends) -> None:
    sender, receivers = ends.rows_sender({1: 1, 10: 1}), {rank: ends.rows_receiver(rank) for rank in (1, 10)}
    for step in (4, 5):
        sender.send(step, {1: [row(step)], 10: [row(10 * step), row(20 * step)]})
        received = {rank: receiver.receive(step) for rank, receiver in receivers.items()}
        assert received == {1: [row(step)], 10: [row(10 * step), row(20 * step)]}


def test_an_image_is_sent_once_however_many_sequences_show_it(ends) -> None:
    one, other = (ImageReference(name, f"data:;base64,{name * 100_000}", 2, 3) for name in "ab")
    rows = [replace(row(1), images=[[one, other], [one]]), row(2), replace(row(3), images=[[], [other, one]])]
    sender, receiver = ends.rows_sender({0: 1}), ends.rows_receiver(0)
    lengths: list[int] = []
    encode = sender._encoder.encode
    sender._encoder = SimpleNamespace(encode=lambda value: lengths.append(len(encode(value))) or encode(value))
    sender.send(0, {0: rows})
    assert receiver.receive(0) == rows
    assert 200_000 < lengths[0] < 201_000
