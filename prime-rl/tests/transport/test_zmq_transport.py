"""ZeroMQ transport: run names, subscriptions, and ports."""

from __future__ import annotations

import logging

import pytest
import zmq

from prime_rl.configs.shared import ZMQTransportConfig
from prime_rl.run.paths import RunPaths
from prime_rl.transport import TrainingBatch, TrainingSample, TransportError, setup_batch_receiver, setup_batch_sender
from prime_rl.transport.batches import ZMQMicroBatchReceiver, ZMQMicroBatchSender
from prime_rl.transport.endpoints import Endpoint
from prime_rl.utils.engine_keys import TRANSPORT_KEY_VARIABLE

KEY = "a key that both ends share"
ALL_ADDRESSES = "0.0.0.0"


@pytest.fixture
def config(zmq_port: int) -> ZMQTransportConfig:
    """TCP, as between machines: 127.0.0.1 would be a Unix socket."""
    return ZMQTransportConfig(host=ALL_ADDRESSES, port=zmq_port)


@pytest.fixture(autouse=True)
def shared_key(monkeypatch) -> None:
    monkeypatch.setenv(TRANSPORT_KEY_VARIABLE, KEY)


@pytest.fixture
def receiver(config, tmp_path):
    end = setup_batch_receiver(config, RunPaths(tmp_path / "mine").orchestrator)
    yield end
    end.close()


@pytest.fixture
def engine_log(caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("prime_rl"), "propagate", True)
    return caplog


def poll_until(receiver, is_done) -> TrainingBatch | None:
    while not is_done(batch := receiver.receive(0)):
        continue
    return batch


def test_a_batch_of_another_run_is_dropped_and_both_runs_are_named(config, receiver, tmp_path, engine_log) -> None:
    sender = setup_batch_sender(config, RunPaths(tmp_path / "theirs").orchestrator)
    sender.send(TrainingBatch([], step=0))
    poll_until(receiver, lambda _: engine_log.records)
    sender.close()
    assert "'theirs/run_default': this is run 'mine/run_default', and both use the same port" in engine_log.text
    assert receiver.receive(0) is None


def test_a_message_that_is_not_a_batch_is_dropped(config, receiver, engine_log) -> None:
    with zmq.Context() as context, context.socket(zmq.PUSH) as stranger:
        Endpoint(f"tcp://{config.host}:{config.port}", KEY).connect(stranger)
        stranger.send_multipart([b"mine/run_default", b"\xc1"])
        poll_until(receiver, lambda _: engine_log.records)
    assert "not a valid training batch" in engine_log.text


def test_the_last_of_two_batches_for_one_step_counts(config, receiver, tmp_path) -> None:
    sender = setup_batch_sender(config, RunPaths(tmp_path / "mine").orchestrator)
    samples = [TrainingSample([token], [False], [], [], [], []) for token in (1, 2)]
    for sample in samples:
        sender.send(TrainingBatch([sample], step=0))
    last = poll_until(receiver, lambda batch: batch is not None and batch.examples != [samples[0]])
    sender.close()
    assert last is not None
    assert last.examples == [samples[1]]


def test_a_port_in_use_is_reported_with_the_keys_to_change(config, receiver, tmp_path) -> None:
    address = f"tcp://{config.host}:{config.port}"
    with pytest.raises(TransportError, match=rf"listen on {address}: Address already in use.*\.port"):
        setup_batch_receiver(config, RunPaths(tmp_path).orchestrator)


def test_rows_of_another_step_are_an_error(config, tmp_path) -> None:
    run = RunPaths(tmp_path)
    sender, receiver = ZMQMicroBatchSender(config, run, {1: 1}), ZMQMicroBatchReceiver(config, run, 1)
    sender.send(4, {1: []})
    with pytest.raises(TransportError, match="expected the rows of step 5, but received those of step 4"):
        receiver.receive(5)
    receiver.close()
    sender.close()
