"""Tool-call parsers: what each format parses as calls and what stays content."""

from __future__ import annotations

import itertools
import json

import pytest

from prime_rl.inference.embedded.engine.text import TOOL_PARSERS, ToolCall

WEATHER = '{"name": "weather", "arguments": {"city": "Köln"}}'
CALL = ToolCall("weather", '{"city": "Köln"}')


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ("Sunny.", "Sunny.", []),
        (f"<tool_call>\n{WEATHER}\n</tool_call>", None, [CALL]),
        (f"Let me see.\n<tool_call>{WEATHER}</tool_call>", "Let me see.\n", [CALL]),
        (f"<tool_call>{WEATHER}</tool_call>\n<tool_call>{WEATHER}</tool_call>", None, [CALL, CALL]),
        (f"<tool_call>{WEATHER}", None, [CALL]),
        ("<tool_call>weather(Köln)</tool_call>", "<tool_call>weather(Köln)</tool_call>", []),
        ('<tool_call>{"name": "weather"}</tool_call>', '<tool_call>{"name": "weather"}</tool_call>', []),
        ("<tool_call>[1]</tool_call>", "<tool_call>[1]</tool_call>", []),
        ('<tool_call>{"name": "wea', '<tool_call>{"name": "wea', []),
        (f"Look. <tool_call>{WEATHER}</tool_call><tool_call>{{</tool_call>", "unchanged", []),
        ('<tool_call>{"name": 3, "arguments": {}}</tool_call>', "unchanged", []),
        ('<tool_call>{"name": "f", "arguments": {"x": "\\ud800"}}</tool_call>', "unchanged", []),
    ],
)
def test_hermes_parses_tagged_json_and_keeps_the_rest(text, content, calls) -> None:
    reading = TOOL_PARSERS["hermes"].parse(text)
    assert (reading.content, list(reading.calls)) == (text if content == "unchanged" else content, calls)


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ("Sunny.", "Sunny.", []),
        (WEATHER, None, [CALL]),
        ('<|python_tag|>{"name": "weather", "parameters": {"city": "Köln"}}', None, [CALL]),
        (f"{WEATHER}; {WEATHER}", None, [CALL, CALL]),
        ('{"name": "f", "parameters": {"point": {"x": 1}}}', None, [ToolCall("f", '{"point": {"x": 1}}')]),
        ("{not json}", "{not json}", []),
        ('{"city": "Köln"}', '{"city": "Köln"}', []),
        (f"Let me see. {WEATHER}", None, [CALL]),
        (f"{WEATHER}; {{", f"{WEATHER}; {{", []),
        ('{"name": 3, "parameters": {}}', '{"name": 3, "parameters": {}}', []),
    ],
)
@pytest.mark.parametrize("name", ["llama3_json", "llama4_json"])
def test_llama_json_parses_bare_json_and_keeps_the_rest(name, text, content, calls) -> None:
    reading = TOOL_PARSERS[name].parse(text)
    assert (reading.content, list(reading.calls)) == (content, calls)


@pytest.mark.parametrize(
    ("text", "final_length"),
    [("Sunny", 5), ("a <", 2), ("a <tool_cal", 2), ("a <tool_call>{", 2), ("a <b", 4)],
)
def test_text_that_may_become_a_call_is_not_final_content(text, final_length) -> None:
    assert TOOL_PARSERS["hermes"].final_length(text) == final_length


@pytest.mark.parametrize("name", TOOL_PARSERS)
def test_content_that_was_streamed_is_never_taken_back(name: str) -> None:
    text = f"Two. <tool_call>{WEATHER}</tool_call>\n<tool_call>{WEATHER}</tool_call>"
    parser = TOOL_PARSERS[name]
    reading = parser.parse(text)
    assert list(reading.calls) == [CALL, CALL]
    sent = [text[: parser.final_length(text[:size])] for size in range(len(text) + 1)]
    assert all(after.startswith(before) for before, after in itertools.pairwise(sent))
    assert (reading.content or "").startswith(sent[-1])


def test_arguments_stay_json_text() -> None:
    (call,) = TOOL_PARSERS["hermes"].parse(f"<tool_call>{WEATHER}</tool_call>").calls
    assert json.loads(call.arguments) == {"city": "Köln"}
