"""Tokenizes dataset rows and marks the tokens to train on.

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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date
from itertools import pairwise
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from prime_rl.checks.chat_templates import TemplateTraces
from prime_rl.configs.data import LossMaskConfig
from prime_rl.trainer.process.errors import BadRow, DataError, ModelError
from prime_rl.utils.conversations import (
    ROLES,
    Conversation,
    Message,
    PlainText,
    RowFault,
    plain_messages,
    read_row,
    split_images,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from prime_rl.trainer.model.images import Images, SampleImage


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
    is_trained: Sequence[bool]
    """Of each message."""
    kwargs: dict[str, Any]
    text: str
    """The whole conversation, rendered."""


class ChatSpans:
    """Renders conversations and finds the spans of trained messages."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        trained_roles: Mapping[str, bool],
        today: date | None = None,
        *,
        in_parts: bool = False,
    ) -> None:
        """`in_parts`: the template reads the content of every message as a list of parts, as for images."""
        self.tokenizer = tokenizer
        self.trained_roles = trained_roles
        self._in_parts = in_parts
        # A variable of this name hides the template's global function, which returns today's date.
        self._clock: dict[str, Any] = {} if today is None else {"strftime_now": today.strftime}
        special: set[str] = set(tokenizer.convert_ids_to_tokens(sorted(special_ids(tokenizer))))
        alternatives = "|".join(re.escape(token) for token in sorted(special, key=len, reverse=True)) or "(?!)"
        self._ends_with_special = re.compile(rf"(?:{alternatives})\Z")
        self._special_next = re.compile(rf" ?(?:{alternatives})")
        self._begins_with_special = re.compile(rf"(?:{alternatives})")

    def __call__(self, conversation: Conversation) -> tuple[str, list[Span]]:
        """Return the text of a conversation and its trained spans, in order.

        An assistant's span is what the assistant generates: from after its header up to and including its end token.
        Spans of other roles include everything written around their messages, also the next assistant's header.

        Raises:
            DataError: the tokenizer has no chat template, or the template refuses the conversation.
            UnmaskableSample: a trained span cannot be found.
        """
        messages, kwargs = conversation.messages, conversation.template_kwargs
        flags = self.flags(conversation)
        if not any(flags):
            return self.render(messages, kwargs), []
        if any(flag for flag, message in zip(flags, messages, strict=True) if message["role"] != "assistant"):
            text = self.render(messages, kwargs)
            return text, self._spans(_Chat(messages, flags, kwargs, text))
        text, marked = self._render_marked(messages, kwargs)
        chat = _Chat(messages, flags, kwargs, text)
        if marked is None:
            return text, self._spans(chat)
        marked = [(begin, self.settled(text, begin, end)) for begin, end in marked]
        return text, self._of_trained(chat, marked)

    def flags(self, conversation: Conversation) -> list[bool]:
        """Whether each message is trained: as the row says, or else as its role is."""
        own = conversation.trained or (None,) * len(conversation.messages)
        return [
            self.trained_roles[message["role"]] if flag is None else flag
            for message, flag in zip(conversation.messages, own, strict=True)
        ]

    def _of_trained(self, chat: _Chat, marked: list[Span]) -> list[Span]:
        """The spans that the template marks, of the trained messages alone."""
        asked = [flag for flag, message in zip(chat.is_trained, chat.messages, strict=True)
                 if message["role"] == "assistant"]  # fmt: skip
        if all(asked):
            return marked
        if len(marked) == len(asked):
            return [span for span, is_trained in zip(marked, asked, strict=True) if is_trained]
        wanted = self._spans(chat)
        return [(b, e) for b, e in marked if any(b < end and begin < e for begin, end in wanted)]

    def begins_with_special(self, text: str) -> bool:
        """Whether a text begins with a special token."""
        return self._begins_with_special.match(text) is not None

    def writes(self, token: str) -> bool:
        """Whether the chat template begins a conversation with a token."""
        if self.tokenizer.chat_template is None:
            return True
        try:
            return self.render([{"role": "user", "content": "a"}], {}).startswith(token)
        except DataError:
            return True

    def ends_by_itself(self, text: str) -> bool:
        """Whether the template has written an end token after the last message."""
        return self._ends_with_special.search(text.rstrip()) is not None

    def _spans(self, chat: _Chat) -> list[Span]:
        generated = self._generated_spans(chat)
        spans, begin = [], 0
        for index in range(len(chat.messages)):
            if index in generated:
                start, end = generated[index]
            else:
                start, end = begin, self._end_of_other(chat, index, generated, begin)
            if chat.is_trained[index]:
                spans.append((start, end))
            begin = end
        return spans

    def _generated_spans(self, chat: _Chat) -> dict[int, Span]:
        """Span of each assistant message, by index."""
        spans, after = {}, 0
        for index, message in enumerate(chat.messages):
            if message["role"] == "assistant":
                start, end = self._prefix_span(chat, index, after) or self._compared_span(chat, index, after)
                spans[index] = start, self.settled(chat.text, start, end)
                after = spans[index][1]
        return spans

    def _end_of_other(self, chat: _Chat, index: int, generated: Mapping[int, Span], begin: int) -> int:
        """End of a message of another role. The last of several neighbours with the same flag gets the whole text."""
        if index + 1 == len(chat.messages):
            return len(chat.text)
        if index + 1 in generated:
            return generated[index + 1][0]
        if chat.is_trained[index] == chat.is_trained[index + 1]:
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

    def settled(self, text: str, begin: int, end: int) -> int:
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
                self._given(messages),
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                **self._clock,
                **kwargs,
            )
        except Exception as error:
            raise BadRow(f"the chat template refuses the conversation: {error}") from error
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
                conversations=[self._given(messages)],
                chat_template=template,
                return_assistant_tokens_mask=True,
                **{**self.tokenizer.special_tokens_map, **self._clock, **kwargs},
            )
        except Exception as error:
            raise BadRow(f"the chat template refuses the conversation: {error}") from error
        # Its annotation says str.
        texts, spans = cast("tuple[list[str], list[list[Span]]]", answer)
        return texts[0], [(begin, end) for begin, end in spans[0] if begin < end]

    def _given(self, messages: Sequence[Message]) -> list[Message]:
        """Messages as the template gets them."""
        if not self._in_parts:
            return list(messages)
        return [
            {**each, "content": [{"type": "text", "text": each["content"]}]}
            if isinstance(each["content"], str)
            else each
            for each in messages
        ]

    def _check_template(self) -> None:
        if self.tokenizer.chat_template is None:
            raise DataError("the tokenizer has no chat template: set tokenizer.chat_template")


def special_ids(tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """The special tokens of a tokenizer: those that its config names, and others that are special in tokenizer.json.

    The end token of a chat format is often of the second kind in base models.
    """
    added = {token_id for token_id, token in tokenizer.added_tokens_decoder.items() if token.special}
    return added.union(tokenizer.all_special_ids)


def padding_id(tokenizer: PreTrainedTokenizerBase) -> int:
    """The token that pads the sequences of a reward model: the tokenizer's, or without one that which ends texts.

    Raises:
        ModelError: the tokenizer has neither.
    """
    for each in (tokenizer.pad_token_id, tokenizer.eos_token_id):
        if isinstance(each, int):
            return each
    raise ModelError("the tokenizer has neither a padding token nor an end token, and a reward model needs one")


def _splits_anywhere(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether a piece of text has the same tokens wherever it stands. SentencePiece begins each text with a blank."""

    def ids(text: str) -> list[int]:
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])

    return ids("b") != ids(" b") and ids("a") + ids(" b") == ids("a b")


def _common_length(one: str, other: str) -> int:
    """Length of the longest common prefix."""
    limit = min(len(one), len(other))
    return next((index for index in range(limit) if one[index] != other[index]), limit)


_WHOLE_CHARS = 1 << 19
"""Shorter texts are tokenized as a whole, so that their lengths are known. Each character takes some 300 bytes."""
_MARGIN_TOKENS = 64
"""The tokens next to a cut may differ from those of the whole text."""


@dataclass(frozen=True, slots=True)
class TokenizedSample:
    """n tokens, and for each whether it is trained."""

    token_ids: np.ndarray
    """int32 [n]."""
    is_trained: np.ndarray
    """bool [n]."""
    unmarked_calls: bool = False
    """Whether the chat template marks what is generated, but not the calls of a trained message."""
    is_cut: bool = False
    """Whether these are the first tokens of a text that was too long to tokenize as a whole."""
    whole_inputs: int | None = None
    """About how many inputs the whole text has, if it is cut."""
    images: tuple[SampleImage, ...] = ()
    """What the image tokens stand for, in order. Those of images at the end may be cut off."""

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def sequences(self) -> tuple[TokenizedSample, ...]:
        """The sequences of the sample, which do not attend to each other: itself."""
        return (self,)

    @property
    def packed(self) -> tuple[TokenizedSample, ...]:
        """The sequences as a row holds them."""
        return (self,)

    @property
    def inputs(self) -> int:
        """Number of input tokens. The last token is only a target."""
        return len(self.token_ids) - 1

    @property
    def targets(self) -> int:
        """Number of trained tokens. The first token is never a target."""
        return int(self.is_trained[1:].sum())

    def first(self, inputs: int) -> TokenizedSample:
        """The sample, cut to `inputs` input tokens."""
        return replace(self, token_ids=self.token_ids[: inputs + 1], is_trained=self.is_trained[: inputs + 1])

    def pieces(self, inputs: int) -> Iterator[TokenizedSample]:
        """Samples of at most `inputs` input tokens, in order. Each begins with the last target of the one before.

        A token is a target once, because the first token of a sample is none.
        """
        for start in range(0, max(self.inputs, 1), inputs):
            end = start + inputs + 1
            yield replace(self, token_ids=self.token_ids[start:end], is_trained=self.is_trained[start:end])


class ConversationTokenizer:
    """Tokenizes rows and marks the tokens of trained roles. A token belongs to the message in which it starts.

    Of a very long text, only as much is tokenized as has more than `max_inputs` tokens. None tokenizes everything.
    `section` is the config's section with the dataset, for messages. `today` is what a template that asks for the date
    gets. Without `images`, rows with images are refused.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        loss_mask: LossMaskConfig,
        ignored_keys: Sequence[str] = (),
        max_inputs: int | None = None,
        section: str = "data",
        today: date | None = None,
        images: Images | None = None,
    ) -> None:
        if not tokenizer.is_fast:
            raise ModelError(f"{type(tokenizer).__name__} gives no token offsets: use a fast tokenizer")
        self.tokenizer = tokenizer
        self.max_inputs = max_inputs
        self.section = section
        self.trained_roles = {role: getattr(loss_mask, role) for role in ROLES}
        self.trained_roles["developer"] = loss_mask.system
        self.images = images
        self._spans = ChatSpans(tokenizer, self.trained_roles, today, in_parts=images is not None)
        self._special_ids = np.array(sorted(special_ids(tokenizer)), dtype=np.int32)
        self._splits_anywhere = _splits_anywhere(tokenizer)
        self._traces = TemplateTraces(self._rendered, DataError, ignored_keys)

    def __call__(self, row: Mapping[str, Any]) -> TokenizedSample:
        """Tokenize a row. A text without an end token gets one, which is trained if the text before it is.

        Raises:
            DataError: the row is not a conversation, has an unknown role, the tokenizer has no chat template, or the
                template leaves out a key of the row.
            UnmaskableSample: the chat template does not show where the messages start and end.
        """
        try:
            content = read_row(row, self.section, with_images=self.images is not None)
        except RowFault as fault:
            raise BadRow(str(fault)) from fault
        if isinstance(content, PlainText):
            sample = self._plain(content)
            return sample if self.images is None else self.images.masked(sample, ())
        template = self.tokenizer.chat_template
        messages, sources = split_images(content.messages)
        conversation = replace(
            content, messages=plain_messages(messages, template if isinstance(template, str) else None)
        )
        self._refuse_losses(conversation)
        text, spans = self._spans(conversation)
        if self.images is None:
            return self._chat(conversation, text, spans)
        text, spans, images = self.images.expanded(text, spans, sources, content.folder)
        return self.images.masked(self._chat(conversation, text, spans), images)

    def _chat(self, conversation: Conversation, text: str, spans: list[Span]) -> TokenizedSample:
        # The chat template has already written the special tokens.
        sample = self._encode(text, spans, add_special_tokens=False)
        sample = replace(sample, unmarked_calls=self._has_unmarked_calls(conversation, text, spans))
        if sample.is_cut or self._spans.ends_by_itself(text):
            return sample
        return self._with_end(sample, self._spans.flags(conversation)[-1])

    def _has_unmarked_calls(self, conversation: Conversation, text: str, spans: list[Span]) -> bool:
        marked = "".join(text[begin:end] for begin, end in spans)
        return any(
            flag and name not in marked
            for message, flag in zip(conversation.messages, self._spans.flags(conversation), strict=True)
            for call in message.get("tool_calls") or ()
            if (name := str((call.get("function") or {}).get("name") or "")) and name in text
        )

    def _refuse_losses(self, conversation: Conversation) -> None:
        """Raises DataError if the chat template drops a part of the conversation."""
        left_out = self._traces.left_out({"messages": conversation.messages, **conversation.template_kwargs})
        if left_out:
            raise DataError(
                f"the chat template of {self.tokenizer.name_or_path} leaves out {', '.join(left_out)}: set "
                "tokenizer.chat_template to one that renders them (chatml renders tools), or list keys that the model "
                f"need not see in {self.section}.ignored_keys"
            )

    def _rendered(self, arguments: Mapping[str, Any]) -> str:
        others = {name: value for name, value in arguments.items() if name != "messages"}
        return self._spans.render(arguments["messages"], others)

    def _plain(self, content: PlainText) -> TokenizedSample:
        prompt, is_end_trained = content.prompt or "", content.prompt is None or self.trained_roles["assistant"]
        text = prompt + content.completion
        end = len(text) if content.prompt is None else self._spans.settled(text, len(prompt), len(text))
        spans = [(len(prompt), end)] if is_end_trained else []
        if content.prompt is not None and self.trained_roles["user"]:
            spans.append((0, len(prompt)))
        sample = self._encode(text, spans, add_special_tokens=not self._is_rendered(text))
        if sample.is_cut or self._spans.ends_by_itself(text):
            return sample
        return self._with_end(sample, is_end_trained)

    def _is_rendered(self, text: str) -> bool:
        """Whether a chat template has written the text, with the token that begins it if it has one.

        TRL and others leave that token out of the text; the tokenizer then adds it.
        """
        bos = self.tokenizer.bos_token
        if bos and text.startswith(bos):
            return True
        return self._spans.begins_with_special(text) and not (bos and self._spans.writes(bos))

    def _encode(self, text: str, spans: list[Span], add_special_tokens: bool) -> TokenizedSample:
        """Tokenize a text, or a beginning of it that is long enough. Raises DataError if it cannot be tokenized."""
        chars = len(text) if self.max_inputs is None else max(_WHOLE_CHARS, 8 * self.max_inputs)
        while True:
            cuts = [begin for begin, _ in spans if 0 < begin < chars]
            try:
                sample = _masked(self._joined(text[:chars], cuts, add_special_tokens), spans, text)
            except (TypeError, UnicodeEncodeError) as error:  # the tokenizer takes text with half a character for none
                raise BadRow("a text holds half a character (a single surrogate)") from error
            if chars >= len(text):
                return sample
            if self.max_inputs is not None and sample.inputs > self.max_inputs + _MARGIN_TOKENS:
                about = int(sample.inputs * (len(text) / chars))
                return replace(sample.first(self.max_inputs + 1), is_cut=True, whole_inputs=about)
            chars *= 4

    def _joined(self, text: str, cuts: Sequence[int], add_special_tokens: bool) -> _Tokens:
        """The tokens of a text. What the model generates from a cut on begins with a token, as in inference.

        "Answer: " and "yes" are one text, and yet the model is asked with a prompt that ends in a blank. Tokenized
        together, the blank belongs to the token of "yes", which a prompt never ends before.
        """
        whole = self._tokens(text, add_special_tokens)
        if not cuts or not self._splits_anywhere:
            return whole
        is_special = np.isin(whole.ids, self._special_ids) & (whole.ends > whole.starts)
        befores, behinds = whole.ends[is_special], whole.starts[is_special]
        for begin, cut, end in _regions(text, cuts, befores, behinds):
            pieces = [self._tokens(text[a:b], False).shifted(a) for a, b in pairwise([begin, *cut, end])]
            inside = (whole.starts >= begin) & (whole.ends <= end) & (whole.ends > whole.starts)
            places = np.flatnonzero(inside)
            new = _Tokens.joined(pieces)
            if len(places) and not np.array_equal(new.ids, whole.ids[places]):
                whole = _Tokens.joined([whole.part(0, places[0]), new, whole.part(places[-1] + 1, len(whole.ids))])
        return whole

    def _tokens(self, text: str, add_special_tokens: bool) -> _Tokens:
        # verbose=False: no warning about the model's maximum length, since `data.seq_len` is the limit here.
        encoding = self.tokenizer(
            text, add_special_tokens=add_special_tokens, return_offsets_mapping=True, verbose=False
        )
        offsets = np.array(encoding["offset_mapping"], dtype=np.int64).reshape(-1, 2)
        return _Tokens(np.array(encoding["input_ids"], dtype=np.int32), offsets[:, 0], offsets[:, 1])

    def _with_end(self, sample: TokenizedSample, is_trained: bool) -> TokenizedSample:
        """Append the end token unless the sample ends with one. End tokens inside the text do not count."""
        end = self.tokenizer.eos_token_id
        if end is None:
            return sample
        if len(sample) and sample.token_ids[-1] == end:
            # If the tokenizer added it, no span of the text covers it.
            return replace(sample, is_trained=np.append(sample.is_trained[:-1], is_trained))
        return replace(
            sample,
            token_ids=np.append(sample.token_ids, np.int32(end)),
            is_trained=np.append(sample.is_trained, is_trained),
        )


@dataclass(frozen=True, slots=True)
class _Tokens:
    """Tokens and the characters [start, end) of each. A token that the tokenizer adds has none."""

    ids: np.ndarray
    starts: np.ndarray
    ends: np.ndarray

    def shifted(self, by: int) -> _Tokens:
        return _Tokens(self.ids, self.starts + by, self.ends + by)

    def part(self, begin: int, end: int) -> _Tokens:
        return _Tokens(self.ids[begin:end], self.starts[begin:end], self.ends[begin:end])

    @classmethod
    def joined(cls, parts: Sequence[_Tokens]) -> _Tokens:
        return cls(*(np.concatenate([getattr(part, name) for part in parts]) for name in ("ids", "starts", "ends")))


def _regions(
    text: str, cuts: Sequence[int], befores: np.ndarray, behinds: np.ndarray
) -> Iterator[tuple[int, list[int], int]]:
    """The stretches of text between special tokens that have cuts inside: begin, cuts and end.

    A special token splits the text before anything else does, so what is outside of a stretch keeps its tokens.
    """
    regions: dict[tuple[int, int], list[int]] = {}
    for cut in sorted(set(cuts)):
        begin = int(befores[befores <= cut].max(initial=0))
        end = int(behinds[behinds >= cut].min(initial=len(text)))
        if begin < cut < end:
            regions.setdefault((begin, end), []).append(cut)
    for (begin, end), inside in regions.items():
        yield begin, inside, end


def _masked(tokens: _Tokens, spans: list[Span], text: str) -> TokenizedSample:
    """A token belongs to the message in which it starts; blanks before the message do not count."""
    is_trained = np.zeros(len(tokens.ids), dtype=bool)
    for begin, end in spans:
        is_trained |= (tokens.starts >= begin) & (tokens.starts < end)
        for at in np.flatnonzero((tokens.starts < begin) & (tokens.ends > begin)):
            is_trained[at] |= not text[tokens.starts[at] : begin].strip()
    return TokenizedSample(tokens.ids, is_trained)
