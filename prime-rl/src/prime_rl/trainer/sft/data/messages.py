"""Reads dataset rows as conversations, in the form that chat templates expect, or as plain text."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from prime_rl.trainer.process.errors import DataError

Message = dict[str, Any]

ROLES = ("system", "user", "assistant", "tool")


@dataclass(frozen=True, slots=True)
class Conversation:
    """Chat messages and the other arguments of the chat template."""

    messages: list[Message]
    template_kwargs: dict[str, Any] = field(default_factory=dict)
    """`tools`, and the row's `chat_template_kwargs`."""


@dataclass(frozen=True, slots=True)
class PlainText:
    """Text without a chat template. The prompt counts as the user's."""

    prompt: str | None
    """None if the whole text is trained, whatever `data.loss_mask` says."""
    completion: str


def check_columns(name: str, row: Mapping[str, Any]) -> None:
    """Check that a row has columns to train on.

    Raises:
        DataError: it has neither `messages`, nor `prompt` and `completion`, nor `text`. The message lists its columns.
    """
    if "messages" in row or ("prompt" in row and "completion" in row) or "text" in row:
        return
    raise DataError(
        f"data.name = {name} has no conversations: rows need `messages`, or `prompt` and `completion`, or `text`; "
        f"the columns are {', '.join(row) or 'none'}"
    )


def read_row(row: Mapping[str, Any]) -> Conversation | PlainText:
    """Read a row: `messages`, or `prompt` and `completion` as message lists or strings, or `text`; and `tools`.

    Raises:
        DataError: a field is missing or malformed.
    """
    if row.get("messages") is not None:
        parts = {"messages": row["messages"]}
    elif row.get("prompt") is not None or row.get("completion") is not None:
        parts = {"prompt": row.get("prompt"), "completion": row.get("completion")}
    elif isinstance(row.get("text"), str):
        return PlainText(None, row["text"])
    else:
        raise DataError(f"no `messages`, `prompt` and `completion`, or `text`: the row has {_filled(row)}")
    missing = [name for name, part in parts.items() if part is None]
    if missing:
        raise DataError(f"`{missing[0]}` is missing")
    if "prompt" in parts and all(isinstance(part, str) for part in parts.values()):
        return PlainText(parts["prompt"], parts["completion"])
    return Conversation(_messages(parts), _template_kwargs(row))


def _filled(row: Mapping[str, Any]) -> str:
    return ", ".join(name for name, value in row.items() if value is not None) or "no field at all"


def _messages(parts: Mapping[str, Any]) -> list[Message]:
    parts = {name: _decoded(part, name) if name == "messages" else part for name, part in parts.items()}
    if not all(isinstance(part, list) for part in parts.values()):
        if "messages" in parts:
            raise DataError("`messages` must be a list of messages")
        raise DataError("`prompt` and `completion` must both be message lists or both strings")
    together = [message for part in parts.values() for message in part]
    if not together:
        raise DataError("the conversation has no messages")
    return [_message(number, message) for number, message in enumerate(together, start=1)]


def _message(number: int, message: Any) -> Message:
    """A message as chat templates expect it: no nulls, trimmed text, decoded tool arguments."""
    if not isinstance(message, Mapping) or "role" not in message:
        raise DataError(f"message {number}: must be an object with a role, got {message!r}")
    cleaned = _without_nulls(message)
    role = cleaned.get("role")
    if role not in ROLES:
        raise DataError(f"message {number}: unknown role {role!r}: known are {', '.join(ROLES)}")
    if "content" not in cleaned:
        if role != "assistant" or not ("tool_calls" in cleaned or "reasoning_content" in cleaned):
            raise DataError(f"message {number}: the {role} message has no `content`")
        cleaned["content"] = ""
    if isinstance(cleaned["content"], str):
        cleaned["content"] = cleaned["content"].strip()
    elif not isinstance(cleaned["content"], list):
        raise DataError(f"message {number}: `content` must be text, got {cleaned['content']!r}")
    if "tool_calls" in cleaned:
        cleaned["tool_calls"] = _tool_calls(number, cleaned["tool_calls"])
    return cleaned


def _tool_calls(number: int, calls: Any) -> list[dict[str, Any]]:
    calls = _decoded(calls, f"message {number}: tool_calls")
    if not isinstance(calls, list) or not all(isinstance(call, Mapping) for call in calls):
        raise DataError(f"message {number}: `tool_calls` must be a list of objects")
    return [_tool_call(number, call) for call in calls]


def _tool_call(number: int, call: Mapping[str, Any]) -> dict[str, Any]:
    cleaned = _without_nulls(call)
    function = cleaned.get("function")
    if isinstance(function, Mapping) and isinstance(function.get("arguments"), str):
        arguments = _decoded(function["arguments"], f"message {number}: tool call arguments")
        cleaned["function"] = {**function, "arguments": arguments}
    return cleaned


def _template_kwargs(row: Mapping[str, Any]) -> dict[str, Any]:
    kwargs = _decoded(row.get("chat_template_kwargs") or {}, "chat_template_kwargs")
    if not isinstance(kwargs, Mapping):
        raise DataError("`chat_template_kwargs` must be an object")
    kwargs = _without_nulls(kwargs)
    if row.get("tools"):
        tools = _decoded(row["tools"], "tools")
        if not isinstance(tools, list) or not all(isinstance(tool, Mapping) for tool in tools):
            raise DataError("`tools` must be a list of function schemas, or such a list as JSON text")
        kwargs["tools"] = [_without_nulls(tool) for tool in tools]
    return kwargs


def _decoded(value: Any, what: str) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except json.JSONDecodeError as error:
        raise DataError(f"{what}: not valid JSON: {error.msg}") from error


def _without_nulls(mapping: Mapping[str, Any]) -> dict[str, Any]:
    """Drop nulls at every depth: columnar files use them for missing fields, but templates would render them."""
    return {
        key: _without_nulls(value) if isinstance(value, Mapping) else value
        for key, value in mapping.items()
        if value is not None
    }
