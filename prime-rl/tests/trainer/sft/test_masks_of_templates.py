"""Loss masks of chat templates, compared with hand-written conversations that mark what the assistant generates.

The tokenizer makes one token per character and per special token, so the expected masks are exact to the token.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from prime_rl.configs.data import LossMaskConfig
from prime_rl.trainer.sft.data.conversation import ConversationTokenizer

SPECIAL = ["<s>", "</s>", "<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>", "<start_of_turn>", "<end_of_turn>"]

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}"
    "<tool>{{ c.function.name }} {{ c.function.arguments | tojson }}</tool>{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CHATML_MARKED = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
    "<|im_end|>{% endgeneration %}{% else %}{{ m.content }}<|im_end|>{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA = (
    "{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ 'ipython' if m.role == 'tool' else m.role }}"
    "<|end_header_id|>\n\n{{ m.content | trim }}"
    "{% if m.tool_calls %}{{ m.tool_calls[0].function | tojson }}{% endif %}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
MISTRAL = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
    "{% elif m.role == 'assistant' %} {{ m.content }}</s>{% else %}{{ raise_exception('only user and assistant') }}"
    "{% endif %}{% endfor %}"
)
GEMMA = (
    "{{ bos_token }}{% if messages[0].role == 'assistant' %}{{ raise_exception('the user begins') }}{% endif %}"
    "{% for m in messages %}<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n"
    "{{ m.content | trim }}<end_of_turn>\n{% endfor %}"
    "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
QWEN3 = """\
{%- set at = namespace(last=0) -%}
{%- for m in messages %}{% if m.role == 'user' %}{% set at.last = loop.index0 %}{% endif %}{% endfor -%}
{%- for m in messages -%}
{%- if m.role == 'assistant' -%}
{%- set content = m.content.split('</think>')[-1].lstrip('\\n') -%}
{%- set thought = m.reasoning_content or '' -%}
{%- if '</think>' in m.content -%}
{%- set thought = m.content.split('</think>')[0].split('<think>')[-1].strip('\\n') -%}
{%- endif -%}
{{- '<|im_start|>assistant\\n' -}}
{%- if loop.index0 > at.last and (loop.last or thought) -%}
{{- '<think>\\n' + thought + '\\n</think>\\n\\n' -}}
{%- endif -%}
{{- content -}}
{%- for c in m.tool_calls or [] -%}
{{- '\\n' if content else '' }}{{ '<tool_call>\\n' + c.function | tojson + '\\n</tool_call>' -}}
{%- endfor -%}
{{- '<|im_end|>\\n' -}}
{%- elif m.role == 'tool' -%}
{%- if messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user' }}{% endif -%}
{{- '\\n<tool_response>\\n' + m.content + '\\n</tool_response>' -}}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\\n' }}{% endif -%}
{%- else -%}
{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif -%}
"""

SYSTEM = {"role": "system", "content": "be brief"}
USER = {"role": "user", "content": "why?"}
ANSWER = {"role": "assistant", "content": "so."}
CALL = {"role": "assistant", "tool_calls": [{"function": {"name": "add", "arguments": {"x": 3}}}]}
THOUGHT_CALL = {**CALL, "reasoning_content": "add it"}
FUNCTION = json.dumps(CALL["tool_calls"][0]["function"])
RESULTS = [{"role": "tool", "content": "3"}, {"role": "tool", "content": "4"}]
BEGIN = "<|im_start|>"


@dataclass(frozen=True)
class Case:
    """A conversation rendered with a template. What the assistant generates is between « and »."""

    name: str
    template: str
    messages: list[dict[str, Any]]
    truth: str
    loss_mask: dict[str, bool] = field(default_factory=dict)


CASES = [
    Case(
        "chatml, two turns",
        CHATML,
        [SYSTEM, USER, ANSWER, USER, ANSWER],
        f"{BEGIN}system\nbe brief<|im_end|>\n"
        + 2 * f"{BEGIN}user\nwhy?<|im_end|>\n{BEGIN}assistant\n«so.<|im_end|>»\n",
    ),
    Case(
        "chatml, tools with two results",
        CHATML,
        [USER, CALL, *RESULTS, ANSWER, USER],
        f'{BEGIN}user\nwhy?<|im_end|>\n{BEGIN}assistant\n«<tool>add {{"x": 3}}</tool><|im_end|>»\n'
        f"{BEGIN}tool\n3<|im_end|>\n{BEGIN}tool\n4<|im_end|>\n{BEGIN}assistant\n«so.<|im_end|>»\n"
        f"{BEGIN}user\nwhy?<|im_end|>\n",
    ),
    Case(
        "chatml, the assistant begins and speaks twice",
        CHATML,
        [ANSWER, ANSWER, USER, ANSWER],
        2 * f"{BEGIN}assistant\n«so.<|im_end|>»\n"
        + f"{BEGIN}user\nwhy?<|im_end|>\n{BEGIN}assistant\n«so.<|im_end|>»\n",
    ),
    Case(
        "chatml, a header and an end in what the user says",
        CHATML,
        [{"role": "user", "content": f"{BEGIN}assistant\nno<|im_end|>\n"}, ANSWER, USER, ANSWER],
        f"{BEGIN}user\n{BEGIN}assistant\nno<|im_end|>\n<|im_end|>\n{BEGIN}assistant\n«so.<|im_end|>»\n"
        f"{BEGIN}user\nwhy?<|im_end|>\n{BEGIN}assistant\n«so.<|im_end|>»\n",
    ),
    Case(
        "chatml, tool results are trained too",
        CHATML,
        [USER, CALL, *RESULTS, ANSWER],
        f'{BEGIN}user\nwhy?<|im_end|>\n{BEGIN}assistant\n«<tool>add {{"x": 3}}</tool><|im_end|>»'
        f"«\n{BEGIN}tool\n3<|im_end|>\n{BEGIN}tool\n4<|im_end|>\n{BEGIN}assistant\n»«so.<|im_end|>»\n",
        loss_mask={"tool": True},
    ),
    Case(
        "chatml, only the system is trained",
        CHATML,
        [SYSTEM, USER, ANSWER],
        f"«{BEGIN}system\nbe brief<|im_end|>\n»{BEGIN}user\nwhy?<|im_end|>\n{BEGIN}assistant\nso.<|im_end|>\n",
        loss_mask={"system": True, "assistant": False},
    ),
    Case(
        "chatml with a generation mark in a comment",
        "{# {% generation %} is left out #}" + CHATML,
        [USER, ANSWER],
        f"{BEGIN}user\nwhy?<|im_end|>\n{BEGIN}assistant\n«so.<|im_end|>»\n",
    ),
    Case(
        "chatml with generation marks",
        CHATML_MARKED,
        [USER, ANSWER, USER, ANSWER],
        2 * f"{BEGIN}user\nwhy?<|im_end|>\n{BEGIN}assistant\n«so.<|im_end|>»\n",
    ),
    Case(
        "llama 3, tools",
        LLAMA,
        [SYSTEM, USER, CALL, *RESULTS, ANSWER, USER, ANSWER],
        "<s><|start_header_id|>system<|end_header_id|>\n\nbe brief<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\nwhy?<|eot_id|>"
        f"<|start_header_id|>assistant<|end_header_id|>\n\n«{FUNCTION}<|eot_id|>»"
        "<|start_header_id|>ipython<|end_header_id|>\n\n3<|eot_id|>"
        "<|start_header_id|>ipython<|end_header_id|>\n\n4<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n«so.<|eot_id|>»"
        "<|start_header_id|>user<|end_header_id|>\n\nwhy?<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n«so.<|eot_id|>»",
    ),
    Case(
        "mistral, two turns",
        MISTRAL,
        [USER, ANSWER, USER, ANSWER],
        "<s>" + 2 * "[INST] why? [/INST]« so.</s>»",
    ),
    Case(
        "gemma, two turns",
        GEMMA,
        [USER, ANSWER, USER, ANSWER],
        "<s>" + 2 * "<start_of_turn>user\nwhy?<end_of_turn>\n<start_of_turn>model\n«so.<end_of_turn>»\n",
    ),
    Case(
        "qwen 3, earlier thoughts are dropped",
        QWEN3,
        [
            USER,
            {**ANSWER, "reasoning_content": "hm"},
            USER,
            {"role": "assistant", "content": "<think>\nwell\n</think>\n\nso."},
        ],
        f"{BEGIN}user\nwhy?<|im_end|>\n{BEGIN}assistant\n«so.<|im_end|>»\n"
        f"{BEGIN}user\nwhy?<|im_end|>\n{BEGIN}assistant\n«<think>\nwell\n</think>\n\nso.<|im_end|>»\n",
    ),
    Case(
        "qwen 3, tools behind the last question keep their thoughts",
        QWEN3,
        [USER, THOUGHT_CALL, *RESULTS, ANSWER],
        f"{BEGIN}user\nwhy?<|im_end|>\n{BEGIN}assistant\n"
        f"«<think>\nadd it\n</think>\n\n<tool_call>\n{FUNCTION}\n</tool_call><|im_end|>»\n"
        f"{BEGIN}user\n<tool_response>\n3\n</tool_response>\n<tool_response>\n4\n</tool_response><|im_end|>\n"
        f"{BEGIN}assistant\n«<think>\n\n</think>\n\nso.<|im_end|>»\n",
    ),
    Case(
        "qwen 3, tools before the last question lose them",
        QWEN3,
        [USER, THOUGHT_CALL, *RESULTS, ANSWER, USER, ANSWER],
        f"{BEGIN}user\nwhy?<|im_end|>\n{BEGIN}assistant\n«<tool_call>\n{FUNCTION}\n</tool_call><|im_end|>»\n"
        f"{BEGIN}user\n<tool_response>\n3\n</tool_response>\n<tool_response>\n4\n</tool_response><|im_end|>\n"
        f"{BEGIN}assistant\n«so.<|im_end|>»\n{BEGIN}user\nwhy?<|im_end|>\n"
        f"{BEGIN}assistant\n«<think>\n\n</think>\n\nso.<|im_end|>»\n",
    ),
]


@pytest.fixture
def tokenizer(tiny_model_dir: Path) -> PreTrainedTokenizerBase:
    tokenizer = AutoTokenizer.from_pretrained(tiny_model_dir)
    tokenizer.add_special_tokens({"bos_token": "<s>", "additional_special_tokens": [BEGIN, *SPECIAL]})
    return tokenizer


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_mask_is_what_the_assistant_generates(case: Case, tokenizer: PreTrainedTokenizerBase) -> None:
    tokenizer.chat_template = case.template
    sample = ConversationTokenizer(tokenizer, LossMaskConfig(**case.loss_mask))({"messages": case.messages})
    expected_ids, expected_mask, is_generated = [], [], False
    for piece in case.truth.replace("«", "\0«\0").replace("»", "\0»\0").split("\0"):
        if piece in ("«", "»"):
            is_generated = piece == "«"
            continue
        ids = tokenizer(piece, add_special_tokens=False)["input_ids"]
        expected_ids += ids
        expected_mask += [is_generated] * len(ids)
    assert tokenizer.decode(sample.token_ids) == tokenizer.decode(expected_ids)
    assert sample.token_ids.tolist() == expected_ids
    assert sample.is_trained.tolist() == expected_mask


def test_marks_agree_with_the_mask_that_transformers_makes_of_them(tokenizer: PreTrainedTokenizerBase) -> None:
    tokenizer.chat_template = CHATML_MARKED
    messages = [SYSTEM, USER, ANSWER, USER, ANSWER]
    theirs = tokenizer.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
    ours = ConversationTokenizer(tokenizer, LossMaskConfig())({"messages": messages})
    assert ours.token_ids.tolist() == theirs["input_ids"]
    assert ours.is_trained.tolist() == [bool(flag) for flag in theirs["assistant_masks"]]


def test_merged_tokens_belong_to_the_message_they_start_in() -> None:
    """A byte-level BPE, whose tokens may be several characters, start with a space, or be part of a character."""
    tokenizer = _byte_pair_tokenizer()
    row = {"messages": [{"role": "user", "content": "où ça ?"}, {"role": "assistant", "content": "là-bas 🙂 et là"}]}
    sample = ConversationTokenizer(tokenizer, LossMaskConfig())(row)
    assert tokenizer.decode(sample.token_ids[sample.is_trained]) == "là-bas 🙂 et là<|im_end|>"
    first = int(sample.is_trained.argmax())
    assert tokenizer.decode(sample.token_ids[:first]).endswith("<|im_start|>assistant\n")


def _byte_pair_tokenizer() -> PreTrainedTokenizerBase:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    core.train_from_iterator(["où ça ? là-bas et là, assistant user"] * 50, trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|im_end|>")
    tokenizer.add_special_tokens({"additional_special_tokens": [BEGIN]})
    tokenizer.chat_template = CHATML
    return tokenizer
