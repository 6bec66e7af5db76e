"""Runs an agent or a workflow once, offers it an engine to ask for tokens, and reads what it returns."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, Protocol

from prime_rl.environments.agents.context import Attempt, enter
from prime_rl.environments.agents.returns import BadTensors, InvalidReward, checked_reward, read_sequences
from prime_rl.environments.agents.targets import CLIENTS, Target, accepted
from prime_rl.utils.errors import one_line

if TYPE_CHECKING:
    from openai import AsyncOpenAI, DefaultAsyncHttpxClient

# The engine that a workflow asks for tokens: `await engine.agenerate(ModelRequest(...))`.


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


MAX_ERROR_CHARS = 2000
POOLS = 8
HUNG_THREADS = 8
"""Threads of functions that did not end in time, before the process gives up. They cannot be stopped."""
HUNG_AFTER_S = 5.0
"""Seconds after which a function whose attempt was cancelled should have ended: its calls of the model are refused."""
MAX_THREADS = 16_384
"""As many as rollouts may be in flight. A thread starts only when no other is free."""


class Attempts:
    """Makes attempts with one target. Its clients share their connections."""

    def __init__(self, target: Target, max_threads: int = MAX_THREADS) -> None:
        self._target = target
        # Not the event loop's own threads, which are few: a function would wait for others, until its time is up.
        self._threads = ThreadPoolExecutor(max_threads, "agent")
        self._left: dict[asyncio.Future[Any], float] = {}
        """When each function that runs without an attempt should have ended, by the event loop's clock."""
        self._pools: list[DefaultAsyncHttpxClient] = []
        self._next_pool = 0

    @property
    def hung_threads(self) -> int:
        now_s = asyncio.get_running_loop().time()
        return sum(limit_s <= now_s for limit_s in self._left.values())

    async def make(self, row: Mapping[str, Any], session: Mapping[str, Any], attempt: Attempt) -> dict[str, Any]:
        """Make one attempt at a row. `session` has `base_url`, `api_key`, `model` and `timeout_s`.

        Returns:
            `reward`: a number, or one for each completion id; `sequences`: those of a workflow; `is_rejected`;
            `error` and `detail`: name and message of what ended the attempt.
        """
        enter(attempt)
        try:
            async with asyncio.timeout(session["timeout_s"]) as limit:
                result = await self._run(row, session, limit)
            return _read(result)
        except TimeoutError:
            return {"error": "SessionTimeout", "detail": f"the agent did not end within {session['timeout_s']:g} s"}
        except (InvalidReward, BadTensors) as error:
            return {"error": type(error).__name__, "detail": str(error)}
        except SystemExit as error:
            return {"error": "SystemExit", "detail": f"it called sys.exit({error.code!r})"}
        except Exception as error:  # noqa: BLE001 - an agent's own code may raise anything
            return {"error": type(error).__name__, "detail": one_line(str(error), MAX_ERROR_CHARS)}

    def _client(self, session: Mapping[str, Any]) -> AsyncOpenAI:
        from openai import AsyncOpenAI

        return AsyncOpenAI(
            base_url=session["base_url"],
            api_key=session["api_key"],
            max_retries=0,
            timeout=session["timeout_s"],
            http_client=self._pool(),
        )

    def _pool(self) -> DefaultAsyncHttpxClient:
        """The next of several pools of connections. For each request, httpx looks at all connections of a pool."""
        from openai import DefaultAsyncHttpxClient

        if not self._pools:
            # The proxy is on this machine, behind no other, and the session limits the time.
            self._pools = [DefaultAsyncHttpxClient(timeout=None, trust_env=False) for _ in range(POOLS)]
        self._next_pool = (self._next_pool + 1) % POOLS
        return self._pools[self._next_pool]

    async def _run(self, row: Mapping[str, Any], session: Mapping[str, Any], limit: asyncio.Timeout) -> Any:
        target = self._target
        if target.kind == "workflow":
            engine = SessionEngine(_posting(self._client(session)))
            return await self._awaited(partial(target.call, engine, dict(row)), limit)
        named = accepted(target.call, dict.fromkeys((*CLIENTS, "base_url", "api_key", "model")))
        extras = {name: session[name] for name in named if name not in CLIENTS}
        if "client" in named:
            extras["client"] = self._client(session)
        if "http_client" in named:
            extras["http_client"] = self._pool()
        return await self._awaited(partial(target.call, dict(row), **extras, **target.arguments), limit)

    async def _awaited(self, call: Callable[[], Any], limit: asyncio.Timeout) -> Any:
        """The result of a coroutine function, or of a plain function in a thread. `limit` counts from its start."""
        function = call.func if isinstance(call, partial) else call
        if inspect.iscoroutinefunction(function):
            return await call()
        result = await self._threaded(call, limit)
        return await result if inspect.isawaitable(result) else result

    async def _threaded(self, call: Callable[[], Any], limit: asyncio.Timeout) -> Any:
        loop, started = asyncio.get_running_loop(), asyncio.Event()
        time_s = (limit.when() or 0.0) - loop.time()
        limit.reschedule(None)

        def start() -> Any:
            loop.call_soon_threadsafe(started.set)
            return call()

        given = self._threads.submit(copy_context().run, start)
        running = asyncio.wrap_future(given)
        try:
            await started.wait()
            limit.reschedule(loop.time() + time_s)
            return await asyncio.shield(running)
        except asyncio.CancelledError:
            # One that has not started never will.
            if not given.cancel() and not running.done():
                self._left[running] = loop.time() + (0.0 if limit.expired() else HUNG_AFTER_S)
                running.add_done_callback(self._thread_ended)
            raise

    def _thread_ended(self, running: asyncio.Future[Any]) -> None:
        del self._left[running]
        with contextlib.suppress(asyncio.CancelledError):
            running.exception()  # retrieved, or asyncio would log it


def _posting(client: AsyncOpenAI) -> Post:
    async def post(path: str, body: dict[str, Any]) -> dict[str, Any]:
        answer: dict[str, Any] = await client.post(path, body=body, cast_to=dict[str, Any])
        return answer

    return post


def _read(result: Any) -> dict[str, Any]:
    """What `make` returns for what an agent returned.

    Raises:
        InvalidReward: it is no reward.
        BadTensors: it is no trajectory.
    """
    if result is None:
        return {"is_rejected": True}
    if not isinstance(result, Mapping):
        return {"reward": checked_reward(result)}
    if "input_ids" in result:
        return {"sequences": read_sequences(result)}
    # Records of interactions have their rewards as an attribute.
    rewards = {str(name): getattr(value, "reward", value) for name, value in result.items()}
    return {"reward": {name: checked_reward(value) for name, value in rewards.items() if value is not None}}
