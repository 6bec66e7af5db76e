"""Several datasets with weights: the shares, the order, and resuming in it."""

from __future__ import annotations

import json
from collections import Counter
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from prime_rl.configs.data import SFTDataConfig
from prime_rl.configs.sft import SFTConfig
from prime_rl.trainer.process.errors import DataError
from prime_rl.trainer.process.mesh import DataAxis
from prime_rl.trainer.sft.data.packer import PackedRows, setup_rows
from prime_rl.trainer.sft.data.sources import load_rows, stream_rows
from prime_rl.trainer.sft.resume import fingerprint_of


@pytest.fixture
def tokenizer(tiny_model_dir: Path) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(tiny_model_dir)


@pytest.fixture
def sources(tmp_path: Path) -> list[dict[str, Any]]:
    """Three sources of three formats, with 60, 20 and 5 rows; the letter of a text tells its source."""
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": f"a{row}"}) + "\n" for row in range(60)))
    (tmp_path / "b.csv").write_text("body\n" + "".join(f"b{row}\n" for row in range(20)))
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "test.jsonl").write_text("".join(json.dumps({"text": f"c{row}"}) + "\n" for row in range(5)))
    return [
        {"name": str(tmp_path / "a.jsonl"), "weight": 5},
        {"name": str(tmp_path / "b.csv"), "weight": 3, "columns": {"text": "body"}},
        {"name": str(tmp_path / "c"), "weight": 2, "split": "test"},
    ]


def texts(config: SFTDataConfig) -> list[str]:
    return [row["text"] for row in load_rows(config)]


def test_rows_come_in_shares_of_the_weights(sources: list[dict[str, Any]]) -> None:
    config = SFTDataConfig(sources=sources)
    drawn = texts(config)
    assert set(drawn) == {
        *(f"a{row}" for row in range(60)),
        *(f"b{row}" for row in range(20)),
        *(f"c{row}" for row in range(5)),
    }
    shares = {letter: count / len(drawn) for letter, count in Counter(text[0] for text in drawn).items()}
    assert shares == pytest.approx({"a": 0.5, "b": 0.3, "c": 0.2}, abs=0.12)
    assert texts(config) == drawn == [reading()["text"] for reading in stream_rows(config)]


def test_only_the_ratio_of_weights_counts(sources: list[dict[str, Any]]) -> None:
    tenth = [{**source, "weight": source["weight"] / 10} for source in sources]
    assert texts(SFTDataConfig(sources=sources)) == texts(SFTDataConfig(sources=tenth))


def test_one_source_is_the_dataset_itself(sources: list[dict[str, Any]]) -> None:
    assert texts(SFTDataConfig(sources=sources[:1])) == texts(SFTDataConfig(name=sources[0]["name"]))


def test_sources_without_columns_take_those_of_data(sources: list[dict[str, Any]]) -> None:
    first, second, _ = sources
    second.pop("columns")
    config = SFTDataConfig(sources=[{**first, "columns": {}}, second], columns={"text": "body"})
    assert {text[0] for text in texts(config)} == {"a", "b"}


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("pack_function", ["cat", "best_fit"])
@pytest.mark.parametrize("steps", [0, 3, 40, 150])
def test_a_resumed_mixture_continues_with_the_next_row(
    steps: int, pack_function: str, streaming: bool, sources: list[dict[str, Any]], tokenizer: PreTrainedTokenizerBase
) -> None:
    config = SFTDataConfig(
        sources=sources, streaming=streaming, shuffle_buffer=16, pack_function=pack_function, seq_len=12
    )

    def opened() -> PackedRows:
        return setup_rows(config, tokenizer, 128, DataAxis(0, 1))

    straight = opened()
    for _ in islice(straight, steps):
        pass
    state = straight.state()
    resumed = opened()
    resumed.load_state([state])
    for _ in range(200):
        assert next(straight).input_ids.tolist() == next(resumed).input_ids.tolist()


def test_a_resume_names_a_changed_mixture_and_no_moved_file(
    sources: list[dict[str, Any]], tmp_path: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    before = fingerprint_of(SFTDataConfig(sources=sources), tokenizer)
    moved = Path(sources[0]["name"]).rename(tmp_path / "moved.jsonl")
    sources[0]["name"] = str(moved)
    assert before.differences(fingerprint_of(SFTDataConfig(sources=sources), tokenizer)) == []
    sources[0]["weight"] = 1
    (difference,) = before.differences(fingerprint_of(SFTDataConfig(sources=sources), tokenizer))
    assert difference.startswith("data.sources was ")


def test_a_source_without_the_columns_is_named(sources: list[dict[str, Any]]) -> None:
    sources[1]["columns"] = {"text": "boddy"}
    for rows in (load_rows, lambda config: list(stream_rows(config))):
        with pytest.raises(
            DataError, match=r"data\.sources\[1\]\.name = .*b\.csv .*no column 'boddy'.*did you mean 'body'"
        ):
            rows(SFTDataConfig(sources=sources))


@pytest.mark.parametrize("weight", [0, -1, float("inf"), float("nan")])
def test_weights_are_positive_numbers(weight: float) -> None:
    with pytest.raises(ValidationError, match="weight"):
        SFTDataConfig(sources=[{"name": "x", "weight": weight}])


@pytest.mark.parametrize("key", ["name", "splits", "subsets", "probabilities"])
def test_sources_replace_the_other_ways_to_name_data(key: str) -> None:
    value = "x" if key == "name" else [1.0] if key == "probabilities" else ["x"]
    with pytest.raises(ValidationError, match=f"sources and {key} are both set"):
        SFTDataConfig(sources=[{"name": "y"}], **{key: value})


def test_validation_data_may_be_one_dataset_of_a_mixture() -> None:
    data = {"sources": [{"name": "x"}], "columns": {"prompt": "q", "response": "a"}}
    config = SFTConfig(data=data, val={"data": {"name": "y"}}, max_steps=1)
    assert config.val is not None
    assert (config.val.data.name, config.val.data.sources) == ("y", None)
    assert config.val.data.columns.prompt == "q"
    mixed = SFTConfig(data={"name": "x"}, val={"data": {"sources": [{"name": "y"}]}}, max_steps=1)
    assert mixed.val is not None
    assert mixed.val.data.label == "val.data.sources = y"
