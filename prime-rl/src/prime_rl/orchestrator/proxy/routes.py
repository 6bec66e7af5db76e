"""The proxy's HTTP server: chat completions, responses and rewards for requests with the key of a session.

It listens on the loopback interface of this machine. A session's key replaces the engine's, which no agent gets. An
engine's answer is recorded as a whole, so a stream has all of it in one delta.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import math
import secrets
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import aiohttp
import msgspec
from aiohttp import web

from prime_rl.environments.agents.returns import InvalidReward
from prime_rl.orchestrator.errors import MalformedRollout
from prime_rl.orchestrator.proxy.completions import Refused, complete, generate
from prime_rl.orchestrator.proxy.recording import Offers, Session, Sessions
from prime_rl.orchestrator.proxy.responses import respond
from prime_rl.orchestrator.servers.channel import OverlongPrompt, ServerAnswered
from prime_rl.orchestrator.workers.inside.model_client import SESSION_HEADER
from prime_rl.utils.http_server import HOST, error_answer, json_object, listening

MAX_BODY_BYTES = 64 << 20
MAX_WAIT_S = 60.0
"""Longest time that a request to start a session waits for an attempt."""

_CHUNK = "chat.completion.chunk"

Answering = Callable[[web.Request], Awaitable[web.StreamResponse]]
InSession = Callable[[web.Request, Session], Awaitable[web.StreamResponse]]


class RecordingProxy:
    """Serves sessions on a port of the loopback interface: a free one, unless `port` names it."""

    def __init__(self, port: int = 0) -> None:
        self.sessions = Sessions()
        self.key = secrets.token_hex(24)
        """Lets a process ask in the name of any session, which it names in a header."""
        self.offers = Offers()
        self.starter_key = secrets.token_hex(24)
        """The key with which agents in foreign processes start sessions."""
        self._port = port
        self._runner: web.AppRunner | None = None
        self._opening = asyncio.Lock()
        self.base_url = ""
        """`http://127.0.0.1:PORT/v1` once the proxy is open."""

    async def open(self) -> None:
        """Start to listen, if the proxy does not yet.

        Raises:
            OSError: the port is taken.
        """
        async with self._opening:
            if self._runner is None:
                self._runner = await self._listening()
                self.base_url = f"http://{HOST}:{self._runner.addresses[0][1]}/v1"

    async def _listening(self) -> web.AppRunner:
        app = web.Application(client_max_size=MAX_BODY_BYTES)
        posts: dict[str, InSession] = {
            "/v1/chat/completions": _chat,
            "/v1/responses": _responses,
            "/v1/rl/generate": _generate,
            "/v1/rl/set_reward": self._set_reward,
            "/v1/rl/end_session": self._end,
        }
        for path, answer in posts.items():
            app.router.add_post(path, self._answering(answer))
        app.router.add_get("/v1/models", self._answering(_models))
        app.router.add_post("/v1/rl/start_session", _with_errors(self._start))
        return await listening(app, "recording proxy", self._port)

    async def close(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()

    def _answering(self, answer: InSession) -> Answering:
        async def within(request: web.Request) -> web.StreamResponse:
            return await answer(request, self._session(request))

        return _with_errors(within)

    def _session(self, request: web.Request) -> Session:
        key = _key(request)
        if secrets.compare_digest(key.encode(errors="surrogateescape"), self.key.encode()):
            session = self.sessions.named(request.headers.get(SESSION_HEADER, ""))
        else:
            session = self.sessions.find(key)
        if session is None:
            raise Refused(401, "no session with this API key: it has ended, or the key is wrong")
        return session

    async def _start(self, request: web.Request) -> web.StreamResponse:
        if not hmac.compare_digest(_key(request).encode(errors="surrogateescape"), self.starter_key.encode()):
            raise Refused(401, "starting a session needs the run's key for agents")
        wait_s = (await json_object(request)).get("wait_s", 0.0)
        if not isinstance(wait_s, int | float) or not 0 <= wait_s <= MAX_WAIT_S:
            raise Refused(400, f"wait_s: 0 to {MAX_WAIT_S:g} seconds")
        offer = await self.offers.take(wait_s)
        if offer is None:
            raise Refused(429, "no attempt is waiting for an agent: ask again later", "no_attempt")
        key = offer.session.key
        return web.json_response(
            {"api_key": key, "base_url": self.base_url, "model": offer.session.model, "task": offer.task}
        )

    async def _set_reward(self, request: web.Request, session: Session) -> web.StreamResponse:
        body = await json_object(request)
        completion_id, choice = body.get("completion_id"), body.get("choice")
        if completion_id is not None and not isinstance(completion_id, str):
            raise Refused(400, "completion_id: a text")
        if choice is not None and type(choice) is not int:
            raise Refused(400, "choice: a number")
        session.set_reward(body.get("reward", math.nan), completion_id, choice)
        return web.json_response({"status": "ok"})

    async def _end(self, request: web.Request, session: Session) -> web.StreamResponse:
        session.set_rewards((await json_object(request)).get("reward"))
        self.sessions.end(session)
        self.offers.end(session)
        return web.json_response({"status": "ok", "calls": len(session.calls)})


async def _models(request: web.Request, session: Session) -> web.StreamResponse:
    return web.json_response({"object": "list", "data": [{"id": session.model, "object": "model"}]})


async def _chat(request: web.Request, session: Session) -> web.StreamResponse:
    body = await json_object(request)
    completion = await complete(session, body)
    if body.get("stream"):
        return await streamed(request, chat_chunks(body, completion), done=True)
    return _json(completion)


async def _responses(request: web.Request, session: Session) -> web.StreamResponse:
    body = await json_object(request)
    response = await respond(session, body)
    if body.get("stream"):
        return await streamed(request, response_events(response), named=True)
    return _json(response)


async def _generate(request: web.Request, session: Session) -> web.StreamResponse:
    return _json(await generate(session, await json_object(request)))


def chat_chunks(body: Mapping[str, Any], completion: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The chunks of a chat completion: one with all of each choice, one with its end, and the usage if asked for."""
    head = {name: completion.get(name) for name in ("id", "created", "model")} | {"object": _CHUNK}
    for choice in completion["choices"]:
        said = choice["message"]
        calls = [{"index": at, **call} for at, call in enumerate(said.get("tool_calls") or ())]
        # Reasoning too, which has another name in each version of an engine.
        delta = {name: value for name, value in said.items() if value is not None} | (
            {"tool_calls": calls} if calls else {}
        )
        for part, reason in ((delta, None), ({}, choice.get("finish_reason"))):
            shown = {"index": choice.get("index", 0), "delta": part, "finish_reason": reason}
            yield head | {"choices": [shown | {"logprobs": choice.get("logprobs") if part else None}]}
    options = body.get("stream_options")
    if isinstance(options, dict) and options.get("include_usage"):
        yield head | {"choices": [], "usage": completion.get("usage")}


def response_events(response: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The events of a response of the responses API, as its clients expect them."""
    started = {**response, "status": "in_progress", "output": [], "usage": None, "incomplete_details": None}
    events: list[dict[str, Any]] = [
        {"type": "response.created", "response": started},
        {"type": "response.in_progress", "response": started},
    ]
    for index, item in enumerate(response["output"]):
        place = {"output_index": index}
        kind = item["type"]
        empties: dict[str, dict[str, Any]] = {"message": {"content": []}, "function_call": {"arguments": ""}}
        empty = empties.get(kind, {})
        events.append(
            {"type": "response.output_item.added", **place, "item": {**item, "status": "in_progress"} | empty}
        )
        inside = {"item_id": item["id"], **place}
        if kind == "message":
            for at, part in enumerate(item["content"]):
                events += _text_events(inside | {"content_index": at}, part)
        elif kind == "function_call":
            name = "response.function_call_arguments"
            events.append({"type": f"{name}.delta", **inside, "delta": item["arguments"]})
            events.append({"type": f"{name}.done", **inside, "name": item["name"], "arguments": item["arguments"]})
        events.append({"type": "response.output_item.done", **place, "item": item})
    end = "response.completed" if response["status"] == "completed" else "response.incomplete"
    events.append({"type": end, "response": response})
    for number, event in enumerate(events):
        yield {**event, "sequence_number": number}


def _text_events(place: Mapping[str, Any], part: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    text = part["text"]
    yield {"type": "response.content_part.added", **place, "part": {**part, "text": ""}}
    yield {"type": "response.output_text.delta", **place, "delta": text, "logprobs": []}
    yield {"type": "response.output_text.done", **place, "text": text, "logprobs": []}
    yield {"type": "response.content_part.done", **place, "part": part}


async def streamed(
    request: web.Request, events: Iterable[Mapping[str, Any]], *, named: bool = False, done: bool = False
) -> web.StreamResponse:
    """Send events. `named` events have their type as a name too; `done` ends them as chat completions do."""
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
    await response.prepare(request)
    for event in events:
        name = f"event: {event['type']}\n" if named else ""
        await response.write(f"{name}data: {json.dumps(event)}\n\n".encode())
    if done:
        await response.write(b"data: [DONE]\n\n")
    await response.write_eof()
    return response


def _json(body: Any) -> web.Response:
    return web.Response(body=msgspec.json.encode(body), content_type="application/json")


def _key(request: web.Request) -> str:
    return request.headers.get("Authorization", "").removeprefix("Bearer ")


def _with_errors(answer: Answering) -> Answering:
    """Turn what can go wrong in a request into an OpenAI error body."""
    return partial(_answered, answer)


async def _answered(answer: Answering, request: web.Request) -> web.StreamResponse:
    try:
        return await answer(request)
    except Refused as error:
        return error_answer(error.status, str(error), error.code)
    except InvalidReward as error:
        return error_answer(400, str(error), "invalid_reward")
    except OverlongPrompt as error:
        return error_answer(400, error.message, "context_length_exceeded")
    except ServerAnswered as error:
        return error_answer(error.status, error.message)
    except (aiohttp.ClientError, TimeoutError, MalformedRollout, msgspec.MsgspecError) as error:
        return error_answer(502, f"the inference server gave no usable answer: {error}")
