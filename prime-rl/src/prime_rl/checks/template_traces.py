"""Finds what a chat template leaves out of a conversation: keys that change nothing in the rendered text.

Each key is tried on its own. Text is replaced by a marker that must appear; another value is removed, and the text must
change. A template that refuses the changed conversation reads the key.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Arguments = Mapping[str, Any]
"""Arguments of a chat template: `messages`, and others such as `tools`."""

METADATA = frozenset(
    "id index name type tool_call_id strict return returns refusal annotations timestamp created created_at date model "
    "source lang language uid uuid".split()
)
"""Keys that data carries for other programs than the model. A template may leave them out."""

_MARK, _OTHER_MARK = "QzTraceMarkzQ", "QzSecondMarkzQ"
_NAMED = (("tools", "name"), ("tools", "function", "name"), ("tool_calls", "function", "name"))
"""The names that the model must see."""
_SCHEMA = {"type": "object", "properties": {_MARK: {"type": "string", "description": _OTHER_MARK}}, "required": [_MARK]}
_REMOVED = object()
_CALLER = "calling assistant"


@dataclass(frozen=True, slots=True)
class Key:
    """A key of a kind of message, or of the tools."""

    owner: str
    """A role, or nothing for tools. `later system` is a system message after the first message, `calling assistant` a
    message with tool calls. Templates may treat these in another way."""
    names: tuple[str, ...]
    """Names of the nested keys, without the places in lists."""

    @property
    def top(self) -> Key:
        return Key(self.owner, self.names[:1])

    def __str__(self) -> str:
        path = ".".join(self.names)
        if self.owner == _CALLER:
            return f"{path} of assistant messages" + ("" if self.names[0] == "tool_calls" else " with tool_calls")
        return f"{path} of {self.owner} messages" if self.owner else path


@dataclass(frozen=True, slots=True)
class Edit:
    """A change to one key of a conversation, which must show in the text."""

    key: Key
    path: tuple[str | int, ...]
    """Path in the template's arguments."""
    value: Any
    marks: tuple[str, ...] = ()
    """Must appear in the text. Without any, the text must change."""


class TemplateTraces:
    """Remembers which keys a template renders, so that each is tried once.

    `render` renders a conversation and raises `refusal` if the template refuses it. `ignored` names keys, in addition
    to `METADATA`, that may be left out with everything in them.
    """

    def __init__(
        self, render: Callable[[Arguments], str], refusal: type[Exception], ignored: Collection[str] = ()
    ) -> None:
        self._render = render
        self._refusal = refusal
        self._ignored = frozenset(ignored)
        self._has_trace: dict[Key, bool] = {}

    def left_out(self, arguments: Arguments) -> list[str]:
        """The keys of a conversation that leave no trace, as words. One whose parts all leave none stands for them.

        Raises:
            Exception: the template refuses the conversation; of the type `refusal`.
        """
        keys: dict[Key, list[Key]] = {}
        for edit in self._edits(arguments):
            if edit.key not in self._has_trace:
                self._has_trace[edit.key] = self._shows(edit, arguments)
            keys.setdefault(edit.key.top, []).append(edit.key)
        lines: list[str] = []
        for top, parts in keys.items():
            without = dict.fromkeys(part for part in parts if not self._has_trace[part])
            lines += [str(top)] if len(without) == len(set(parts)) else map(str, without)
        return lines

    def _edits(self, arguments: Arguments) -> Iterator[Edit]:
        for at, message in enumerate(arguments["messages"]):
            role = str(message["role"])
            owner = "later system" if at and role == "system" else _CALLER if message.get("tool_calls") else role
            yield Edit(Key(owner, ("role",)), ("messages", at, "role"), "user" if role == "assistant" else "assistant")
            yield from self._inner(message, Key(owner, ()), ("messages", at))
        tools = () if "tools" in self._ignored else arguments.get("tools") or ()
        for at, tool in enumerate(tools):
            yield from self._inner(tool, Key("", ("tools",)), ("tools", at))

    def _inner(self, part: Mapping[str, Any], above: Key, path: tuple[str | int, ...]) -> Iterator[Edit]:
        for name, value in part.items():
            key, place = Key(above.owner, (*above.names, name)), (*path, name)
            is_metadata = name in METADATA and key.names not in _NAMED
            if is_metadata or name in self._ignored or key.names == ("role",) or value in (None, "", [], {}):
                continue
            if isinstance(value, str):
                yield Edit(key, place, _MARK, (_MARK,))
            elif name == "arguments" and isinstance(value, Mapping):
                yield Edit(key, place, dict.fromkeys(value, _MARK), (_MARK,))
            elif name == "parameters" and isinstance(value, Mapping):
                yield from _schema_edits(value, key, place)
            elif isinstance(value, Mapping):
                yield from self._inner(value, key, place)
            elif isinstance(value, Sequence) and isinstance(value[0], Mapping):
                # The items are alike, and a template may refuse more than one.
                yield from self._inner(value[0], key, (*place, 0))
            else:
                yield Edit(key, place, _REMOVED)

    def _shows(self, edit: Edit, arguments: Arguments) -> bool:
        """Whether an edit shows in the whole conversation, or in the part of it that ends with the edited message.

        Templates that leave out the reasoning of earlier turns render that of the last one.
        """
        messages = arguments["messages"]
        original = self._render(arguments)
        try:
            if _differ(edit, self._render(_edited(arguments, edit.path, edit.value)), original):
                return True
        except self._refusal:
            return True
        if edit.path[0] == "tools" or edit.path[1] == len(messages) - 1:
            return False
        shorter = {**arguments, "messages": messages[: int(edit.path[1]) + 1]}
        try:
            return _differ(edit, self._render(_edited(shorter, edit.path, edit.value)), self._render(shorter))
        except self._refusal:
            return False


def _schema_edits(schema: Mapping[str, Any], key: Key, path: tuple[str | int, ...]) -> Iterator[Edit]:
    """The parameters of a tool: their names, and their descriptions if they have any."""
    properties = schema.get("properties") or {}
    if properties:
        yield Edit(key, path, _SCHEMA, (_MARK,))
    if any(isinstance(each, Mapping) and each.get("description") for each in properties.values()):
        yield Edit(Key(key.owner, (*key.names, "description")), path, _SCHEMA, (_OTHER_MARK,))


def _differ(edit: Edit, text: str, original: str) -> bool:
    if not edit.marks:
        return text != original
    # Some templates change the case.
    return all(mark.casefold() in text.casefold() for mark in edit.marks)


def _edited(tree: Any, path: tuple[str | int, ...], value: Any) -> Any:
    """A copy of nested mappings and lists with another value at `path`, or without it."""
    if not path:
        return value
    name, *rest = path
    if isinstance(tree, Mapping):
        if not rest and value is _REMOVED:
            return {other: each for other, each in tree.items() if other != name}
        return {**tree, name: _edited(tree[name], tuple(rest), value)}
    return [_edited(each, tuple(rest), value) if at == name else each for at, each in enumerate(tree)]
