"""Runs an agent or a workflow once, and reads what it returns."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from prime_rl.environments.agents.context import Attempt, enter
from prime_rl.environments.agents.engine import SessionEngine
from prime_rl.environments.agents.returns import InvalidReward, checked_reward
from prime_rl.environments.agents.targets import CLIENTS, Target, accepted
from prime_rl.environments.agents.tensors import BadTensors, read_sequences

if TYPE_CHECKING:
    from openai import AsyncOpenAI, DefaultAsyncHttpxClient

    from prime_rl.environments.agents.engine import Post

MAX_ERROR_CHARS = 2000
POOLS = 8
HUNG_THREADS = 8
"""Threads of functions that did not end in time, before the process gives up. They cannot be stopped."""


class Attempts:
    """Makes attempts with one target. Its clients share their connections."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._pools: list[DefaultAsyncHttpxClient] = []
        self._next_pool = 0
        self.hung_threads = 0

    async def make(self, row: Mapping[str, Any], session: Mapping[str, Any], attempt: Attempt) -> dict[str, Any]:
        """Make one attempt at a row. `session` has `base_url`, `api_key`, `model` and `timeout_s`.

        Returns:
            `reward`: a number, or one for each completion id; `sequences`: those of a workflow; `is_rejected`;
            `error` and `detail`: name and message of what ended the attempt.
        """
        enter(attempt)
        try:
            async with asyncio.timeout(session["timeout_s"]):
                result = await self._run(row, session)
            return _read(result)
        except TimeoutError:
            return {"error": "SessionTimeout", "detail": f"the agent did not end within {session['timeout_s']:g} s"}
        except (InvalidReward, BadTensors) as error:
            return {"error": type(error).__name__, "detail": str(error)}
        except SystemExit as error:
            return {"error": "SystemExit", "detail": f"it called sys.exit({error.code!r})"}
        except Exception as error:  # noqa: BLE001 - an agent's own code may raise anything
            return {"error": type(error).__name__, "detail": " ".join(str(error).split())[:MAX_ERROR_CHARS]}

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

    async def _run(self, row: Mapping[str, Any], session: Mapping[str, Any]) -> Any:
        target = self._target
        if target.kind == "workflow":
            engine = SessionEngine(_posting(self._client(session)))
            return await self._awaited(partial(target.call, engine, dict(row)))
        named = accepted(target.call, dict.fromkeys((*CLIENTS, "base_url", "api_key", "model")))
        extras = {name: session[name] for name in named if name not in CLIENTS}
        if "client" in named:
            extras["client"] = self._client(session)
        if "http_client" in named:
            extras["http_client"] = self._pool()
        return await self._awaited(partial(target.call, dict(row), **extras, **target.arguments))

    async def _awaited(self, call: Callable[[], Any]) -> Any:
        """The result of a coroutine function, or of a plain function in a thread."""
        function = call.func if isinstance(call, partial) else call
        if inspect.iscoroutinefunction(function):
            return await call()
        running = asyncio.ensure_future(asyncio.to_thread(call))
        try:
            result = await asyncio.shield(running)
        except asyncio.CancelledError:
            if not running.done():
                self.hung_threads += 1
                running.add_done_callback(self._thread_ended)
            raise
        return await result if inspect.isawaitable(result) else result

    def _thread_ended(self, running: asyncio.Future[Any]) -> None:
        self.hung_threads -= 1
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
