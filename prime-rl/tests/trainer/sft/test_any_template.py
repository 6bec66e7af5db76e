"""Whatever the chat template of a model directory does: samples, or one line of what it refuses.

`pytest prime-rl/tests -k test_any_ --hypothesis-profile campaign --timeout 0` tries 10,000 cases. A template without an
end is in `test_huge_rows.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from prime_rl.configs.data import LossMaskConfig
from prime_rl.trainer.process.errors import DataError
from prime_rl.trainer.sft.data.conversation import ConversationTokenizer, UnmaskableSample

CANARY = "canary"
PIECES = (
    "{{ m.role }}",
    "{{ m.content }}",
    "{{ m['content'] | trim }}",
    "{{ messages }}",
    "{{ messages | tojson }}",
    "{{ tools | tojson }}",
    "<|im_start|>",
    "<|im_end|>\n",
    "assistant\n",
    "{% generation %}{{ m.content }}{% endgeneration %}",
    "{% generation %}",
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
    "{{ raise_exception('no such role') }}",
    "{{ raise_exception(messages) }}",
    "{{ 1 // 0 }}",
    "{{ 10 ** 5000 }}",
    "{{ messages[99].x.y }}",
    "{{ messages[0].x.y.z }}",
    "{{ undefined_function() }}",
    "{{ m.content + 1 }}",
    "{{ ().__class__.__base__.__subclasses__() }}",
    "{{ self.__init__.__globals__ }}",
    f"{{{{ cycler.__init__.__globals__.os.system('touch {CANARY}') }}}}",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "{% for i in range(10 ** 9) %}x{% endfor %}",
    "{% include 'x' %}",
    "{% import 'x' as x %}",
    "{% extends 'x' %}",
    "{% set ns = namespace(x=m) %}{{ ns.x.y }}",
    "{{ strftime_now('%Y') }}",
    "{{ strftime_now(1) }}",
    "{{ messages.append(1) }}",
    "{{ m.update({'role': 'user'}) }}",
    "{{ m.pop('role') }}",
    "{% break %}",
    "{{ '\\ud800' }}",
    "{{ 'x' * 100000 }}",
    "{{ loop.previtem.role }}",
    "{%",
    "{{",
    "}}",
    "{#",
    "$(id) `id` ~ ${HOME}",
)
TEMPLATES = st.one_of(
    st.lists(st.one_of(st.sampled_from(PIECES), st.text(max_size=3)), max_size=5).map(
        lambda pieces: "{% for m in messages %}" + "".join(pieces) + "{% endfor %}"
    ),
    st.lists(st.one_of(st.sampled_from(PIECES), st.text(max_size=5)), max_size=5).map("".join),
)
CONVERSATIONS: list[dict[str, Any]] = [
    {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]},
    {
        "messages": [
            {"role": "system", "content": "be"},
            {"role": "user", "content": ""},
            {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": {"x": 1}}}]},
            {"role": "tool", "content": "1"},
            {"role": "assistant", "content": "a"},
        ],
        "tools": [{"type": "function", "function": {"name": "f", "description": "d", "parameters": {}}}],
    },
]
MASKS = [LossMaskConfig(), LossMaskConfig(user=True, system=True, tool=True)]


@pytest.fixture(scope="module")
def tokenizer(tiny_model_dir: Path) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(tiny_model_dir)


def test_any_template_gives_samples_or_a_line(
    tokenizer: PreTrainedTokenizerBase, tmp_path: Path, limited_time: Callable[[], AbstractContextManager[None]]
) -> None:
    @given(TEMPLATES, st.sampled_from(CONVERSATIONS), st.sampled_from(MASKS))
    def renders(template: str, row: dict[str, Any], mask: LossMaskConfig) -> None:
        tokenizer.chat_template = template
        fault = ""
        with limited_time():
            try:
                ConversationTokenizer(tokenizer, mask, max_inputs=64)(row)
            except UnmaskableSample:
                pass
            except DataError as error:
                fault = str(error) or "no message"
        assert fault.isprintable()
        assert len(fault) < 2200

    renders()
    assert not Path(CANARY).exists()
