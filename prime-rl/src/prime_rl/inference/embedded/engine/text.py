"""Tokenization: encoding, chat templates, incremental detokenization, stop strings, and tool calls in a text."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

from jinja2 import TemplateError
from transformers import AutoTokenizer, GenerationConfig, PreTrainedTokenizerBase

from prime_rl.checks.chat_templates import read_template
from prime_rl.checks.time_limit import MAX_RENDER_S, OutOfTime, time_limit
from prime_rl.inference.embedded.errors import EngineError, TemplateFailed
from prime_rl.transport.images import ImageReader, image_reader
from prime_rl.utils.conversations import plain_messages
from prime_rl.utils.errors import StartFault, first_line
from prime_rl.utils.images import is_image

_REPLACEMENT = "\ufffd"
_MOST_BYTES = 4
"""Bytes of a character in UTF-8, and so the largest number of tokens that it takes."""
_SHORT = [{"role": "user", "content": "hello"}]
_WORD = "hello"
_WITH_IMAGE = [{"role": "user", "content": [{"type": "image_url"}, {"type": "text", "text": _WORD}]}]


class Text:
    """A model's tokenizer. Used by the HTTP thread and, for stop strings, by the engine's thread."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, eos_token_ids: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._token_texts: dict[int, str] = {}
        self.eos_token_ids = eos_token_ids
        self.is_in_parts = False
        """Whether the chat template gets the content of every message as a list of parts, as in training with images.
        """
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is not None:
            # Set only here: changing them while another thread decodes raises "Already borrowed".
            backend.no_truncation()
            backend.no_padding()

    @property
    def template(self) -> str | None:
        """The chat template in use. Of several, the one for tools."""
        found = self._tokenizer.chat_template
        return found.get("tool_use", found.get("default")) if isinstance(found, dict) else found

    @cached_property
    def _special_token_ids(self) -> frozenset[int]:
        return frozenset(self._tokenizer.all_special_ids)

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        return self._tokenizer(text, add_special_tokens=add_special_tokens)["input_ids"]

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        template_kwargs: Mapping[str, Any],
    ) -> str:
        """Render the messages with the chat template.

        Raises:
            TemplateFailed: the template rejects the messages; the message includes the template's error.
        """
        try:
            plain = plain_messages(messages, self.template)
            if self.is_in_parts:
                plain = [message | {"content": _parts_of(message["content"])} for message in plain]
            rendered = self._tokenizer.apply_chat_template(
                plain, tools=[dict(tool) for tool in tools] if tools else None, tokenize=False, **template_kwargs
            )
        except (TemplateError, ValueError, TypeError, KeyError) as exc:
            raise TemplateFailed(f"The chat template rejected the messages: {exc}") from exc
        except Exception as exc:  # a template computes with what the request says, so anything can fail
            raise TemplateFailed(f"The chat template rejected the messages: {exc!r}") from exc
        return str(rendered)

    def image_reader(self, name: str) -> ImageReader:
        """The reader of images of the checkpoint `name`. From now on the chat template gets parts.

        Raises:
            StartFault: the checkpoint has no image processor, or the template writes no images.
        """
        try:
            reader = image_reader(name, self._tokenizer)
        except (OSError, ValueError, KeyError, ImportError) as exc:
            raise StartFault(first_line(exc)) from exc
        self.is_in_parts = True
        try:
            with time_limit(MAX_RENDER_S):
                written = self.render_chat(_WITH_IMAGE, None, {"add_generation_prompt": True})
        except (TemplateFailed, OutOfTime) as exc:
            written = str(exc)
        if written.count(reader.family.placeholder) != 1 or _WORD not in written or "'text'" in written:
            self.is_in_parts = False
            raise StartFault(f"its chat template does not write {reader.family.placeholder} for an image")
        return reader

    def refuse_endless_template(self, limit_s: float = MAX_RENDER_S) -> None:
        """Render a short message. A template that refuses it may render others.

        Raises:
            EngineError: it takes longer than `limit_s`.
        """
        try:
            with suppress(TemplateFailed), time_limit(limit_s):
                self.render_chat(_SHORT, None, {"add_generation_prompt": True})
        except OutOfTime:
            raise EngineError(
                f"the chat template of {self._tokenizer.name_or_path} takes more than {limit_s:g} s for one short "
                "message: check it for a loop, or set model.chat_template"
            ) from None

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        text = self._tokenizer.decode(
            list(token_ids), skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
        )
        assert isinstance(text, str), "one sequence is one text"
        return text

    def token_text(self, token_id: int) -> str:
        """The text of a single token, including special tokens."""
        if token_id not in self._token_texts:
            self._token_texts[token_id] = self.decode([token_id], skip_special_tokens=False)
        return self._token_texts[token_id]

    def detokenizer(self, skip_special_tokens: bool) -> IncrementalDetokenizer:
        return IncrementalDetokenizer(lambda token_ids: self.decode(token_ids, skip_special_tokens))

    def stop_matcher(self, stops: Sequence[str], skip_special_tokens: bool) -> StopStringMatcher:
        return StopStringMatcher(stops, lambda token_ids: self.decode(token_ids, skip_special_tokens))


def _parts_of(content: Any) -> list[Any]:
    """The content of a message as parts, of which those with an image only say that it is here."""
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    return [{"type": "image"} if is_image(part) else part for part in content]


class IncrementalDetokenizer:
    """Detokenizes a growing token sequence piece by piece."""

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._pending: list[int] = []
        self._context: list[int] = []

    def push(self, tokens: Sequence[int]) -> str:
        """Add tokens. Returns the text they add, or "" while the last character is still missing bytes."""
        self._pending += tokens
        before = self._decode(self._context)
        text = self._decode(self._context + self._pending)
        num_complete = len(self._pending)
        if text.endswith(_REPLACEMENT):
            # Only the last tokens can belong to a character that later ones complete. Bytes that are part of none would
            # otherwise be decoded again and again.
            num_complete = max(num_complete - _MOST_BYTES, 0)
            complete = self._decode(self._context + self._pending[:num_complete])
            # Several bytes may have one replacement together, and are not torn apart.
            if not num_complete or complete + self._decode(self._pending[num_complete:]) != text:
                return ""
            text = complete
        self._context, self._pending = self._pending[:num_complete], self._pending[num_complete:]
        return text[len(before) :]


class StopStringMatcher:
    """Searches the text of one sample for its stop strings."""

    def __init__(self, stops: Sequence[str], decode: Callable[[Sequence[int]], str]) -> None:
        self._stops = stops
        self._detokenizer = IncrementalDetokenizer(decode)
        self._keep = max(map(len, stops)) - 1
        self._tail = ""

    def push(self, token: int) -> str | None:
        """Add the next token. Returns the stop string that it completes, if any."""
        self._tail += self._detokenizer.push([token])
        found = min((stop for stop in self._stops if stop in self._tail), key=self._tail.index, default=None)
        self._tail = self._tail[-self._keep :] if self._keep else ""
        return found


def load_text(
    name: str, trust_remote_code: bool, generation: GenerationConfig, chat_template: str | None = None
) -> Text:
    """Load a model's tokenizer. Its end-of-sequence tokens are the tokenizer's own and those of `generation`.

    `chat_template`, as in a config, replaces the tokenizer's own.

    Raises:
        EngineError: the model has no tokenizer, or there is no such template.
    """
    try:
        tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, ImportError) as exc:
        raise EngineError(f"cannot load the tokenizer of model {name!r}: {first_line(exc)}") from exc
    if len(tokenizer) <= len(tokenizer.all_special_ids):
        # If there are no tokenizer files, Transformers returns an empty tokenizer of the model's class.
        raise EngineError(f"model {name!r} has no tokenizer files")
    if chat_template is not None:
        try:
            tokenizer.chat_template = read_template("model.chat_template", chat_template)
        except StartFault as fault:
            raise EngineError(str(fault)) from fault
    listed = generation.eos_token_id
    ends = {tokenizer.eos_token_id, *(listed if isinstance(listed, list) else [listed])}
    return Text(tokenizer, frozenset(token for token in ends if token is not None))


def generation_defaults(directory: Path) -> GenerationConfig:
    """Load the model's `generation_config.json`, or an empty config if there is none."""
    if (directory / "generation_config.json").is_file():
        return GenerationConfig.from_pretrained(directory)
    return GenerationConfig()


# Tool calls in generated text. Formats and validity rules follow vLLM's parsers of the same names.


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
