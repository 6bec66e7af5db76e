"""Tool calls in a model's text. The formats, and what counts as one, are those of vLLM's parsers of the same names."""

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
    """A call as the model wrote it. `arguments` is JSON text, as in OpenAI's messages."""

    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Reading:
    """An answer taken apart. Text that is no valid call stays content."""

    content: str | None
    calls: Sequence[ToolCall] = ()


class ToolParser(Protocol):
    """Reads the tool calls of one family of models."""

    needs_special_tokens: bool
    """Whether the marks around a call may be special tokens, which must then stay in the text."""

    def read(self, text: str) -> Reading:
        """Take a whole answer apart."""

    def settled(self, text: str) -> int:
        """How many characters of an answer that goes on are content, whatever follows."""


class Hermes:
    """`<tool_call>{"name": …, "arguments": {…}}</tool_call>`, any number of times, after the content."""

    needs_special_tokens = True

    def read(self, text: str) -> Reading:
        if _HERMES_START not in text:
            return Reading(text)
        try:
            calls = [_call(json.loads(closed or open_), "arguments") for closed, open_ in _HERMES_CALL.findall(text)]
        except (ValueError, KeyError, TypeError):
            return Reading(text)
        return Reading(text[: text.index(_HERMES_START)] or None, calls)

    def settled(self, text: str) -> int:
        if _HERMES_START in text:
            return text.index(_HERMES_START)
        begun = (size for size in range(len(_HERMES_START) - 1, 0, -1) if text.endswith(_HERMES_START[:size]))
        return len(text) - next(begun, 0)


class Llama3Json:
    """`{"name": …, "parameters": {…}}`, several of them with anything between, and no content beside them."""

    needs_special_tokens = False

    def read(self, text: str) -> Reading:
        calls: list[ToolCall] = []
        start = text.find("{")
        try:
            while start >= 0:
                value, end = json.JSONDecoder().raw_decode(text, start)
                calls.append(_call(value, "arguments" if "arguments" in value else "parameters"))
                start = text.find("{", end)
        except (ValueError, KeyError):
            return Reading(text)
        return Reading(None, calls) if calls else Reading(text)

    def settled(self, text: str) -> int:
        return 0


TOOL_PARSERS: Mapping[str, ToolParser] = MappingProxyType(
    {"hermes": Hermes(), "llama3_json": Llama3Json(), "llama4_json": Llama3Json()}
)
"""By vLLM's names."""


def _call(value: Any, arguments_key: str) -> ToolCall:
    return ToolCall(value["name"], json.dumps(value[arguments_key], ensure_ascii=False))
