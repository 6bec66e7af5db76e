"""Rows are divided by data rank, not by process: processes that share a data rank get the same rows."""

from __future__ import annotations

from contextlib import ExitStack, closing
from dataclasses import replace
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch

from prime_rl.configs.data import FakeDataConfig
from prime_rl.configs.shared import FileSystemTransportConfig, TransportConfig, ZMQTransportConfig
from prime_rl.configs.trainer import FakeDataLoaderConfig, ModelConfig, TrainerConfig
from prime_rl.run.paths import RunPaths
from prime_rl.trainer.process.errors import TrainerError
from prime_rl.trainer.process.mesh import DataAxis, Mesh, data_groups
from prime_rl.trainer.process.world import Process
from prime_rl.trainer.rl.batches import FakeBatches, PackedBatches, readers_by_data_rank
from prime_rl.trainer.sft.data.packer import setup_rows
from prime_rl.transport import MicroBatch, TrainingBatch, TrainingSample, setup_batch_sender
from prime_rl.transport.batches import ZMQMicroBatchSender

CPU = torch.device("cpu")
SEQ_LEN = 8


@pytest.mark.parametrize(
    ("sizes", "names", "groups"),
    [
        pytest.param((4,), ("dp_shard",), [[0, 1, 2, 3]], id="fsdp"),
        pytest.param((2, 2), ("dp_replicate", "dp_shard"), [[0, 1, 2, 3]], id="hsdp"),
        pytest.param((1, 2), ("dp_shard", "tp"), [[0], [1]], id="tensor parallel alone"),
        pytest.param((2, 2), ("dp_shard", "cp"), [[0, 2], [1, 3]], id="context parallel"),
        pytest.param((2, 2, 2), ("dp_shard", "cp", "tp"), [[0, 4], [1, 5], [2, 6], [3, 7]], id="context and tensor"),
        pytest.param((2, 2, 2), ("pp", "dp_shard", "tp"), [[0, 2], [1, 3], [4, 6], [5, 7]], id="pipeline first"),
    ],
)
def test_processes_read_different_rows_only_along_the_data_parallel_axes(
    sizes: tuple[int, ...], names: tuple[str, ...], groups: list[list[int]]
) -> None:
    assert data_groups(torch.arange(np.prod(sizes)).reshape(sizes), names) == groups


def test_a_single_process_is_the_whole_data_axis(mesh: Mesh) -> None:
    assert mesh.data_axis == DataAxis(data_rank=0, data_size=1)


def test_made_up_rl_rows_follow_the_data_rank() -> None:
    config = FakeDataLoaderConfig(batch_size=4)
    shared, halves = (
        [FakeBatches(config, SEQ_LEN, axis).take(0) for axis in axes]
        for axes in ([DataAxis(0, 1)] * 2, [DataAxis(0, 2), DataAxis(1, 2)])
    )
    assert shared[0] == shared[1]
    assert [len(rows) for rows in (*shared, *halves)] == [4, 4, 2, 2]
    assert halves[0] != halves[1]


def test_sft_rows_follow_the_data_rank() -> None:
    config = FakeDataConfig(input_ids="random", seq_len=SEQ_LEN, batch_size=4, pack_function="cat")

    def rows_of(axis: DataAxis) -> list[list[int]]:
        return [row.input_ids.tolist() for row in islice(setup_rows(config, None, 128, axis), 4)]

    every_row = rows_of(DataAxis(0, 1))
    assert rows_of(DataAxis(0, 1)) == every_row
    assert rows_of(DataAxis(1, 2))[:2] == every_row[1::2]


@pytest.mark.parametrize(
    ("processes", "data_size", "readers"),
    [(1, 1, {}), (3, 3, {1: 1, 2: 1}), (2, 1, {0: 1}), (4, 2, {0: 1, 1: 2})],
)
def test_every_process_but_the_main_one_reads_the_rows_of_its_data_rank(
    processes: int, data_size: int, readers: dict[int, int]
) -> None:
    assert readers_by_data_rank(Process(0, processes, 0, CPU), DataAxis(0, data_size)) == readers


@pytest.fixture(params=["filesystem", "zmq"])
def transport(request: pytest.FixtureRequest, zmq_port: int) -> TransportConfig:
    if request.param == "filesystem":
        return FileSystemTransportConfig()
    return ZMQTransportConfig(host="127.0.0.1", port=zmq_port)


def taken(transport: TransportConfig, mesh: Mesh, root: Path, data_ranks: list[int]) -> list[list[MicroBatch]]:
    """The rows that each process takes of a batch of four rows; `data_ranks` are those of the processes."""
    paths, data_size = RunPaths(root), max(data_ranks) + 1
    config = TrainerConfig(
        output_dir=root, device="cpu", model=ModelConfig(seq_len=SEQ_LEN), rollout_transport=transport
    )
    with ExitStack() as stack:
        sources = []
        for rank, data_rank in enumerate(data_ranks):
            process = Process(rank, len(data_ranks), rank, CPU)
            seen = replace(mesh, process=process, data_axis=DataAxis(data_rank, data_size))
            sources.append(PackedBatches(config, paths, seen, SEQ_LEN))
            stack.callback(sources[-1].close)
        sender = setup_batch_sender(transport, paths.orchestrator)
        stack.callback(sender.close)
        rest = SEQ_LEN - 1
        samples = [
            TrainingSample([1], [False], [token] * rest, [True] * rest, [-0.5] * rest, [1.0] * rest, advantage=0.5)
            for token in (10, 11, 12, 13)
        ]
        sender.send(TrainingBatch(samples, step=0))
        while not sources[0].is_ready(0):
            continue
        return [source.take(0) for source in sources]


@pytest.mark.parametrize("data_ranks", [[0, 0], [0, 1], [0, 0, 1, 1]], ids=str)
def test_processes_of_one_data_rank_take_the_same_packed_rows(
    transport: TransportConfig, mesh: Mesh, tmp_path: Path, data_ranks: list[int]
) -> None:
    rows_of_processes = taken(transport, mesh, tmp_path / "run", data_ranks)
    by_data_rank = dict(zip(data_ranks, rows_of_processes, strict=True))
    assert all(rows == by_data_rank[rank] for rank, rows in zip(data_ranks, rows_of_processes, strict=True))
    tokens = [row.input_ids[1] for rows in by_data_rank.values() for row in rows]
    assert sorted(tokens) == [10, 11, 12, 13]
    if transport.type == "filesystem":
        files = {file.name for file in (tmp_path / "run" / "rollouts" / "step_0").glob("rank_*.bin")}
        assert files == {f"rank_{data_rank}.bin" for data_rank in data_ranks[1:]}


def test_rows_of_another_step_are_an_error_of_one_line(mesh: Mesh, tmp_path: Path, zmq_port: int) -> None:
    transport, paths = ZMQTransportConfig(host="127.0.0.1", port=zmq_port), RunPaths(tmp_path)
    config = TrainerConfig(
        output_dir=tmp_path, device="cpu", model=ModelConfig(seq_len=SEQ_LEN), rollout_transport=transport
    )
    second = replace(mesh, process=Process(1, 2, 1, CPU), data_axis=DataAxis(1, 2))
    with (
        closing(ZMQMicroBatchSender(transport, paths, {1: 1})) as first,
        closing(PackedBatches(config, paths, second, SEQ_LEN)) as batches,
    ):
        first.send(4, {1: []})
        with pytest.raises(TrainerError, match="expected the rows of step 5, but received those of step 4"):
            batches.take(5)
