"""Masks of TRL, axolotl and LLaMA-Factory for the formats that they read, which benchmarks/sft/peer_masks.py wrote.

Where ours differ, `docs/sft.md` says how.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from prime_rl.configs.data import LossMaskConfig
from prime_rl.trainer.sft.data.conversation import ConversationTokenizer

MODEL = Path(__file__).parents[4] / "examples" / "reverse_text" / "model"
CASES: list[dict[str, Any]] = json.loads(Path(__file__).with_name("peer_masks.json").read_text(encoding="utf-8"))
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' }}{% if message.role == 'assistant' %}"
    "{% generation %}{{ message.content + '<|im_end|>' }}{% endgeneration %}{{ '\n' }}{% else %}"
    "{{ message.content + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

pytestmark = pytest.mark.skipif(not MODEL.is_dir(), reason="the examples are not part of an installed prime-rl")


@pytest.fixture(params=["marked", "plain"])
def tokenizer(request: pytest.FixtureRequest) -> PreTrainedTokenizerBase:
    """With a template that marks what is generated, and with one that does not."""
    made = AutoTokenizer.from_pretrained(MODEL)
    made.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"], "eos_token": "<|im_end|>"})
    marks = ("{% generation %}", "{% endgeneration %}") if request.param == "plain" else ()
    made.chat_template = TEMPLATE
    for mark in marks:
        made.chat_template = made.chat_template.replace(mark, "")
    return made


def expected_of(case: dict[str, Any], tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], list[int]]:
    """Tokens and mask of the peer, without what we do differently on purpose."""
    ids, trained = case["ids"], list(case["trained"])
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    trains_line_ends = case["peer"] == "llamafactory" or (case["peer"], case["case"][:10]) == ("trl", "pair: mess")
    if trains_line_ends:
        # The line end that the template writes behind an answer's end token. A model stops before it.
        trained = [flag and not (at and ids[at - 1] == end) for at, flag in enumerate(trained)]
    return ids, [int(flag) for flag in trained]


def test_the_tokens_and_masks_are_those_of_the_peers(tokenizer: PreTrainedTokenizerBase) -> None:
    make = ConversationTokenizer(tokenizer, LossMaskConfig())
    compared = 0
    for case in CASES:
        if (case["peer"], case["case"]) in DIFFERENT:
            continue
        sample = make(case["row"])
        ours = sample.token_ids.tolist(), [int(flag) for flag in sample.is_trained]
        assert ours == expected_of(case, tokenizer), (case["peer"], case["case"])
        compared += 1
    assert compared == len(CASES) - len(DIFFERENT)
    assert {case["peer"] for case in CASES} == {"trl", "axolotl", "llamafactory"}


DIFFERENT = (
    # LLaMA-Factory joins instruction and input with one line end, Alpaca's own prompt and ours with an empty line.
    ("llamafactory", "alpaca: with an input"),
    # A trained user message: axolotl trains its content, we train its header and the next one too, so that a model that
    # plays the user also learns to begin and to end.
    ("axolotl", "turns that say so"),
)


def test_the_differences_are_the_ones_that_the_page_names(tokenizer: PreTrainedTokenizerBase) -> None:
    make = ConversationTokenizer(tokenizer, LossMaskConfig())
    (alpaca, turns) = (next(each for each in CASES if (each["peer"], each["case"]) == name) for name in DIFFERENT)
    ours, theirs = make(alpaca["row"]), tokenizer.decode(alpaca["ids"])
    assert tokenizer.decode(ours.token_ids) == theirs.replace("translate\nfever", "translate\n\nfever")
    sample = make(turns["row"])
    assert sample.token_ids.tolist() == turns["ids"]
    assert all(ours or not theirs for ours, theirs in zip(sample.is_trained, turns["trained"], strict=True))
