"""Reads dataset rows as conversations, in the form that chat templates expect, or as plain text."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any

from prime_rl.checks.data_files import Part
from prime_rl.configs.sft import ColumnsConfig, RowFormatConfig
from prime_rl.trainer.process.errors import DataError
from prime_rl.utils.row_files.reading import parsed

Row = Mapping[str, Any]

FORMATS = (
    ("messages",),
    ("conversations",),
    ("instruction", "output"),
    ("prompt", "response"),
    ("prompt", "completion"),
    ("text",),
)
"""The columns of each format. Of several that apply to a row, the first is read."""
EXPECTED = "`messages`, `conversations`, `instruction` and `output`, `prompt` and `response` or `completion`, or `text`"

_WITH_EVERY_FORMAT = ("tools", "chat_template_kwargs")
_WITH_MESSAGES = ("messages", "conversations", "prompt", "completion")


def renamed(row: Row, config: RowFormatConfig) -> Row:
    """A row under our names for its columns, for the keys of its messages, and for their roles."""
    columns = config.columns
    if chosen := columns.of_rows:
        kept = {name: row[name] for name in _WITH_EVERY_FORMAT if name in row}
        row = {**kept, **{ours: row.get(theirs) for ours, theirs in chosen.items()}}
    if not (columns.role or columns.content or config.roles):
        return row
    return {name: _renamed_messages(name, value, config) for name, value in row.items()}


def standard(row: Row) -> Row:
    """A row of any of `FORMATS` as `messages`, `prompt` and `completion`, or `text`.

    A question and its answer become a conversation. `prompt` and `completion` stay: as texts, they are trained without
    a chat template.
    """
    filled = {name: value for name, value in row.items() if value is not None}
    kind = next((kind for kind in FORMATS if all(name in filled for name in kind)), ())
    match kind:
        case ("messages",) | ("conversations",):
            messages = decoded(filled[kind[0]], kind[0])
        case ("instruction", "output"):
            question = "\n\n".join(str(filled[name]) for name in ("instruction", "input") if filled.get(name))
            messages = [*_history(filled.get("history")), *_turn(question, filled["output"])]
        case ("prompt", "response"):
            asked, answer = filled["prompt"], filled["response"]
            messages = [*asked, *_turn(None, answer)] if isinstance(asked, list) else _turn(asked, answer)
        case _:
            return row
    if filled.get("system") and isinstance(messages, list):
        messages = [{"role": "system", "content": filled["system"]}, *messages]
    return {**{name: filled[name] for name in _WITH_EVERY_FORMAT if name in filled}, "messages": messages}


def check_columns(part: Part, row: Row) -> None:
    """Check that a row of a dataset has columns to train on.

    Raises:
        DataError: a column of `data.columns` is missing, or no format applies. The message lists the columns.
    """
    config = part.format
    found = f"found the columns {', '.join(row) or '(none)'}"
    for ours, theirs in config.columns.of_rows.items():
        if theirs not in row:
            near = get_close_matches(theirs, row, 1)
            advice = f"; did you mean {near[0]!r}?" if near else ""
            raise DataError(f"{part}: no column {theirs!r} for columns.{ours}; {found}{advice}")
    columns = renamed(row, config)
    if not any(all(name in columns for name in kind) for kind in FORMATS):
        raise DataError(f"{part}: {found}; expected {EXPECTED}. Name other columns in {part.section}.columns")


def decoded(value: Any, what: str) -> Any:
    """The value, or what its text holds: columnar files and CSV store nested values as JSON."""
    if not isinstance(value, str):
        return value
    try:
        return parsed(value)
    except ValueError as error:
        raise DataError(f"{what}: not valid JSON: {getattr(error, 'msg', error)}") from error


def _renamed_messages(name: str, value: Any, config: RowFormatConfig) -> Any:
    """A column of a row; if it holds messages, with our names for their keys and roles."""
    if name not in _WITH_MESSAGES:
        return value
    value = decoded(value, name) if name in ("messages", "conversations") else value
    if not isinstance(value, list):
        return value
    columns, roles = config.columns, config.roles
    return [_renamed_message(each, columns, roles) if isinstance(each, Mapping) else each for each in value]


def _renamed_message(message: Mapping[str, Any], columns: ColumnsConfig, roles: Mapping[str, str]) -> dict[str, Any]:
    ours = {theirs: name for name, theirs in (("role", columns.role), ("content", columns.content)) if theirs}
    message = {ours.get(name, name): value for name, value in message.items()}
    key = "from" if "from" in message and "role" not in message else "role"
    named = key in message and isinstance(message[key], str)
    return {**message, key: roles.get(message[key], message[key])} if named else message


def _turn(question: Any, answer: Any) -> list[dict[str, Any]]:
    asked = [] if question is None else [{"role": "user", "content": question}]
    return [*asked, {"role": "assistant", "content": answer}]


def _history(pairs: Any) -> list[dict[str, Any]]:
    """Earlier turns, as pairs of question and answer."""
    if not isinstance(pairs or [], list) or not all(isinstance(pair, list) and len(pair) == 2 for pair in pairs or []):
        raise DataError(f"`history` must be a list of pairs of question and answer, got {pairs!r}")
    return [message for pair in pairs or [] for message in _turn(*pair)]


Message = dict[str, Any]

ROLES = ("system", "user", "assistant", "tool")
OTHER_NAMES = {
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bot": "assistant",
    "model": "assistant",
    "developer": "system",
    "observation": "tool",
    "function": "tool",
    "function_response": "tool",
    "ipython": "tool",
}
"""Other programs' names for roles. `function_call` in ShareGPT is an assistant's message that holds a call."""


_RESERVED = frozenset(
    "conversation messages chat_template add_generation_prompt continue_final_message tokenize padding truncation "
    "max_length return_tensors return_dict return_assistant_tokens_mask tokenizer_kwargs".split()
)
"""Arguments of the rendering itself. A row's own template would be a program that came with the data."""


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


def read_row(row: Mapping[str, Any], section: str = "data") -> Conversation | PlainText:
    """Read a row of any format in `formats.py`. `section` is the config's section with the dataset, for messages.

    Raises:
        DataError: a field is missing or malformed.
    """
    row = standard(row)
    if row.get("messages") is not None:
        parts = {"messages": row["messages"]}
    elif row.get("prompt") is not None or row.get("completion") is not None:
        parts = {"prompt": row.get("prompt"), "completion": row.get("completion")}
    elif isinstance(row.get("text"), str):
        return PlainText(None, row["text"])
    elif row.get("text") is not None:
        raise DataError(f"`text` must be a string, got {row['text']!r}")
    else:
        raise DataError(f"found {_filled(row)}; expected {EXPECTED}")
    missing = [name for name, part in parts.items() if part is None]
    if missing:
        raise DataError(f"`{missing[0]}` is missing")
    if "prompt" in parts and all(isinstance(part, str) for part in parts.values()):
        return PlainText(parts["prompt"], parts["completion"])
    return Conversation(_messages(parts, section), _template_kwargs(row))


def _filled(row: Mapping[str, Any]) -> str:
    return ", ".join(name for name, value in row.items() if value is not None) or "no field at all"


def _messages(parts: Mapping[str, Any], section: str) -> list[Message]:
    parts = {name: decoded(part, name) if name == "messages" else part for name, part in parts.items()}
    if not all(isinstance(part, list) for part in parts.values()):
        if "messages" in parts:
            raise DataError("`messages` must be a list of messages")
        raise DataError("`prompt` and `completion` must both be message lists or both strings")
    together = [message for part in parts.values() for message in part]
    if not together:
        raise DataError("the conversation has no messages")
    return [_message(number, message, section) for number, message in enumerate(together, start=1)]


def _message(number: int, message: Any, section: str) -> Message:
    """A message as chat templates expect it: no nulls, trimmed text, decoded tool arguments."""
    if not isinstance(message, Mapping):
        raise DataError(f"message {number}: found {message!r}; expected an object with `role` and `content`")
    cleaned = _as_openai(number, _without_nulls(message))
    role = cleaned.get("role")
    if role is None:
        keys = ", ".join(f"`{name}`" for name in message)
        raise DataError(
            f"message {number}: found the keys {keys or '(none)'}; expected `role` and `content`, or `from` and "
            f"`value`. Name others in {section}.columns"
        )
    if role not in ROLES:
        known = ", ".join((*ROLES, *OTHER_NAMES))
        raise DataError(f"message {number}: unknown role {role!r}: known are {known}; map others in {section}.roles")
    if "content" not in cleaned:
        if role != "assistant" or not ("tool_calls" in cleaned or "reasoning_content" in cleaned):
            raise DataError(f"message {number}: the {role} message has no `content`")
        cleaned["content"] = ""
    cleaned["content"] = _text(number, cleaned["content"]).strip()
    if "tool_calls" in cleaned:
        cleaned["tool_calls"] = _tool_calls(number, cleaned["tool_calls"])
    return cleaned


def _as_openai(number: int, message: dict[str, Any]) -> dict[str, Any]:
    """A message with `role` and `content`, and our name of its role. ShareGPT calls them `from` and `value`."""
    for theirs, ours in (("from", "role"), ("value", "content")):
        if theirs in message and ours not in message:
            message[ours] = message.pop(theirs)
    role = message.get("role")
    if role == "function_call" and "content" in message:
        call = decoded(message.pop("content"), f"message {number}: function_call")
        calls = call if isinstance(call, list) else [call]
        return {
            **message,
            "role": "assistant",
            "tool_calls": [{"type": "function", "function": each} for each in calls],
        }
    if isinstance(role, str) and role in OTHER_NAMES:
        message["role"] = OTHER_NAMES[role]
    return message


def _text(number: int, content: Any) -> str:
    """The text of a message. Parts of text are joined by newlines, as in inference."""
    texts = []
    for part in content if isinstance(content, list) else [content]:
        text = part.get("text") if isinstance(part, Mapping) else part
        if isinstance(text, str):
            texts.append(text)
        elif isinstance(part, Mapping) and isinstance(content, list):
            kind = part.get("type")
            raise DataError(f"message {number}: a part of type {kind!r}: only parts of text can be trained on")
        else:
            raise DataError(f"message {number}: `content` must be text, or a list of parts of text, got {content!r}")
    return "\n".join(texts)


def _tool_calls(number: int, calls: Any) -> list[dict[str, Any]]:
    calls = decoded(calls, f"message {number}: tool_calls")
    if not isinstance(calls, list) or not all(isinstance(call, Mapping) for call in calls):
        raise DataError(f"message {number}: `tool_calls` must be a list of objects")
    return [_tool_call(number, call) for call in calls]


def _tool_call(number: int, call: Mapping[str, Any]) -> dict[str, Any]:
    cleaned = _without_nulls(call)
    function = cleaned.get("function")
    if isinstance(function, Mapping) and isinstance(function.get("arguments"), str):
        arguments = decoded(function["arguments"], f"message {number}: tool call arguments")
        cleaned["function"] = {**function, "arguments": arguments}
    return cleaned


def _template_kwargs(row: Mapping[str, Any]) -> dict[str, Any]:
    kwargs = decoded(row.get("chat_template_kwargs") or {}, "chat_template_kwargs")
    if not isinstance(kwargs, Mapping):
        raise DataError("`chat_template_kwargs` must be an object")
    kwargs = _without_nulls(kwargs)
    if reserved := sorted(_RESERVED & kwargs.keys()):
        raise DataError(f"`chat_template_kwargs` sets {reserved[0]}, which rows may not set")
    if row.get("tools"):
        tools = decoded(row["tools"], "tools")
        if not isinstance(tools, list) or not all(isinstance(tool, Mapping) for tool in tools):
            raise DataError("`tools` must be a list of function schemas, or such a list as JSON text")
        kwargs["tools"] = [_without_nulls(tool) for tool in tools]
    return kwargs


def _without_nulls(mapping: Mapping[str, Any]) -> dict[str, Any]:
    """Drop nulls at every depth: columnar files use them for missing fields, but templates would render them."""
    return {
        key: _without_nulls(value) if isinstance(value, Mapping) else value
        for key, value in mapping.items()
        if value is not None
    }
