from __future__ import annotations

from pathlib import Path

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from prime_rl.configs.data import FakeDataConfig, SFTDataConfig
from prime_rl.trainer.sft.resume import DataFingerprint, fingerprint_of


@pytest.fixture
def tokenizer(tiny_model_dir: Path) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(tiny_model_dir)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "a", "completion": "b"}\n')
    return path


def test_the_same_data_elsewhere_has_the_same_fingerprint(
    file: Path, tmp_path: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    before = fingerprint_of(SFTDataConfig(name=str(file)), tokenizer)
    (tmp_path / "moved").mkdir()
    moved = file.rename(tmp_path / "moved" / file.name)
    after = fingerprint_of(SFTDataConfig(name=str(moved), batch_size=64), tokenizer)
    assert after == before == DataFingerprint.from_dict(before.as_dict())
    assert before.differences(after) == []


def test_each_thing_that_changes_the_rows_is_named(file: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    before = fingerprint_of(SFTDataConfig(name=str(file), seq_len=32), tokenizer)
    file.write_text('{"prompt": "a", "completion": "c"}\n')
    tokenizer.chat_template += "!"
    tokenizer.add_tokens(["<new>"])
    changed = SFTDataConfig(name=str(file), seq_len=64, loss_mask={"user": True})
    changed.hold_pairs()
    lines = before.differences(fingerprint_of(changed, tokenizer))
    assert [line.split(" (")[0] for line in lines] == [
        "the contents of the data changed",
        "the tokenizer changed",
        "the chat template changed",
        "data.loss_mask.user was False and is True",
        "loss.type trained on samples and now trains on pairs",
        "data.seq_len was 32 and is 64",
    ]


def test_a_large_file_is_judged_by_size_and_samples(file: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    config = SFTDataConfig(name=str(file))
    before = fingerprint_of(config, tokenizer, whole_bytes=8)
    assert before == fingerprint_of(config, tokenizer, whole_bytes=8)
    file.write_text(file.read_text() + "\n")
    assert before.contents != fingerprint_of(config, tokenizer, whole_bytes=8).contents


def test_made_up_data_is_known_by_its_settings(tokenizer: PreTrainedTokenizerBase) -> None:
    before = fingerprint_of(FakeDataConfig(), tokenizer)
    assert before.differences(fingerprint_of(FakeDataConfig(length="variable"), tokenizer)) == [
        "data.length was 'fixed' and is 'variable'"
    ]
