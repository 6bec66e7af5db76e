"""HTTP routes of the embedded engine. Imports no torch, so that the server can respond while the model loads."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from prime_rl.checks.time_limit import MAX_RENDER_S, OutOfTime, time_limit
from prime_rl.inference.embedded.engine.generation import Generation, GenerationRequest
from prime_rl.inference.embedded.errors import EngineBusy, EngineStopped, GenerationFailed
from prime_rl.inference.embedded.http.answers import (
    Answered,
    ChatChunks,
    CompletionChunks,
    EventStream,
    chat_response,
    completion_response,
)
from prime_rl.inference.guards import HEALTH, METRICS, BoundBodies, RequireKey
from prime_rl.inference.model_files import AdapterMissing, WeightError
from prime_rl.inference.protocol import (
    ASLEEP,
    NO_SLEEP_MODE,
    PAUSED,
    ChatBody,
    CompletionBody,
    InitBroadcasterBody,
    LoadAdapterBody,
    Parsed,
    RequestError,
    SamplingBody,
    TokenizeBody,
    TokensBody,
    UpdateWeightsBody,
    parse_body,
)
from prime_rl.inference.rendering import in_time
from prime_rl.monitors.prometheus import exposition
from prime_rl.transport.endpoints import TransportError
from prime_rl.utils.images import image_parts
from prime_rl.utils.logger import get_logger

if TYPE_CHECKING:
    from prime_rl.inference.embedded.engine.engine import Engine
    from prime_rl.inference.embedded.http.service import Service

Handler = Callable[[Request], Awaitable[Response]]
Result = TypeVar("Result")
_CLIENT_CLOSED_REQUEST = 499
_INLINE_BYTES = 64 << 10
"""A smaller body is parsed and tokenized on the event loop, in a few milliseconds: a thread would only add latency."""
_INLINE_S = 0.5
"""Time to prepare a request on the event loop. One that takes longer, and all after it, are prepared in threads."""
_SLOW_BYTES = _INLINE_BYTES + 1
"""Counts for a request with images, however short: a small file may hold many pixels."""
_NUM_THREADS = 4
_BYTES_PER_TOKEN = 32


class ClientDisconnected(Exception):
    """The client disconnected before the response was ready."""


class Api:
    """Routes to a `Service`, which is set once the model is loaded."""

    def __init__(
        self, model_name: str, key: str, preparation_s: float = MAX_RENDER_S, public_metrics: bool = False
    ) -> None:
        """`key` is required of every request but health checks and, with `public_metrics`, metrics; `preparation_s` is
        the time to prepare a request."""
        self._open_paths = (HEALTH, METRICS) if public_metrics else (HEALTH,)
        self.model_name = model_name
        self._preparation_s = preparation_s
        self._key = key
        self.service: Service | None = None
        self.created_s = int(time.time())
        self._parsing = ThreadPoolExecutor(1, thread_name_prefix="parsing")
        self._threads = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="http")
        self._is_slow = False
        """Whether preparing a small request has taken long once, as with a chat template that loops."""

    def app(self) -> Starlette:
        posts: dict[str, Handler] = {
            "/v1/chat/completions": self.chat,
            "/v1/chat/completions/tokens": self.chat_from_tokens,
            "/v1/completions": self.complete,
            "/tokenize": self.tokenize,
            "/update_weights": self.update_weights,
            "/reload_weights": self.reload_weights,
            "/pause": self.pause,
            "/resume": self.resume,
            "/sleep": self.sleep,
            "/load_lora_adapter": self.load_adapter,
            "/init_broadcaster": self.init_broadcaster,
        }
        gets: dict[str, Handler] = {
            "/health": self.health,
            "/v1/models": self.models,
            "/is_paused": self.is_paused,
            "/is_sleeping": self.is_sleeping,
            "/load": self.load,
            METRICS: self.metrics,
        }
        return Starlette(
            routes=[
                *(Route(path, _with_error_responses(handler), methods=["POST"]) for path, handler in posts.items()),
                *(Route(path, _with_error_responses(handler)) for path, handler in gets.items()),
            ],
            exception_handlers={HTTPException: _http_error_response},
            middleware=[Middleware(RequireKey, key=self._key, open_paths=self._open_paths), Middleware(BoundBodies)],
        )

    def ready(self) -> Service:
        """Return the service.

        Raises:
            RequestError: status 503 while the model is loading.
        """
        if self.service is None:
            raise RequestError("The model is still loading", HTTPStatus.SERVICE_UNAVAILABLE)
        return self.service

    async def health(self, _: Request) -> Response:
        self.ready()
        return Response()

    async def models(self, _: Request) -> Response:
        service = self.ready()
        base = service.model.name
        common = {"object": "model", "created": self.created_s, "owned_by": "prime-rl"}
        entries = [{"id": base, "root": base, "parent": None, "max_model_len": service.model.max_model_len}]
        for adapter in service.adapters.values():
            entries.append({"id": adapter.name, "root": str(adapter.directory), "parent": base, "max_model_len": None})
        return _json({"object": "list", "data": [common | entry for entry in entries]})

    async def chat(self, request: Request) -> Response:
        return await self._chat(request, ChatBody)

    async def chat_from_tokens(self, request: Request) -> Response:
        return await self._chat(request, TokensBody)

    async def complete(self, request: Request) -> Response:
        service, raw = self.ready(), await request.body()
        body = await self._parsed(CompletionBody, raw)
        wanted = await self._prepared(len(raw), lambda: service.completion_requests(body))
        if body.stream:
            return _stream(service, body, wanted, CompletionChunks(body, service.text))
        answered = await _generate(service, request, wanted)
        name = body.model or service.model.name
        return await self._in_thread(
            _size_bytes(body, answered), lambda: _json(completion_response(name, body, service.text, answered))
        )

    async def tokenize(self, request: Request) -> Response:
        service, raw = self.ready(), await request.body()
        body = await self._parsed(TokenizeBody, raw)
        service.adapter(body.model)

        def answer() -> Response:
            tokens = service.tokens_of(body)
            strings = [service.text.token_text(token) for token in tokens] if body.return_token_strs else None
            counted = {"count": len(tokens), "max_model_len": service.model.max_model_len, "tokens": tokens}
            return _json(counted | {"token_strs": strings})

        return await self._prepared(_SLOW_BYTES if image_parts(body.messages) else len(raw), answer)

    async def update_weights(self, request: Request) -> Response:
        body = parse_body(UpdateWeightsBody, await request.body())
        return await self._swap_weights(Path(body.weight_dir) if body.weight_dir is not None else None)

    async def reload_weights(self, _: Request) -> Response:
        return await self._swap_weights(None)

    async def load_adapter(self, request: Request) -> Response:
        body = parse_body(LoadAdapterBody, await request.body())
        engine = self.ready().engine
        try:
            version = await _on_engine(lambda: engine.load_adapter(body.lora_name, Path(body.lora_path)))
        except AdapterMissing as exc:
            raise RequestError(str(exc), HTTPStatus.NOT_FOUND, "lora_path") from exc
        except (WeightError, OSError) as exc:
            raise RequestError(str(exc), param="lora_path") from exc
        return _json({"status": "ok", "version": version})

    async def pause(self, request: Request) -> Response:
        if request.query_params.get("mode", "keep") != "keep":
            raise RequestError("This engine supports only mode=keep: requests stay and continue after /resume")
        self._refuse_asleep()
        await _on_engine(self.ready().engine.pause)
        return _json({"status": "paused"})

    async def resume(self, _: Request) -> Response:
        self._refuse_asleep()
        await _on_engine(self.ready().engine.resume)
        return _json({"status": "resumed"})

    async def is_paused(self, _: Request) -> Response:
        return _json({"is_paused": self.ready().engine.paused})

    def _refuse_asleep(self) -> None:
        if self.ready().engine.is_asleep:
            raise RequestError(ASLEEP)

    async def sleep(self, _: Request) -> Response:
        service = self.ready()
        if not service.may_sleep:
            raise RequestError(NO_SLEEP_MODE)
        if service.engine.paused:
            raise RequestError(PAUSED)
        await _on_engine(service.engine.sleep)
        return _json({"status": "sleeping"})

    async def is_sleeping(self, _: Request) -> Response:
        return _json({"is_sleeping": self.ready().engine.is_asleep})

    async def metrics(self, _: Request) -> Response:
        """Gauges in Prometheus's text format. They are missing while the model loads."""
        text = "" if self.service is None else exposition(engine_metrics(self.service.engine), {})
        return Response(text, media_type="text/plain; version=0.0.4")

    async def load(self, _: Request) -> Response:
        """Number of samples running or waiting."""
        return _json({"server_load": self.ready().engine.load})

    async def init_broadcaster(self, request: Request) -> Response:
        body = parse_body(InitBroadcasterBody, await request.body())
        try:
            # In a thread, because joining blocks until the trainer is there.
            await asyncio.to_thread(self.ready().engine.weight_source.join, body)
        except TransportError as exc:
            raise RequestError(str(exc), HTTPStatus.INTERNAL_SERVER_ERROR) from exc
        return _json({"status": "ok"})

    async def _chat(self, request: Request, kind: type[ChatBody]) -> Response:
        service, raw = self.ready(), await request.body()
        body = await self._parsed(kind, raw)
        parser = service.parser_for(body)
        if parser is not None and parser.needs_special_tokens:
            body = body.model_copy(update={"skip_special_tokens": False})
        size_bytes = _SLOW_BYTES if image_parts(body.messages) else len(raw)
        wanted = await self._prepared(size_bytes, lambda: service.chat_requests(body))
        if body.stream:
            return _stream(service, body, wanted, ChatChunks(body, service.text, parser))
        answered = await _generate(service, request, wanted)
        name = body.model or service.model.name
        return await self._in_thread(
            _size_bytes(body, answered), lambda: _json(chat_response(name, body, service.text, answered, parser))
        )

    async def _parsed(self, kind: type[Parsed], raw: bytes) -> Parsed:
        """Parse a body; a large one in another thread, one at a time, because parsing holds Python's lock."""
        if len(raw) <= _INLINE_BYTES:
            return parse_body(kind, raw)
        return await asyncio.get_running_loop().run_in_executor(self._parsing, parse_body, kind, raw)

    async def _prepared(self, size_bytes: int, work: Callable[[], Result]) -> Result:
        """Render and tokenize a request of that many bytes, without keeping `/health` from being answered.

        Raises:
            RequestError: it takes too long.
        """
        if size_bytes <= _INLINE_BYTES and not self._is_slow:
            try:
                with time_limit(_INLINE_S):
                    return work()
            except OutOfTime:
                self._is_slow = True
        return await asyncio.get_running_loop().run_in_executor(self._threads, in_time, work, self._preparation_s)

    async def _in_thread(self, size_bytes: int, work: Callable[[], Result]) -> Result:
        """Run work on that many bytes; in a thread if they are many, so that `/health` is answered meanwhile."""
        if size_bytes <= _INLINE_BYTES:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    async def _swap_weights(self, directory: Path | None) -> Response:
        engine = self.ready().engine
        try:
            version = await _on_engine(lambda: engine.update_weights(directory))
        except TransportError as exc:
            raise RequestError(str(exc), HTTPStatus.INTERNAL_SERVER_ERROR) from exc
        except (WeightError, OSError) as exc:
            raise RequestError(str(exc), param="weight_dir") from exc
        return _json({"status": "ok", "version": version})


async def _generate(service: Service, request: Request, wanted: list[GenerationRequest]) -> Answered:
    """Run requests to completion, or cancel them if the client disconnects first."""
    everything = asyncio.gather(*map(asyncio.wrap_future, _submit(service, wanted)))
    # After a disconnect nobody awaits it, and asyncio logs each error that nobody has looked at.
    everything.add_done_callback(lambda done: done.cancelled() or done.exception())
    gone = asyncio.create_task(_disconnected(request))
    either: set[asyncio.Future[Any]] = {everything, gone}
    try:
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if not everything.done():
            raise ClientDisconnected
        return list(zip(wanted, everything.result(), strict=True))
    except EngineStopped as exc:
        raise RequestError(str(exc), HTTPStatus.SERVICE_UNAVAILABLE) from exc
    except GenerationFailed as exc:
        raise RequestError(str(exc), HTTPStatus.INTERNAL_SERVER_ERROR) from exc
    finally:
        gone.cancel()
        _cancel(wanted)


def _stream(
    service: Service, body: SamplingBody, wanted: list[GenerationRequest], chunks: ChatChunks | CompletionChunks
) -> Response:
    stream = EventStream(body.model or service.model.name, body, wanted, service.text, chunks)
    _submit(service, wanted)
    return _Events(stream.events(), wanted)


class _Events(StreamingResponse):
    """A server-sent event stream. Cancels unfinished requests when it ends or the client disconnects."""

    def __init__(self, events: AsyncIterator[bytes], wanted: list[GenerationRequest]) -> None:
        super().__init__(events, media_type="text/event-stream")
        self._wanted = wanted

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            _cancel(self._wanted)


def _size_bytes(body: SamplingBody, answered: Answered) -> int:
    """About how large the response is."""
    tokens = sum(len(one.token_ids) for _, generation in answered for one in generation.completions)
    tokens += sum(len(request.prompt) for request, _ in answered if body.num_prompt_logprobs is not None)
    tops = max(body.num_prompt_logprobs or 0, *(request.params.top_logprobs for request, _ in answered))
    return _BYTES_PER_TOKEN * tokens * (1 + tops)


def _submit(service: Service, wanted: list[GenerationRequest]) -> list[Future[Generation]]:
    """Submit all requests, or none if the engine refuses one."""
    try:
        return [service.engine.submit(one) for one in wanted]
    except EngineBusy as exc:
        _cancel(wanted)
        raise RequestError(str(exc), HTTPStatus.TOO_MANY_REQUESTS) from exc
    except EngineStopped as exc:
        raise RequestError(str(exc), HTTPStatus.SERVICE_UNAVAILABLE) from exc


async def _on_engine(command: Callable[[], Future[Any]]) -> Any:
    """Run a command on the engine between two steps, and return its result."""
    try:
        return await asyncio.wrap_future(command())
    except EngineStopped as exc:
        raise RequestError(str(exc), HTTPStatus.SERVICE_UNAVAILABLE) from exc


def _cancel(requests: list[GenerationRequest]) -> None:
    """Cancel requests. Has no effect on those that are complete."""
    for request in requests:
        request.result.cancel()


async def _disconnected(request: Request) -> None:
    """Return when the client disconnects. Requires the body to have been read, so that no other message can arrive."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _json(content: dict[str, Any], status: int = HTTPStatus.OK) -> Response:
    return Response(msgspec.json.encode(content), status_code=status, media_type="application/json")


def _with_error_responses(handler: Handler) -> Handler:
    """Wrap a handler so that every error becomes a response and the connection stays open."""

    async def answer(request: Request) -> Response:
        try:
            return await handler(request)
        except RequestError as exc:
            return _json(exc.body(), exc.status)
        except ClientDisconnected:
            return Response(status_code=_CLIENT_CLOSED_REQUEST)
        except Exception as exc:  # noqa: BLE001 - the outermost boundary: logged and returned to the client
            name = uuid.uuid4().hex
            get_logger().error(f"Request {name} to {request.url.path} failed: {exc!r}", exc_info=exc)
            error = RequestError(f"Request {name} failed: {exc!r}", HTTPStatus.INTERNAL_SERVER_ERROR)
            return _json(error.body(), error.status)

    return answer


async def _http_error_response(_: Request, exc: Exception) -> Response:
    """Response for unknown paths and methods."""
    assert isinstance(exc, HTTPException)
    return _json(RequestError(exc.detail, exc.status_code).body(), exc.status_code)


def engine_metrics(engine: Engine) -> dict[str, float]:
    """Gauges of the engine. The totals count since its start."""
    return {
        "inference_samples_running": engine.num_running,
        "inference_samples_waiting": max(0, engine.load - engine.num_running),
        "inference_generated_tokens": engine.total_tokens,
        "inference_busy_seconds": engine.total_busy_s,
        "inference_policy_version": engine.version,
        "inference_paused": float(engine.paused),
    }
