"""Filesystem transport: batches and rows are files that are complete or absent."""

from __future__ import annotations

import logging

import msgspec
import pytest

from prime_rl.configs.shared import FileSystemTransportConfig
from prime_rl.run.paths import RunPaths
from prime_rl.transport import (
    MicroBatch,
    TrainingBatch,
    TrainingSample,
    setup_batch_receiver,
    setup_batch_sender,
    setup_micro_batch_sender,
)

CONFIG = FileSystemTransportConfig()


@pytest.fixture
def paths(tmp_path) -> RunPaths:
    return RunPaths(tmp_path)


@pytest.fixture
def engine_log(caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("prime_rl"), "propagate", True)
    return caplog


def sample(token: int = 5) -> TrainingSample:
    return TrainingSample([1, 2], [False, False], [token], [True], [-0.5], [1.0], advantage=0.25)


def row(token: int) -> MicroBatch:
    return MicroBatch([token], [True], [0.5], [-0.1], [0], [1.0])


def test_batches_of_earlier_steps_are_removed_once_a_later_one_is_read(paths) -> None:
    sender, receiver = setup_batch_sender(CONFIG, paths.orchestrator), setup_batch_receiver(CONFIG, paths.orchestrator)
    for step in (0, 1, 2):
        sender.send(TrainingBatch([sample()], step=step))
    receiver.receive(1)
    assert not paths.orchestrator.batch(0).exists()
    assert paths.orchestrator.batch(1).exists()
    assert paths.orchestrator.batch(2).exists()


def test_an_undecodable_batch_is_logged_once_and_read_when_it_is_replaced(paths, engine_log) -> None:
    receiver = setup_batch_receiver(CONFIG, paths.orchestrator)
    paths.orchestrator.batch(0).parent.mkdir(parents=True)
    paths.orchestrator.batch(0).write_bytes(b"\xc1 not msgpack")
    assert receiver.receive(0) is None
    assert receiver.receive(0) is None
    assert [record.levelname for record in engine_log.records] == ["ERROR"]
    assert str(paths.orchestrator.batch(0)) in engine_log.text
    sender = setup_batch_sender(CONFIG, paths.orchestrator)
    sender.send(TrainingBatch([sample()], step=0))
    assert receiver.receive(0) is not None


def test_a_batch_of_another_step_in_the_file_is_not_trained_on(paths, engine_log) -> None:
    receiver = setup_batch_receiver(CONFIG, paths.orchestrator)
    paths.orchestrator.batch(4).parent.mkdir(parents=True)
    paths.orchestrator.batch(4).write_bytes(msgspec.msgpack.encode(TrainingBatch([sample()], step=9)))
    assert receiver.receive(4) is None
    assert "contains the batch of step 9" in engine_log.text


def test_a_new_sender_deletes_only_batches_of_an_earlier_start(paths) -> None:
    setup_batch_sender(CONFIG, paths.orchestrator).send(TrainingBatch([sample()], step=7))
    neighbour = paths.orchestrator.batch(7).with_name("notes.txt")
    neighbour.write_text("mine")
    setup_batch_sender(CONFIG, paths.orchestrator)
    assert not paths.orchestrator.batch(7).exists()
    assert neighbour.read_text() == "mine"


def test_row_files_of_the_step_before_are_removed(paths) -> None:
    sender = setup_micro_batch_sender(CONFIG, paths, {0: 1})
    sender.send(0, {0: [row(1)]})
    sender.send(1, {0: [row(2)]})
    assert not paths.rank_batch(0, 0).exists()
    assert paths.rank_batch(1, 0).exists()


def test_structs_are_encoded_as_positional_arrays(paths) -> None:
    setup_batch_sender(CONFIG, paths.orchestrator).send(TrainingBatch([sample()], step=0))
    examples, step, run, early_end, images = msgspec.msgpack.decode(paths.orchestrator.batch(0).read_bytes())
    # PRIME-RL's 11 fields, `version`, `kept_as`, `completion_advantages`, `teacher_top`, `routed_experts`, `images` and
    # `sampler_top`.
    assert (step, run, early_end, images, len(examples[0])) == (0, None, None, [], 18)
