"""An inference server without a model: it gives the answers that it is told to give."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web

from prime_rl.utils.http_server import HOST, json_object, listening

MODEL = "scripted"
MAX_CALLS = 40
"""Model calls of one rollout. An environment that asks for more does not end by itself."""
MAX_BODY_BYTES = 256 << 20
Message = Mapping[str, Any]
ECHO: Message = {}
"""A message of a script that repeats the last one that the environment wrote."""


class ScriptedEngine:
    """Answers the calls of one rollout after the other with the messages of a script; the last one is repeated."""

    def __init__(self) -> None:
        self.base_url = ""
        self.num_calls = 0
        """Since the last `play`."""
        self.max_calls = MAX_CALLS
        self._script: Sequence[Message] = ()

    def play(self, script: Sequence[Message], rollouts: int = 1) -> None:
        """Answer with these messages from now on, or refuse without any.

        Several rollouts are supposed to get the same single message.
        """
        self._script = script
        self.num_calls = 0
        self.max_calls = MAX_CALLS * rollouts

    @property
    def is_endless(self) -> bool:
        """Whether the last rollout asked for more answers than it could get."""
        return self.num_calls > self.max_calls

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        """Listen on a free port in the block."""
        app = web.Application(client_max_size=MAX_BODY_BYTES)
        app.router.add_get("/health", self._health)
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/v1/chat/completions", self._chat)
        app.router.add_post("/v1/chat/completions/tokens", self._chat)
        app.router.add_post("/tokenize", self._tokenize)
        runner = await listening(app, "scripted engine")
        try:
            self.base_url = f"http://{HOST}:{runner.addresses[0][1]}/v1"
            yield
        finally:
            await runner.cleanup()

    async def _health(self, request: web.Request) -> web.Response:
        return web.json_response({})

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": MODEL, "object": "model"}]})

    async def _tokenize(self, request: web.Request) -> web.Response:
        ids = tokens_of((await json_object(request)).get("messages") or [])
        return web.json_response({"tokens": ids, "count": len(ids), "max_model_len": 1 << 20})

    async def _chat(self, request: web.Request) -> web.Response:
        body = await json_object(request)
        self.num_calls += 1
        if self.num_calls > self.max_calls:
            error = {"message": f"more than {MAX_CALLS} calls in one rollout", "type": "invalid_request_error"}
            return web.json_response({"error": error}, status=400)
        if not self._script:
            error = {"message": "the script has no answer", "type": "invalid_request_error"}
            return web.json_response({"error": error}, status=400)
        message = self._script[min(self.num_calls, len(self._script)) - 1]
        if message is ECHO:
            message = {"content": _last_text(body.get("messages") or [])}
        prompt = body.get("tokens") or tokens_of(body.get("messages") or [])
        choice = {
            "index": 0,
            "message": {"role": "assistant", **message},
            "finish_reason": "tool_calls" if message.get("tool_calls") else "stop",
            "token_ids": [1],
            "logprobs": {"content": [{"token": "x", "logprob": -1.0, "bytes": [], "top_logprobs": []}]},
        }
        usage = {"prompt_tokens": len(prompt), "completion_tokens": 1, "total_tokens": len(prompt) + 1}
        answer = {"id": "scripted", "object": "chat.completion", "created": 1, "model": MODEL, "usage": usage}
        return web.json_response({**answer, "prompt_token_ids": prompt, "choices": [choice]})


def _last_text(messages: Sequence[Message]) -> str:
    content = messages[-1].get("content") if messages else ""
    if isinstance(content, list):
        return "".join(str(part.get("text", "")) for part in content if isinstance(part, Mapping))
    return str(content or "")


def tokens_of(messages: Sequence[Message]) -> list[int]:
    """One token for each message, so that a longer conversation begins with the tokens of a shorter one."""
    return [1000 + sum(json.dumps(each, default=str).encode()[:4096]) % 1000 for each in messages] or [1]
