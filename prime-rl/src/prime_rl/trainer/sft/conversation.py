"""From a row of the dataset to tokens, and to the knowledge which of them are trained on."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jinja2
import numpy as np
from transformers import PreTrainedTokenizerBase

from prime_rl.configs.sft import LossMaskConfig
from prime_rl.trainer.errors import DataError, ModelError

Message = dict[str, Any]


class UnmaskableSample(Exception):
    """The chat template renders the start of a conversation differently once more follows, so no message's tokens can
    be told from its neighbour's. Stock Qwen3 does so when it drops earlier reasoning."""


@dataclass(frozen=True, slots=True)
class TokenizedSample:
    """n tokens and, for each, whether the model is trained to predict it."""

    token_ids: np.ndarray
    """int32 [n]."""
    is_trained: np.ndarray
    """bool [n]."""


@dataclass(frozen=True, slots=True)
class Conversation:
    """Either chat messages, or plain text that is trained from some character on."""

    messages: list[Message]
    template_kwargs: dict[str, Any]
    text: tuple[str, str] | None = None
    """Prompt and completion of a row that holds strings; they are joined without a chat template."""


def check_columns(name: str, row: Mapping[str, Any]) -> None:
    """Check that a row has a conversation.

    Raises:
        DataError: it has neither `messages` nor `prompt` and `completion`; names the columns it has.
    """
    if "messages" in row or ("prompt" in row and "completion" in row):
        return
    raise DataError(
        f"data.name = {name} has no conversations: rows need `messages`, or `prompt` and `completion`; "
        f"the columns are {', '.join(row) or 'none'}"
    )


def conversation_of(row: Mapping[str, Any]) -> Conversation:
    """Read a row: `messages`, or `prompt` and `completion` as message lists or strings; and `tools`.

    Raises:
        DataError: a field has another form.
    """
    kwargs = dict(_without_nulls(row.get("chat_template_kwargs") or {}))
    if row.get("tools"):
        kwargs["tools"] = _decoded(row["tools"], "tools")
    if row.get("messages") is not None:
        parts = [row["messages"]]
    else:
        parts = [row.get("prompt"), row.get("completion")]
        if all(isinstance(part, str) for part in parts):
            return Conversation([], {}, text=(parts[0], parts[1]))
    if not all(isinstance(part, list) for part in parts):
        raise DataError("`prompt` and `completion` must both be message lists or both be strings")
    messages = [_message(message) for part in parts for message in part]
    if not messages:
        raise DataError("the conversation has no messages")
    return Conversation(messages, kwargs)


class ConversationTokenizer:
    """Tokenizes conversations with the tokenizer's chat template, and marks the tokens of the trained roles.

    The conversation is rendered and tokenized once. Where the flag changes from one message to the next, the template
    is asked for the text up to there, which must be a prefix of the whole; a token belongs to the message in which it
    starts. A generation prompt (the assistant's header) counts to the message before it.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, loss_mask: LossMaskConfig) -> None:
        if not tokenizer.is_fast:
            raise ModelError(f"{type(tokenizer).__name__} does not say where its tokens start: use a fast tokenizer")
        self.tokenizer = tokenizer
        self.trained_roles = {role: getattr(loss_mask, role) for role in ("system", "user", "assistant", "tool")}

    def __call__(self, row: Mapping[str, Any]) -> TokenizedSample:
        """Tokenize a row. A sequence without the end token gets one, trained.

        Raises:
            DataError: the row is no conversation, has an unknown role, or the tokenizer lacks a chat template.
            UnmaskableSample: see there.
        """
        conversation = conversation_of(row)
        is_plain = conversation.text is not None
        text, spans = self._join(*conversation.text) if is_plain else self._render(conversation)
        # A chat template writes the special tokens itself.
        encoding = self.tokenizer(text, add_special_tokens=is_plain, return_offsets_mapping=True)
        token_ids = np.array(encoding["input_ids"], dtype=np.int32)
        starts = np.array(encoding["offset_mapping"], dtype=np.int64).reshape(-1, 2)[:, 0]
        is_trained = np.zeros(len(token_ids), dtype=bool)
        for begin, end in spans:
            is_trained |= (starts >= begin) & (starts < end)
        return self._with_end(token_ids, is_trained)

    def _with_end(self, token_ids: np.ndarray, is_trained: np.ndarray) -> TokenizedSample:
        end = self.tokenizer.eos_token_id
        if end is None or end in token_ids:
            return TokenizedSample(token_ids, is_trained)
        return TokenizedSample(np.append(token_ids, np.int32(end)), np.append(is_trained, True))

    def _join(self, prompt: str, completion: str) -> tuple[str, list[tuple[int, int]]]:
        """Plain text, in which the prompt counts as the user's and the completion as the assistant's."""
        spans = {"user": (0, len(prompt)), "assistant": (len(prompt), len(prompt) + len(completion))}
        return prompt + completion, [span for role, span in spans.items() if self.trained_roles[role]]

    def _render(self, conversation: Conversation) -> tuple[str, list[tuple[int, int]]]:
        """The conversation's text, and the spans of characters in it that are trained."""
        messages, kwargs = conversation.messages, conversation.template_kwargs
        text = self._apply_template(messages, kwargs)
        spans, begin = [], 0
        for stop, is_trained in self._runs(messages):
            end = len(text) if stop == len(messages) else self._length_of_start(messages, stop, kwargs, text)
            if is_trained:
                spans.append((begin, end))
            begin = end
        return text, spans

    def _runs(self, messages: Sequence[Message]) -> Iterator[tuple[int, bool]]:
        """Runs of messages with the same flag: index behind the run, flag."""
        flags = [self._is_trained(message) for message in messages]
        for index in range(1, len(messages) + 1):
            if index == len(messages) or flags[index] != flags[index - 1]:
                yield index, flags[index - 1]

    def _is_trained(self, message: Message) -> bool:
        role = message.get("role")
        if role not in self.trained_roles:
            raise DataError(f"unknown role {role!r}: known are {', '.join(self.trained_roles)}")
        return self.trained_roles[role]

    def _length_of_start(self, messages: Sequence[Message], stop: int, kwargs: dict[str, Any], text: str) -> int:
        """Characters of `text` that the first `stop` messages take."""
        answers_next = messages[stop - 1]["role"] in ("user", "tool") and messages[stop]["role"] == "assistant"
        try:
            start = self._apply_template(messages[:stop], kwargs, add_generation_prompt=answers_next)
        except DataError as error:
            raise UnmaskableSample from error
        if not text.startswith(start):
            raise UnmaskableSample
        return len(start)

    def _apply_template(self, messages: Sequence[Message], kwargs: dict[str, Any], **options: bool) -> str:
        if self.tokenizer.chat_template is None:
            raise DataError("the tokenizer has no chat template: set tokenizer.chat_template")
        try:
            return self.tokenizer.apply_chat_template(list(messages), tokenize=False, **options, **kwargs)
        except jinja2.TemplateError as error:
            raise DataError(f"the chat template refuses the conversation: {error}") from error


def _message(message: Any) -> Message:
    """A message as chat templates expect it: no nulls, trimmed text, decoded tool arguments."""
    if not isinstance(message, Mapping) or "role" not in message:
        raise DataError(f"a message must be an object with a role, but one is {message!r}")
    cleaned = {"content": "", **_without_nulls(message)}
    if isinstance(cleaned["content"], str):
        cleaned["content"] = cleaned["content"].strip()
    if "tool_calls" in cleaned:
        cleaned["tool_calls"] = [_tool_call(call) for call in _decoded(cleaned["tool_calls"], "tool_calls")]
    return cleaned


def _tool_call(call: Mapping[str, Any]) -> dict[str, Any]:
    cleaned = _without_nulls(call)
    function = cleaned.get("function")
    if isinstance(function, Mapping) and isinstance(function.get("arguments"), str):
        cleaned["function"] = {**function, "arguments": _decoded(function["arguments"], "tool call arguments")}
    return cleaned


def _decoded(value: Any, what: str) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except json.JSONDecodeError as error:
        raise DataError(f"{what}: not valid JSON: {error.msg}") from error


def _without_nulls(mapping: Mapping[str, Any]) -> dict[str, Any]:
    """Columnar files fill the keys that a row lacks with nulls, which templates would take for values."""
    return {key: value for key, value in mapping.items() if value is not None}
