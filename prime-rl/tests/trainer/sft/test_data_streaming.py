from __future__ import annotations

import json
import subprocess
import sys
from itertools import islice
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import torch
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from prime_rl.configs.data import SFTDataConfig
from prime_rl.trainer.process.errors import DataError
from prime_rl.trainer.process.mesh import DataAxis
from prime_rl.trainer.process.world import Process
from prime_rl.trainer.sft.data.examination import check_first_rows
from prime_rl.trainer.sft.data.packer import PackedRows, setup_rows
from prime_rl.trainer.sft.data.sources import load_rows, stream_rows


@pytest.fixture
def tokenizer(tiny_model_dir: Path) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(tiny_model_dir)


def open_stream(
    file: Path, tokenizer: PreTrainedTokenizerBase, rank: int = 0, data_size: int = 1, **fields
) -> PackedRows:
    config = SFTDataConfig(name=str(file), streaming=True, **{"seq_len": 128, "pack_function": "cat", **fields})
    return setup_rows(config, tokenizer, 128, DataAxis(rank, data_size))


def write_texts(path: Path, texts: list[str]) -> Path:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def texts_of(rows: PackedRows, tokenizer: PreTrainedTokenizerBase, count: int) -> list[str]:
    samples = islice(iter(lambda: next(rows.stream), None), count)
    return [tokenizer.decode(sample.token_ids[:-1]) for sample in samples]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return write_texts(tmp_path / "texts.jsonl", [f"{number:02}" for number in range(50)])


def test_a_stream_has_every_row_once_an_epoch_shuffled_by_blocks(
    file: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    rows = open_stream(file, tokenizer, shuffle_buffer=20)
    first, second = (texts_of(rows, tokenizer, 50) for _ in range(2))
    everything = [f"{number:02}" for number in range(50)]
    assert sorted(first) == sorted(second) == everything
    assert first != second
    assert first != everything
    assert sorted(first[:20]) == everything[:20]
    assert rows.stream.row_count == 50


@pytest.mark.parametrize("shuffle_buffer", [20, 50, 1000])
def test_inspecting_the_first_rows_moves_no_stream(
    file: Path, tokenizer: PreTrainedTokenizerBase, shuffle_buffer: int
) -> None:
    inspected, other = (open_stream(file, tokenizer, shuffle_buffer=shuffle_buffer) for _ in range(2))
    check_first_rows(inspected, tokenizer, Process(0, 1, 0, torch.device("cpu")), show=False)
    assert texts_of(inspected, tokenizer, 120) == texts_of(other, tokenizer, 120)


def test_a_stream_is_divided_over_the_processes(file: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    alone = texts_of(open_stream(file, tokenizer, shuffle_buffer=20), tokenizer, 100)
    shares = [texts_of(open_stream(file, tokenizer, rank, 2, shuffle_buffer=20), tokenizer, 50) for rank in range(2)]
    assert [text for pair in zip(*shares, strict=True) for text in pair] == alone


def test_without_shuffling_a_stream_has_the_order_of_the_file(file: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    rows = open_stream(file, tokenizer, shuffle=False, shuffle_buffer=7)
    assert texts_of(rows, tokenizer, 52) == [f"{number % 50:02}" for number in range(52)]


def test_rows_that_a_process_does_not_train_on_are_not_parsed(file: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    lines = file.read_text().splitlines()
    # The first row is parsed to find the columns.
    own = {0, *range(1, 50, 5)}
    file.write_text("".join(f"{line}\n" if index in own else "no JSON\n" for index, line in enumerate(lines)))
    rows = open_stream(file, tokenizer, rank=1, data_size=5, shuffle=False, shuffle_buffer=10)
    assert texts_of(rows, tokenizer, 10) == [f"{number:02}" for number in range(1, 50, 5)]


@pytest.mark.parametrize("stopping_strategy", ["first_exhausted", "all_exhausted"])
@pytest.mark.parametrize("probabilities", [None, [0.5, 0.2, 0.3]])
def test_interleaved_streams_have_the_order_of_interleaved_files(
    tmp_path: Path, stopping_strategy: str, probabilities: list[float] | None
) -> None:
    for split, count in (("a", 3), ("b", 70), ("c", 9)):
        write_texts(tmp_path / f"{split}.jsonl", [f"{split}{number}" for number in range(count)])
    config = SFTDataConfig(
        name=str(tmp_path),
        splits=["a", "b", "c"],
        probabilities=probabilities,
        stopping_strategy=stopping_strategy,
    )
    assert [reading() for reading in stream_rows(config)] == list(load_rows(config))


def test_every_kind_of_file_can_be_streamed(tmp_path: Path) -> None:
    import datasets

    rows = [{"text": f"row {number}"} for number in range(3000)]
    table = pyarrow.Table.from_pylist(rows)
    pyarrow.parquet.write_table(table, tmp_path / "rows.parquet")
    with pyarrow.ipc.new_stream(str(tmp_path / "rows.arrow"), table.schema) as writer:
        writer.write_table(table)
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    datasets.Dataset.from_list(rows).save_to_disk(str(tmp_path / "saved"))
    for name in ("rows.parquet", "rows.arrow", "rows.json", "saved"):
        config = SFTDataConfig(name=str(tmp_path / name), streaming=True)
        assert [dict(reading()) for reading in stream_rows(config)] == rows


def test_a_row_of_a_table_is_found_in_any_of_its_row_groups(tmp_path: Path) -> None:
    rows = [{"text": f"row {number}"} for number in range(50)]
    table = pyarrow.Table.from_pylist(rows)
    pyarrow.parquet.write_table(table, tmp_path / "rows.parquet", row_group_size=3)
    with pyarrow.ipc.new_stream(str(tmp_path / "rows.arrow"), table.schema) as writer:
        for start, count in ((0, 0), (0, 7), (7, 0), (7, 1), (8, 42), (50, 0)):
            writer.write_table(table.slice(start, count))
    for name in ("rows.parquet", "rows.arrow"):
        opened = load_rows(SFTDataConfig(name=str(tmp_path / name)))
        assert [opened[index] for index in range(len(opened))] == rows


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"], ids=["unix", "windows", "old-mac"])
def test_a_row_of_a_csv_file_is_found_after_rows_of_several_lines(tmp_path: Path, end: str) -> None:
    lines = ["\ufeffprompt,completion", 'one,"1', '2"', "", "", "zwei ä,2", '"a ""b"", c",3', ""]
    file = tmp_path / "rows.csv"
    file.write_bytes(end.join(lines).encode())
    rows = load_rows(SFTDataConfig(name=str(file)))
    read = [(rows[index], rows.where(index)) for index in (2, 0, 1)]
    assert [row["prompt"] for row, _ in read] == ['a "b", c', "one", "zwei ä"]
    assert read[1][0]["completion"] == f"1{end}2"
    assert len(rows) == 3
    # The lines that the rows begin in.
    assert [where for _, where in read] == [f"{file}:7", f"{file}:2", f"{file}:6"]


def test_a_parquet_file_is_read_without_pandas(tmp_path: Path) -> None:
    pyarrow.parquet.write_table(pyarrow.table({"text": ["a"]}), tmp_path / "rows.parquet")
    program = (
        "import sys; from prime_rl.utils.rows import read_file; from pathlib import Path; "
        f"print(read_file(Path({str(tmp_path / 'rows.parquet')!r}))[0], 'pandas' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "{'text': 'a'} False\n"


def test_several_files_are_one_dataset(tmp_path: Path) -> None:
    for number in range(3):
        write_texts(tmp_path / f"train-{number}.jsonl", [f"{number}{letter}" for letter in "abc"])
    rows = load_rows(SFTDataConfig(name=str(tmp_path)))
    assert [rows[index]["text"] for index in (0, 2, 3, 8)] == ["0a", "0c", "1a", "2c"]
    assert rows.where(4).endswith("train-1.jsonl:2")


def test_a_broken_line_of_a_stream_is_named_when_it_is_reached(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text('{"text": "good"}\n{"text": \n')
    rows = open_stream(file, tokenizer, shuffle=False)
    assert texts_of(rows, tokenizer, 1) == ["good"]
    with pytest.raises(DataError, match=r"^\S+rows\.jsonl:2: not valid JSON"):
        next(rows)
    (tmp_path / "empty.jsonl").touch()
    with pytest.raises(DataError, match="has no rows"):
        open_stream(tmp_path / "empty.jsonl", tokenizer)


def test_a_faulty_row_of_a_shuffled_stream_has_its_line(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text('{"text": "good"}\n' * 4 + '{"text": 3}\n')
    rows = open_stream(file, tokenizer)
    with pytest.raises(DataError, match=r"^\S+rows\.jsonl:5: `text` must be a string, got 3$"):
        texts_of(rows, tokenizer, 5)


@pytest.mark.parametrize(("overlong", "lengths"), [("truncate", [3, 8, 5]), ("drop", [3, 5, 3])])
def test_samples_that_are_too_long_are_cut_or_left_out_and_counted(
    overlong: str, lengths: list[int], tmp_path: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    file = write_texts(tmp_path / "rows.jsonl", ["a" * 3, "b" * 30, "c" * 5])
    config = SFTDataConfig(name=str(file), shuffle=False, seq_len=8, overlong=overlong)
    stream = setup_rows(config, tokenizer, 128, DataAxis(0, 1)).stream
    assert [next(stream).inputs for _ in range(3)] == lengths
    counts = stream.counts
    assert (counts.truncated, counts.overlong) == ((1, 0) if overlong == "truncate" else (0, 1))


def test_a_sample_that_is_too_long_can_stop_the_run(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    file = write_texts(tmp_path / "rows.jsonl", ["a" * 3, "b" * 30])
    config = SFTDataConfig(name=str(file), shuffle=False, seq_len=8, overlong="error")
    stream = setup_rows(config, tokenizer, 128, DataAxis(0, 1)).stream
    next(stream)
    with pytest.raises(DataError, match=r"rows\.jsonl:2: 30 tokens, more than data\.seq_len = 8"):
        next(stream)


def test_a_cut_sample_keeps_what_fits(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    file = write_texts(tmp_path / "rows.jsonl", ["abcdefghijkl"])
    rows = open_stream(file, tokenizer, seq_len=8, micro_batch_size=2, batch_size=2)
    row = next(rows)
    assert tokenizer.decode(row.target_ids) == "bcdefghi" * 2
    assert np.array_equal(row.position_ids, np.tile(np.arange(8), 2))
