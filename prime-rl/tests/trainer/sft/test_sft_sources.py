from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from prime_rl.configs.data import SFTDataConfig
from prime_rl.trainer.process.errors import DataError
from prime_rl.trainer.sft.data.sources import interleave, load_rows

ROWS = [{"prompt": f"question {index}", "completion": "ja"} for index in range(3)]


def rows_of(name: Path, **fields) -> list[Mapping]:
    return list(load_rows(SFTDataConfig(name=str(name), **fields)))


def write_jsonl(path: Path, rows: list[dict]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def write_arrow(path: Path, opener) -> Path:
    table = pyarrow.Table.from_pylist(ROWS)
    with opener(str(path), table.schema) as writer:
        writer.write_table(table)
    return path


def test_every_kind_of_file_gives_the_same_rows(tmp_path: Path) -> None:
    array = tmp_path / "array.json"
    array.write_text(json.dumps(ROWS))
    parquet = tmp_path / "rows.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), parquet)
    files = [
        write_jsonl(tmp_path / "rows.jsonl", ROWS),
        write_jsonl(tmp_path / "lines.json", ROWS),
        array,
        parquet,
        write_arrow(tmp_path / "stream.arrow", pyarrow.ipc.new_stream),
        write_arrow(tmp_path / "footer.arrow", pyarrow.ipc.new_file),
    ]
    assert [rows_of(file) for file in files] == [ROWS] * len(files)


def test_a_saved_dataset_is_read_split_by_split(tmp_path: Path) -> None:
    import datasets

    part = datasets.Dataset.from_list(ROWS)
    part.save_to_disk(str(tmp_path / "one"))
    datasets.DatasetDict({"train": part, "test": part.select([2])}).save_to_disk(str(tmp_path / "two"))
    assert rows_of(tmp_path / "one") == ROWS
    assert rows_of(tmp_path / "two", splits=["test"]) == ROWS[2:]
    with pytest.raises(DataError, match="no split dev; it has train, test"):
        rows_of(tmp_path / "two", splits=["dev"])


def test_a_directory_is_read_by_the_names_of_its_files(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "train-00000.jsonl", ROWS[:2])
    write_jsonl(tmp_path / "train-00001.jsonl", ROWS[2:])
    write_jsonl(tmp_path / "test.jsonl", ROWS[:1])
    write_jsonl(tmp_path / "hard" / "train.jsonl", ROWS[1:2])
    assert rows_of(tmp_path) == ROWS
    assert rows_of(tmp_path, splits=["test"]) == ROWS[:1]
    assert rows_of(tmp_path, subsets=["hard"]) == ROWS[1:2]
    assert rows_of(tmp_path, splits=["test", "train"], stopping_strategy="first_exhausted") == [ROWS[0], ROWS[0]]


@pytest.mark.parametrize("stopping_strategy", ["first_exhausted", "all_exhausted"])
@pytest.mark.parametrize("probabilities", [None, [0.5, 0.2, 0.3]])
def test_interleaving_equals_that_of_datasets(stopping_strategy: str, probabilities: list[float] | None) -> None:
    import datasets

    lengths = [3, 700, 90]
    names = [[f"{part}/{row}" for row in range(length)] for part, length in enumerate(lengths)]
    parts = [datasets.Dataset.from_dict({"at": of_part}) for of_part in names]
    theirs = datasets.interleave_datasets(parts, probabilities, seed=0, stopping_strategy=stopping_strategy)
    ours = [names[part][row] for part, row in interleave(lengths, probabilities, stopping_strategy)]
    assert ours == theirs["at"]


def test_a_line_that_is_not_json_is_named_with_its_file_and_line(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text('{"a": 1}\n\n{"a": 2,}\n')
    with pytest.raises(DataError, match=r"rows\.jsonl:3: not valid JSON"):
        rows_of(file)


def test_a_line_may_hold_unicode_line_separators(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps({"text": "x\u2028y\x85z"}, ensure_ascii=False), encoding="utf-8")
    assert rows_of(file) == [{"text": "x\u2028y\x85z"}]


@pytest.mark.parametrize("name", ["nowhere.jsonl", "./nowhere", "/no/where"])
def test_a_path_that_does_not_exist_is_not_looked_up_on_the_hub(name: str) -> None:
    with pytest.raises(DataError, match="no such file or directory"):
        load_rows(SFTDataConfig(name=name))


def test_files_that_are_not_what_they_are_called_are_named(tmp_path: Path) -> None:
    for name in ("rows.parquet", "rows.arrow"):
        (tmp_path / name).write_text("plain text")
        with pytest.raises(DataError, match=name):
            rows_of(tmp_path / name)
    (tmp_path / "rows.xls").touch()
    with pytest.raises(DataError, match="unknown file type"):
        rows_of(tmp_path / "rows.xls")


def test_an_empty_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="has no rows"):
        rows_of(write_jsonl(tmp_path / "rows.jsonl", []))


def test_a_split_of_a_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="is a single file, so it has no subset or split test"):
        rows_of(write_jsonl(tmp_path / "rows.jsonl", ROWS), splits=["test"])
