from __future__ import annotations

import json
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from prime_rl.configs.data import FakeDataConfig, SFTDataConfig
from prime_rl.trainer.process.errors import DataError
from prime_rl.trainer.process.mesh import DataAxis
from prime_rl.trainer.sft.data.packer import PackedRows, setup_rows
from prime_rl.utils.logger import setup_logger


@pytest.fixture
def tokenizer(tiny_model_dir: Path) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(tiny_model_dir)


def write_texts(path: Path, texts: list[str]) -> Path:
    path.write_text("".join(json.dumps({"prompt": ">", "completion": text}) + "\n" for text in texts))
    return path


def texts_of(rows: PackedRows, tokenizer: PreTrainedTokenizerBase, count: int) -> list[str]:
    """Completions of the stream's next samples."""
    samples = islice(iter(lambda: next(rows.stream), None), count)
    return [tokenizer.decode(sample.token_ids[1:-1]) for sample in samples]


def test_samples_are_concatenated_and_the_last_is_cut(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    file = write_texts(tmp_path / "rows.jsonl", ["ab", "cde", "fghi"])
    config = SFTDataConfig(
        name=str(file), shuffle=False, seq_len=5, micro_batch_size=2, batch_size=2, pack_function="cat"
    )
    row = next(setup_rows(config, tokenizer, 128, DataAxis(0, 1)))
    assert tokenizer.decode(row.input_ids) == ">ab>cde>fg"
    assert tokenizer.decode(row.target_ids) == "ab<|im_end|>cde<|im_end|>fgh"
    assert row.position_ids.tolist() == [0, 1, 2, 0, 1, 2, 3, 0, 1, 2]
    assert row.is_trained.all()
    assert row.samples == 3


def test_processes_take_turns_and_every_epoch_is_reshuffled(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    texts = [chr(ord("a") + index) * 3 for index in range(10)]
    config = SFTDataConfig(name=str(write_texts(tmp_path / "rows.jsonl", texts)), seed=5, seq_len=128)
    alone = texts_of(setup_rows(config, tokenizer, 128, DataAxis(0, 1)), tokenizer, 20)
    assert sorted(alone[:10]) == sorted(alone[10:]) == texts
    assert alone[:10] != alone[10:]
    shares = [texts_of(setup_rows(config, tokenizer, 128, DataAxis(rank, 2)), tokenizer, 10) for rank in range(2)]
    assert [text for pair in zip(*shares, strict=True) for text in pair] == alone


def test_a_saved_position_continues_exactly(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    texts = ["x" * length for length in range(1, 12)]
    config = SFTDataConfig(name=str(write_texts(tmp_path / "rows.jsonl", texts)), seq_len=16)
    straight = setup_rows(config, tokenizer, 128, DataAxis(0, 1))
    next(straight)
    state = straight.state()
    resumed = setup_rows(config, tokenizer, 128, DataAxis(0, 1))
    resumed.load_state([state])
    for _ in range(20):
        expected, row = next(straight), next(resumed)
        assert np.array_equal(expected.input_ids, row.input_ids)
        assert np.array_equal(expected.position_ids, row.position_ids)
    assert straight.stream.epoch == resumed.stream.epoch > 1


def test_rows_that_cannot_be_trained_on_are_left_out_and_counted(
    tmp_path: Path,
    tokenizer: PreTrainedTokenizerBase,
    capsys: pytest.CaptureFixture[str],
) -> None:
    setup_logger("warning")
    rows = [
        {"prompt": "long " * 30, "completion": "never reached"},
        {"prompt": ">", "completion": "good"},
    ]
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = SFTDataConfig(name=str(file), shuffle=False, seq_len=20)
    stream = setup_rows(config, tokenizer, 128, DataAxis(0, 1))
    assert texts_of(stream, tokenizer, 3) == ["good"] * 3
    assert capsys.readouterr().out.count("rows.jsonl:1: no trained token within data.seq_len = 20") == 1
    assert stream.stream.counts.untrainable == 3


def test_a_dataset_without_any_usable_row_is_refused(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    file = write_texts(tmp_path / "rows.jsonl", ["abc"])
    config = SFTDataConfig(name=str(file), seq_len=128, loss_mask={"assistant": False})
    rows = setup_rows(config, tokenizer, 128, DataAxis(0, 1))
    # A plain text gets an end token, which would be trained.
    tokenizer.eos_token = None
    with pytest.raises(DataError, match="no row has a trained token"):
        next(rows)


def test_a_data_rank_whose_share_has_no_usable_row_names_it(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    useless = {"prompt": "p" * 30, "completion": "c"}
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in [{"prompt": ">", "completion": "good"}, useless] * 4))
    config = SFTDataConfig(name=str(file), shuffle=False, seq_len=20)
    assert texts_of(setup_rows(config, tokenizer, 128, DataAxis(0, 2)), tokenizer, 1) == ["good"]
    fault = "no row that data rank 1 of 2 reads .* Set data.shuffle = true"
    with pytest.raises(DataError, match=fault):
        next(setup_rows(config, tokenizer, 128, DataAxis(1, 2)))


def test_a_bad_row_is_named_by_its_number(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text('{"prompt": "a", "completion": "b"}\n{"prompt": "a", "completion": 7}\n')
    rows = setup_rows(SFTDataConfig(name=str(file), shuffle=False, seq_len=128), tokenizer, 128, DataAxis(0, 1))
    with pytest.raises(DataError, match=r"rows\.jsonl:2: `prompt` and `completion`"):
        next(rows)


@pytest.mark.parametrize(("length", "input_ids"), [("fixed", "increasing"), ("variable", "random")])
def test_made_up_rows_are_full_trained_and_repeatable(
    length: str, input_ids: str, tokenizer: PreTrainedTokenizerBase
) -> None:
    config = FakeDataConfig(seq_len=16, micro_batch_size=2, batch_size=2, length=length, input_ids=input_ids)
    first, second = (next(setup_rows(config, tokenizer, 50, DataAxis(0, 1))) for _ in range(2))
    assert first.input_ids.shape == (32,)
    assert first.is_trained.all()
    assert first.input_ids.max() < 50
    assert np.array_equal(first.input_ids, second.input_ids)
    assert first.samples == 2 or length == "variable"
