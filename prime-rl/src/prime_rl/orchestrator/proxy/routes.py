"""The proxy's HTTP server: chat completions for requests with the key of a session.

It listens on the loopback interface of this machine. A session's key replaces the engine's, which no agent gets.
"""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import aiohttp
import msgspec
from aiohttp import web
from verifiers import errors as vf_errors

from prime_rl.orchestrator.errors import MalformedRollout
from prime_rl.orchestrator.guests.inside.model_client import SESSION_HEADER
from prime_rl.orchestrator.proxy.continuation import canonical, continued_prompt
from prime_rl.orchestrator.proxy.recording import MAX_CALLS, Session, Sessions
from prime_rl.orchestrator.rollouts.chat_client import ChatChannel, ServerAnswered
from prime_rl.orchestrator.rollouts.replies import decode_chat_reply

HOST = "127.0.0.1"
MAX_BODY_BYTES = 64 << 20
FORWARDED = (
    "messages", "tools", "tool_choice", "parallel_tool_calls", "response_format", "stop", "n",
    "max_tokens", "max_completion_tokens", "chat_template_kwargs",
)  # fmt: skip
"""Arguments of the agent that reach the engine. The session sets how tokens are sampled."""
RENDERED = ("tools", "chat_template_kwargs")
"""Those that the chat template writes into a prompt, apart from the messages."""
CLOSE_S = 1.0
"""Seconds that open requests get when the proxy closes."""


class Refused(Exception):
    """The proxy does not forward a request."""

    def __init__(self, status: int, message: str, code: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.code = code


class RecordingProxy:
    """Serves sessions on a free port of the loopback interface."""

    def __init__(self) -> None:
        self.sessions = Sessions()
        self.key = secrets.token_hex(24)
        """Lets a process ask in the name of any session, which it names in a header."""
        self._runner: web.AppRunner | None = None
        self._opening = asyncio.Lock()
        self.base_url = ""
        """`http://127.0.0.1:PORT/v1` once the proxy is open."""

    async def open(self) -> None:
        """Start to listen, if the proxy does not yet."""
        async with self._opening:
            if self._runner is None:
                self._runner = await self._listening()
                self.base_url = f"http://{HOST}:{self._runner.addresses[0][1]}/v1"

    async def _listening(self) -> web.AppRunner:
        app = web.Application(client_max_size=MAX_BODY_BYTES)
        app.router.add_post("/v1/chat/completions", self._chat)
        app.router.add_get("/v1/models", self._models)
        # An agent that is gone must not keep the engine busy.
        runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=CLOSE_S)
        await runner.setup()
        await web.TCPSite(runner, HOST, 0).start()
        return runner

    async def close(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()

    async def _models(self, request: web.Request) -> web.Response:
        async with _errors_as_answers() as answer:
            session = self._session(request)
            answer.append(web.json_response({"object": "list", "data": [{"id": session.model, "object": "model"}]}))
        return answer[-1]

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        async with _errors_as_answers() as answer:
            session = self._session(request)
            body = await _body(request)
            completion = await complete(session, body)
            answer.append(web.json_response(completion))
            if body.get("stream"):
                return await _streamed(request, body, completion)
        return answer[-1]

    def _session(self, request: web.Request) -> Session:
        key = request.headers.get("Authorization", "").removeprefix("Bearer ")
        if secrets.compare_digest(key.encode(), self.key.encode()):
            session = self.sessions.named(request.headers.get(SESSION_HEADER, ""))
        else:
            session = self.sessions.find(key)
        if session is None:
            raise Refused(401, "no such session: it has ended, or the API key is not that of a session")
        return session


async def complete(session: Session, body: Mapping[str, Any]) -> dict[str, Any]:
    """The chat completion that a request's body asks for, recorded in its session.

    Raises:
        Refused: the body is not a chat request, or the session has asked too often.
    """
    messages = _messages(body)
    asked = {name: body[name] for name in FORWARDED if body.get(name) is not None}
    _refuse_masks(asked, session)
    count = asked["n"] if isinstance(asked.get("n"), int) and asked["n"] > 0 else 1
    if session.num_asked + count > MAX_CALLS:
        raise Refused(429, f"the session asks the model for more than {MAX_CALLS} answers")
    session.num_asked += count
    channel: ChatChannel = session.server.client.client
    sent = {**asked, **session.sampling, **_limits(asked, session.sampling)}
    sent |= {"model": session.model, "logprobs": True, "return_token_ids": True}
    sent.pop("max_tokens", None)
    rendering = {name: sent[name] for name in RENDERED if sent.get(name)}
    try:
        tokenize = partial(_tokenize, channel, session, rendering)
        prompt_ids = await continued_prompt(session.calls, messages, rendering, tokenize)
    except ServerAnswered as error:
        if error.status >= 500:
            raise
        prompt_ids = None  # a template that refuses a conversation without its beginning
    path = "/chat/completions" if prompt_ids is None else "/chat/completions/tokens"
    answer = await channel.exchange(path, sent if prompt_ids is None else {**sent, "tokens": prompt_ids})
    session.record(messages, rendering, decode_chat_reply(answer.body, answer.started_s, answer.ended_s))
    return _shown(json.loads(answer.body), bool(body.get("logprobs")))


def _messages(body: Mapping[str, Any]) -> list[dict[str, Any]]:
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages or not all(isinstance(each, dict) for each in messages):
        raise Refused(400, "messages: a list of messages, and at least one")
    try:
        for message in messages:
            canonical(message)
    except (AttributeError, TypeError) as error:
        raise Refused(400, "messages: tool_calls must be a list of calls with a function") from error
    return messages


def _refuse_masks(asked: Mapping[str, Any], session: Session) -> None:
    """Refuse what lets only some tokens be sampled: the trainer computes log-probabilities over all of them."""
    if not session.sampling.get("return_token_ids"):
        return  # an evaluation
    if asked.get("response_format", {"type": "text"}) != {"type": "text"}:
        raise Refused(
            400, "response_format: not in training, where every token can be sampled; check the answer's form"
        )
    if asked.get("tool_choice", "auto") not in ("auto", "none"):
        raise Refused(400, "tool_choice: auto or none in training, where every token can be sampled")


def _limits(asked: Mapping[str, Any], sampling: Mapping[str, Any]) -> dict[str, int]:
    """The smaller limit of tokens, if agent and session both set one."""
    limits = [sampling.get("max_completion_tokens"), asked.get("max_completion_tokens"), asked.get("max_tokens")]
    known = [limit for limit in limits if isinstance(limit, int)]
    return {"max_completion_tokens": min(known)} if known else {}


async def _tokenize(
    channel: ChatChannel,
    session: Session,
    rendering: Mapping[str, Any],
    messages: Sequence[Mapping[str, Any]],
    add_generation_prompt: bool,
) -> list[int]:
    body = {"model": session.server.base_model, "messages": list(messages), **rendering}
    root = channel.with_options(base_url=session.server.root_url)
    reply = await root.post("/tokenize", body={**body, "add_generation_prompt": add_generation_prompt})
    return list(reply.tokens)


def _shown(completion: dict[str, Any], with_logprobs: bool) -> dict[str, Any]:
    """The completion without what only training needs."""
    completion.pop("prompt_token_ids", None)
    for choice in completion["choices"]:
        for name in ("token_ids", "weight_versions", "routed_experts"):
            choice.pop(name, None)
        if not with_logprobs:
            choice["logprobs"] = None
    return completion


async def _body(request: web.Request) -> dict[str, Any]:
    try:
        # Stricter than `json`: what it takes can be sent on.
        body = msgspec.json.decode(await request.read())
    except (msgspec.DecodeError, RecursionError) as error:
        raise Refused(400, f"the body is no JSON: {error}") from error
    if not isinstance(body, dict):
        raise Refused(400, "the body must be a JSON object")
    return body


async def _streamed(request: web.Request, body: Mapping[str, Any], completion: Mapping[str, Any]) -> web.StreamResponse:
    """The finished completion as a stream of events: one delta with all of it, and its end."""
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
    await response.prepare(request)
    head = {name: completion.get(name) for name in ("id", "created", "model")} | {"object": "chat.completion.chunk"}
    for choice in completion["choices"]:
        said = choice["message"]
        calls = [{"index": at, **call} for at, call in enumerate(said.get("tool_calls") or ())]
        # Reasoning too, which has another name in each version of an engine.
        delta = {name: value for name, value in said.items() if value is not None} | (
            {"tool_calls": calls} if calls else {}
        )
        for part, reason in ((delta, None), ({}, choice.get("finish_reason"))):
            shown = {"index": choice.get("index", 0), "delta": part, "finish_reason": reason}
            await _event(response, head | {"choices": [shown | {"logprobs": choice.get("logprobs") if part else None}]})
    options = body.get("stream_options")
    if isinstance(options, dict) and options.get("include_usage"):
        await _event(response, head | {"choices": [], "usage": completion.get("usage")})
    await response.write(b"data: [DONE]\n\n")
    await response.write_eof()
    return response


async def _event(response: web.StreamResponse, chunk: Mapping[str, Any]) -> None:
    await response.write(f"data: {json.dumps(chunk)}\n\n".encode())


@asynccontextmanager
async def _errors_as_answers() -> AsyncIterator[list[web.Response]]:
    """Turn what can go wrong in the block into an OpenAI error body, appended to the list."""
    answers: list[web.Response] = []
    try:
        yield answers
    except Refused as error:
        answers.append(_error(error.status, str(error), error.code))
    except vf_errors.OverlongPromptError as error:
        answers.append(_error(400, str(error), "context_length_exceeded"))
    except ServerAnswered as error:
        answers.append(_error(error.status, error.message))
    except (aiohttp.ClientError, TimeoutError, MalformedRollout, msgspec.MsgspecError) as error:
        answers.append(_error(502, f"the inference server gave no usable answer: {error}"))


def _error(status: int, message: str, code: str | None = None) -> web.Response:
    kind = "invalid_request_error" if status < 500 else "server_error"
    return web.json_response({"error": {"message": message, "type": kind, "code": code}}, status=status)
