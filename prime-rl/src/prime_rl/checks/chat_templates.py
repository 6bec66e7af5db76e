"""Finds the chat template that a config names, the parser of tool calls that fits it, and the keys it leaves out."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from prime_rl.checks.start_dir import StartDir
from prime_rl.configs.inference import ModelConfig
from prime_rl.utils.errors import StartFault

CHATML = """\
{%- macro text_of(message) %}
{%- if message.content is string %}{{- message.content }}
{%- else %}{%- for part in message.content or [] %}{{- part.text }}{%- endfor %}{%- endif %}
{%- endmacro %}
{%- set system = messages[0] if messages and messages[0].role == 'system' else none %}
{%- if system or tools %}
{{- '<|im_start|>system\\n' }}
{%- if system %}{{- text_of(system) }}{%- endif %}
{%- if tools %}
{{- '\\n\\n' if system else '' }}
{{- 'You can call these functions:\\n<tools>\\n' }}
{%- for tool in tools %}{{- tool | tojson + '\\n' }}{%- endfor %}
{{- '</tools>\\nWrite each call as a JSON object with its name and arguments, between <tool_call> and </tool_call>.' }}
{%- endif %}
{{- '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
{%- if message.role != 'system' or not loop.first %}
{{- '<|im_start|>' + message.role + '\\n' }}
{%- if message.reasoning_content %}{{- '<think>\\n' + message.reasoning_content + '\\n</think>\\n\\n' }}{%- endif %}
{{- text_of(message) }}
{%- for call in message.tool_calls or [] %}
{{- '\\n' if message.content or not loop.first else '' }}
{{- '<tool_call>\\n{"name": ' + call.function.name | tojson + ', "arguments": ' }}
{{- call.function.arguments if call.function.arguments is string else call.function.arguments | tojson }}
{{- '}\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""

NAMED = {"chatml": CHATML}
"""Templates that can be chosen by name. `chatml` renders tools and their calls as the `hermes` parser reads them."""

_JINJA = ("{{", "{%")
_GENERATION = re.compile(r"\{%-?\s*(?:end)?generation\s*-?%\}")
_SHOWN_CHARACTERS = 80


def template_faults(key: str, template: str | None, start: StartDir) -> Iterator[str]:
    """Why the template of a config cannot be read, if it cannot."""
    try:
        if template is not None:
            read_template(key, template, start)
    except StartFault as fault:
        yield str(fault)


def read_template(key: str, template: str, start: StartDir | None = None) -> str:
    """The text of a chat template. Empty for a path that only the machine of a batch job can see.

    A value with `{{` or `{%` is the template itself. Any other value is a name in `NAMED` or a path: as the template
    it would print the same text for every conversation.

    Raises:
        StartFault: there is no such file, or it holds no template. The message begins with `key`.
    """
    start = start or StartDir()
    if _is_jinja(template):
        return _checked(key, template)
    path = start.find(template)
    # For text that is too long for a path, `Path` raises and `os.path` says False.
    if os.path.isfile(path):  # noqa: PTH113
        return _read_file(f"{key} = {template!r}", path)
    if template in NAMED:
        return NAMED[template]
    if start.is_here or os.path.isdir(path.parent):  # noqa: PTH112
        near = _nearest(template, path)
        shown = template if len(template) <= _SHOWN_CHARACTERS else f"{template[:_SHOWN_CHARACTERS]}…"
        raise StartFault(
            f"{key} = {shown!r}: no such file, and not Jinja text, which contains {{{{ or {{%; "
            + (f"did you mean {near!r}?" if near else f"built-in names: {', '.join(NAMED)}")
        )
    return ""


def _read_file(place: str, path: Path) -> str:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise StartFault(f"{place}: the file cannot be read: {error}") from error
    if not _is_jinja(text):
        raise StartFault(f"{place}: the file is not Jinja text, which contains {{{{ or {{%")
    return _checked(place, text)


def _checked(place: str, text: str) -> str:
    from jinja2 import Environment, TemplateSyntaxError

    try:
        # Transformers adds the tag `generation`, which marks what the assistant writes.
        Environment(extensions=["jinja2.ext.loopcontrols"], autoescape=False).parse(_GENERATION.sub("", text))
    except TemplateSyntaxError as error:
        raise StartFault(f"{place}: not valid Jinja, line {error.lineno}: {error.message}") from error
    return text


def _is_jinja(text: str) -> bool:
    return any(mark in text for mark in _JINJA)


def _nearest(template: str, path: Path) -> str | None:
    """The file next to `path`, or the known name, that is spelled most like it."""
    if "\n" in template or not os.path.isdir(path.parent):  # noqa: PTH112
        return None
    files = [each.name for each in path.parent.iterdir() if each.is_file()]
    names = {name: str(Path(template).parent / name) for name in files} | {name: name for name in NAMED}
    close = get_close_matches(path.name, names, 1)
    return names[close[0]] if close else None


# The parser of tool calls, by how a chat template writes them.


_MARKS = (
    (("<minimax:tool_call>",), "minimax_m2"),
    (("<|tool_calls_section_begin|>",), "kimi_k2"),
    (("<｜tool▁calls▁begin｜>", "```json"), "deepseek_v3"),
    (("<｜tool▁calls▁begin｜>",), "deepseek_v31"),
    (("<arg_key>",), "glm45"),
    (("<function=",), "qwen3_coder"),
    (("<tool_call>",), "hermes"),
    (("[TOOL_CALLS]",), "mistral"),
    (("<|python_tag|>",), "llama3_json"),
)
"""Marks that a template writes around a call, and vLLM's parser for them. The first whose marks all occur decides: GLM
and Qwen3-Coder write `<tool_call>` too, and DeepSeek V3.1 no longer fences the arguments."""
_FILES = ("chat_template.jinja", "tokenizer_config.json")


def parser_of_template(template: str) -> str | None:
    """The parser for what a chat template writes; None if it writes no tools, or in an unknown form."""
    if "tools" not in template:
        return None
    return next((parser for marks, parser in _MARKS if all(mark in template for mark in marks)), None)


def tool_call_parser(model: ModelConfig, template: str | None) -> str | None:
    """The parser of a served model: the configured one, or with `auto` that of its family, or of its chat template.

    `template` is the model's own, if it is known.
    """
    if model.tool_call_parser != "auto":
        return model.tool_call_parser
    if model.chat_template is not None:
        return parser_of_template(read_template("model.chat_template", model.chat_template))
    return model.chosen_tool_call_parser or (None if template is None else parser_of_template(template))


def model_template(name: str) -> str | None:
    """The chat template in a model's files: those of a folder, or of a hub id, which may be downloaded. None if it has
    none, or if they cannot be read: loading the model then says why."""
    for file in _FILES:
        path = Path(name, file)
        if not Path(name).is_dir():
            downloaded = _downloaded(name, file)
            if downloaded is None:
                continue
            path = downloaded
        if path.is_file() and (text := _template_in(path)) is not None:
            return text
    return None


def _downloaded(name: str, file: str) -> Path | None:
    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(name, file))
    except (OSError, ValueError):  # also of the hub's own errors
        return None


def _template_in(path: Path) -> str | None:
    try:
        text = path.read_text(encoding="utf-8")
        if path.suffix == ".jinja":
            return text
        found: Any = json.loads(text).get("chat_template")
    except (OSError, ValueError, AttributeError):
        return None
    if isinstance(found, list):  # several templates with names
        named = {each.get("name"): each.get("template") for each in found if isinstance(each, dict)}
        found = named.get("tool_use") or named.get("default")
    return found if isinstance(found, str) else None


# Finds what a chat template leaves out of a conversation: keys that change nothing in the rendered text.
#
# Each key is tried on its own. Text is replaced by a marker that must appear; another value is removed, and the text
# must change. A template that refuses the changed conversation reads the key.


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
