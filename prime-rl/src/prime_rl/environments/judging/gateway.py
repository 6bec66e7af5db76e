"""The judge gateway: an OpenAI-compatible server on the loopback interface that all environments of a run use.

It runs in a thread with its own event loop, so it answers even if code of an environment blocks this process's loop.
`http://127.0.0.1:PORT/NAME/v1` is the base URL of the judge NAME. Requests need the gateway's key; the keys of the
judges stay here. `offered` tells environments the URLs and the key by two environment variables, which child processes
inherit.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import threading
from collections.abc import Callable, Coroutine, Iterator, Mapping, MutableMapping
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, Self, TypeVar

from aiohttp import web

from prime_rl.configs.rollouts.judges import JudgeConfig
from prime_rl.environments.judging.judge import (
    CallFailed,
    CallRefused,
    Counters,
    Judge,
    JudgeCache,
    JudgeLost,
    JudgeServer,
)
from prime_rl.utils.engine_keys import direct_loopback, is_bearer
from prime_rl.utils.http_server import HOST, entries_fault, error_answer, json_object, listening

MAX_BODY_BYTES = 16 << 20
T = TypeVar("T")
_NO_RETRY = {"x-should-retry": "false"}
"""Stops the `openai` package from repeating requests after a 5xx: the gateway has already retried."""
JUDGES_VARIABLE = "ENVIRONMENT_JUDGES"
"""JSON with `base_url`, `model` and `sampling` of each judge, by name. Environments of any interpreter read it."""
JUDGE_KEY_VARIABLE = "ENVIRONMENT_JUDGE_KEY"
"""The key of the gateway: `judge_api_key_var` of environments."""


class JudgeGateway:
    """Serves environments until it is closed. Use it as a context manager."""

    def __init__(
        self,
        configs: Mapping[str, tuple[JudgeServer, JudgeConfig, JudgeCache | None]],
        calling: Callable[[str], AbstractContextManager[None]] = lambda name: nullcontext(),
    ) -> None:
        """`calling(name)` is a context manager that wraps each call to the judge of this name."""
        self.key = secrets.token_urlsafe(32)
        self.lost: Future[None] = Future()
        """Gets a `JudgeLost` as its exception when a judge cannot be used any more."""
        self.port = 0
        self.judges: dict[str, Judge] = {}
        self._configs = configs
        self._calling = calling
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="judges", daemon=True)
        self._runner: web.AppRunner | None = None

    def __enter__(self) -> Self:
        self._thread.start()
        try:
            self._run(self._open())
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self._run(self._close())
        self._stop()

    def base_url(self, name: str) -> str:
        return f"http://{HOST}:{self.port}/{name}/v1"

    async def warm(self) -> None:
        """Wait until every judge has answered once. Can be awaited on any event loop.

        Raises:
            JudgeLost: a judge does not answer.
        """

        async def warm(name: str, judge: Judge) -> None:
            with self._calling(name):
                await judge.warm()

        async def warm_all() -> None:
            await asyncio.gather(*(warm(name, judge) for name, judge in self.judges.items()))

        await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(warm_all(), self._loop))

    def take_metrics(self) -> dict[str, float]:
        """Metrics since the last call of this method."""

        async def take() -> dict[str, float]:
            metrics: dict[str, float] = {}
            for judge in self.judges.values():
                prices = judge.config.prompt_price, judge.config.completion_price
                metrics |= judge.step.metrics(f"judge/{judge.server.name}", *prices)
                judge.step = Counters()
            return metrics

        return self._run(take())  # on the gateway's loop, which counts

    async def _open(self) -> None:
        for name, (server, config, cache) in self._configs.items():
            self.judges[name] = Judge(server, config, cache, self._note_lost, partial(self._calling, name))
        app = web.Application(client_max_size=MAX_BODY_BYTES)
        app.router.add_post("/{judge}/v1/chat/completions", self._chat)
        app.router.add_get("/{judge}/v1/models", self._models)
        self._runner = await listening(app, "judges")
        self.port = self._runner.addresses[0][1]

    async def _close(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
        await asyncio.gather(*(judge.close() for judge in self.judges.values()))

    def _stop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    async def _models(self, request: web.Request) -> web.Response:
        judge = self._judge_of(request)
        if isinstance(judge, web.Response):
            return judge
        return web.json_response({"object": "list", "data": [{"id": judge.config.model, "object": "model"}]})

    async def _chat(self, request: web.Request) -> web.Response:
        judge = self._judge_of(request)
        if isinstance(judge, web.Response):
            return judge
        body = await json_object(request)
        messages = body.get("messages")
        if not isinstance(messages, list) or not messages or not all(isinstance(each, dict) for each in messages):
            return _error(400, "messages: a list of messages, and at least one")
        if (fault := entries_fault(messages, "messages")) is not None:
            return _error(400, fault)
        if body.get("stream"):
            return _error(400, "stream: not supported, because answers are cached")
        if self.lost.done():
            return _error(503, "a judge of this run failed, and the run is ending")
        return await _answered(judge, body)

    def _note_lost(self, error: JudgeLost) -> None:
        if not self.lost.done():
            self.lost.set_exception(error)

    def _judge_of(self, request: web.Request) -> Judge | web.Response:
        if not is_bearer(request.headers.get("Authorization", ""), self.key):
            return _error(401, "this gateway needs its key: judge_api_key, or the variable in judge_api_key_var")
        name = request.match_info["judge"]
        judge = self.judges.get(name)
        return judge if judge is not None else _error(404, f"no judge is called {name!r}")


async def _answered(judge: Judge, body: dict[str, Any]) -> web.Response:
    try:
        return web.json_response(await judge.complete(body))
    except CallRefused as error:
        return _error(error.status, str(error))
    except CallFailed as error:
        return _error(502, str(error))
    except JudgeLost as error:
        return _error(503, str(error))


def _error(status: int, message: str) -> web.Response:
    answer = error_answer(status, message)
    answer.headers.update(_NO_RETRY)
    return answer


@contextmanager
def offered(
    judges: Mapping[str, JudgeConfig],
    base_urls: Mapping[str, str],
    key: str,
    environ: MutableMapping[str, str] = os.environ,
) -> Iterator[None]:
    """Offer judges to the environments that this process loads in the block, and to those of its children."""
    if not judges:
        yield
        return
    shown = {
        name: {"base_url": base_urls[name], "model": judge.model, "sampling": judge.sampling}
        for name, judge in judges.items()
    }
    added = {JUDGES_VARIABLE: json.dumps(shown), JUDGE_KEY_VARIABLE: key}
    added |= direct_loopback(environ)
    before = {name: environ.get(name) for name in added}
    environ.update(added)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                environ.pop(name, None)
            else:
                environ[name] = value


@contextmanager
def offered_in_a_trial(judges: Mapping[str, JudgeConfig]) -> Iterator[None]:
    """Offer judges that do not answer, to environments that are loaded but not run."""
    nowhere = {name: f"http://{HOST}:9/{name}/v1" for name in judges}
    with offered(judges, nowhere, "no-key-in-a-trial"):
        yield
