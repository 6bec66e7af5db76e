"""A client that leaves ends its request, and nothing is logged: orchestrators cancel rollouts all the time."""

from __future__ import annotations

import asyncio
import gc
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from prime_rl.configs.inference import InferenceConfig
from prime_rl.inference.embedded.http.api import Api
from prime_rl.inference.embedded.http.service import Service
from prime_rl.inference.embedded.startup import start_service

KEY = "0" * 32


@pytest.fixture
def service(tiny_model_dir: Path) -> Iterator[Service]:
    config = InferenceConfig.model_validate({"model": {"name": str(tiny_model_dir)}, "device": "cpu"})
    service = start_service(config)
    with service.engine.in_thread():
        yield service


async def ask_and_leave(api: Api) -> None:
    """Send a request for completions and disconnect before the first token."""
    service = api.ready()
    body = json.dumps({"prompt": [5, 6, 7], "n": 2, "max_tokens": 900, "ignore_eos": True}).encode()
    messages = iter([{"type": "http.request", "body": body, "more_body": False}])
    scope = {
        "type": "http",
        "method": "POST",
        "path": "/v1/completions",
        "query_string": b"",
        "headers": [(b"authorization", f"Bearer {KEY}".encode()), (b"content-length", str(len(body)).encode())],
    }

    async def receive() -> dict[str, Any]:
        if message := next(messages, None):
            return message
        while service.engine.load < 2:
            await asyncio.sleep(0)
        return {"type": "http.disconnect"}

    async def send(message: dict[str, Any]) -> None:
        assert message.get("status", 499) == 499

    await api.app()(scope, receive, send)


def test_a_request_that_its_client_leaves_ends_without_a_word(service: Service) -> None:
    api = Api("model", KEY)
    api.service = service
    service.engine.pause().result()
    said: list[dict[str, Any]] = []

    async def leave_twice() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: said.append(context))
        for _ in range(2):
            await ask_and_leave(api)
        # What the engine's thread reported is handled in the next iterations of the loop.
        for _ in range(10):
            await asyncio.sleep(0)
        gc.collect()

    asyncio.run(leave_twice())
    assert service.engine.load == 0
    assert [context["message"] for context in said] == []
