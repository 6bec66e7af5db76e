"""Makes attempts with one agent or workflow. Needs Python 3.11, and `openai` if the agent takes a client."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from functools import partial
from typing import TYPE_CHECKING, Any

from prime_rl.environments.agents.attempting import Post, SessionEngine
from prime_rl.environments.agents.context import Attempt, enter
from prime_rl.environments.agents.returns import BadTensors, InvalidReward, checked_reward, read_sequences
from prime_rl.environments.agents.targets import CLIENTS, BadTarget, Target, accepted, load_target, needs_client
from prime_rl.orchestrator.workers.inside.judge_arguments import NoJudge, offered_arguments
from prime_rl.orchestrator.workers.inside.model_client import http_client, quick
from prime_rl.orchestrator.workers.inside.serving import Ending, Unusable
from prime_rl.utils.errors import one_line

if TYPE_CHECKING:
    from openai import AsyncOpenAI, DefaultAsyncHttpxClient

MAX_ERROR_CHARS = 2000
HUNG_THREADS = 8
"""Threads of functions that did not end in time, before the process gives up. They cannot be stopped."""
HUNG_AFTER_S = 5.0
"""Seconds after which a function whose attempt was cancelled should have ended: its calls of the model are refused."""
MAX_THREADS = 16_384
"""As many as rollouts may be in flight. A thread starts only when no other is free."""


class Served:
    """Makes attempts."""

    def __init__(self, start: Mapping[str, Any]) -> None:
        """Raises Unusable if the agent cannot be loaded."""
        # An agent is found where the run starts.
        given = start["attributes"]["path"]
        sys.path[:] = [*given, *(place for place in sys.path if place not in given)]
        try:
            offered = partial(offered_arguments, start["judge"], repr(start["module"]))
            target = load_target(start["module"], start["args"], offered)
        except (BadTarget, NoJudge) as error:
            raise Unusable(str(error)) from error
        if needs_client(target) and importlib.util.find_spec("openai") is None:
            raise Unusable(
                "it needs the package openai to call the model, and its interpreter does not have it: install it there"
            )
        self._attempts = Attempts(target)

    async def attempt(
        self, row: Mapping[str, Any], session: Mapping[str, Any], task_id: str, is_eval: bool
    ) -> dict[str, Any]:
        """One attempt at a row. See `Attempts.make`."""
        return await self._attempts.make(row, session, Attempt(task_id, is_eval))

    def ping(self) -> None:
        """Answers while the agent's code does not block the process."""

    def after_answer(self) -> None:
        """Raises Ending once too many threads of plain functions did not end in time: they cannot be stopped."""
        if self._attempts.hung_threads >= HUNG_THREADS:
            raise Ending(f"{HUNG_THREADS} threads of the agent did not end in time; its process starts again")

    async def close(self) -> None:
        """Nothing outlives the process."""


class Attempts:
    """Makes attempts with one target. Its clients share their connections."""

    def __init__(self, target: Target, max_threads: int = MAX_THREADS) -> None:
        self._target = target
        # Not the event loop's own threads, which are few: a function would wait for others, until its time is up.
        self._threads = ThreadPoolExecutor(max_threads, "agent")
        self._left: dict[asyncio.Future[Any], float] = {}
        """When each function that runs without an attempt should have ended, by the event loop's clock."""
        self._http: dict[str, DefaultAsyncHttpxClient] = {}

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

        client: AsyncOpenAI = quick(
            AsyncOpenAI(
                base_url=session["base_url"],
                api_key=session["api_key"],
                max_retries=0,
                timeout=session["timeout_s"],
                http_client=self._http_client(session),
            )
        )
        return client

    def _http_client(self, session: Mapping[str, Any]) -> DefaultAsyncHttpxClient:
        # The session limits the time. All attempts share the connections to the proxy.
        url = session["base_url"]
        if url not in self._http:
            self._http[url] = http_client(url)
        return self._http[url]

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
            extras["http_client"] = self._http_client(session)
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
