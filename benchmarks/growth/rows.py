"""Data files of many short conversations, for the costs of reading them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

AT_ONCE = 100_000
PARQUET_GROUP = 1000
"""Rows of a row group, as `datasets` writes them for long rows."""


def conversations(count: int) -> Iterator[list[dict[str, str]]]:
    for number in range(count):
        yield [
            {"role": "user", "content": f"What is {number} plus {number % 97}?"},
            {"role": "assistant", "content": str(number + number % 97)},
        ]


def write_jsonl(count: int, file: Path) -> None:
    with file.open("w") as lines:
        lines.writelines(json.dumps({"messages": messages}) + "\n" for messages in conversations(count))


def write_csv(count: int, file: Path) -> None:
    with file.open("w") as lines:
        lines.write("prompt,completion\n")
        lines.writelines(f"What is {number} plus {number % 97}?,{number + number % 97}\n" for number in range(count))


def write_parquet(count: int, file: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    every = conversations(count)
    schema = pyarrow.schema(
        [("messages", pyarrow.list_(pyarrow.struct([("role", pyarrow.string()), ("content", pyarrow.string())])))]
    )
    with pyarrow.parquet.ParquetWriter(file, schema) as writer:
        for start in range(0, count, AT_ONCE):
            some = [next(every) for _ in range(min(AT_ONCE, count - start))]
            writer.write_table(pyarrow.table({"messages": some}, schema), row_group_size=PARQUET_GROUP)


WRITERS = {"jsonl": write_jsonl, "csv": write_csv, "parquet": write_parquet}
