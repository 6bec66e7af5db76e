"""The connections of guests to the proxy, against a real HTTP server and with the real `openai` client."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import openai
import pytest
from aiohttp import web
from openai.types.chat import ChatCompletionMessage

from prime_rl.orchestrator.workers.inside.model_client import http_client, quick

PATH = "/v1/chat/completions"


class Server:
    """Answers with the request's text. Texts name what it does instead."""

    def __init__(self) -> None:
        self.connections: set[Any] = set()
        self.bodies: list[dict[str, Any]] = []

    async def answer(self, request: web.Request) -> web.StreamResponse:
        self.connections.add(request.transport)
        self.bodies.append(await request.json())
        text = self.bodies[-1]["messages"][0]["content"]
        if text == "hangs":
            await asyncio.Event().wait()
        if text == "cuts":
            assert request.transport is not None
            request.transport.write(b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n{")
            request.transport.close()
        if text == "refuses":
            return web.json_response({"error": {"message": "no session with this API key"}}, status=401)
        choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": text}}
        body = {"id": "1", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice]}
        if text != "streams":
            return web.json_response(body)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for word in ("one", "two"):
            delta = {**body, "object": "chat.completion.chunk", "choices": [{"index": 0, "delta": {"content": word}}]}
            await response.write(f"data: {json.dumps(delta)}\n\n".encode())
        await response.write(b"data: [DONE]\n\n")
        return response


Ask = Callable[..., Any]


@asynccontextmanager
async def asking(server: Server) -> AsyncIterator[Ask]:
    app = web.Application(client_max_size=1 << 26)
    app.router.add_post(PATH, server.answer)
    runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=1.0)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
    client = quick(openai.AsyncOpenAI(base_url=url, api_key="k", max_retries=0, http_client=http_client(url)))

    async def ask(text: str, *others: Any, **options: Any) -> Any:
        messages = [{"role": "user", "content": text}, *others]
        return await client.chat.completions.create(model="m", messages=messages, **options)

    yield ask
    await runner.cleanup()
    with pytest.raises(openai.APIConnectionError):
        await ask("nobody listens")
    await client.close()


@pytest.mark.parametrize("text", ["hello", "ü\r\n\r\n", "x" * (1 << 20)])
async def test_answers_of_any_length_come_back_and_connections_are_used_again(text: str) -> None:
    server = Server()
    async with asking(server) as ask:
        for _ in range(3):
            assert (await ask(text)).choices[0].message.content == text
        assert len(server.connections) == 1
        answers = await asyncio.gather(*(ask(f"{text}{number}") for number in range(20)))
        assert [each.choices[0].message.content for each in answers] == [f"{text}{number}" for number in range(20)]


async def test_a_streamed_answer_is_read() -> None:
    async with asking(Server()) as ask:
        words = [chunk.choices[0].delta.content async for chunk in await ask("streams", stream=True)]
        assert words == ["one", "two"]


async def test_a_refusal_a_cut_and_a_time_limit_are_errors_and_the_next_request_is_answered() -> None:
    async with asking(Server()) as ask:
        with pytest.raises(openai.AuthenticationError, match="no session with this API key"):
            await ask("refuses")
        with pytest.raises(openai.APIConnectionError):
            await ask("cuts")
        with pytest.raises(openai.APITimeoutError):
            await ask("hangs", timeout=0.01)
        cancelled = asyncio.ensure_future(ask("hangs"))
        await asyncio.sleep(0)
        cancelled.cancel()
        with pytest.raises(asyncio.CancelledError):
            await cancelled
        assert (await ask("hello")).choices[0].message.content == "hello"


@pytest.mark.parametrize(
    "said",
    [
        {"role": "assistant", "content": "4"},
        {"role": "assistant", "content": [{"type": "text", "text": "4"}]},
        ChatCompletionMessage(role="assistant", content="4"),
    ],
    ids=["text", "parts", "an object of openai"],
)
async def test_messages_arrive_as_they_were_given(said: Any) -> None:
    server = Server()
    async with asking(server) as ask:
        await ask("2 + 2?", said, temperature=0.5, extra_headers={"X-Extra": "1"})
        expected = said if isinstance(said, dict) else {"role": "assistant", "content": "4"}
        messages = [{"role": "user", "content": "2 + 2?"}, expected]
        assert server.bodies == [{"model": "m", "messages": messages, "temperature": 0.5}]
