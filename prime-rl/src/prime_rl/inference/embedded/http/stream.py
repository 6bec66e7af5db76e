"""Answers as server-sent events, in vLLM's shapes: a chunk for what each sample has grown by."""

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
    chat_logprobs,
    completion_logprobs,
    completion_text,
    envelope,
    read_message,
    tools_finish,
    usage,
)
from prime_rl.inference.protocol import ChatBody, CompletionBody, RequestError, SamplingBody

if TYPE_CHECKING:
    from prime_rl.inference.embedded.engine.text import Text
    from prime_rl.inference.embedded.http.tool_calls import ToolParser

Chunk = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Piece:
    """What a sample has grown by. `completion` is set with its last piece; `text` is then the rest of its text."""

    tokens: Tokens
    text: str
    completion: Completion | None


class GrowingSample:
    """One sample on its way to the client.

    The texts of its pieces make up the text of the whole answer: as many characters as could turn out to be the start
    of a stop string wait for the next piece.
    """

    def __init__(self, sample: Sample, index: int, body: SamplingBody, text: Text) -> None:
        self.index = index
        self.num_prompt = len(sample.request.prompt)
        self.num_sent = 0
        self.is_finished = False
        self._sample = sample
        self._body = body
        self._text = text
        self._growing = text.growing(body.skip_special_tokens)
        self._held_back = 0
        if body.stop_strings and not body.include_stop_str_in_output:
            self._held_back = max(map(len, body.stop_strings)) - 1
        self._known = ""
        self._shown = 0

    def advance(self, settled: Callable[[str], int]) -> Piece | None:
        """What is new since the last call, if anything. `settled` tells how much of the text is content for sure."""
        tokens = self._sample.drawn(self.num_sent)
        if self.is_finished or not tokens.token_ids:
            return None
        self.num_sent += len(tokens.token_ids)
        completion = self._sample.completion
        if completion is not None and self.num_sent == len(completion.token_ids):
            self.is_finished = True
            return Piece(tokens, completion_text(self._body, self._text, completion)[self._shown :], completion)
        self._known += self._growing.push(tokens.token_ids)
        start = self._shown
        self._shown = max(start, min(settled(self._known), len(self._known) - self._held_back))
        return Piece(tokens, self._known[start : self._shown], None)


class ChatChunks:
    """Chunks of `chat.completion.chunk`: first the role of every sample, with the prompt's ids on the top level."""

    def __init__(self, body: ChatBody, text: Text, parser: ToolParser | None) -> None:
        self.settled: Callable[[str], int] = len if parser is None else parser.settled
        self._body = body
        self._text = text
        self._parser = parser

    def envelope(self, model: str) -> Chunk:
        return envelope("chatcmpl", "chat.completion.chunk", model)

    def opening(self, sample: GrowingSample, prompt: Sequence[int]) -> Chunk | None:
        delta = {"role": "assistant", "content": ""}
        choice = {"index": sample.index, "delta": delta, "logprobs": None, "finish_reason": None}
        return {"choices": [choice], "prompt_token_ids": list(prompt)}

    def choice(self, sample: GrowingSample, piece: Piece, prompt: Sequence[int]) -> Chunk:
        delta: dict[str, Any] = {"content": piece.text}
        finish = _finish(piece.completion)
        if piece.completion is not None and self._parser is not None:
            whole = completion_text(self._body, self._text, piece.completion)
            message = read_message(self._body, whole, self._parser)
            if "tool_calls" in message:
                rest = (message["content"] or "")[len(whole) - len(piece.text) :]
                calls = [{"index": place, **call} for place, call in enumerate(message["tool_calls"])]
                delta, finish = {"content": rest or None, "tool_calls": calls}, finish | tools_finish(message)
        logprobs = chat_logprobs(self._body, self._text, piece.tokens)
        return {"delta": delta, "logprobs": logprobs, **finish}


class CompletionChunks:
    """Chunks of `text_completion`: the first one of every sample has its prompt's ids."""

    settled = staticmethod(len)

    def __init__(self, body: CompletionBody, text: Text) -> None:
        self._body = body
        self._text = text
        self._offsets: dict[int, int] = {}

    def envelope(self, model: str) -> Chunk:
        return envelope("cmpl", "text_completion", model)

    def opening(self, sample: GrowingSample, prompt: Sequence[int]) -> Chunk | None:
        return None

    def choice(self, sample: GrowingSample, piece: Piece, prompt: Sequence[int]) -> Chunk:
        is_first = sample.index not in self._offsets
        start = self._offsets.setdefault(sample.index, 0)
        self._offsets[sample.index] += sum(len(self._text.token_text(token)) for token in piece.tokens.token_ids)
        first = {"prompt_token_ids": list(prompt)} if is_first else {}
        logprobs = completion_logprobs(self._body, self._text, piece.tokens, start)
        return {"text": piece.text, "logprobs": logprobs, **_finish(piece.completion), **first}


class EventStream:
    """The events of one request's samples. Made on the server's loop, before the requests are submitted."""

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
        self._samples = [(GrowingSample(sample, index, body, text), sample) for index, sample in enumerate(every)]
        for request in requests:
            request.on_progress = self._wake

    async def events(self) -> AsyncIterator[bytes]:
        """One event a chunk, the count of all tokens when it is wanted, and `[DONE]`. An error is an event as well."""
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
            if (piece := sample.advance(self._chunks.settled)) is not None:
                choice = self._chunks.choice(sample, piece, source.request.prompt)
                own = {"index": sample.index, "token_ids": piece.tokens.token_ids}
                yield self._event({"choices": [own | choice]}, sample)

    def _event(self, chunk: Chunk, sample: GrowingSample | None = None) -> bytes:
        if self._counts_each and sample is not None:
            chunk["usage"] = usage(sample.num_prompt, sample.num_sent)
        return _encoded(self._start | chunk)

    def _raise_failure(self) -> None:
        for request in self._requests:
            if request.result.done() and not request.result.cancelled():
                request.result.result()

    def _wake(self) -> None:
        """Called from the engine's thread."""
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
