"""Rows of megabytes: only their beginning is tokenized, and what takes too long is named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer

from prime_rl.checks.time_limit import OutOfTime, time_limit
from prime_rl.configs.data import LossMaskConfig, SFTDataConfig
from prime_rl.trainer.process.errors import DataError
from prime_rl.trainer.sft.data.conversation import ConversationTokenizer
from prime_rl.trainer.sft.data.samples import Made, SampleMaker
from prime_rl.trainer.sft.data.sources import setup_entries

ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}{% if a < 0 %}x{% endif %}{% endfor %}{% endfor %}"
LONG = "one two, three " * 40_000


def rows_of(text: str) -> list[dict[str, Any]]:
    chat = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": text}]
    late = [{"role": "user", "content": text}, {"role": "assistant", "content": "yes"}]
    return [{"messages": chat}, {"messages": late}, {"prompt": "hi", "completion": text}, {"text": text}]


def made_from(
    row: dict[str, Any], tmp_path: Path, model: Path, template: str | None = None, max_row_s: float = 100, **data: Any
) -> Made:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(row) + "\n")
    config = SFTDataConfig(name=str(path), batch_size=1, **{"seq_len": 128, **data})
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.chat_template = template or tokenizer.chat_template
    return SampleMaker(config, tokenizer, max_row_s)(setup_entries(config).at(0))


@pytest.mark.parametrize("row", rows_of(LONG), ids=["answer", "question", "completion", "text"])
def test_a_cut_text_has_the_tokens_of_the_whole_one(row: dict[str, Any], tiny_model_dir: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_model_dir)
    whole = ConversationTokenizer(tokenizer, LossMaskConfig())(row)
    cut = ConversationTokenizer(tokenizer, LossMaskConfig(), max_inputs=300)(row)
    assert cut.is_cut
    assert cut.inputs == 301
    np.testing.assert_array_equal(cut.token_ids, whole.token_ids[: len(cut)])
    np.testing.assert_array_equal(cut.is_trained, whole.is_trained[: len(cut)])


def test_a_row_of_megabytes_is_cut_skipped_or_refused_as_any_long_row(tmp_path: Path, tiny_model_dir: Path) -> None:
    row = {"prompt": "hi", "completion": "yes " * (1 << 20)}
    cut = made_from(row, tmp_path, tiny_model_dir, seq_len=64)
    assert (cut.kind, cut.sample.inputs, cut.has_end) == ("truncated", 64, True)
    assert made_from(row, tmp_path, tiny_model_dir, seq_len=64, overlong="drop").kind == "overlong"
    with pytest.raises(DataError, match=r"rows\.jsonl:1: at least 65 tokens, more than data\.seq_len = 64"):
        made_from(row, tmp_path, tiny_model_dir, seq_len=64, overlong="error")


def test_a_row_whose_template_does_not_end_is_named(tmp_path: Path, tiny_model_dir: Path) -> None:
    with pytest.raises(DataError, match=r"rows\.jsonl:1: tokenizing takes more than 1 s: .* loop in the chat template"):
        made_from(rows_of("yes")[0], tmp_path, tiny_model_dir, ENDLESS, max_row_s=1, seq_len=64)


def test_a_limit_inside_another_leaves_it_in_force() -> None:
    def spin() -> None:
        with time_limit(0.2):
            with time_limit(100):
                pass
            while True:
                pass

    with pytest.raises(OutOfTime):
        spin()


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        ('{"messages": ' + "[" * 50_000, "rows.jsonl:1: not valid JSON: lists or objects are nested too deeply"),
        ('{"text": ' + "9" * 5000 + "}", "rows.jsonl:1: not valid JSON: Exceeds the limit"),
        ('{"prompt": "\\ud800", "completion": "x"}', "rows.jsonl:1: a text holds half a character"),
        (
            '{"messages": [{"role": "user", "content": "x"}], "chat_template_kwargs": {"chat_template": "{{ 1 }}"}}',
            "rows.jsonl:1: `chat_template_kwargs` sets chat_template, which rows may not set",
        ),
        ('{"messages": [{"role": ["user"], "content": "x"}]}', "rows.jsonl:1: message 1: unknown role ['user']"),
    ],
)
def test_a_hostile_row_is_one_line(line: str, fault: str, tmp_path: Path, tiny_model_dir: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(line + "\n")
    config = SFTDataConfig(name=str(path), batch_size=1, seq_len=128)
    with pytest.raises(DataError) as error:
        SampleMaker(config, AutoTokenizer.from_pretrained(tiny_model_dir))(setup_entries(config).at(0))
    assert fault in str(error.value)


def test_a_fault_shows_only_the_beginning_of_a_huge_value(tmp_path: Path, tiny_model_dir: Path) -> None:
    with pytest.raises(DataError) as error:
        made_from({"messages": [{"role": "user", "content": {"x": "y" * (1 << 20)}}]}, tmp_path, tiny_model_dir)
    assert len(str(error.value)) < 2200
