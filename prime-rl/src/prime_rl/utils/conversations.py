"""Reads a row of data as a conversation for a chat template, or as plain text.

SFT, the prompts of RL and evaluation, the inference server and `rollouts --to-sft` all read messages here, so one
conversation is rendered in the same way wherever it comes from.

    read_row({"instruction": "Translate.", "input": "fever", "output": "Fieber"})

Nulls: an optional key of a message or a call that is null is absent. A null inside a call's arguments or a tool's
schema is a value and stays. Columnar files fill missing keys with nulls: `utils/rows.py` drops those when it reads.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from prime_rl.utils.images import image_parts, is_image, source_of
from prime_rl.utils.rows import parsed

Row = Mapping[str, Any]
Message = dict[str, Any]

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
WITH_EVERY_FORMAT = ("tools", "chat_template_kwargs")
IMAGE_COLUMNS = ("images", "image")
"""Columns with a row's images. Of two that have some, the first is read."""
IMAGE_MARK = "<image>"
"""LLaVA's place of an image in a text."""

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
TRAIN_KEYS = ("weight", "train", "training")
"""Keys of a message that say whether it is trained: OpenAI's `weight`, axolotl's `train` and `training`."""

_RESERVED = frozenset(
    "conversation messages chat_template add_generation_prompt continue_final_message tokenize padding truncation "
    "max_length return_tensors return_dict return_assistant_tokens_mask tokenizer_kwargs".split()
)
"""Arguments of the rendering itself. A row's own template would be a program that came with the data."""


class RowFault(ValueError):
    """A row has no conversation or text to train on. The message is one line, without the place of the row."""


class NamedRow(dict[str, Any]):
    """A row under our names for its columns, which knows the user's names, and the folder of its file."""

    def __init__(self, values: Mapping[str, Any], theirs: Mapping[str, str], folder: Path = Path()) -> None:
        super().__init__(values)
        self.theirs = dict(theirs)
        self.folder = folder


def column_name(row: Row, ours: str) -> str:
    """The user's name of a column, for messages."""
    return row.theirs.get(ours, ours) if isinstance(row, NamedRow) else ours


@dataclass(frozen=True, slots=True)
class Conversation:
    """Chat messages and the other arguments of the chat template."""

    messages: list[Message]
    template_kwargs: dict[str, Any] = field(default_factory=dict)
    """`tools`, and the row's `chat_template_kwargs`."""
    trained: tuple[bool | None, ...] = ()
    """Whether each message is trained, where the row says so. None leaves it to the role, as does an empty tuple."""
    folder: Path = Path()
    """The folder of the row's file, where paths of images begin."""


@dataclass(frozen=True, slots=True)
class PlainText:
    """Text without a chat template. The prompt counts as the user's."""

    prompt: str | None
    """None if the whole text is trained, whatever `data.loss_mask` says."""
    completion: str


def read_row(row: Row, section: str = "data", *, with_images: bool = False) -> Conversation | PlainText:
    """Read a row of any of `FORMATS`. `section` is the config's section with the dataset, for messages.

    With images, the content of a message that has some is a list of `{"type": "text", "text": …}` and
    `{"type": "image", "image": …}`, whatever form the row has them in; `utils/images.py` reads these. Without, a row
    with images is refused.

    Raises:
        RowFault: a field is missing, empty or malformed.
    """
    filled = {name: value for name, value in row.items() if not _is_blank(name, value)}
    kind = next((kind for kind in FORMATS if all(name in filled for name in kind)), None)
    if kind is None:
        raise RowFault(_what_is_missing(row, filled))
    images = _images_of(row, filled)
    if images and (not with_images or kind == ("text",)):
        name = next(name for name in IMAGE_COLUMNS if name in filled)
        how = f"; to train on the text alone, name its column in {section}.columns" if not with_images else ""
        raise RowFault(f"`{column_name(row, name)}` has images: {_NO_CHAT if with_images else only_text(section)}{how}")
    if kind == ("text",):
        return PlainText(None, _whole_text(row, "text", filled["text"]))
    if kind[0] == "prompt":
        filled = {name: listed(value) if name in kind else value for name, value in filled.items()}
    if kind == ("prompt", "completion") and all(isinstance(filled[name], str) for name in kind):
        if images:
            raise RowFault(f"`prompt` and `completion` are plain text, and the row has images: {_NO_CHAT}")
        return PlainText(filled["prompt"], _whole_text(row, "completion", filled["completion"]))
    asked, answered = _parts(kind, filled, row)
    if not asked and not answered:
        raise RowFault("the conversation has no messages")
    if kind != ("prompt", "completion") and not is_missing(filled.get("system")) and filled["system"] != "":
        asked = [{"role": "system", "content": filled["system"]}, *asked]
    raw = [*asked, *answered]
    messages = [
        _message(number, message, section, with_images=with_images) for number, message in enumerate(raw, start=1)
    ]
    if with_images:
        _place_images(messages, images)
    # Earlier answers in a prompt are context: only the completion is meant to be learned.
    in_prompt = len(asked) if kind[0] == "prompt" else 0
    trained = tuple(
        _is_trained(number, message, is_context=number <= in_prompt and messages[number - 1]["role"] == "assistant")
        for number, message in enumerate(raw, start=1)
    )
    for number, (message, flag) in enumerate(zip(messages, trained, strict=True), start=1):
        if message["role"] == "assistant" and flag is not False and _says_nothing(message):
            name = "" if kind[0] in ("messages", "conversations", "prompt") else column_name(row, kind[-1])
            name = column_name(row, "response") if kind == ("prompt", "response") else name
            raise RowFault(f"`{name}` is empty" if name else f"message {number}: the assistant message is empty")
    folder = row.folder if isinstance(row, NamedRow) else Path()
    return Conversation(messages, _template_kwargs(filled), trained if set(trained) - {None} else (), folder)


def _what_is_missing(row: Row, filled: Row) -> str:
    """The column of the likeliest format that has no value, or the columns that there are."""
    near = [kind for kind in FORMATS if all(name in row for name in kind)]
    if not near and ("prompt" in filled or "completion" in filled):
        near = [("prompt", "completion")]
    if not near:
        return f"found {', '.join(column_name(row, name) for name in filled) or 'no field at all'}; expected {EXPECTED}"
    likeliest = max(near, key=lambda kind: sum(name in filled for name in kind))
    missing = next(name for name in likeliest if name not in filled)
    return f"`{column_name(row, missing)}` is missing"


def _is_blank(name: str, value: Any) -> bool:
    # An empty cell of a CSV file has no messages; an empty answer is told apart later.
    return is_missing(value) or (name in ("messages", "conversations") and isinstance(value, str) and not value.strip())


def is_missing(value: Any) -> bool:
    """Whether a cell has no value: null, or the NaN that pandas writes for it."""
    return value is None or (isinstance(value, float) and math.isnan(value))


def prompt_messages(messages: Sequence[Any]) -> list[Message]:
    """Messages of a prompt for RL or evaluation, read as SFT reads those of a row.

    Calls have OpenAI's form, with arguments as JSON text: rows of a table with objects would get each other's keys.
    Calls and answers of tools without an id get one, because the form requires it.

    Raises:
        RowFault: a message is malformed.
    """
    read = plain_messages([_message(number, message, None) for number, message in enumerate(messages, start=1)])
    pending: list[str] = []
    for number, message in enumerate(read):
        for place, call in enumerate(message.get("tool_calls") or []):
            call.update({"type": "function", "id": call.get("id") or f"call_{number}_{place}"})
            pending.append(call["id"])
            arguments = call["function"].get("arguments", {})
            if not isinstance(arguments, str):
                call["function"]["arguments"] = json.dumps(arguments, ensure_ascii=False)
        if message["role"] == "tool":
            first = pending.pop(0) if pending else "call"
            message.setdefault("tool_call_id", first)
    return read


def question_of(row: Row) -> Any:
    """The question of a row with `instruction`: text, or messages if it has earlier turns or a system message.

    Raises:
        RowFault: the history is malformed.
    """
    text = _instruction(row)
    earlier = [] if is_missing(row.get("history")) else _history(row["history"])
    system = "" if is_missing(row.get("system")) else row.get("system")
    if not earlier and not system:
        return text
    opening = [{"role": "system", "content": system}] if system else []
    return [*opening, *earlier, {"role": "user", "content": text}]


def _instruction(row: Row) -> str:
    parts = (row.get(name) for name in ("instruction", "input"))
    return "\n\n".join(str(part) for part in parts if not is_missing(part) and part != "")


def _parts(kind: tuple[str, ...], filled: Row, row: Row) -> tuple[list[Any], list[Any]]:
    """The messages of a row: those that come before, and those of the answer."""
    if kind in (("messages",), ("conversations",)):
        messages = decoded(filled[kind[0]], kind[0])
        if not isinstance(messages, list):
            raise RowFault("`messages` must be a list of messages")
        return [], messages
    if kind == ("instruction", "output"):
        return [], [*_history(filled.get("history")), *_turn(_instruction(filled), filled["output"])]
    prompt, answer = filled["prompt"], filled[kind[1]]
    if kind == ("prompt", "response"):
        asked = prompt if isinstance(prompt, list) else _turn(prompt)
        return asked, [{"role": "assistant", "content": answer}]
    if not (isinstance(prompt, list) and isinstance(answer, list)):
        names = " and ".join(f"`{column_name(row, name)}`" for name in kind)
        raise RowFault(f"{names} must both be message lists or both strings")
    return prompt, answer


def _whole_text(row: Row, ours: str, text: Any) -> str:
    name = column_name(row, ours)
    if not isinstance(text, str):
        raise RowFault(f"`{name}` must be a string, got {text!r}")
    if not text.strip():
        raise RowFault(f"`{name}` is empty")
    return text


def _says_nothing(message: Message) -> bool:
    return not (message["content"].strip() or message.get("tool_calls") or message.get("reasoning_content"))


def decoded(value: Any, what: str) -> Any:
    """The value, or what its text holds: columnar files and CSV store nested values as JSON."""
    if not isinstance(value, str):
        return value
    try:
        return parsed(value)
    except ValueError as error:
        raise RowFault(f"{what}: not valid JSON: {getattr(error, 'msg', error)}") from error


def listed(value: Any) -> Any:
    """A list of messages that a CSV or columnar file holds as JSON text; any other value as it is."""
    if not (isinstance(value, str) and value.lstrip().startswith("[{")):
        return value
    try:
        found = parsed(value)
    except ValueError:
        return value
    return found if is_chat(found) else value


def is_chat(value: Any) -> bool:
    """Whether a value is a list of messages, not of other objects."""
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(each, Mapping) and {"role", "from"} & each.keys() for each in value)
    )


def _turn(question: Any, *answers: Any) -> list[Message]:
    return [{"role": "user", "content": question}, *({"role": "assistant", "content": each} for each in answers)]


def _history(pairs: Any) -> list[Message]:
    """Earlier turns, as pairs of question and answer."""
    pairs = decoded(pairs or [], "`history`")
    if not isinstance(pairs, list) or not all(isinstance(pair, list) and len(pair) == 2 for pair in pairs):
        raise RowFault(f"`history` must be a list of pairs of question and answer, got {pairs!r}")
    return [message for pair in pairs for message in _turn(*pair)]


def _is_trained(number: int, message: Any, is_context: bool) -> bool | None:
    """Whether the message itself says that it is trained, or not. None leaves it to its role."""
    for name in TRAIN_KEYS:
        value = message.get(name)
        if is_missing(value):
            continue
        if value not in (0, 1):
            raise RowFault(
                f"message {number}: `{name}` must be 0 or 1, got {value!r}: a message is trained or it is not"
            )
        # OpenAI's weight of 1 is the default, and trains no other role than the assistant.
        return None if name == "weight" and value and not is_context else bool(value)
    return False if is_context else None


# Messages, as every program of ours hands them to a chat template.


def plain_messages(messages: Sequence[Mapping[str, Any]], template: str | None = None) -> list[Message]:
    """Messages as chat templates expect them. `template` decides whether `developer` is a role that it knows."""
    knows_developer = template is not None and "developer" in template
    return [_plain_message(message, knows_developer) for message in messages]


def _plain_message(message: Mapping[str, Any], knows_developer: bool) -> Message:
    """Without null keys, with its content as one text, and the arguments of its calls as objects."""
    plain = {key: value for key, value in message.items() if value is not None}
    if plain.get("role") == "developer" and not knows_developer:
        plain["role"] = "system"
    if isinstance(plain.get("content"), list):
        texts = [part.get("text") if isinstance(part, Mapping) else part for part in plain["content"]]
        if all(isinstance(text, str) for text in texts):  # images stay parts, which the caller refuses
            plain["content"] = "\n".join(map(str, texts))
    plain.setdefault("content", "")
    if calls := plain.get("tool_calls"):
        plain["tool_calls"] = [plain_call(call) for call in calls]
    return plain


def plain_call(call: Mapping[str, Any]) -> dict[str, Any]:
    """A tool call without null keys, with its arguments as an object. A call without arguments has none: `{}`.

    Models may write invalid JSON, which the template receives unchanged.
    """
    plain = {key: value for key, value in call.items() if value is not None}
    function = plain.get("function")
    if not isinstance(function, Mapping):
        return plain
    function = {key: value for key, value in function.items() if value is not None}
    arguments = function.get("arguments", "")
    if isinstance(arguments, str):
        try:
            arguments = parsed(arguments) if arguments.strip() else {}
        except ValueError:
            return {**plain, "function": function}
    return {**plain, "function": {**function, "arguments": {} if arguments is None else arguments}}


# Messages of training data, which may have other names, and are checked.


def _message(number: int, message: Any, section: str | None, *, with_images: bool = False) -> Message:
    """A message of a row, under our names and checked. Without `section`, no key of the config names others.

    Raises:
        RowFault: it has no role, no content, or something that is not text.
    """
    if not isinstance(message, Mapping):
        raise RowFault(f"message {number}: found {message!r}; expected an object with `role` and `content`")
    given = {key: value for key, value in message.items() if not is_missing(value) and key not in TRAIN_KEYS}
    renamed = _as_openai(number, given)
    role = renamed.get("role")
    if role is None:
        keys = ", ".join(f"`{name}`" for name in message)
        raise RowFault(
            f"message {number}: found the keys {keys or '(none)'}; expected `role` and `content`, or `from` and "
            f"`value`" + (f". Name others in {section}.columns" if section else "")
        )
    if role not in (*ROLES, "developer"):
        known = ", ".join((*ROLES, *OTHER_NAMES))
        others = f"; map others in {section}.roles" if section else ""
        raise RowFault(f"message {number}: unknown role {role!r}: known are {known}{others}")
    if "content" not in renamed:
        if role != "assistant" or not ("tool_calls" in renamed or "reasoning_content" in renamed):
            raise RowFault(f"message {number}: the {role} message has no `content`")
        renamed["content"] = ""
    renamed["content"] = _content(number, renamed["content"], with_images, section)
    if role == "assistant" and not isinstance(renamed["content"], str):
        raise RowFault(f"message {number}: an answer of the assistant has an image: models answer with text")
    if "tool_calls" in renamed:
        renamed["tool_calls"] = _tool_calls(number, renamed["tool_calls"])
    (plain,) = plain_messages([renamed], "developer")
    return plain


def _as_openai(number: int, message: Message) -> Message:
    """A message with `role` and `content`, and our name of its role. ShareGPT calls them `from` and `value`."""
    for theirs, ours in (("from", "role"), ("value", "content")):
        if theirs in message and ours not in message:
            message[ours] = message.pop(theirs)
    role = message.get("role")
    if role == "function_call" and "content" in message:
        message["role"] = "assistant"
        call = decoded(message.pop("content"), f"message {number}: function_call")
        message["tool_calls"] = call if isinstance(call, list) else [call]
    elif "function_call" in message and role == "assistant":
        # OpenAI's older form of one call.
        call = decoded(message.pop("function_call"), f"message {number}: function_call")
        message.setdefault("tool_calls", [call])
    elif isinstance(role, str) and role in OTHER_NAMES and role != "developer":
        message["role"] = OTHER_NAMES[role]
    return message


def _content(number: int, content: Any, with_images: bool, section: str | None) -> str | list[dict[str, Any]]:
    """The text of a message, or its texts and images. Texts without an image are joined by newlines, as in inference.

    An image without a source has None for one, or its number among the row's images.
    """
    parts: list[dict[str, Any]] = []
    for part in content if isinstance(content, list) else [content]:
        text = part.get("text") if isinstance(part, Mapping) else part
        if isinstance(text, str) and not is_image(part):
            parts.append({"type": "text", "text": text})
        elif isinstance(part, Mapping) and isinstance(content, list):
            if not (with_images and is_image(part)):
                only = ONLY_IMAGES if with_images else only_text(section)
                raise RowFault(f"message {number}: a part of type {part.get('type')!r}: {only}")
            source = source_of(part)
            parts.append({"type": "image", "image": part.get("index") if source is None else source})
        else:
            raise RowFault(f"message {number}: `content` must be text, or a list of parts of text, got {content!r}")
    return parts if any(map(is_image, parts)) else "\n".join(part["text"] for part in parts)


def _tool_calls(number: int, calls: Any) -> list[dict[str, Any]]:
    calls = decoded(calls, f"message {number}: tool_calls")
    if not isinstance(calls, list) or not all(isinstance(call, Mapping) for call in calls):
        raise RowFault(f"message {number}: `tool_calls` must be a list of objects")
    return [_tool_call(number, call) for call in calls]


def _tool_call(number: int, call: Mapping[str, Any]) -> dict[str, Any]:
    """A call in OpenAI's form. ShareGPT and some datasets leave out the object `function` around it."""
    if "function" not in call and "name" in call:
        call = {"type": "function", "function": dict(call)}
    function = call.get("function")
    if isinstance(function, Mapping) and isinstance(function.get("arguments"), str) and function["arguments"].strip():
        decoded(function["arguments"], f"message {number}: tool call arguments")
    return plain_call(call)


def _template_kwargs(filled: Row) -> dict[str, Any]:
    kwargs = decoded(filled.get("chat_template_kwargs") or {}, "chat_template_kwargs")
    if not isinstance(kwargs, Mapping):
        raise RowFault("`chat_template_kwargs` must be an object")
    kwargs = {name: value for name, value in kwargs.items() if value is not None}
    if reserved := sorted(_RESERVED & kwargs.keys()):
        raise RowFault(f"`chat_template_kwargs` sets {reserved[0]}, which rows may not set")
    if tools := tools_of(filled):
        kwargs["tools"] = tools
    return kwargs


def tools_of(row: Row) -> list[dict[str, Any]]:
    """The function schemas in `tools`; empty without any.

    Raises:
        RowFault: the column holds something else.
    """
    if is_missing(row.get("tools")) or not row["tools"]:
        return []
    tools = decoded(row["tools"], "tools")
    if not isinstance(tools, list) or not all(isinstance(tool, Mapping) for tool in tools):
        raise RowFault("`tools` must be a list of function schemas, or such a list as JSON text")
    return [dict(tool) for tool in tools]


# Images in rows and messages.


ONLY_TEXT = "only parts of text can be trained on without [model.vision]"
ONLY_IMAGES = "only parts of text and images can be trained on"
_NO_CHAT = "write messages, in which each image has its place"
NO_IMAGES = "the model reads text alone: set [model.vision], or use an environment of text"


def only_text(section: str | None) -> str:
    """Why images of a dataset cannot be trained on. Only SFT's own data can have some."""
    is_of_sft = section in (None, "data", "val.data")
    return ONLY_TEXT if is_of_sft else f"{section} is trained as text alone, also with [model.vision]"


def split_images(messages: Sequence[Message]) -> tuple[list[Message], list[Any]]:
    """Messages that `read_row` has read, with parts that only say where an image is, and the images in order."""
    images: list[Any] = []
    marked: list[Message] = []
    for message in messages:
        content = message["content"]
        if isinstance(content, list):
            images += [part["image"] for part in content if is_image(part)]
            content = [{"type": "image"} if is_image(part) else part for part in content]
        marked.append({**message, "content": content})
    return marked, images


def _images_of(row: Row, filled: Row) -> list[Any]:
    """The images in columns of a row: a path, bytes, or what `datasets` writes; one, or a list."""
    for name in IMAGE_COLUMNS:
        value = filled.get(name)
        if isinstance(value, str) and value.lstrip().startswith("["):
            value = decoded(value, f"`{column_name(row, name)}`")  # a cell of a CSV file
        values = value if isinstance(value, list) else [value]
        if found := [each for each in values if not (is_missing(each) or each == "")]:
            if len(found) < len(values):
                at = next(number for number, each in enumerate(values, 1) if is_missing(each) or each == "")
                raise RowFault(f"`{column_name(row, name)}` has {len(values)} images, and number {at} is missing")
            return found
    return []


def _place_images(messages: list[Message], images: Sequence[Any]) -> None:
    """Put the images of a row's columns where its messages say.

    Places are parts `{"type": "image"}` without a source, as TRL has them, or `<image>` in texts, as LLaVA does.
    Without places the images come before the text of the first message of the user, as in TRL.

    Raises:
        RowFault: there are not as many places as images, as in rows whose images are in a column of another name.
    """
    parts = [part for message in messages if isinstance(message["content"], list) for part in message["content"]]
    own = [part for part in parts if is_image(part)]
    places = [part for part in own if part["image"] is None or isinstance(part["image"], int)]
    if not own:
        for message in messages:
            if message["role"] != "assistant" and IMAGE_MARK in (message["content"] or ""):
                message["content"] = _split_at_marks(message["content"])
                places += filter(is_image, message["content"])
        first = next((each for each in messages if each["role"] == "user"), None)
        if images and not places and first is not None:
            places = [{"type": "image", "image": None} for _ in images]
            first["content"] = [*places, *_split_at_marks(first["content"])]
    has_numbers = bool(places) and all(isinstance(part["image"], int) for part in places)
    order = [part["image"] if has_numbers else at for at, part in enumerate(places)]
    if set(order) != set(range(len(images))):
        raise RowFault(f"the messages have places for {len(places)} images, and the row has {len(images)}")
    for part, index in zip(places, order, strict=True):
        part["image"] = images[index]


def _split_at_marks(text: str) -> list[dict[str, Any]]:
    """The texts around the marks, and an image without a source for each mark."""
    first, *others = text.split(IMAGE_MARK)
    pieces: list[dict[str, Any]] = [{"type": "text", "text": first}]
    for each in others:
        pieces += [{"type": "image", "image": None}, {"type": "text", "text": each}]
    return [piece for piece in pieces if is_image(piece) or piece["text"]]


def has_image(messages: Any) -> bool:
    """Whether a conversation has an image. A prompt of plain text has none."""
    return bool(image_parts(messages))


def first_row_with_image(rows: Sequence[Any], prompt_of: Callable[[int], Any]) -> int | None:
    """The first row whose prompt has an image. Prompts of a `Dataset` that can only hold text are not read."""
    features = getattr(rows, "features", None)
    if features is not None:
        feature = features.get("prompt")
        if feature is None or _is_text(feature) or _is_text(_content_of(feature)):
            return None
    return next((row for row in range(len(rows)) if has_image(prompt_of(row))), None)


def _content_of(feature: Any) -> Any:
    """The feature of a message's `content`, in the feature of a list of messages."""
    message = feature[0] if isinstance(feature, list) and feature else getattr(feature, "feature", None)
    return message.get("content") if isinstance(message, Mapping) else None


def _is_text(feature: Any) -> bool:
    return getattr(feature, "dtype", None) in ("string", "large_string")
