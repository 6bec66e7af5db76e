from __future__ import annotations

from pathlib import Path

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from prime_rl.checks.data_files import Part
from prime_rl.configs.data import LossMaskConfig, SFTDataConfig
from prime_rl.trainer.process.errors import DataError
from prime_rl.trainer.sft.data.conversation import ConversationTokenizer, UnmaskableSample
from prime_rl.trainer.sft.data.messages import check_columns
from prime_rl.utils.rows import without_fills

SYSTEM = {"role": "system", "content": "be brief"}
USER = {"role": "user", "content": "hi"}
ASSISTANT = {"role": "assistant", "content": "yo"}


@pytest.fixture
def tokenizer(tiny_model_dir: Path) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(tiny_model_dir)


def trained_text(tokenizer: PreTrainedTokenizerBase, row: dict, **loss_mask: bool) -> str:
    """The text of the trained tokens."""
    sample = ConversationTokenizer(tokenizer, LossMaskConfig(**loss_mask))(row)
    return tokenizer.decode(sample.token_ids[sample.is_trained])


def whole_text(tokenizer: PreTrainedTokenizerBase, row: dict) -> str:
    return tokenizer.decode(ConversationTokenizer(tokenizer, LossMaskConfig())(row).token_ids)


def test_the_answer_is_trained_and_its_header_is_not(tokenizer: PreTrainedTokenizerBase) -> None:
    row = {"prompt": [SYSTEM, USER], "completion": [ASSISTANT]}
    assert whole_text(tokenizer, row).endswith("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nyo<|im_end|>\n")
    assert trained_text(tokenizer, row) == "yo<|im_end|>"


def test_messages_and_prompt_with_completion_are_the_same_text(tokenizer: PreTrainedTokenizerBase) -> None:
    messages = [USER, ASSISTANT, USER, ASSISTANT]
    by_parts = {"prompt": messages[:3], "completion": messages[3:]}
    assert whole_text(tokenizer, {"messages": messages}) == whole_text(tokenizer, by_parts)
    assert trained_text(tokenizer, {"messages": messages}) == "yo<|im_end|>" * 2
    assert trained_text(tokenizer, by_parts) == "yo<|im_end|>", "earlier answers of a prompt are context"


def test_each_role_can_be_trained(tokenizer: PreTrainedTokenizerBase) -> None:
    row = {"messages": [SYSTEM, USER, ASSISTANT]}
    header = "<|im_start|>assistant\n"
    assert trained_text(tokenizer, row, system=True, assistant=False) == "<|im_start|>system\nbe brief<|im_end|>\n"
    assert trained_text(tokenizer, row, user=True, assistant=False) == f"<|im_start|>user\nhi<|im_end|>\n{header}"
    assert trained_text(tokenizer, row, system=True, user=True) + "\n" == whole_text(tokenizer, row)


def test_strings_are_joined_without_a_template_and_end_with_the_end_token(tokenizer: PreTrainedTokenizerBase) -> None:
    row = {"prompt": "2 + 2 =", "completion": " 4"}
    assert whole_text(tokenizer, row) == "2 + 2 = 4<|im_end|>"
    assert trained_text(tokenizer, row) == " 4<|im_end|>"


@pytest.mark.parametrize("row", [{"prompt": "{}", "completion": "yo"}, {"text": "{}yo"}], ids=["completion", "text"])
@pytest.mark.parametrize("bos_is_eos", [False, True])
def test_an_end_token_within_the_text_does_not_replace_the_one_at_its_end(
    tokenizer: PreTrainedTokenizerBase, row: dict, bos_is_eos: bool
) -> None:
    chat = tokenizer.apply_chat_template([SYSTEM, USER], tokenize=False, add_generation_prompt=True)
    if bos_is_eos:
        tokenizer.bos_token = tokenizer.eos_token
        chat = tokenizer.eos_token + chat
    assert tokenizer.eos_token in chat
    row = {key: text.format(chat) for key, text in row.items()}
    assert trained_text(tokenizer, row).endswith("yo<|im_end|>")
    assert whole_text(tokenizer, row) == chat + "yo<|im_end|>"


def test_an_end_token_that_the_text_brings_is_not_doubled(tokenizer: PreTrainedTokenizerBase) -> None:
    row = {"prompt": "2 + 2 =", "completion": " 4<|im_end|>"}
    assert whole_text(tokenizer, row) == "2 + 2 = 4<|im_end|>"
    assert trained_text(tokenizer, row) == " 4<|im_end|>"


def test_all_of_a_plain_text_is_trained(tokenizer: PreTrainedTokenizerBase) -> None:
    assert trained_text(tokenizer, {"text": "to be"}, assistant=False) == "to be<|im_end|>"


def test_nulls_that_columnar_files_fill_in_do_not_reach_the_template(tokenizer: PreTrainedTokenizerBase) -> None:
    tokenizer.chat_template = "{{ tools | tojson }}{% for m in messages %}{{ m | tojson }}{% endfor %}"
    call = {"function": {"name": "add", "arguments": {"x": 3, "of_another_tool": None}}, "type": None}
    row = {
        "messages": [USER, {"role": "assistant", "content": None, "tool_calls": [call]}],
        "tools": [{"name": "add", "parameters": {"x": {"type": "int", "enum": None}, "of_another_tool": None}}],
    }
    assert "null" not in whole_text(tokenizer, without_fills(row))


def test_outer_blanks_of_a_message_stay_as_in_inference(tokenizer: PreTrainedTokenizerBase) -> None:
    row = {"messages": [USER, {"role": "assistant", "content": "\n yo \n"}]}
    assert trained_text(tokenizer, row) == "\n yo \n<|im_end|>"


def test_tools_reach_the_template_decoded(tokenizer: PreTrainedTokenizerBase) -> None:
    tokenizer.chat_template = (
        "{% for t in tools or [] %}[{{ t.name }}]{% endfor %}"
        "{% for m in messages %}{{ m.role }}:{{ m.content }}"
        "{% for c in m.tool_calls or [] %}{{ c.function.name }}({{ c.function.arguments.x }}){% endfor %};{% endfor %}"
    )
    call = {"function": {"name": "add", "arguments": '{"x": 3}'}, "id": None}
    messages = [
        USER,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "3"},
        {"role": "tool", "content": "4"},
        {**ASSISTANT, "tool_calls": None},
    ]
    row = {"messages": messages, "tools": '[{"name": "add"}]'}
    assert whole_text(tokenizer, row) == "[add]user:hi;assistant:add(3);tool:3;tool:4;assistant:yo;<|im_end|>"
    assert trained_text(tokenizer, row, tool=True, assistant=False) == "tool:3;tool:4;"
    # The template adds no end token, so the appended one belongs to the last message.
    assert trained_text(tokenizer, row) == "assistant:add(3);assistant:yo;<|im_end|>"


def test_a_template_that_cuts_earlier_turns_short_is_told_apart(tokenizer: PreTrainedTokenizerBase) -> None:
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.role }}:{{ m.content if loop.last else m.content[:1] }};{% endfor %}"
    )
    with pytest.raises(UnmaskableSample):
        trained_text(tokenizer, {"messages": [USER, ASSISTANT, USER, ASSISTANT]})


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"messages": [{"role": "wizard", "content": "x"}]}, "unknown role 'wizard'"),
        ({"messages": ["hi"]}, "message 1: found 'hi'; expected an object with `role` and `content`"),
        ({"messages": []}, "no messages"),
        ({"messages": [USER, {"role": "assistant"}]}, "message 2: the assistant message has no `content`"),
        ({"messages": [{"role": "user", "content": 7}]}, "message 1: `content` must be text, .*, got 7"),
        ({"messages": {"role": "user"}}, "`messages` must be a list"),
        ({"messages": [{**ASSISTANT, "tool_calls": "[1]"}]}, "message 1: `tool_calls` must be a list of objects"),
        ({"messages": [USER, ASSISTANT], "tools": {"name": "add"}}, "`tools` must be a list"),
        ({"messages": None, "id": 3}, "`messages` is missing"),
        ({"prompt": "2 + 2 =", "completion": None}, "`completion` is missing"),
        ({"prompt": [USER], "completion": "yo"}, "must both be message lists or both strings"),
        ({"messages": [USER, ASSISTANT], "tools": "[{]"}, "tools: not valid JSON"),
    ],
)
def test_a_row_of_another_form_is_refused(tokenizer: PreTrainedTokenizerBase, row: dict, said: str) -> None:
    with pytest.raises(DataError, match=said):
        trained_text(tokenizer, row)


def test_a_tokenizer_without_a_template_is_refused(tokenizer: PreTrainedTokenizerBase) -> None:
    tokenizer.chat_template = None
    with pytest.raises(DataError, match=r"tokenizer\.chat_template"):
        trained_text(tokenizer, {"messages": [USER, ASSISTANT]})


def test_a_dataset_without_conversations_is_named_with_its_columns() -> None:
    with pytest.raises(
        DataError,
        match=r"data\.name = somewhere \(split train\): found the columns question, label; expected `messages`, .*",
    ):
        check_columns(Part("somewhere", None, "train", SFTDataConfig()), {"question": "", "label": 1})
