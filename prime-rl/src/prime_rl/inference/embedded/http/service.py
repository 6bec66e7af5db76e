"""Translates request bodies into engine requests: applies defaults, checks limits, tokenizes prompts."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transformers import GenerationConfig

from prime_rl.inference.embedded.engine.engine import Engine
from prime_rl.inference.embedded.engine.generation import GenerationRequest, SamplingParams
from prime_rl.inference.embedded.engine.lora import Adapter
from prime_rl.inference.embedded.engine.text import Text, ToolParser
from prime_rl.inference.embedded.engine.vision import ImageStore, ReadImage
from prime_rl.inference.embedded.errors import TemplateFailed
from prime_rl.inference.protocol import (
    CONTEXT_LENGTH_MESSAGE,
    MAX_CHARS_PER_TOKEN,
    ChatBody,
    CompletionBody,
    RequestError,
    SamplingBody,
    TokenizeBody,
    TokensBody,
    check_token_ids,
)
from prime_rl.utils.images import ImageFault, image_parts, requested_bytes

COMPLETION_MAX_TOKENS = 16
"""OpenAI's default `max_tokens` for text completions. Chats default to the model's own limit, or to the rest of the
context."""
_DEFAULTS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "max_new_tokens")
"""Arguments that a request may leave to the model, by their name in `generation_config.json`."""


@dataclass(frozen=True, slots=True)
class ServedModel:
    """Properties of the served model that requests are validated against."""

    name: str
    max_model_len: int
    vocab_size: int
    defaults: GenerationConfig
    """The model's own sampling defaults, used for arguments that a request omits."""

    def default_texts(self) -> list[str]:
        """The defaults that the model has, as `name = value`."""
        values = ((name, getattr(self.defaults, name, None)) for name in _DEFAULTS)
        return [f"{name} = {value}" for name, value in values if value is not None]


@dataclass(frozen=True, slots=True)
class ServedImages:
    """What reads the images of requests."""

    store: ImageStore | None = None
    fault: str = "the model has no vision tower"
    """Why there is no store."""
    folder: Path | None = None
    """Where files are that requests may name; None: they send images as data URLs."""

    def read(self, messages: Sequence[Mapping[str, Any]], most_tokens: int) -> list[ReadImage]:
        """The images of a conversation, in order.

        Raises:
            RequestError: one of them cannot be used, or there are too many, or they alone take `most_tokens`.
        """
        parts = image_parts(messages)
        if not parts:
            return []
        if self.store is None:
            raise RequestError(f"This server reads text alone: {self.fault}", param="messages")
        if len(parts) > (most := self.store.limits.max_images):
            raise RequestError(f"messages: {len(parts)} images; at most {most} are read", param="messages")
        images = []
        for number, part in enumerate(parts, start=1):
            try:
                images.append(self.store.read(requested_bytes(part.source, self.folder, self.store.limits)))
            except ImageFault as fault:
                where = f"messages[{part.message - 1}]: image {number}"
                raise RequestError(f"{where}: {fault}", param="messages") from fault
            # Before the next is read: the pixels of 32 large ones would take 10 GB.
            if (tokens := sum(each.tokens for each in images)) >= most_tokens:
                raise RequestError(CONTEXT_LENGTH_MESSAGE.format(limit=most_tokens, length=tokens))
        return images


@dataclass(frozen=True, slots=True)
class Service:
    """A running engine with its tokenizer, model properties and tool-call parser."""

    engine: Engine
    text: Text
    model: ServedModel
    seeds: random.Random = field(default_factory=random.Random)
    """Generates seeds for requests without one."""
    tool_parser: ToolParser | None = None
    """Parser for tool calls; None if the server was started without one."""
    may_sleep: bool = False
    """Whether the config allows `/sleep`."""
    images: ServedImages = field(default_factory=ServedImages)

    @property
    def adapters(self) -> dict[str, Adapter]:
        """The loaded adapters by name."""
        return self.engine.adapters.loaded if self.engine.adapters is not None else {}

    def adapter(self, name: str | None) -> Adapter | None:
        """The adapter that a request's `model` selects; None for the base model, which is the default.

        Raises:
            RequestError: status 404 if there is no such model.
        """
        if name in (None, self.model.name):
            return None
        adapters = self.adapters
        if name not in adapters:
            served = ", ".join(f"`{known}`" for known in (self.model.name, *adapters))
            raise RequestError(f"The model `{name}` does not exist; this server serves {served}.", 404, "model")
        return adapters[name]

    def chat_prompt(self, body: ChatBody | TokenizeBody, images: Sequence[ReadImage]) -> list[int]:
        """Token ids of the messages, rendered with the chat template. `images` are theirs."""
        flags: dict[str, Any] = {
            "add_generation_prompt": body.add_generation_prompt,
            "continue_final_message": body.continue_final_message,
        }
        special = isinstance(body, TokenizeBody) and bool(body.add_special_tokens)
        try:
            rendered = self.text.render_chat(body.messages or [], body.tools, flags | body.chat_template_kwargs)
        except TemplateFailed as exc:
            raise RequestError(str(exc), param="messages") from exc
        if images and self.images.store is not None:
            try:
                rendered, _ = self.images.store.reader.expanded(rendered, [each.written for each in images])
            except ValueError as exc:
                raise RequestError(str(exc), param="messages") from exc
        return self._encoded(rendered, special)

    def parser_for(self, body: ChatBody) -> ToolParser | None:
        """The tool-call parser for a request; None if the request has no tools or disables them.

        Raises:
            RequestError: the request has tools, but the server has no parser.
        """
        if not body.tools or body.tool_choice == "none":
            return None
        if self.tool_parser is None:
            raise RequestError(
                "This server does not parse tool calls: its chat template uses no known format of tool calls. Set "
                "inference.model.tool_call_parser (for `inference` alone: model.tool_call_parser), "
                "or inference.model.chat_template to chatml, "
                'or send tool_choice = "none" to leave calls in the text.',
                param="tools",
            )
        return self.tool_parser

    def chat_requests(self, body: ChatBody) -> list[GenerationRequest]:
        images = self.images.read(body.messages, self.model.max_model_len)
        prompt = body.tokens if isinstance(body, TokensBody) else self.chat_prompt(body, images)
        reader = None if self.images.store is None else self.images.store.reader
        if reader is not None and not (images or isinstance(body, TokensBody)) and reader.token_id in prompt:
            # Trainers take it for an image. In tokens, the model may have sampled it.
            message = f"messages: a text holds {reader.family.token}, the token that stands for images: remove it"
            raise RequestError(message, param="messages")
        top = body.top_logprobs if body.logprobs else 0
        asked = body.max_completion_tokens or body.max_tokens
        return [self._request(body, prompt, asked or self.model.defaults.max_new_tokens, top, images)]

    def completion_requests(self, body: CompletionBody) -> list[GenerationRequest]:
        prompts = [
            self._encoded(prompt, body.add_special_tokens) if isinstance(prompt, str) else prompt
            for prompt in body.prompts
        ]
        if not prompts:
            raise RequestError("`prompt` is empty", param="prompt")
        # The engine samples at least one token, which the answer to a request for none leaves out.
        max_tokens = COMPLETION_MAX_TOKENS if body.max_tokens is None else max(body.max_tokens, 1)
        return [self._request(body, prompt, max_tokens, body.logprobs or 0) for prompt in prompts]

    def tokens_of(self, body: TokenizeBody) -> list[int]:
        if body.prompt is not None:
            return self._encoded(body.prompt, body.add_special_tokens is not False)
        return self.chat_prompt(body, self.images.read(body.messages or [], self.model.max_model_len))

    def _encoded(self, text: str, add_special_tokens: bool) -> list[int]:
        """The token ids of a text.

        Raises:
            RequestError: the text is so long that tokenizing it would only show that it does not fit.
        """
        limit = self.model.max_model_len
        if len(text) > MAX_CHARS_PER_TOKEN * limit:
            raise RequestError(
                f"This model's maximum context length is {limit} tokens. Your prompt has {len(text)} characters, over "
                f"{MAX_CHARS_PER_TOKEN} for each of them. Please shorten it."
            )
        return self.text.encode(text, add_special_tokens)

    def _request(
        self,
        body: SamplingBody,
        prompt: Sequence[int],
        max_tokens: int | None,
        top_logprobs: int,
        images: Sequence[ReadImage] = (),
    ) -> GenerationRequest:
        limit = self._max_new_tokens(prompt)
        of_prompt = None
        if images and self.images.store is not None:
            try:
                of_prompt = self.images.store.of_prompt(prompt, images)
            except ValueError as exc:
                raise RequestError(str(exc), param="messages") from exc
        params = self._sampling_params(body, min(max_tokens or limit, limit), top_logprobs)
        stops = body.stop_strings
        return GenerationRequest(
            prompt=tuple(prompt),
            params=params,
            seed=body.seed if body.seed is not None else self._next_seed(prompt),
            n=body.n,
            eos_token_ids=self.text.eos_token_ids,
            adapter=self.adapter(body.model),
            images=of_prompt,
            num_prompt_logprobs=body.num_prompt_logprobs,
            stop_matchers=[
                self.text.stop_matcher(stops, body.skip_special_tokens) for _ in range(body.n if stops else 0)
            ],
        )

    def _next_seed(self, prompt: Sequence[int]) -> int:
        """Depends on the prompt too: servers of a run, and all its starts, generate the same numbers in turn."""
        return self.seeds.getrandbits(62) ^ (hash(tuple(prompt)) & (1 << 62) - 1)

    def _max_new_tokens(self, prompt: Sequence[int]) -> int:
        remaining = self.model.max_model_len - len(prompt)
        if remaining < 1:
            raise RequestError(CONTEXT_LENGTH_MESSAGE.format(limit=self.model.max_model_len, length=len(prompt)))
        check_token_ids(prompt, self.model.vocab_size)
        return remaining

    def _sampling_params(self, body: SamplingBody, max_tokens: int, top_logprobs: int) -> SamplingParams:
        stops = set(body.stop_token_ids)
        if any(not 0 <= token < self.model.vocab_size for token in stops):
            message = f"stop_token_ids has token ids outside 0..{self.model.vocab_size - 1}"
            raise RequestError(message, param="stop_token_ids")
        if any(not 0 <= token < self.model.vocab_size for token in body.logit_bias):
            raise RequestError(f"logit_bias has token ids outside 0..{self.model.vocab_size - 1}", param="logit_bias")
        if body.min_tokens > max_tokens:
            raise RequestError(f"min_tokens ({body.min_tokens}) exceeds the limit of {max_tokens} new tokens")

        def chosen(name: str, neutral: float) -> Any:
            own, default = getattr(body, name), getattr(self.model.defaults, name, None)
            return next(value for value in (own, default, neutral) if value is not None)

        return SamplingParams(
            max_tokens=max_tokens,
            temperature=chosen("temperature", 1.0),
            top_k=max(chosen("top_k", 0), 0),
            top_p=chosen("top_p", 1.0),
            min_p=chosen("min_p", 0.0),
            repetition_penalty=chosen("repetition_penalty", 1.0),
            presence_penalty=body.presence_penalty,
            frequency_penalty=body.frequency_penalty,
            logit_bias=tuple(body.logit_bias.items()),
            min_tokens=body.min_tokens,
            stop_token_ids=frozenset(stops if body.ignore_eos else stops | self.text.eos_token_ids),
            top_logprobs=top_logprobs,
        )
