"""Parsers for tool calls in generated text. Formats and validity rules follow vLLM's parsers of the same names."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Protocol

_HERMES_START = "<tool_call>"
_HERMES_CALL = re.compile(r"<tool_call>(.*?)</tool_call>|<tool_call>(.*)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A parsed tool call. `arguments` is JSON text, as in OpenAI's messages."""

    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class ParsedMessage:
    """The content and tool calls of a completion. Text that is not a valid call stays in the content."""

    content: str | None
    calls: Sequence[ToolCall] = ()


class ToolParser(Protocol):
    """Parses the tool-call format of one model family."""

    needs_special_tokens: bool
    """Whether the call delimiters may be special tokens, which detokenization must then keep."""

    def parse(self, text: str) -> ParsedMessage:
        """Split a complete text into content and tool calls."""

    def final_length(self, text: str) -> int:
        """Number of leading characters of an incomplete text that are content, whatever follows."""


class Hermes:
    """Parses `<tool_call>{"name": …, "arguments": {…}}</tool_call>`, repeated any number of times after the content."""

    needs_special_tokens = True

    def parse(self, text: str) -> ParsedMessage:
        if _HERMES_START not in text:
            return ParsedMessage(text)
        try:
            calls = [_call(json.loads(closed or open_), "arguments") for closed, open_ in _HERMES_CALL.findall(text)]
        except (ValueError, KeyError, TypeError, RecursionError):
            return ParsedMessage(text)
        return ParsedMessage(text[: text.index(_HERMES_START)] or None, calls)

    def final_length(self, text: str) -> int:
        if _HERMES_START in text:
            return text.index(_HERMES_START)
        begun = (size for size in range(len(_HERMES_START) - 1, 0, -1) if text.endswith(_HERMES_START[:size]))
        return len(text) - next(begun, 0)


class Llama3Json:
    """Parses one or more `{"name": …, "parameters": {…}}` objects. Text around them is dropped."""

    needs_special_tokens = False

    def parse(self, text: str) -> ParsedMessage:
        calls: list[ToolCall] = []
        start = text.find("{")
        try:
            while start >= 0:
                value, end = json.JSONDecoder().raw_decode(text, start)
                calls.append(_call(value, "arguments" if "arguments" in value else "parameters"))
                start = text.find("{", end)
        except (ValueError, KeyError, TypeError, RecursionError):
            return ParsedMessage(text)
        return ParsedMessage(None, calls) if calls else ParsedMessage(text)

    def final_length(self, text: str) -> int:
        return 0


TOOL_PARSERS: Mapping[str, ToolParser] = MappingProxyType(
    {"hermes": Hermes(), "llama3_json": Llama3Json(), "llama4_json": Llama3Json()}
)
"""Parsers by vLLM's names for them."""


def _call(value: Any, arguments_key: str) -> ToolCall:
    """Raises KeyError, TypeError or ValueError if the object is not a call that an answer can carry."""
    name, arguments = value["name"], json.dumps(value[arguments_key], ensure_ascii=False)
    if not isinstance(name, str):
        raise TypeError(f"a function's name is text, not {type(name).__name__}")
    (name + arguments).encode()  # raises for half of a surrogate pair
    return ToolCall(name, arguments)
