"""Tokenizes dataset rows and marks the tokens to train on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from prime_rl.checks.template_traces import TemplateTraces
from prime_rl.configs.sft import LossMaskConfig
from prime_rl.trainer.process.errors import DataError, ModelError
from prime_rl.trainer.sft.data.chat_spans import ChatSpans, Span
from prime_rl.trainer.sft.data.messages import ROLES, Conversation, PlainText, read_row

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


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
    is_cut: bool = False
    """Whether these are the first tokens of a text that was too long to tokenize as a whole."""

    def __len__(self) -> int:
        return len(self.token_ids)

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
        return TokenizedSample(self.token_ids[: inputs + 1], self.is_trained[: inputs + 1], self.is_cut)


class ConversationTokenizer:
    """Tokenizes rows and marks the tokens of trained roles. A token belongs to the message in which it starts.

    Of a very long text, only as much is tokenized as has more than `max_inputs` tokens. None tokenizes everything.
    `section` is the config's section with the dataset, for messages.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        loss_mask: LossMaskConfig,
        ignored_keys: Sequence[str] = (),
        max_inputs: int | None = None,
        section: str = "data",
    ) -> None:
        if not tokenizer.is_fast:
            raise ModelError(f"{type(tokenizer).__name__} gives no token offsets: use a fast tokenizer")
        self.tokenizer = tokenizer
        self.max_inputs = max_inputs
        self.section = section
        self.trained_roles = {role: getattr(loss_mask, role) for role in ROLES}
        self._spans = ChatSpans(tokenizer, self.trained_roles)
        self._traces = TemplateTraces(self._rendered, DataError, ignored_keys)

    def __call__(self, row: Mapping[str, Any]) -> TokenizedSample:
        """Tokenize a row. A text without an end token gets one, which is trained if the text before it is.

        Raises:
            DataError: the row is not a conversation, has an unknown role, the tokenizer has no chat template, or the
                template leaves out a key of the row.
            UnmaskableSample: the chat template does not show where the messages start and end.
        """
        content = read_row(row, self.section)
        return self._plain(content) if isinstance(content, PlainText) else self._chat(content)

    def _chat(self, conversation: Conversation) -> TokenizedSample:
        self._refuse_losses(conversation)
        text, spans = self._spans(conversation)
        # The chat template has already written the special tokens.
        sample = self._encode(text, spans, add_special_tokens=False)
        if sample.is_cut or self._spans.ends_by_itself(text):
            return sample
        return self._with_end(sample, self.trained_roles[conversation.messages[-1]["role"]])

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
        spans = [(len(prompt), len(text))] if is_end_trained else []
        if content.prompt is not None and self.trained_roles["user"]:
            spans.append((0, len(prompt)))
        sample = self._encode(text, spans, add_special_tokens=True)
        return sample if sample.is_cut else self._with_end(sample, is_end_trained)

    def _encode(self, text: str, spans: list[Span], add_special_tokens: bool) -> TokenizedSample:
        """Tokenize a text, or a beginning of it that is long enough. Raises DataError if it cannot be tokenized."""
        chars = len(text) if self.max_inputs is None else max(_WHOLE_CHARS, 8 * self.max_inputs)
        while True:
            try:
                # verbose=False: no warning about the model's maximum length, since `data.seq_len` is the limit here.
                encoding = self.tokenizer(
                    text[:chars], add_special_tokens=add_special_tokens, return_offsets_mapping=True, verbose=False
                )
            except (TypeError, UnicodeEncodeError) as error:  # the tokenizer takes text with half a character for none
                raise DataError("a text holds half a character (a single surrogate)") from error
            sample = _masked(encoding, spans)
            if chars >= len(text):
                return sample
            if self.max_inputs is not None and sample.inputs > self.max_inputs + _MARGIN_TOKENS:
                return replace(sample.first(self.max_inputs + 1), is_cut=True)
            chars *= 4

    def _with_end(self, sample: TokenizedSample, is_trained: bool) -> TokenizedSample:
        """Append the end token unless the sample ends with one. End tokens inside the text do not count."""
        end = self.tokenizer.eos_token_id
        if end is None:
            return sample
        if len(sample) and sample.token_ids[-1] == end:
            # If the tokenizer added it, no span of the text covers it.
            return TokenizedSample(sample.token_ids, np.append(sample.is_trained[:-1], is_trained))
        return TokenizedSample(np.append(sample.token_ids, np.int32(end)), np.append(sample.is_trained, is_trained))


def _masked(encoding: Mapping[str, Any], spans: list[Span]) -> TokenizedSample:
    token_ids = np.array(encoding["input_ids"], dtype=np.int32)
    starts = np.array(encoding["offset_mapping"], dtype=np.int64).reshape(-1, 2)[:, 0]
    is_trained = np.zeros(len(token_ids), dtype=bool)
    for begin, end in spans:
        is_trained |= (starts >= begin) & (starts < end)
    return TokenizedSample(token_ids, is_trained)
