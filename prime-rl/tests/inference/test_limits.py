"""A server stays up and quick, whatever one request sends. Requests beyond a limit are refused and say why."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from prime_rl.inference.protocol import MAX_BODY_BYTES, MAX_CHARS_PER_TOKEN, MAX_ENTRIES, MAX_INT64
from prime_rl.utils.http_server import MAX_MARKS

COMPLETIONS, CHAT, TOKENS = "/v1/completions", "/v1/chat/completions", "/v1/chat/completions/tokens"
MESSAGE = {"role": "user", "content": "Hi"}
SLOW_TEMPLATE = "{% for i in range(9999) %}{% for j in range(9999) %}{% endfor %}{% endfor %}"


@pytest.fixture
def embedded(server, engine):
    """The embedded engine's server. vLLM checks its own arguments, with other limits and messages."""
    if engine != "embedded":
        pytest.skip("limits of the embedded engine")
    return server


@pytest.fixture(scope="module", autouse=True)
def silent(shared_server) -> Iterator[socket.socket]:
    """A connection without a request, open since the first of these tests."""
    with _connected(shared_server) as connection:
        yield connection


@pytest.fixture(autouse=True)
def _answers_as_before(server):
    """After every test, the server gives the answer that it gave before."""
    ask = {"max_tokens": 8, "temperature": 0, "ignore_eos": True}
    before = server.complete([12, 9, 16], **ask)["choices"][0]["token_ids"]
    yield
    assert server.complete([12, 9, 16], **ask)["choices"][0]["token_ids"] == before


def refusal(server, route: str, body: dict[str, Any] | bytes, status: int = 400) -> str:
    """The message of the error that refuses a body."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    answer = server.client.post(route, content=content, headers={"content-type": "application/json"})
    assert answer.status_code == status, answer.text
    message = answer.json()["error"]["message"]
    assert "\n" not in message
    assert len(message) < 500
    return message


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("top_k", 2**63),
        ("top_k", -2),
        ("seed", 2**63),
        ("seed", -(2**63) - 1),
        ("max_tokens", MAX_INT64 + 1),
        ("min_tokens", MAX_INT64 + 1),
        ("temperature", 1e-300),
        ("temperature", 1e308),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("top_p", float("nan")),
        ("min_p", float("nan")),
        ("repetition_penalty", 1e-300),
        ("repetition_penalty", 1e308),
        ("presence_penalty", float("nan")),
        ("frequency_penalty", float("inf")),
        ("logit_bias", {"7": float("nan")}),
        ("logit_bias", {str(2**70): 1.0}),
        ("stop_token_ids", [2**70]),
        ("prompt", [2**70]),
        ("prompt", [-1]),
        ("n", 2**70),
        ("prompt_logprobs", 2**70),
        ("stop", ["x" * 2000]),
    ],
    ids=str,
)
def test_a_number_that_the_engine_cannot_hold_is_refused(embedded, argument: str, value: Any) -> None:
    assert argument in refusal(embedded, COMPLETIONS, {"prompt": [5, 6], argument: value})


@pytest.mark.parametrize(
    "options",
    [
        {"top_p": 1e-300},
        {"top_p": 1e-45},
        {"min_p": 1e-300},
        {"temperature": 0.0001},
        {"temperature": 100.0},
        {"repetition_penalty": 0.01},
        {"repetition_penalty": 100.0},
        {"top_k": 2**31 - 1},
        {"seed": -(2**63)},
    ],
    ids=str,
)
def test_the_extremes_of_every_range_are_sampled(embedded, options: dict[str, float]) -> None:
    (choice,) = embedded.complete([5, 6], max_tokens=6, ignore_eos=True, **options)["choices"]
    assert len(choice["token_ids"]) == 6


@pytest.mark.parametrize(
    ("route", "name", "entry"),
    [
        (COMPLETIONS, "prompt", "Hi"),
        (COMPLETIONS, "stop", "x"),
        (COMPLETIONS, "stop_token_ids", 5),
        (CHAT, "messages", MESSAGE),
        (CHAT, "tools", {"function": {"name": "f"}}),
    ],
)
def test_a_list_with_too_many_entries_is_refused_by_its_name(embedded, route, name, entry) -> None:
    body = {"prompt": "Hi"} if route == COMPLETIONS else {"messages": [MESSAGE]}
    count = MAX_ENTRIES[name] + 1
    assert refusal(embedded, route, body | {name: [entry] * count}).startswith(f"`{name}` has {count} entries; at most")


@pytest.mark.parametrize("tokens", [[5, -1], [5, 10_000], [5, 2**31], []], ids=str)
def test_a_token_that_the_model_does_not_have_is_refused(server, tokens: list[int]) -> None:
    body = {"model": server.model, "messages": [MESSAGE], "tokens": tokens, "max_tokens": 2}
    assert refusal(server, TOKENS, body)


def test_prompts_times_samples_are_bounded(embedded) -> None:
    assert "4112 samples" in refusal(embedded, COMPLETIONS, {"prompt": ["Hi"] * 257, "n": 16})


def test_a_text_far_beyond_the_context_is_refused_with_the_message_that_clients_match(embedded) -> None:
    text = "a" * (MAX_CHARS_PER_TOKEN * 1024 + 1)
    for route, body in [
        (COMPLETIONS, {"prompt": text}),
        ("/tokenize", {"prompt": text}),
        (CHAT, {"messages": [{"role": "user", "content": text}]}),
    ]:
        assert "maximum context length is 1024 tokens" in refusal(embedded, route, body)


def test_a_body_that_announces_too_many_bytes_is_refused_before_it_is_sent(server) -> None:
    head = _head(server, f"content-length: {MAX_BODY_BYTES + 1}")
    with _connected(server) as connection:
        connection.sendall(head)
        assert _answer(connection).startswith(b"HTTP/1.1 413")


def test_a_body_of_unknown_size_is_refused_once_it_is_too_large(server) -> None:
    chunk = b"10000\r\n" + b"x" * 0x10000 + b"\r\n"
    with _connected(server) as connection:
        connection.sendall(_head(server, "transfer-encoding: chunked"))
        for _ in range(MAX_BODY_BYTES // 0x10000 + 1):
            connection.sendall(chunk)
        assert _answer(connection).startswith(b"HTTP/1.1 413")


def test_a_stranger_is_refused_without_sending_a_body(server) -> None:
    # An open route has no body: a stranger's would wait in the room of others' bodies.
    for head in (b"POST /v1/completions", b"GET /health"):
        for size in (b"content-length: 60000000", b"transfer-encoding: chunked"):
            with _connected(server) as connection:
                connection.sendall(head + b" HTTP/1.1\r\nhost: x\r\n" + size + b"\r\n\r\n")
                assert _answer(connection).startswith(b"HTTP/1.1 401")


def test_a_body_with_millions_of_values_is_refused_before_it_is_parsed(server) -> None:
    for body in (b'{"prompt":[' + b"[]," * MAX_MARKS + b"[]]}", b"[" * MAX_MARKS * 2):
        assert "opening brackets" in refusal(server, COMPLETIONS, body)


def test_deep_nesting_is_refused(embedded) -> None:
    deep = b"[" * 100_000 + b"]" * 100_000
    assert "recursion limit" in refusal(embedded, CHAT, b'{"messages":[],"tools":' + deep + b"}")


@pytest.mark.parametrize("depth", [150, 5000])
def test_tool_calls_with_deep_arguments_are_rendered_or_refused(embedded, depth: int) -> None:
    arguments = '{"a":' * depth + "1" + "}" * depth
    call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
    messages = [MESSAGE, {"role": "assistant", "tool_calls": [call]}, MESSAGE]
    answer = embedded.client.post("/tokenize", json={"messages": messages})
    assert answer.status_code in (200, 400), answer.text


@pytest.mark.parametrize("calls", [5, "x", [5], [{"function": "x"}], [{}], [None]], ids=str)
def test_malformed_tool_calls_are_refused(embedded, calls: Any) -> None:
    messages = [{"role": "assistant", "content": "", "tool_calls": calls}]
    assert "chat template" in refusal(embedded, CHAT, {"messages": messages})


def test_a_request_brings_no_template(embedded) -> None:
    body = {"messages": [MESSAGE]}
    assert "chat_template" in refusal(embedded, CHAT, body | {"chat_template": SLOW_TEMPLATE})
    for route in (CHAT, "/tokenize"):
        message = refusal(embedded, route, body | {"chat_template_kwargs": {"chat_template": SLOW_TEMPLATE}})
        assert "may not set" in message


@pytest.mark.parametrize(
    ("route", "body"),
    [
        ("/update_weights", {"weight_dir": "a\0b"}),
        ("/update_weights", {"weight_dir": "a" * 300}),
        ("/update_weights", {"weight_dir": "a" * 5000}),
        ("/load_lora_adapter", {"lora_name": "x", "lora_path": "a\0b"}),
        ("/load_lora_adapter", {"lora_name": "x", "lora_path": "a" * 300}),
        ("/load_lora_adapter", {"lora_name": "x" * 5000, "lora_path": "a"}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_path_that_no_file_can_have_is_refused(embedded, route: str, body: dict[str, str]) -> None:
    answer = embedded.client.post(route, json=body)
    assert 400 <= answer.status_code < 500, answer.text


def test_a_connection_without_a_request_is_closed(embedded, silent) -> None:
    assert silent.recv(1) == b""


def test_health_is_answered_while_a_large_body_is_parsed_and_refused(embedded) -> None:
    body = b'{"prompt":[' + b"1," * (MAX_BODY_BYTES // 2 - 20) + b"1]}"
    with ThreadPoolExecutor(4) as pool:
        large = [pool.submit(refusal, embedded, COMPLETIONS, body) for _ in range(8)]
        answered = 0
        while not all(one.done() for one in large):
            assert httpx.get(f"{embedded.client.base_url}/health", timeout=None).status_code == 200
            answered += not all(one.done() for one in large)
        assert all("context length" in one.result() for one in large)
    assert answered > 0


def _head(server, *lines: str) -> bytes:
    first = ["POST /v1/completions HTTP/1.1", "host: x", f"authorization: {server.client.headers['Authorization']}"]
    return "\r\n".join([*first, *lines, "", ""]).encode()


def _connected(server) -> socket.socket:
    return socket.create_connection((server.client.base_url.host, server.client.base_url.port))


def _answer(connection: socket.socket) -> bytes:
    return connection.recv(4096)
