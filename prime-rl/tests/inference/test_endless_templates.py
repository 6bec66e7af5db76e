"""A model's own chat template may loop: that ends the request that it is rendered for, and nothing else."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import httpx
import pytest
from transformers import AutoTokenizer

from prime_rl.checks.time_limit import OutOfTime, time_limit
from prime_rl.configs.inference import InferenceConfig
from prime_rl.inference.embedded.errors import EngineError
from prime_rl.inference.embedded.http.api import Api
from prime_rl.inference.embedded.http.service import Service
from prime_rl.inference.embedded.startup import start_service
from prime_rl.inference.protocol import RequestError
from prime_rl.inference.rendering import bound_rendering, in_time

LOOP = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
TEMPLATE = "{% if messages[0].content == 'loop' %}" + LOOP + "{% endif %}{{ messages[0].content }}"
KEY = "0" * 32
CHAT = "/v1/chat/completions"


@pytest.fixture
def service(tiny_model_dir: Path) -> Iterator[Service]:
    config = InferenceConfig.model_validate(
        {"model": {"name": str(tiny_model_dir), "chat_template": TEMPLATE}, "device": "cpu"}
    )
    service = start_service(config)
    with service.engine.in_thread():
        yield service


@pytest.fixture
def expiry(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """The limits of threads end when this event is set, and not after some seconds."""
    expired = threading.Event()

    class Watch(threading.Timer):
        def run(self) -> None:
            expired.wait()
            if not self.finished.is_set():
                self.function()

    monkeypatch.setattr(threading, "Timer", Watch)
    yield expired
    expired.set()


def body(text: str) -> dict[str, object]:
    return {"messages": [{"role": "user", "content": text}], "max_tokens": 2}


def test_only_the_request_whose_template_loops_fails(service: Service, expiry: threading.Event) -> None:
    api = Api("model", KEY, preparation_s=2)
    api.service = service

    async def ask() -> list[httpx.Response]:
        headers = {"Authorization": f"Bearer {KEY}"}
        async with httpx.AsyncClient(
            transport=httpx.ASGITransport(api.app()), base_url="http://server", headers=headers, timeout=None
        ) as client:
            looping = [asyncio.create_task(client.post(CHAT, json=body("loop"))) for _ in range(2)]
            others = [await client.get("/health"), await client.post(CHAT, json=body("hello"))]
            assert not any(each.done() for each in looping), "they loop meanwhile"
            expiry.set()
            refused = [await each for each in looping]
            expiry.clear()
            return [*others, *refused, await client.post(CHAT, json=body("hello"))]

    health, first, one, other, last = asyncio.run(ask())
    assert [each.status_code for each in (health, first, one, other, last)] == [200, 200, 400, 400, 200]
    for refused in (one, other):
        assert refused.json()["error"]["message"] == (
            "Rendering and tokenizing the messages takes more than 2 s: check the chat template for a loop"
        )


def test_a_template_that_always_loops_is_refused_at_the_start(service: Service) -> None:
    service.text._tokenizer.chat_template = LOOP
    with pytest.raises(EngineError, match=r"takes more than 0\.3 s for one short message: check it for a loop"):
        service.text.refuse_endless_template(limit_s=0.3)
    service.text._tokenizer.chat_template = "{{ raise_exception('no') }}"
    service.text.refuse_endless_template()


def test_vllm_answers_a_template_that_loops_as_any_other_that_fails(
    tiny_model_dir: Path, expiry: threading.Event
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_model_dir)
    tokenizer.chat_template = TEMPLATE
    with ThreadPoolExecutor(1) as thread:
        assert thread.submit(bound_rendering, tokenizer).result() is None

        def rendered(text: str) -> str:
            messages = [{"role": "user", "content": text}]
            return thread.submit(tokenizer.apply_chat_template, messages, tokenize=False).result()

        assert rendered("hello") == "hello"
        expiry.set()
        with pytest.raises(ValueError, match="check the chat template for a loop"):
            rendered("loop")
    endless = AutoTokenizer.from_pretrained(tiny_model_dir)
    endless.chat_template = LOOP
    fault = bound_rendering(endless, limit_s=0.3)
    assert fault is not None
    assert "with one short message: Rendering and tokenizing the messages takes more than 0.3 s" in fault


def test_the_limit_holds_in_any_thread_and_leaves_the_thread_as_it_was() -> None:
    outcomes: list[object] = []

    def work() -> None:
        for limit_s, seconds in ((0.2, None), (60, 0.0)):
            try:
                outcomes.append(in_time(partial(_spin, seconds), limit_s))
            except RequestError as error:
                outcomes.append(error.param)
        with pytest.raises(OutOfTime), time_limit(0.2):
            _spin(None)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert outcomes == ["messages", "ended"]


def _spin(seconds: float | None) -> str:
    while seconds is None:
        pass
    return "ended"
