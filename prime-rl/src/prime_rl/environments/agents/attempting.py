"""The engine that a workflow asks for tokens: `await engine.agenerate(ModelRequest(...))`."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

StopReason = Literal["stop", "length", "tool_calls", "abort"]


@dataclass(slots=True)
class GenerationConfig:
    """How much a request generates. How tokens are sampled is set by the run: the trainer must know it."""

    n_samples: int = 1
    max_new_tokens: int = 16384
    max_tokens: int = 32768
    """Prompt and answer together."""
    stop: list[str] = field(default_factory=list)
    stop_token_ids: list[int] = field(default_factory=list)

    def new(self, **changes: Any) -> GenerationConfig:
        """A copy with other values."""
        values = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return GenerationConfig(**values | changes)


@dataclass(slots=True)
class ModelRequest:
    """A prompt of N tokens."""

    input_ids: Sequence[int]
    gconfig: GenerationConfig = field(default_factory=GenerationConfig)
    rid: str = field(default_factory=lambda: uuid.uuid4().hex)
    tokenizer: Any = None
    """Not used: the engine gets tokens."""
    metadata: dict[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class ModelResponse:
    """The M tokens sampled after a prompt."""

    input_tokens: list[int]
    output_tokens: list[int]
    output_logprobs: list[float]
    output_versions: list[int]
    """The policy version that sampled each token; -1 if the server did not say."""
    stop_reason: StopReason
    latency: float
    """Seconds."""

    @property
    def input_len(self) -> int:
        return len(self.input_tokens)

    @property
    def output_len(self) -> int:
        return len(self.output_tokens)


class Post(Protocol):
    """Posts JSON to a route of the proxy in the name of the session, and returns the JSON of the answer."""

    async def __call__(self, path: str, body: dict[str, Any]) -> dict[str, Any]: ...


class SessionEngine:
    """An engine for one attempt. All requests go to one server, which keeps the attention cache of earlier turns."""

    def __init__(self, post: Post) -> None:
        self._post = post

    async def agenerate(self, request: ModelRequest) -> ModelResponse:
        """Sample one answer.

        Raises:
            ValueError: more than one sample is asked for, or the prompt leaves no room for an answer.
        """
        config, prompt = request.gconfig, [int(token) for token in request.input_ids]
        if config.n_samples != 1:
            raise ValueError("agenerate samples one answer: n_samples must be 1")
        budget = min(config.max_tokens - len(prompt), config.max_new_tokens)
        if budget <= 0:
            raise ValueError(
                f"a prompt of {len(prompt)} tokens leaves no room for an answer: shorten it, or raise max_tokens (now "
                f"{config.max_tokens})"
            )
        started_s = time.monotonic()
        answer = await self._post(
            "/rl/generate",
            {
                "input_ids": prompt,
                "max_new_tokens": budget,
                "stop": list(config.stop),
                "stop_token_ids": [int(token) for token in config.stop_token_ids],
            },
        )
        return ModelResponse(
            input_tokens=prompt,
            output_tokens=answer["output_tokens"],
            output_logprobs=answer["output_logprobs"],
            output_versions=answer["output_versions"],
            stop_reason=answer["stop_reason"],
            latency=time.monotonic() - started_s,
        )
