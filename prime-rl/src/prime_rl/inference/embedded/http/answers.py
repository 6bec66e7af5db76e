"""Builds responses in vLLM's format, whole or as a stream, extended by the weight version of every token."""

from __future__ import annotations

import asyncio
import base64
import io
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from prime_rl.inference.embedded.engine.generation import Completion, Generation, GenerationRequest, Tokens, TopLogprobs
from prime_rl.inference.embedded.engine.generation import Sequence as Sample
from prime_rl.inference.embedded.errors import EngineStopped, GenerationFailed
from prime_rl.inference.protocol import ChatBody, CompletionBody, RequestError, SamplingBody

if TYPE_CHECKING:
    from prime_rl.inference.embedded.engine.text import Text, ToolParser

_LOWEST_LOGPROB = -9999.0
"""Replaces minus infinity, which JSON cannot represent."""

_REPLACEMENT = "\ufffd"
"""Stands for the bytes of a character of which some are missing."""

Answered = Sequence[tuple[GenerationRequest, Generation]]


def chat_response(
    model: str, body: ChatBody, text: Text, answered: Answered, parser: ToolParser | None
) -> dict[str, Any]:
    """A `chat.completion` body, with the prompt's token ids at the top level and the completion's in each choice."""
    request, generation = answered[0]
    choices = []
    for index, completion in enumerate(generation.completions):
        message = assistant_message(body, completion_text(body, text, completion), parser)
        content = {"message": message, "logprobs": chat_logprobs(body, text, completion)}
        choices.append(_choice(completion, index) | content | tool_finish_reason(message))
    return envelope("chatcmpl", "chat.completion", model) | {
        "usage": _usage_of(answered),
        "choices": choices,
        "prompt_token_ids": list(request.prompt),
        "prompt_logprobs": _prompt_logprobs(text, generation),
    }


def completion_response(model: str, body: CompletionBody, text: Text, answered: Answered) -> dict[str, Any]:
    """A `text_completion` body; every choice has the token ids of its prompt and of its completion."""
    choices: list[dict[str, Any]] = []
    if body.max_tokens == 0:
        answered = [(request, _without_completions(generation)) for request, generation in answered]
    for prompt, (request, generation) in zip(body.prompts, answered, strict=True):
        asked = None if body.prompt_logprobs is None else _prompt_logprobs(text, generation)
        for completion in generation.completions:
            content = {
                "text": completion_text(body, text, completion),
                "logprobs": completion_logprobs(body, text, completion),
            }
            if body.echo:
                echoed = prompt if isinstance(prompt, str) else text.decode(prompt, skip_special_tokens=False)
                logprobs = _echoed_logprobs(body, text, (request, generation), completion)
                content = {"text": f"{echoed}{content['text']}", "logprobs": logprobs}
            ids = {"prompt_token_ids": list(request.prompt), "prompt_logprobs": asked}
            choices.append(_choice(completion, len(choices)) | content | ids)
    return envelope("cmpl", "text_completion", model) | {"usage": _usage_of(answered), "choices": choices}


def _without_completions(generation: Generation) -> Generation:
    """A generation whose completions have no tokens."""
    empty = Completion([], [], [], finish_reason="length", stop_reason=None, versions=[])
    return replace(generation, completions=[empty for _ in generation.completions])


def _echoed_logprobs(
    body: CompletionBody, text: Text, answered: tuple[GenerationRequest, Generation], completion: Completion
) -> dict[str, Any] | None:
    """`completion_logprobs` of prompt and completion. A prompt's first token has none, so its entries are null."""
    request, generation = answered
    if body.logprobs is None or generation.prompt_logprobs is None:
        return None
    scored = generation.prompt_logprobs
    others = Tokens(
        [token.token_id for token in scored],
        [token.logprob for token in scored],
        [token.top[: body.logprobs] for token in scored],
    )
    first: dict[str, list[Any]] = {
        "text_offset": [0],
        "token_logprobs": [None],
        "tokens": [_token_name(body, text, request.prompt[0])],
        "top_logprobs": [None],
    }
    offset = len(text.token_text(request.prompt[0]))
    of_prompt = completion_logprobs(body, text, others, offset) or {}
    offset += sum(len(text.token_text(token_id)) for token_id in others.token_ids)
    of_completion = completion_logprobs(body, text, completion, offset) or {}
    return {key: [*start, *of_prompt[key], *of_completion[key]] for key, start in first.items()}


def envelope(prefix: str, kind: str, model: str) -> dict[str, Any]:
    """The fields common to every response and every stream chunk."""
    return {"id": f"{prefix}-{uuid.uuid4().hex}", "object": kind, "created": int(time.time()), "model": model}


def usage(num_prompt: int, num_completion: int) -> dict[str, int]:
    """OpenAI's `usage` object: token counts."""
    total = num_prompt + num_completion
    return {"prompt_tokens": num_prompt, "completion_tokens": num_completion, "total_tokens": total}


def assistant_message(body: ChatBody, content: str, parser: ToolParser | None) -> dict[str, Any]:
    """The assistant message. With a parser, tool calls are moved from the text into `tool_calls`."""
    message: dict[str, Any] = {"role": "assistant", "content": content}
    if parser is None:
        return message
    parsed = parser.parse(content)
    calls = parsed.calls[:1] if body.parallel_tool_calls is False else parsed.calls
    message["content"] = parsed.content
    if calls:
        message["tool_calls"] = [
            {
                "id": f"chatcmpl-tool-{uuid.uuid4().hex}",
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for call in calls
        ]
    return message


def tool_finish_reason(message: dict[str, Any]) -> dict[str, str]:
    """Override for the finish reason if the message has tool calls, else empty."""
    return {"finish_reason": "tool_calls"} if "tool_calls" in message else {}


def _usage_of(answered: Answered) -> dict[str, int]:
    num_completion = sum(len(c.token_ids) for _, generation in answered for c in generation.completions)
    return usage(sum(len(request.prompt) for request, _ in answered), num_completion)


def _choice(completion: Completion, index: int) -> dict[str, Any]:
    routes = completion.routed_experts
    return {
        "index": index,
        "finish_reason": completion.finish_reason,
        "stop_reason": completion.stop_reason,
        "token_ids": completion.token_ids,
        "weight_versions": [asdict(span) for span in completion.versions],
    } | ({} if routes is None else {"routed_experts": _npy(routes)})


def _npy(values: np.ndarray) -> str:
    """A NumPy file in base64, as vLLM answers with."""
    file = io.BytesIO()
    np.save(file, values, allow_pickle=False)
    return base64.b64encode(file.getbuffer()).decode()


def completion_text(body: SamplingBody, text: Text, completion: Completion) -> str:
    """The completion's text. The stop token or string that ended it is cut off unless the request includes it."""
    token_ids, reason = completion.token_ids, completion.stop_reason
    if completion.finish_reason == "length" or (body.include_stop_str_in_output and not isinstance(reason, str)):
        return text.decode(token_ids, body.skip_special_tokens)
    before = text.decode(token_ids[:-1], body.skip_special_tokens)
    if not isinstance(reason, str):
        return before
    answer = text.decode(token_ids, body.skip_special_tokens)
    # The last token may complete a character.
    start = answer.find(reason, max(0, len(before.rstrip(_REPLACEMENT)) - len(reason) + 1))
    return answer[: start + len(reason)] if body.include_stop_str_in_output else answer[:start]


def _token_name(body: SamplingBody, text: Text, token_id: int) -> str:
    return f"token_id:{token_id}" if body.return_tokens_as_token_ids else text.token_text(token_id)


def _finite(logprob: float) -> float:
    return max(logprob, _LOWEST_LOGPROB)


def chat_logprobs(body: ChatBody, text: Text, drawn: Tokens) -> dict[str, Any] | None:
    """OpenAI's chat `logprobs`, one entry per token; None unless requested."""
    if not body.logprobs:
        return None
    tops: Sequence[TopLogprobs] = drawn.top_logprobs or [[] for _ in drawn.token_ids]

    def entry(token_id: int, logprob: float) -> dict[str, Any]:
        name = _token_name(body, text, token_id)
        return {"token": name, "logprob": _finite(logprob), "bytes": list(name.encode())}

    rows = zip(drawn.token_ids, drawn.logprobs, tops, strict=True)
    return {
        "content": [
            entry(token_id, logprob) | {"top_logprobs": [entry(*pair) for pair in top]}
            for token_id, logprob, top in rows
        ]
    }


def completion_logprobs(
    body: CompletionBody, text: Text, drawn: Tokens, first_offset: int = 0
) -> dict[str, Any] | None:
    """OpenAI's completion `logprobs` as parallel lists; None unless requested.

    `first_offset` is the character offset of the text of `drawn`.
    """
    if body.logprobs is None:
        return None
    names = [_token_name(body, text, token_id) for token_id in drawn.token_ids]
    lengths = [len(text.token_text(token_id)) for token_id in drawn.token_ids]
    tops: Sequence[TopLogprobs] = drawn.top_logprobs or [[] for _ in names]
    return {
        "text_offset": list(accumulate(lengths, initial=first_offset))[: len(lengths)],
        "token_logprobs": [_finite(logprob) for logprob in drawn.logprobs],
        "tokens": names,
        "top_logprobs": [
            {_token_name(body, text, token): _finite(logprob) for token, logprob in [*top, own]}
            for top, own in zip(tops, zip(drawn.token_ids, drawn.logprobs, strict=True), strict=True)
        ],
    }


def _prompt_logprobs(text: Text, generation: Generation) -> list[dict[str, Any] | None] | None:
    """One object `{token id: {logprob, rank, decoded_token}}` per prompt token, null for the first."""
    if generation.prompt_logprobs is None:
        return None
    rows: list[dict[str, Any] | None] = [None]
    for token in generation.prompt_logprobs:
        ranked = [(top_id, logprob, rank) for rank, (top_id, logprob) in enumerate(token.top, start=1)]
        rows.append(
            {
                str(token_id): {"logprob": _finite(logprob), "rank": rank, "decoded_token": text.token_text(token_id)}
                for token_id, logprob, rank in [*ranked, (token.token_id, token.logprob, token.rank)]
            }
        )
    return rows


# Responses as server-sent events, one chunk per sample and step.


Chunk = dict[str, Any]


@dataclass(frozen=True, slots=True)
class SampleDelta:
    """The new tokens and text of a sample. The last delta has the `completion` and all remaining text."""

    tokens: Tokens
    text: str
    completion: Completion | None


class SampleStream:
    """Tracks how much of one sample has been sent to the client.

    The concatenated texts of the deltas equal the text of the non-streamed response. Characters that may be the start
    of a stop string are held back until the next delta.
    """

    def __init__(self, sample: Sample, index: int, body: SamplingBody, text: Text) -> None:
        self.index = index
        self.num_prompt = len(sample.request.prompt)
        self.num_sent = 0
        self.is_finished = False
        self._sample = sample
        self._body = body
        self._text = text
        self._detokenizer = text.detokenizer(body.skip_special_tokens)
        self._held_back = 0
        if body.stop_strings and not body.include_stop_str_in_output:
            self._held_back = max(map(len, body.stop_strings)) - 1
        self._decoded = ""
        self._num_sent_chars = 0

    def advance(self, final_length: Callable[[str], int]) -> SampleDelta | None:
        """Return what is new since the last call, or None. `final_length` returns how many leading characters of the
        decoded text are certain to be content."""
        tokens = self._sample.drawn(self.num_sent)
        if self.is_finished or not tokens.token_ids:
            return None
        self.num_sent += len(tokens.token_ids)
        completion = self._sample.completion
        if completion is not None and self.num_sent == len(completion.token_ids):
            self.is_finished = True
            remaining = completion_text(self._body, self._text, completion)[self._num_sent_chars :]
            return SampleDelta(tokens, remaining, completion)
        self._decoded += self._detokenizer.push(tokens.token_ids)
        start = self._num_sent_chars
        self._num_sent_chars = max(start, min(final_length(self._decoded), len(self._decoded) - self._held_back))
        return SampleDelta(tokens, self._decoded[start : self._num_sent_chars], None)


class ChatChunks:
    """Builds `chat.completion.chunk` chunks. A sample's first chunk has its role and, at top level, the prompt ids."""

    def __init__(self, body: ChatBody, text: Text, parser: ToolParser | None) -> None:
        self.final_length: Callable[[str], int] = len if parser is None else parser.final_length
        self._body = body
        self._text = text
        self._parser = parser

    def envelope(self, model: str) -> Chunk:
        return envelope("chatcmpl", "chat.completion.chunk", model)

    def opening(self, sample: SampleStream, prompt: Sequence[int]) -> Chunk | None:
        delta = {"role": "assistant", "content": ""}
        choice = {"index": sample.index, "delta": delta, "logprobs": None, "finish_reason": None}
        return {"choices": [choice], "prompt_token_ids": list(prompt)}

    def choice(self, sample: SampleStream, piece: SampleDelta, prompt: Sequence[int]) -> Chunk:
        delta: dict[str, Any] = {"content": piece.text}
        finish = _finish(piece.completion)
        if piece.completion is not None and self._parser is not None:
            whole = completion_text(self._body, self._text, piece.completion)
            message = assistant_message(self._body, whole, self._parser)
            if "tool_calls" in message:
                rest = (message["content"] or "")[len(whole) - len(piece.text) :]
                calls = [{"index": index, **call} for index, call in enumerate(message["tool_calls"])]
                delta, finish = {"content": rest or None, "tool_calls": calls}, finish | tool_finish_reason(message)
        logprobs = chat_logprobs(self._body, self._text, piece.tokens)
        return {"delta": delta, "logprobs": logprobs, **finish}


class CompletionChunks:
    """Builds `text_completion` chunks. A sample's first chunk has the prompt ids."""

    final_length = staticmethod(len)

    def __init__(self, body: CompletionBody, text: Text) -> None:
        self._body = body
        self._text = text
        self._offsets: dict[int, int] = {}

    def envelope(self, model: str) -> Chunk:
        return envelope("cmpl", "text_completion", model)

    def opening(self, sample: SampleStream, prompt: Sequence[int]) -> Chunk | None:
        return None

    def choice(self, sample: SampleStream, piece: SampleDelta, prompt: Sequence[int]) -> Chunk:
        is_first = sample.index not in self._offsets
        start = self._offsets.setdefault(sample.index, 0)
        self._offsets[sample.index] += sum(len(self._text.token_text(token)) for token in piece.tokens.token_ids)
        first = {"prompt_token_ids": list(prompt)} if is_first else {}
        logprobs = completion_logprobs(self._body, self._text, piece.tokens, start)
        return {"text": piece.text, "logprobs": logprobs, **_finish(piece.completion), **first}


class EventStream:
    """The event stream of one HTTP request. Create it on the server's event loop, before submitting the requests."""

    def __init__(
        self,
        model: str,
        body: SamplingBody,
        requests: Sequence[GenerationRequest],
        text: Text,
        chunks: ChatChunks | CompletionChunks,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._grown = asyncio.Event()
        self._chunks = chunks
        self._requests = requests
        self._start = chunks.envelope(model)
        options = body.stream_options
        self._counts_all = options is not None and options.include_usage
        self._counts_each = self._counts_all and options is not None and options.continuous_usage_stats
        every = [sample for request in requests for sample in request.sequences]
        self._samples = [(SampleStream(sample, index, body, text), sample) for index, sample in enumerate(every)]
        for request in requests:
            request.on_progress = self._wake

    async def events(self) -> AsyncIterator[bytes]:
        """Yield one event per chunk, the total token counts if requested, and `[DONE]`. Errors are sent as events."""
        for request in self._requests:
            request.result.add_done_callback(lambda _: self._wake())
        try:
            for sample, source in self._samples:
                if (opening := self._chunks.opening(sample, source.request.prompt)) is not None:
                    yield self._event(opening, sample)
            while not all(sample.is_finished for sample, _ in self._samples):
                await self._grown.wait()
                self._grown.clear()
                for event in self._new_events():
                    yield event
                self._raise_failure()
            if self._counts_all:
                num_prompt = sum(len(request.prompt) for request in self._requests)
                num_drawn = sum(sample.num_sent for sample, _ in self._samples)
                yield self._event({"choices": [], "usage": usage(num_prompt, num_drawn)})
        except (EngineStopped, GenerationFailed) as exc:
            yield _encoded(RequestError(str(exc), 503 if isinstance(exc, EngineStopped) else 500).body())
        yield b"data: [DONE]\n\n"

    def _new_events(self) -> Iterator[bytes]:
        for sample, source in self._samples:
            if (piece := sample.advance(self._chunks.final_length)) is not None:
                choice = self._chunks.choice(sample, piece, source.request.prompt)
                own = {"index": sample.index, "token_ids": piece.tokens.token_ids}
                yield self._event({"choices": [own | choice]}, sample)

    def _event(self, chunk: Chunk, sample: SampleStream | None = None) -> bytes:
        if self._counts_each and sample is not None:
            chunk["usage"] = usage(sample.num_prompt, sample.num_sent)
        return _encoded(self._start | chunk)

    def _raise_failure(self) -> None:
        for request in self._requests:
            if request.result.done() and not request.result.cancelled():
                request.result.result()

    def _wake(self) -> None:
        """Wake the stream; called from the engine's thread."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._grown.set)


def _finish(completion: Completion | None) -> Chunk:
    if completion is None:
        return {"finish_reason": None}
    return {
        "finish_reason": completion.finish_reason,
        "stop_reason": completion.stop_reason,
        "weight_versions": [asdict(span) for span in completion.versions],
    }


def _encoded(content: Chunk) -> bytes:
    return b"data: " + msgspec.json.encode(content) + b"\n\n"
