"""Every key of a conversation shows in the rendered text, or is named. Metadata need not show."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jinja2
import pytest
from transformers import AutoTokenizer

from prime_rl.checks.chat_templates import METADATA, NAMED, TemplateTraces

Chat = dict[str, Any]
LeftOut = Callable[..., list[str]]

CHATML = NAMED["chatml"]
REASONING = {f"reasoning_content of assistant messages{which}" for which in ("", " with tool_calls")}
# As SmolLM2's: no tools, no calls, no reasoning.
PLAIN = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
LAST_REASONING = (
    "{% for m in messages %}{{ m.role }}:{% if loop.last %}{{ m.reasoning_content }}{% endif %}"
    "{{ m.content }}{% endfor %}"
)

TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds two numbers.",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer", "description": "the first"}, "b": {"type": "integer"}},
        },
    },
}
CALL = {"id": "1", "type": "function", "function": {"name": "add", "arguments": {"a": 2, "b": 3}}}
CHAT: Chat = {
    "messages": [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "2+3", "id": "x", "timestamp": 12.5},
        {"role": "assistant", "content": "", "reasoning_content": "a sum", "tool_calls": [CALL]},
        {"role": "tool", "name": "add", "content": "5", "tool_call_id": "1"},
        {"role": "assistant", "content": "5", "reasoning_content": "done"},
    ],
    "tools": [TOOL],
}


@pytest.fixture(scope="module")
def left_out(tiny_model_dir) -> LeftOut:
    tokenizer = AutoTokenizer.from_pretrained(tiny_model_dir)

    def of(template: str, chat: Mapping[str, Any] = CHAT, ignored: tuple[str, ...] = ()) -> list[str]:
        def render(arguments: Mapping[str, Any]) -> str:
            others = {name: value for name, value in arguments.items() if name != "messages"}
            return tokenizer.apply_chat_template(
                arguments["messages"], chat_template=template, tokenize=False, **others
            )

        return TemplateTraces(render, jinja2.TemplateError, ignored).left_out(chat)

    return of


def without(text: str) -> str:
    """ChatML without one of its expressions."""
    assert text in CHATML
    return CHATML.replace(text, "''")


def test_a_template_that_renders_everything_leaves_nothing_out(left_out) -> None:
    assert left_out(CHATML) == []


def test_a_template_without_tools_is_told_from_its_text(left_out) -> None:
    assert left_out(PLAIN) == [
        "reasoning_content of assistant messages with tool_calls",
        "tool_calls of assistant messages",
        "reasoning_content of assistant messages",
        "tools",
    ]


@pytest.mark.parametrize(
    ("template", "named"),
    [
        (without("message.role"), {
            f"role of {owner}" for owner in (
                "user messages", "assistant messages", "assistant messages with tool_calls", "tool messages"
            )
        }),
        (without("{{- text_of(message) }}"), {f"content of {role} messages" for role in ("user", "tool", "assistant")}),
        (without("text_of(system)"), {"content of system messages"}),
        (without("message.reasoning_content + "), REASONING),
        (without("call.function.name | tojson"), {"tool_calls.function.name of assistant messages"}),
        (CHATML.replace("call.function.arguments", "''"), {"tool_calls.function.arguments of assistant messages"}),
        (without("tool | tojson"), {"tools"}),
        (CHATML.replace("tool | tojson", "tool.function.name"), {
            "tools.function.description", "tools.function.parameters", "tools.function.parameters.description"
        }),
        (CHATML.replace("tool | tojson", "tool.function.name ~ tool.function.description ~ "
                        "(tool.function.parameters.properties | list)"), {"tools.function.parameters.description"}),
        (CHATML.replace("tool | tojson", "tool.function.description ~ tool.function.parameters"),
         {"tools.function.name"}),
    ],
)  # fmt: skip
def test_every_part_that_the_model_needs_is_missed(template: str, named: set[str], left_out) -> None:
    found = left_out(template.replace("'' +", "").replace("''+", ""))
    assert set(found) == named


@pytest.mark.parametrize("key", sorted(METADATA))
def test_metadata_need_not_show(key: str, left_out) -> None:
    messages = [{**CHAT["messages"][1], key: "x"}, {**CHAT["messages"][4], key: 3}]
    assert left_out(CHATML, {"messages": messages}) == []


@pytest.mark.parametrize("value", ["x", 0.5, {"a": "x"}, [{"a": "x"}], ["x"], True])
def test_other_keys_must_show_or_be_listed(value: object, left_out) -> None:
    chat = {"messages": [{"role": "user", "content": "hi", "thinking": value}]}
    (found,) = left_out(CHATML, chat)
    assert found == "thinking of user messages"
    assert left_out(CHATML, chat, ignored=("thinking",)) == []


@pytest.mark.parametrize("value", ["", None, [], {}])
def test_an_empty_value_needs_no_trace(value: object, left_out) -> None:
    chat = {"messages": [{"role": "user", "content": "hi", "thinking": value}], "tools": value}
    assert left_out(CHATML, chat) == []


def test_content_with_calls_is_missed_where_content_alone_shows(left_out) -> None:
    """As in Llama 3.1's template."""
    template = (
        "{% for m in messages %}{{ m.role }}:{% if m.tool_calls %}{{ m.tool_calls | tojson }}"
        "{% else %}{{ m.content }}{% endif %}{% endfor %}"
    )
    user, calling, answer = CHAT["messages"][1], {**CHAT["messages"][2], "content": "let me add"}, CHAT["messages"][4]
    messages = [user, answer, user, calling]
    assert left_out(template, {"messages": messages}, ignored=("reasoning_content",)) == [
        "content of assistant messages with tool_calls"
    ]


def test_reasoning_may_show_only_in_the_last_message(left_out) -> None:
    assert left_out(LAST_REASONING, {"messages": CHAT["messages"][1::3]}) == []


def test_a_system_message_that_only_counts_as_the_first_is_missed_later(left_out) -> None:
    first_only = (
        "{% for m in messages %}{% if loop.first or m.role != 'system' %}{{ m.role ~ m.content }}{% endif %}"
        "{% endfor %}"
    )
    first, user = CHAT["messages"][:2]
    assert left_out(first_only, {"messages": [first, user]}) == []
    assert left_out(first_only, {"messages": [first, user, first, user]}) == ["content of later system messages"]


def test_a_template_may_refuse_a_conversation(left_out) -> None:
    with pytest.raises(jinja2.TemplateError, match="no"):
        left_out("{{ raise_exception('no') }}")
