"""Resuming with another number of processes: every sample is used once, regardless of which process read it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from prime_rl.configs.data import FakeDataConfig, SFTDataConfig
from prime_rl.configs.sft import SFTConfig
from prime_rl.run.paths import RunPaths
from prime_rl.trainer.process.mesh import DataAxis
from prime_rl.trainer.sft.data.packer import PackedRow, PackedRows, setup_rows
from prime_rl.trainer.sft.data.places import Places, redistribute
from prime_rl.utils.pydantic_config import dump_toml

HERE = Path(__file__).parent
PACKINGS = ("cat", "best_fit", "stack")
CHANGES = ([2, 1], [1, 2], [2, 1, 2], [3, 2, 4], [4, 1, 3])


def samples_in(row: PackedRow) -> Iterator[np.ndarray]:
    """Token ids of each sample in a row."""
    tokens = row.input_ids[: row.tokens]
    yield from np.split(tokens, np.flatnonzero(row.position_ids[: row.tokens] == 0)[1:])


def run_with(
    counts: Sequence[int], open_rows: Callable[[DataAxis], PackedRows], rounds: int, file: Path
) -> tuple[list[np.ndarray], list[PackedRows]]:
    """Read rounds with each number of processes, with a checkpoint in between. Returns samples and last streams."""
    samples: list[np.ndarray] = []
    ranks: list[PackedRows] = []
    for count in counts:
        torch.save([rows.state() for rows in ranks], file)
        ranks = [open_rows(DataAxis(rank, count)) for rank in range(count)]
        places = torch.load(file, weights_only=True)
        for rows in ranks if places else ():
            rows.load_state(places)
        samples += [sample for rows in ranks for row in islice(rows, rounds) for sample in samples_in(row)]
    return samples, ranks


def held_back(ranks: Sequence[PackedRows]) -> list[np.ndarray]:
    """Token ids of every sample that has been read and waits for a row."""
    states = [rows.state()["waiting"] for rows in ranks]
    groups = [group for state in states for key in ("rows", "held_back", "ready") for group in state.get(key, [])]
    groups += [group for state in states for group in state.get("buckets", {}).values()]
    return [np.frombuffer(tokens, np.int32)[:-1] for group in groups for tokens, _ in group]


@pytest.mark.parametrize("counts", CHANGES, ids=lambda counts: "-".join(map(str, counts)))
@pytest.mark.parametrize("packing", PACKINGS)
def test_no_entry_is_left_out_or_read_twice(packing: str, counts: list[int], tmp_path: Path) -> None:
    """Every token of a fake sample is the index of its entry."""
    config = FakeDataConfig(pack_function=packing, length="variable", seq_len=256, micro_batch_size=2, batch_size=24)
    samples, ranks = run_with(
        counts, lambda axis: setup_rows(config, None, 10**6, axis), rounds=9, file=tmp_path / "places.pt"
    )
    used = Counter(int(sample[0]) for sample in [*samples, *held_back(ranks)])
    assert set(used.values()) == {1}
    states = [rows.state() for rows in ranks]
    unread = {index for state in states for index in state["left_over"]}
    for state in states:
        unread.update(range(state["position"], len(used) + 4096, len(ranks)))
    # There is no gap between entries that have been read and entries still to be read.
    assert sorted(used.keys() | unread)[: max(used) + 1] == list(range(max(used) + 1))
    assert not used.keys() & unread
    assert sum(state["counts"].get("seen", 0) for state in states) == len(used)


@pytest.fixture(scope="module")
def texts() -> list[str]:
    lengths = np.random.default_rng(1).integers(10, 240, 127)
    return [(f"{number:03}" * 80)[:length] for number, length in enumerate(lengths)]


@pytest.fixture
def file(texts: list[str], tmp_path: Path) -> Path:
    path = tmp_path / "texts.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


@pytest.mark.parametrize("counts", [[2, 1], [1, 2], [2, 3, 1]], ids=lambda counts: "-".join(map(str, counts)))
@pytest.mark.parametrize("streaming", [False, True], ids=["loaded", "streamed"])
@pytest.mark.parametrize("packing", ["best_fit", "stack"])
def test_an_epoch_has_every_text_whole_and_once(
    packing: str, streaming: bool, counts: list[int], texts: list[str], file: Path, tiny_model_dir: Path
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_model_dir)
    fields = {"pack_function": packing, "streaming": streaming, "shuffle_buffer": 16}
    config = SFTDataConfig(name=str(file), seq_len=256, micro_batch_size=2, batch_size=24, **fields)
    rounds = -(-3 * sum(map(len, texts)) // 512 // sum(counts))
    samples, ranks = run_with(
        counts, lambda axis: setup_rows(config, tokenizer, 128, axis), rounds, file=file.with_name("places.pt")
    )
    used = Counter(sample.tobytes() for sample in [*samples, *(part.astype(np.int64) for part in held_back(ranks))])
    assert len(used) == len(texts)
    states = [rows.state() for rows in ranks]
    assert sum(used.values()) == sum(state["counts"].get("seen", 0) for state in states)
    # Complete epochs yield each sample equally often; the current one adds at most one.
    assert max(used.values()) - min(used.values()) <= 1


def test_samples_that_were_held_back_by_several_are_more_than_a_row(tmp_path: Path) -> None:
    """Two processes hold back three samples each, and a row holds four: one full row and two waiting samples."""
    sample = (b"", b"")
    stopped = {"buckets": {1024: [], 256: [sample] * 3}, "touched_at": {1024: 0, 256: 4}, "emitted": 5, "ready": []}
    places = [
        {"position": 6 + rank, "left_over": [], "counts": {"seen": 3}, "waiting": stopped, "rank": rank}
        for rank in range(2)
    ]
    waiting = redistribute(places, 0, 1)["waiting"]
    assert waiting["ready"] == [[sample] * 4]
    assert waiting["buckets"] == {1024: [], 256: [sample] * 2}
    assert waiting["emitted"] - waiting["touched_at"][256] == 1


def test_entries_left_over_come_first() -> None:
    places = Places(DataAxis(1, 2))
    places.restore({"position": 9, "left_over": [3, 4]})
    assert [places.take() for _ in range(4)] == [3, 4, 9, 11]
    assert places.state() == {"position": 13, "left_over": []}


def test_a_run_trains_on_what_it_had_not_trained_on(
    texts: list[str], file: Path, tiny_model_dir: Path, tmp_path: Path
) -> None:
    """Within one epoch, resumed twice with another number of processes. The tests above have every packing."""
    counts = (2, 1, 2)
    config = {
        "device": "cpu",
        "model": {"name": str(tiny_model_dir), "attn": "sdpa"},
        "data": {"name": str(file), "seq_len": 256, "batch_size": 4, "pack_function": "best_fit"},
        "output_dir": tmp_path / "out",
    }
    trained: list[str] = []
    tokenizer = AutoTokenizer.from_pretrained(tiny_model_dir)
    for processes, steps, resume in zip(counts, (2, 4, 6), (None, -1, -1), strict=True):
        ckpt = {"resume_step": resume, "weights": None}
        dump_toml(SFTConfig(**config, max_steps=steps, ckpt=ckpt), tmp_path / "sft.toml")
        out = run_recorded(processes, tmp_path)
        for rank in range(processes):
            samples = json.loads((tmp_path / "out" / f"trained_{rank}.json").read_text())
            trained += [tokenizer.decode(sample[:-1]) for sample in samples]
        if resume:
            assert f"redistributed from {3 - processes} to {processes} data ranks" in out
    assert set(Counter(trained).values()) == {1}

    saved = RunPaths(tmp_path / "out").trainer_checkpoint(6)
    ranks = [setup_rows(SFTConfig(**config).data, tokenizer, 128, DataAxis(r, 2)) for r in range(2)]
    for rank, rows in enumerate(ranks):
        rows.load_state([torch.load(saved / f"rank_{rank}.pt", weights_only=True)["data"]])
    waiting = [tokenizer.decode(sample) for sample in held_back(ranks)]
    unread = []
    for rows in ranks:
        while rows.stream.position < len(texts):
            unread.append(tokenizer.decode(next(rows.stream).token_ids[:-1]))
    assert sorted([*trained, *waiting, *unread]) == sorted(texts)


def run_recorded(processes: int, directory: Path) -> str:
    start = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"] if processes > 1 else []
    command = [sys.executable, *start, str(HERE / "recorded_run.py"), "@", str(directory / "sft.toml")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
