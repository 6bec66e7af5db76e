"""Holding out rows of the training data for validation: `val.size` and `val.fraction`."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from transformers import AutoTokenizer

from prime_rl.configs.sft import SFTConfig
from prime_rl.trainer.process.errors import DataError
from prime_rl.trainer.sft.data.sources import load_rows, prompt_of
from prime_rl.trainer.sft.preflight import preflight
from prime_rl.trainer.sft.resume import fingerprint_of
from prime_rl.utils.pydantic_config import ConfigError, dump_toml, load_config


def asked(question: str, *answers: str) -> dict[str, Any]:
    """A conversation whose first question is `question`."""
    turns = [{"role": "user", "content": question}]
    for answer in answers:
        turns += [{"role": "assistant", "content": answer}, {"role": "user", "content": "And then?"}]
    return {"messages": turns[:-1]}


def rows_of(count: int) -> list[dict[str, Any]]:
    """Each question twice: once more with another answer, blanks and a further turn."""
    return [
        *(asked(f"What is {number}?", "a") for number in range(count)),
        *(asked(f"What  is {number}? ", "b", "c") for number in range(count)),
    ]


def written(file: Path, rows: list[dict[str, Any]]) -> str:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


def config_of(data: dict[str, Any] | str, **val: Any) -> SFTConfig:
    table = data if isinstance(data, dict) else {"name": data}
    return SFTConfig(data={"seq_len": 64, "batch_size": 2, **table}, val=val)


def sides(config: SFTConfig) -> tuple[list[str], list[str]]:
    """The first questions on both sides, in the order of the files."""
    assert config.val is not None
    both = load_rows(config.data), load_rows(config.val.data)
    trained, held_out = ([rows[index] for index in range(len(rows))] for rows in both)
    return [prompt_of(row) for row in trained], [prompt_of(row) for row in held_out]


def test_every_row_is_on_one_side_and_a_question_never_on_both(tmp_path: Path) -> None:
    file = written(tmp_path / "rows.jsonl", rows_of(100))
    for val, expected in (({"size": 20}, 20), ({"size": 21}, 20), ({"fraction": 0.1}, None)):
        trained, held_out = sides(config_of(file, **val))
        assert len(trained) + len(held_out) == 200
        assert not set(trained) & set(held_out)
        if expected is None:
            assert 8 <= len(held_out) <= 36, "a tenth of 100 questions with two rows each"
        else:
            assert len(held_out) == expected


def test_the_side_depends_on_seed_and_content_alone(tmp_path: Path) -> None:
    rows = rows_of(60)
    one, other = written(tmp_path / "one.jsonl", rows), written(tmp_path / "other.jsonl", rows[::-1])
    more = written(tmp_path / "more.jsonl", rows_of(90))
    _, held_out = sides(config_of(one, fraction=0.2))
    assert set(sides(config_of(other, fraction=0.2))[1]) == set(held_out)
    trained_later, held_out_later = sides(config_of(more, fraction=0.2))
    assert set(held_out) <= set(held_out_later), "added rows move no other"
    assert not set(held_out) & set(trained_later)
    assert set(sides(config_of({"name": one, "seed": 1}, fraction=0.2))[1]) != set(held_out)


def test_sources_of_several_formats_share_the_split_and_each_held_out_row_is_read_once(tmp_path: Path) -> None:
    chats = written(tmp_path / "chats.jsonl", rows_of(40))
    pairs = written(
        tmp_path / "pairs.jsonl", [{"instruction": f"What is {number}?", "output": "d"} for number in range(40)]
    )
    sources = [{"name": chats, "weight": 1}, {"name": pairs, "weight": 5}]
    trained, held_out = sides(config_of({"sources": sources}, fraction=0.25))
    assert not set(trained) & set(held_out)
    assert len(held_out) == 3 * len(set(held_out))


def test_preflight_the_written_config_and_a_resume_see_the_same_split(tmp_path: Path, tiny_model_dir: Path) -> None:
    file = written(tmp_path / "rows.jsonl", rows_of(20))
    given = {"model": {"name": str(tiny_model_dir)}, "tokenizer": {"chat_template": "chatml"}}
    config = SFTConfig(**given, data={"name": file, "seq_len": 256, "batch_size": 2}, val={"size": 10})
    dump_toml(config, tmp_path / "sft.toml")
    again = load_config(SFTConfig, [tmp_path / "sft.toml"], {})
    assert again == config
    assert sides(again) == sides(config)

    out = io.StringIO()
    assert preflight(config, Console(file=out, width=120, soft_wrap=True)) == 0
    counts = [line.split()[-1] for line in out.getvalue().splitlines() if line.strip().startswith("rows per epoch")]
    assert counts == ["30", "10"]
    assert "rows held out by val.size = 10" in out.getvalue()

    out = io.StringIO()
    same = SFTConfig(**given, data={"name": file, "seq_len": 256, "batch_size": 2}, val={})
    preflight(same, Console(file=out, width=120, soft_wrap=True))
    assert "warning: [val] names no other rows" in out.getvalue()

    tokenizer = AutoTokenizer.from_pretrained(tiny_model_dir)
    changed = config_of(file, size=12)
    before = fingerprint_of(config.data, tokenizer).differences(fingerprint_of(changed.data, tokenizer))
    assert "data.held_out was 'val.size = 10' and is 'val.size = 12'" in before


@pytest.mark.parametrize(
    ("rows", "val", "fault"),
    [
        ([asked("Same?", "a")] * 8, {"size": 4}, "leaves no row for validation: there are 8 rows with 1 different"),
        (rows_of(4), {"size": 8}, "leaves no row to train on: there are 8 rows with 4 different prompts"),
    ],
)
def test_a_split_without_rows_on_a_side_is_refused(
    tmp_path: Path, rows: list[dict[str, Any]], val: dict[str, Any], fault: str
) -> None:
    with pytest.raises(DataError, match=fault):
        load_rows(config_of(written(tmp_path / "rows.jsonl", rows), **val).data)


@pytest.mark.parametrize(
    ("options", "fault"),
    [
        ("val.size=5 val.fraction=0.1", "size (5) and fraction (0.1) are both set"),
        ("val.size=0", "val.size: should be at least 1"),
        ("val.fraction=1.5", "val.fraction: should be above 0 and below 1"),
        ("val.fraction=0.1 val.data.name=other.jsonl", "val.fraction holds out rows of data, and val.data.name names"),
        ("val.fraction=0.1 data.type=fake", "val.fraction needs a dataset"),
        ("val.size=5 data.streaming", "val.size reads all rows at the start"),
    ],
)
def test_a_split_that_cannot_be_made_is_one_line(options: str, fault: str) -> None:
    words = [f"--{option}" for option in ("data.seq-len=8", *options.split())]
    with pytest.raises(ConfigError) as error:
        load_config(SFTConfig, [], words)
    assert [fault in line for line in str(error.value).splitlines()] == [True], str(error.value)
