"""Long documents and Excel files as training data: `.txt`, `.md`, folders of them, `overlong = "split"`, `.xlsx`."""

from __future__ import annotations

import gzip
import io
import sys
from collections.abc import Iterator
from datetime import date
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from prime_rl.checks.data_files import data_faults, find_parts
from prime_rl.checks.start_dir import StartDir
from prime_rl.configs.data import SFTDataConfig
from prime_rl.configs.sft import SFTConfig
from prime_rl.trainer.process.errors import DataError
from prime_rl.trainer.process.mesh import DataAxis
from prime_rl.trainer.sft.data.conversation import TokenizedSample
from prime_rl.trainer.sft.data.packer import PackedRows
from prime_rl.trainer.sft.data.places import redistribute
from prime_rl.trainer.sft.data.samples import DatasetStream, SampleMaker
from prime_rl.trainer.sft.data.sources import load_rows, setup_entries, stream_rows
from prime_rl.trainer.sft.preflight import preflight
from prime_rl.utils.rows import DOCUMENT_BYTES


@pytest.fixture(scope="module")
def tokenizer(tiny_model_dir: Path) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(tiny_model_dir)


def read(path: Path, **settings: Any) -> list[dict[str, Any]]:
    config = SFTDataConfig(name=str(path), **settings)
    rows = load_rows(config)
    streamed = [dict(row()) for row in stream_rows(config)]
    assert streamed == [dict(rows[index]) for index in range(len(rows))], "loaded and streamed rows are the same"
    return streamed


def test_a_text_file_is_a_document_and_a_folder_one_for_each_file(tmp_path: Path) -> None:
    folder = tmp_path / "corpus"
    (folder / "deep" / "er").mkdir(parents=True)
    (folder / ".git").mkdir()
    (folder / ".git" / "notes.txt").write_text("not data")
    (folder / "a.txt").write_bytes(b"\xef\xbb\xbfOne.\r\n\r\nTwo.\r\n")
    (folder / "b.md").write_text("# Title\n")
    (folder / "empty.txt").write_text(" \n")
    (folder / "deep" / "er" / "c.txt.gz").write_bytes(gzip.compress("Grüße\n".encode()))
    assert read(folder) == [{"text": "One.\n\nTwo.\n"}, {"text": "# Title\n"}, {"text": "Grüße\n"}]
    assert read(folder / "a.txt") == [{"text": "One.\n\nTwo.\n"}]

    (folder / "rows.jsonl").write_text('{"text": "row"}\n')
    assert read(folder) == [{"text": "row"}], "beside rows, a README.md is not data"

    (tmp_path / "bad.txt").write_bytes(b"ab\xff")
    with pytest.raises(DataError, match=r"bad\.txt: not UTF-8 text \(byte 2\)"):
        read(tmp_path / "bad.txt")


@pytest.mark.parametrize("gap", ["\n\n", "\n", " ", ""], ids=["paragraphs", "lines", "words", "nothing"])
def test_a_huge_text_file_is_several_rows_that_lose_nothing(tmp_path: Path, gap: str) -> None:
    text = gap.join(f"Größe{number:06}" for number in range(3 * DOCUMENT_BYTES // 13))
    (tmp_path / "book.txt").write_text(text, newline="")
    pieces = [row["text"] for row in read(tmp_path / "book.txt")]
    assert "".join(pieces) == text
    assert len(pieces) > 2
    assert all(len(piece.encode()) <= DOCUMENT_BYTES for piece in pieces)
    assert not gap or all(piece.endswith(gap) for piece in pieces[:-1])


def targets(samples: Iterator[TokenizedSample] | list[TokenizedSample]) -> list[int]:
    """The trained tokens, in order."""
    return [token for each in samples for token in each.token_ids[1:][each.is_trained[1:]].tolist()]


def test_a_split_document_is_trained_once_token_by_token(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    (tmp_path / "a.txt").write_text("abcdefghij" * 11)
    settings: dict[str, Any] = {"name": str(tmp_path / "a.txt"), "shuffle": False}

    def made(**more: Any) -> Any:
        config = SFTDataConfig(**settings, **more)
        return SampleMaker(config, tokenizer)(setup_entries(config).at(0))

    whole, split = made(seq_len=1000), made(seq_len=16, overlong="split")
    assert (split.kind, split.inputs) == ("split", whole.inputs)
    assert targets(list(split.samples)) == targets([whole.sample])
    assert max(sample.inputs for sample in split.samples) == 16
    joined = np.concatenate([split.samples[0].token_ids, *(each.token_ids[1:] for each in split.samples[1:])])
    assert joined.tolist() == whole.sample.token_ids.tolist()
    assert made(seq_len=whole.inputs, overlong="split").kind == "seen", "what fits is not split"


def test_a_run_continues_in_the_middle_of_a_document_with_any_number_of_ranks(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    for number in range(3):
        (tmp_path / f"{number}.txt").write_text("".join(chr(97 + (number * 7 + at) % 26) for at in range(150)))
    config = SFTDataConfig(name=str(tmp_path), seq_len=16, overlong="split", shuffle=False, batch_size=4)

    def rows_on(axis: DataAxis) -> PackedRows:
        return PackedRows(DatasetStream(config, tokenizer, axis), config, axis)

    unbroken, stopped, again = (rows_on(DataAxis(0, 1)) for _ in range(3))
    expected = [row.input_ids.tolist() for row in islice(unbroken, 20)]
    begun = [row.input_ids.tolist() for row in islice(stopped, 7)]
    again.load_state([stopped.state()])
    assert begun + [row.input_ids.tolist() for row in islice(again, 13)] == expected

    stream = DatasetStream(config, tokenizer, DataAxis(0, 1))
    taken = [next(stream) for _ in range(4)]
    place = {**stream.state(), "data_rank": 0, "data_size": 1, "waiting": {}}
    ranks = [DatasetStream(config, tokenizer, DataAxis(rank, 2)) for rank in range(2)]
    for number, rank in enumerate(ranks):
        rank.restore(redistribute([place], number, 2))
    rest = [next(rank) for _ in range(40) for rank in ranks if rank._pieces or rank.position < 3]
    make, entries = SampleMaker(config, tokenizer), setup_entries(config)
    whole = [piece for entry in range(3) for piece in make(entries.at(entry)).samples]
    used = sorted(each.token_ids.tobytes() for each in (*taken, *rest))
    assert used == sorted(each.token_ids.tobytes() for each in whole), "each piece once"


def test_preflight_says_what_seq_len_loses(tmp_path: Path, tiny_model_dir: Path) -> None:
    (tmp_path / "long.txt").write_text("x" * 199)
    (tmp_path / "short.txt").write_text("y" * 20)
    shown = {}
    for overlong in ("truncate", "split", "drop"):
        config = SFTConfig(
            model={"name": str(tiny_model_dir)},
            data={"name": str(tmp_path), "seq_len": 50, "batch_size": 1, "overlong": overlong},
        )
        out = io.StringIO()
        assert preflight(config, Console(file=out, width=140, soft_wrap=True)) == 0
        lines = [line.strip() for line in out.getvalue().splitlines()]
        lost = next(line.split()[-1] for line in lines if line.startswith("tokens lost to data.seq_len"))
        samples = next(line.split()[-1] for line in lines if line.startswith("samples per epoch"))
        shown[overlong] = samples, lost, any('overlong = "split" trains them' in line for line in lines)
    inputs = 199 + 20
    assert shown == {
        "truncate": ("2", f"{149 / inputs:.2%}", True),
        "split": ("5", "0.00%", False),
        "drop": ("1", f"{199 / inputs:.2%}", False),
    }


def test_an_excel_file_reads_as_its_csv(tmp_path: Path) -> None:
    openpyxl = pytest.importorskip("openpyxl")
    book = openpyxl.Workbook()
    sheet = book.active
    for line in (
        [],
        ["prompt", "response", "n", "share", "day", "sure", None],
        ["Dose?\nAdult", "500 mg; Größe", 5, 0.5, date(2026, 11, 26), True],
        [None, None, None],
        ["-5", "=1+1", 5.0, 1e-7, None, False],
    ):
        sheet.append(line)
    book.create_sheet("notes").append(["not data"])
    book.save(tmp_path / "rows.xlsx")
    table = read(tmp_path / "rows.xlsx")
    assert table == [
        {
            "prompt": "Dose?\nAdult",
            "response": "500 mg; Größe",
            "n": "5",
            "share": "0.5",
            "day": "2026-11-26",
            "sure": "TRUE",
        },
        # Excel has never computed this formula.
        {"prompt": "-5", "response": "", "n": "5", "share": "1e-07", "day": "", "sure": "FALSE"},
    ]
    rows = load_rows(SFTDataConfig(name=str(tmp_path / "rows.xlsx")))
    assert rows.where(1).endswith("rows.xlsx:5"), "the row of the sheet"

    sheet.append(["a", "b", None, None, None, None, None, "stray"])
    book.save(tmp_path / "stray.xlsx")
    with pytest.raises(DataError, match=r"stray\.xlsx:6: found 'stray' in a column that has no name in the header"):
        read(tmp_path / "stray.xlsx")
    (tmp_path / "csv.xlsx").write_text("prompt,response\na,b\n")
    with pytest.raises(DataError, match=r"csv\.xlsx: not an Excel file"):
        read(tmp_path / "csv.xlsx")


def test_without_the_package_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "rows.xlsx").write_bytes(b"PK")
    monkeypatch.setitem(sys.modules, "openpyxl", None)  # as where it is not installed
    advice = "install it with `uv sync --inexact --extra excel`"
    config = SFTConfig(data={"name": str(tmp_path / "rows.xlsx"), "seq_len": 8})
    assert len(find_parts(config.data)) == 1
    assert [advice in fault for fault in data_faults(config.datasets, StartDir())] == [True]
    with pytest.raises(DataError, match=advice):
        load_rows(config.data)
