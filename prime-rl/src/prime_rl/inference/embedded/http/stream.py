"""Streams responses as server-sent events in vLLM's format, one chunk per sample and step."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from prime_rl.inference.embedded.engine.generation import Completion, GenerationRequest, Tokens
from prime_rl.inference.embedded.engine.generation import Sequence as Sample
from prime_rl.inference.embedded.errors import EngineStopped, GenerationFailed
from prime_rl.inference.embedded.http.answers import (
    assistant_message,
    chat_logprobs,
    completion_logprobs,
    completion_text,
    envelope,
    tool_finish_reason,
    usage,
)
from prime_rl.inference.protocol import ChatBody, CompletionBody, RequestError, SamplingBody

if TYPE_CHECKING:
    from prime_rl.inference.embedded.engine.text import Text
    from prime_rl.inference.embedded.http.tool_calls import ToolParser

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
