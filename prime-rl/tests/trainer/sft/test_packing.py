from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from prime_rl.configs.data import FakeDataConfig, SFTDataConfig
from prime_rl.configs.trainer import ModelConfig
from prime_rl.trainer.model.build import setup_model
from prime_rl.trainer.process.mesh import DataAxis, Mesh
from prime_rl.trainer.sft.data.conversation import TokenizedSample
from prime_rl.trainer.sft.data.packer import (
    PackedRow,
    PackedRows,
    Stack,
    best_fit,
    lay_out,
    setup_rows,
)
from prime_rl.trainer.sft.step import row_loss_sum

PACKINGS = ("cat", "best_fit", "stack")


def chat_lengths(count: int) -> np.ndarray:
    """Lengths like those of conversations: log-normal with median 400, cut at 2,048."""
    return np.clip(np.random.default_rng(0).lognormal(6, 0.9, count), 8, 2048).astype(int)


@pytest.fixture(scope="module")
def open_rows(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., PackedRows]:
    """Rows of 300 texts with different lengths. Each text repeats its index."""
    tokenizer = AutoTokenizer.from_pretrained(tiny_model_dir)
    file = tmp_path_factory.mktemp("texts") / "texts.jsonl"
    lengths = np.random.default_rng(1).integers(10, 240, 300)
    texts = [(f"{number:03}" * 80)[:length] for number, length in enumerate(lengths)]
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))

    def open_them(rank: int = 0, data_size: int = 1, **fields) -> PackedRows:
        config = SFTDataConfig(name=str(file), **{"seq_len": 256, **fields})
        return setup_rows(config, tokenizer, 128, DataAxis(rank, data_size))

    return open_them


def samples_in(row: PackedRow) -> Iterator[bytes]:
    """Token ids of each sample in a row."""
    tokens = row.input_ids[: row.tokens]
    for part in np.split(tokens, np.flatnonzero(row.position_ids[: row.tokens] == 0)[1:]):
        yield part.tobytes()


# --- the bins


def test_each_length_goes_into_the_fullest_bin_with_space() -> None:
    bins = best_fit(np.array([3, 7, 2, 5, 8]), 10)
    # Bins 8 | 7 | 5. The best fit for 3 is the bin with 7, and for 2 the bin with 8.
    assert bins.tolist() == [1, 1, 0, 2, 0]


def test_short_samples_are_not_sorted_by_length() -> None:
    lengths = np.random.default_rng(0).choice([12, 15], 4096)
    bins = best_fit(lengths, 1024)
    shares = np.bincount(bins, lengths == 12) / np.bincount(bins)
    assert 0.25 < shares.min() < shares.max() < 0.75, "each row is a sample of all"


@pytest.mark.parametrize("capacity", [2048, 4096, 16384])
def test_bins_hold_every_length_whole_and_are_above_98_percent_full(capacity: int) -> None:
    lengths = chat_lengths(20_000)
    bins = best_fit(lengths, capacity)
    assert np.bincount(bins, weights=lengths).max() <= capacity
    assert lengths.sum() / ((bins.max() + 1) * capacity) > 0.98


def test_the_cost_of_a_length_does_not_grow_with_their_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counts executed lines instead of seconds."""

    def lines_run(count: int) -> int:
        lines = 0

        def trace(frame, event, argument):
            nonlocal lines
            if frame.f_code is best_fit.__code__:
                lines += event == "line"
                return trace
            return None

        lengths = chat_lengths(count)
        sys.settrace(trace)
        try:
            best_fit(lengths, 4096)
        finally:
            sys.settrace(None)
        return lines

    assert lines_run(16_000) / 16_000 == pytest.approx(lines_run(1_000) / 1_000, rel=0.05)


def test_a_length_above_the_capacity_is_refused() -> None:
    with pytest.raises(ValueError, match="length 11 exceeds the capacity of 10"):
        best_fit(np.array([11]), 10)


# --- the rows


def test_padding_is_made_of_untrained_sequences_of_its_own() -> None:
    samples = [TokenizedSample(np.array([1, 2, 3]), np.array([False, True, True]))]
    row = lay_out(samples, row_tokens=9, seq_len=4)
    assert row.input_ids.tolist() == [1, 2, 1, 1, 1, 1, 1, 1, 1]
    assert row.target_ids.tolist() == [2, 3, 0, 0, 0, 0, 0, 0, 0]
    assert row.is_trained.tolist() == [True, True] + [False] * 7
    assert row.position_ids.tolist() == [0, 1, 0, 1, 2, 3, 0, 1, 2]
    assert (row.tokens, row.padding, row.samples) == (2, 7, 1)


@pytest.mark.parametrize("packing", ["best_fit", "stack"])
def test_no_sample_is_cut_lost_or_seen_twice_in_an_epoch(packing: str, open_rows: Callable[..., PackedRows]) -> None:
    rows = open_rows(pack_function=packing, micro_batch_size=2)
    seen: list[bytes] = []
    while rows.stream.epoch < 3:
        seen += samples_in(next(rows))
    counts = {text: seen.count(text) for text in seen}
    # Samples that were read but not yet packed wait for a row. No sample can be more than one epoch ahead of the rest.
    assert len(counts) == 300
    assert max(counts.values()) <= 3
    assert min(counts.values()) >= 1
    waiting = rows.state()["waiting"]
    held = [pair for part in _parts(waiting) for pair in part]
    assert len(seen) + len(held) == rows.stream.counts.seen


def _parts(waiting: dict) -> list:
    return [*waiting.get("held_back", []), *waiting.get("rows", []), *waiting.get("buckets", {}).values()]


def test_best_fit_fills_the_rows_of_a_run(open_rows: Callable[..., PackedRows]) -> None:
    rows = open_rows(pack_function="best_fit", micro_batch_size=4)
    row_list = list(islice(rows, 60))
    assert sum(row.tokens for row in row_list) / (60 * 1024) > 0.98
    assert len({row.samples for row in row_list[:8]}) > 1


def test_stacked_samples_are_of_like_length(open_rows: Callable[..., PackedRows]) -> None:
    rows = open_rows(pack_function="stack", seq_len=512, micro_batch_size=2)
    for row in islice(rows, 20):
        assert len(row.input_ids) == 1024
        # All texts have fewer than 256 tokens, so a row holds four.
        assert row.samples == 4


def test_a_bucket_without_new_samples_is_flushed() -> None:
    class Stream:
        """Yields one long sample, then an infinite number of short ones."""

        lengths = iter([300])

        def __next__(self) -> TokenizedSample:
            length = next(self.lengths, 100)
            return TokenizedSample(np.zeros(length + 1, np.int32), np.ones(length + 1, bool))

    packer = Stack(1024)
    stream = Stream()
    rows = [packer(stream) for _ in range(14)]
    assert [len(row) for row in rows] == [4] * 11 + [1] + [4] * 2
    assert rows[11][0].inputs == 300


@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("rows_before", [1, 7, 40])
def test_a_saved_position_continues_exactly(
    packing: str, streaming: bool, rows_before: int, open_rows: Callable[..., PackedRows], tmp_path: Path
) -> None:
    fields = {"pack_function": packing, "streaming": streaming, "shuffle_buffer": 64, "micro_batch_size": 2}
    straight = open_rows(rank=1, data_size=2, **fields)
    for _ in range(rows_before):
        next(straight)
    torch.save(straight.state(), tmp_path / "state.pt")
    resumed = open_rows(rank=1, data_size=2, **fields)
    resumed.load_state([torch.load(tmp_path / "state.pt", weights_only=True)])
    for expected, row in zip(islice(straight, 50), islice(resumed, 50), strict=True):
        assert np.array_equal(expected.input_ids, row.input_ids)
        assert np.array_equal(expected.target_ids, row.target_ids)
        assert np.array_equal(expected.is_trained, row.is_trained)
        assert np.array_equal(expected.position_ids, row.position_ids)
    assert straight.stream.epoch == resumed.stream.epoch


@pytest.mark.parametrize("packing", PACKINGS)
def test_packed_samples_have_the_losses_they_have_alone(
    packing: str, open_rows: Callable[..., PackedRows], tiny_model_dir: Path, mesh: Mesh
) -> None:
    model = setup_model(ModelConfig(name=str(tiny_model_dir), attn="sdpa"), mesh)
    for row in islice(open_rows(pack_function=packing, micro_batch_size=2), 2):
        alone, begin = 0.0, 0
        with torch.no_grad():
            packed = row_loss_sum(model, row, mesh.process.device)
            for end in [*np.flatnonzero(row.position_ids == 0)[1:], len(row.input_ids)]:
                part = _part(row, slice(begin, end))
                alone += row_loss_sum(model, part, mesh.process.device) if part.is_trained.any() else 0.0
                begin = end
        assert (packed / row.is_trained.sum()).item() == pytest.approx((alone / row.is_trained.sum()).item(), abs=1e-5)


def _part(row: PackedRow, cells: slice) -> PackedRow:
    arrays: Sequence[np.ndarray] = (row.input_ids, row.target_ids, row.is_trained, row.position_ids)
    return PackedRow(*(array[cells] for array in arrays), samples=1)


@pytest.mark.parametrize("packing", PACKINGS)
def test_made_up_samples_can_be_packed(packing: str) -> None:
    config = FakeDataConfig(pack_function=packing, length="variable", seq_len=256, micro_batch_size=2, batch_size=2)
    rows = setup_rows(config, None, 128, DataAxis(0, 1))
    assert all(len(row.input_ids) == 512 and row.is_trained.sum() == row.tokens > 0 for row in islice(rows, 20))
