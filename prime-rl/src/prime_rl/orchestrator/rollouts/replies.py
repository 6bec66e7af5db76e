"""Chat completions as inference servers return them: the fields that environments and training read."""

from __future__ import annotations

import base64
import heapq
import io
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from prime_rl.orchestrator.errors import InferenceFault
from prime_rl.transport.messages import ImageReference, LikeliestTokens, RoutedExperts
from prime_rl.utils.terminal import cut_inside

TOKEN_NAME = "token_id:"
EXCLUDED_LOGPROB = -9998.0
"""Servers answer with -9999 for minus infinity, which JSON has no number for."""


class VersionSpan(msgspec.Struct, frozen=True):
    """Completion tokens `start` to `end` (exclusive) were sampled by policy `version`."""

    version: int
    start: int
    end: int


class TopLogprob(msgspec.Struct):
    token: str
    logprob: float


class TokenLogprob(msgspec.Struct):
    logprob: float
    top_logprobs: list[TopLogprob] | None = None


class Logprobs(msgspec.Struct):
    content: list[TokenLogprob] | None = None


class ChatMessage(msgspec.Struct):
    content: str | list[Any] | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[dict[str, Any]] | None = None

    def model_dump(self) -> dict[str, Any]:
        """Where verifiers looks for reasoning text."""
        return {"reasoning": self.reasoning, "reasoning_content": self.reasoning_content}


class Choice(msgspec.Struct):
    message: ChatMessage
    finish_reason: str | None = None
    token_ids: list[int] | None = None
    logprobs: Logprobs | None = None
    weight_versions: list[VersionSpan] | None = None
    routed_experts: str | None = None
    """A NumPy file in base64: expert ids [tokens - 1, layers, k] of prompt and completion, whose last token was never
    routed. Only with `enable_return_routed_experts`."""


class Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    total_tokens: int = 0


class Reported(msgspec.Struct, frozen=True):
    """Which of the likeliest tokens an engine reports with every token."""

    count: int
    is_support: bool
    """Whether it samples from these alone."""

    @classmethod
    def of_request(cls, sent: Mapping[str, Any]) -> Reported | None:
        """What a request asks for; None if nothing."""
        if not (count := sent.get("top_logprobs")) or not sent.get("return_tokens_as_token_ids"):
            return None
        return cls(count, sent.get("top_k", -1) > 0)

    def read(
        self, ids: Sequence[int], logprobs: Sequence[float], tops: Sequence[Mapping[str, float]]
    ) -> LikeliestTokens:
        """The likeliest tokens of an answer, named `token_id:<id>` in `tops`. Each token itself is among them.

        Raises:
            ValueError: there are not as many, or they are something else.
        """
        of_places = np.zeros((len(ids), self.count), "<i4")
        values = np.full(of_places.shape, -np.inf, "<f4")
        for place, (token, logprob, top) in enumerate(zip(ids, logprobs, tops, strict=True)):
            if not top:
                raise ValueError(f"none for token {place}")
            others = {
                other: each
                for name, each in top.items()
                if each > EXCLUDED_LOGPROB and (other := int(name.removeprefix(TOKEN_NAME))) != token
            }
            likeliest = heapq.nlargest(self.count - 1, others, key=others.__getitem__)
            of_places[place, : len(likeliest) + 1] = [token, *likeliest]
            values[place, : len(likeliest) + 1] = [logprob, *map(others.__getitem__, likeliest)]
        weights = np.full(len(ids), self.is_support, "<f4")
        return LikeliestTokens(1, self.count, of_places.tobytes(), values.tobytes(), weights.tobytes())


class ChatReply(msgspec.Struct):
    """One chat completion."""

    choices: list[Choice]
    id: str = ""
    created: int = 0
    model: str = ""
    prompt_token_ids: list[int] | None = None
    usage: Usage | None = None
    started_s: float | None = None
    """Unix time at which the request was sent. Set by the receiver."""
    ended_s: float | None = None
    """Unix time at which the reply had arrived. Set by the receiver."""
    rendering: dict[str, Any] | None = None
    """What the prompt was rendered with besides its messages, such as `tools`. Set by the receiver."""
    shown_images: tuple[ImageReference, ...] = ()
    """The images of the prompt, in order. Set by the receiver."""
    reported: Reported | None = None
    """What the request asked for of the likeliest tokens. Set by the receiver."""


class TokenizeReply(msgspec.Struct):
    tokens: list[int]


_CHAT_DECODER = msgspec.json.Decoder(ChatReply)


def decode_chat_reply(body: bytes, started_s: float, ended_s: float) -> ChatReply:
    """The chat completion in a response's body; the Unix times are those of request and response."""
    reply = _CHAT_DECODER.decode(body)
    reply.started_s, reply.ended_s = started_s, ended_s
    return reply


def read_routed_experts(answer: str) -> RoutedExperts:
    """What a server answered as `routed_experts`.

    Raises:
        ValueError: it is something else.
    """
    file = io.BytesIO(base64.b64decode(answer, validate=True))
    # Not `np.load`, which raises other errors for no data, and takes archives. NumPy does not annotate this one.
    values = np.lib.format.read_array(file, allow_pickle=False)  # type: ignore[no-untyped-call]
    if (
        values.ndim != 3
        or values.dtype.kind not in "iu"
        or not values.size
        or not 0 <= values.min() <= values.max() < 2**16
    ):
        raise ValueError(f"routed_experts is an array of {values.dtype} {list(values.shape)}")
    ids = values.astype("u1" if values.dtype.itemsize == 1 else "<u2")
    return RoutedExperts(values.shape[1], values.shape[2], ids.itemsize, ids.tobytes())


def check_reply(reply: ChatReply, url: str) -> None:
    """Refuse a server whose replies cannot be trained on.

    Raises:
        InferenceFault: the answer, its token ids or its log-probabilities are missing.
    """
    if not reply.choices:
        raise InferenceFault(f"{url} answers a chat request without an answer: `choices` is empty")
    choice = reply.choices[0]
    parts = {
        "prompt_token_ids": reply.prompt_token_ids,
        "choices[0].token_ids": choice.token_ids,
        "choices[0].logprobs.content": choice.logprobs and choice.logprobs.content,
    }
    missing = [name for name, value in parts.items() if value is None]
    if missing:
        raise InferenceFault(
            f"{url} answers without {' and '.join(missing)}, which training needs: use the `inference` command, "
            "or a vLLM that knows `return_token_ids`"
        )


def error_message(answer: bytes) -> str:
    """The message in an OpenAI error body, or the start of any other body, on one line."""
    try:
        body = msgspec.json.decode(answer)
        error = body.get("error", body) if isinstance(body, dict) else body
        text = str(error.get("message", error)) if isinstance(error, dict) else str(error)
    except msgspec.DecodeError:
        text = answer.decode(errors="replace")
    return cut_inside(" ".join(text.split()), 500)
