"""Renders conversations with the chat template and finds the characters that belong to each message.

A chat template is a program: it may drop, merge or reorder messages. So the template itself is used to find where a
message starts and ends, in one of three ways:

1. The template marks what the assistant generates with `{% generation %}`.
2. The messages before it, rendered with the assistant's header, are a prefix of the whole text. The message starts
   where this prefix ends.
3. The prefix is rendered differently when more messages follow. Stock Qwen3 does this when it drops earlier reasoning.
   Then the conversation is rendered with a marker in place of the message, and the text around the marker is compared.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from prime_rl.trainer.process.errors import DataError
from prime_rl.trainer.sft.data.messages import Conversation, Message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Span = tuple[int, int]
"""Characters [begin, end)."""

_MARK = "QzMarkOfMessagezQ"
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
_COMMENT = re.compile(r"\{#.*?#\}", re.DOTALL)


class UnmaskableSample(Exception):
    """The characters that belong to a message cannot be found."""


@dataclass(frozen=True, slots=True)
class _Chat:
    messages: Sequence[Message]
    kwargs: dict[str, Any]
    text: str
    """The whole conversation, rendered."""


class ChatSpans:
    """Renders conversations and finds the spans of trained messages."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, trained_roles: Mapping[str, bool]) -> None:
        self.tokenizer = tokenizer
        self.trained_roles = trained_roles
        added = tokenizer.added_tokens_decoder.values()
        special = {*tokenizer.all_special_tokens, *(token.content for token in added if token.special)}
        alternatives = "|".join(re.escape(token) for token in sorted(special, key=len, reverse=True)) or "(?!)"
        self._ends_with_special = re.compile(rf"(?:{alternatives})\Z")
        self._special_next = re.compile(rf" ?(?:{alternatives})")

    def __call__(self, conversation: Conversation) -> tuple[str, list[Span]]:
        """Return the text of a conversation and its trained spans, in order.

        An assistant's span is what the assistant generates: from after its header up to and including its end token.
        Spans of other roles include everything written around their messages, also the next assistant's header.

        Raises:
            DataError: the tokenizer has no chat template, or the template refuses the conversation.
            UnmaskableSample: a trained span cannot be found.
        """
        messages, kwargs = conversation.messages, conversation.template_kwargs
        flags = [self.trained_roles[message["role"]] for message in messages]
        if any(flag for flag, message in zip(flags, messages, strict=True) if message["role"] != "assistant"):
            text = self.render(messages, kwargs)
            return text, self._spans(_Chat(messages, kwargs, text))
        if not any(flags):
            return self.render(messages, kwargs), []
        text, marked = self._render_marked(messages, kwargs)
        if marked is not None:
            return text, [(begin, self._settled(text, begin, end)) for begin, end in marked]
        return text, self._spans(_Chat(messages, kwargs, text))

    def ends_by_itself(self, text: str) -> bool:
        """Whether the template has written an end token after the last message."""
        return self._ends_with_special.search(text.rstrip()) is not None

    def _spans(self, chat: _Chat) -> list[Span]:
        generated = self._generated_spans(chat)
        spans, begin = [], 0
        for index, message in enumerate(chat.messages):
            if index in generated:
                start, end = generated[index]
            else:
                start, end = begin, self._end_of_other(chat, index, generated, begin)
            if self.trained_roles[message["role"]]:
                spans.append((start, end))
            begin = end
        return spans

    def _generated_spans(self, chat: _Chat) -> dict[int, Span]:
        """Span of each assistant message, by index."""
        spans, after = {}, 0
        for index, message in enumerate(chat.messages):
            if message["role"] == "assistant":
                start, end = self._prefix_span(chat, index, after) or self._compared_span(chat, index, after)
                spans[index] = start, self._settled(chat.text, start, end)
                after = spans[index][1]
        return spans

    def _end_of_other(self, chat: _Chat, index: int, generated: Mapping[int, Span], begin: int) -> int:
        """Where a message of another role ends. Of neighbours with the same flag, the last one gets the whole text."""
        if index + 1 == len(chat.messages):
            return len(chat.text)
        if index + 1 in generated:
            return generated[index + 1][0]
        flags = [self.trained_roles[message["role"]] for message in chat.messages[index : index + 2]]
        if flags[0] == flags[1]:
            return begin
        end = self._prefix_length(chat, index + 1, add_generation_prompt=False)
        if end is None:
            raise UnmaskableSample
        return end

    def _prefix_span(self, chat: _Chat, index: int, after: int) -> Span | None:
        """The span of an assistant message, found by rendering the messages before it, without and with it."""
        start = self._prefix_length(chat, index, add_generation_prompt=True)
        end: int | None = len(chat.text)
        if index + 1 < len(chat.messages):
            end = self._prefix_length(chat, index + 1, add_generation_prompt=False)
        return None if start is None or end is None or not after <= start <= end else (start, end)

    def _compared_span(self, chat: _Chat, index: int, after: int) -> Span:
        """The span of an assistant message, found by rendering a marker in its place."""
        marked = {**chat.messages[index], "content": _MARK}
        marked.pop("tool_calls", None)
        try:
            text = self.render([*chat.messages[:index], marked, *chat.messages[index + 1 :]], chat.kwargs)
        except DataError as error:
            raise UnmaskableSample from error
        before, mark, behind = text.partition(_MARK)
        if not mark or _MARK in behind or not chat.text.endswith(behind):
            raise UnmaskableSample
        end = len(chat.text) - len(behind)
        common = _common_length(before, chat.text[:end])
        header = self._header(chat.messages[:index], chat.kwargs)
        at = chat.text.rfind(header, after, common) if header else -1
        start = at + len(header) if at >= 0 else common
        if not after <= start <= end or (at < 0 and common < len(before)):
            raise UnmaskableSample
        return start, end

    def _header(self, before: Sequence[Message], kwargs: dict[str, Any]) -> str:
        """The text that the template writes before an assistant message."""
        try:
            without = self.render(before, kwargs)
            with_header = self.render(before, kwargs, add_generation_prompt=True)
        except DataError:
            return ""
        return with_header.removeprefix(without) if with_header.startswith(without) else ""

    def _settled(self, text: str, begin: int, end: int) -> int:
        """Move `end` to just after the end token, over blanks that the template adds or to a token that follows."""
        kept = text[begin:end].rstrip()
        if self._ends_with_special.search(kept):
            return begin + len(kept)
        following = self._special_next.match(text, end)
        return following.end() if following else end

    def _prefix_length(self, chat: _Chat, count: int, *, add_generation_prompt: bool) -> int | None:
        """Length of the first `count` messages in the text; None if their own rendering is not a prefix of it."""
        try:
            start = self.render(chat.messages[:count], chat.kwargs, add_generation_prompt=add_generation_prompt)
        except DataError:
            return None
        return len(start) if chat.text.startswith(start) else None

    def render(self, messages: Sequence[Message], kwargs: dict[str, Any], add_generation_prompt: bool = False) -> str:
        """The text of messages. `kwargs` are the template's other arguments.

        Raises:
            DataError: the tokenizer has no chat template, or the template refuses the messages.
        """
        self._check_template()
        try:
            text = self.tokenizer.apply_chat_template(
                list(messages), tokenize=False, add_generation_prompt=add_generation_prompt, **kwargs
            )
        except Exception as error:
            raise DataError(f"the chat template refuses the conversation: {error}") from error
        assert isinstance(text, str), "one conversation is one text"
        return text

    def _render_marked(self, messages: Sequence[Message], kwargs: dict[str, Any]) -> tuple[str, list[Span] | None]:
        """The text, and the spans that the template marks as generated; None if the template has no such marks."""
        self._check_template()
        template = self.tokenizer.get_chat_template(tools=kwargs.get("tools"))
        if not _GENERATION.search(_COMMENT.sub("", template)):
            return self.render(messages, kwargs), None
        from transformers.utils.chat_template_utils import render_jinja_template

        try:
            answer: object = render_jinja_template(
                conversations=[list(messages)],
                chat_template=template,
                return_assistant_tokens_mask=True,
                **{**self.tokenizer.special_tokens_map, **kwargs},
            )
        except Exception as error:
            raise DataError(f"the chat template refuses the conversation: {error}") from error
        # Its annotation says str.
        texts, spans = cast("tuple[list[str], list[list[Span]]]", answer)
        return texts[0], [(begin, end) for begin, end in spans[0] if begin < end]

    def _check_template(self) -> None:
        if self.tokenizer.chat_template is None:
            raise DataError("the tokenizer has no chat template: set tokenizer.chat_template")


def _common_length(one: str, other: str) -> int:
    """Length of the longest common prefix."""
    limit = min(len(one), len(other))
    return next((index for index in range(limit) if one[index] != other[index]), limit)
