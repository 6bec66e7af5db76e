"""Streaming contract of both engines: server-sent events that add up to the non-streamed response."""

from __future__ import annotations

import json
import socket
from collections import defaultdict
from typing import Any

import pytest

PROMPT = [12, 9, 16, 16, 19]
MESSAGES = [{"role": "user", "content": "Hello"}]
FIXED = {"max_tokens": 40, "seed": 3, "ignore_eos": True, "return_token_ids": True}
CHAT, COMPLETE = "/v1/chat/completions", "/v1/completions"


def joined(chunks: list[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """Concatenates the chunks of each choice."""
    choices: dict[int, dict[str, Any]] = defaultdict(
        lambda: {"text": "", "token_ids": [], "logprobs": [], "offsets": [], "finish_reason": None, "stop_reason": None}
    )
    for chunk in chunks:
        for part in chunk["choices"]:
            choice = choices[part["index"]]
            assert choice["finish_reason"] is None, "a sample goes on after its end"
            choice["text"] += part["text"] if "text" in part else part["delta"].get("content") or ""
            choice["token_ids"] += part.get("token_ids") or []
            logprobs = part.get("logprobs") or {}
            choice["logprobs"] += [entry["logprob"] for entry in logprobs.get("content", [])]
            choice["logprobs"] += logprobs.get("token_logprobs", [])
            choice["offsets"] += logprobs.get("text_offset", [])
            choice["finish_reason"] = part["finish_reason"]
            choice["stop_reason"] = part.get("stop_reason")
    return choices


@pytest.mark.parametrize("ending", [{}, {"ignore_eos": False}, {"stop": "no such text"}], ids=str)
def test_the_chunks_of_a_completion_add_up_to_the_response(server, ending) -> None:
    options = {"prompt": PROMPT, "logprobs": 0, **FIXED, **ending}
    whole = server.post(COMPLETE, {"model": server.model, **options})["choices"][0]
    chunks = server.events(COMPLETE, options)
    found = joined(chunks)[0]
    assert found["text"] == whole["text"]
    assert found["token_ids"] == whole["token_ids"]
    assert found["logprobs"] == pytest.approx(whole["logprobs"]["token_logprobs"], abs=1e-4)
    assert found["offsets"] == whole["logprobs"]["text_offset"]
    assert (found["finish_reason"], found["stop_reason"]) == (whole["finish_reason"], whole["stop_reason"])
    assert {chunk["object"] for chunk in chunks} == {"text_completion"}
    assert len({chunk["id"] for chunk in chunks}) == 1
    prompts = [part.get("prompt_token_ids") for chunk in chunks for part in chunk["choices"]]
    assert prompts[0] == PROMPT
    assert not any(prompts[1:])


def test_a_chat_stream_opens_with_the_role_and_the_prompts_ids(server) -> None:
    options = {"messages": MESSAGES, "logprobs": True, **FIXED}
    whole = server.post(CHAT, {"model": server.model, **options})
    chunks = server.events(CHAT, options)
    first, *rest = chunks
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert first["prompt_token_ids"] == whole["prompt_token_ids"]
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert not any(chunk.get("prompt_token_ids") for chunk in rest)
    choice, found = whole["choices"][0], joined(chunks)[0]
    assert found["text"] == choice["message"]["content"]
    assert found["token_ids"] == choice["token_ids"]
    assert found["logprobs"] == pytest.approx([e["logprob"] for e in choice["logprobs"]["content"]], abs=1e-4)
    assert found["finish_reason"] == choice["finish_reason"]


def test_a_chat_stream_continues_given_tokens(server, reference) -> None:
    options = {"messages": MESSAGES, "tokens": PROMPT, "temperature": 0, **FIXED, "max_tokens": 8}
    chunks = server.events("/v1/chat/completions/tokens", options)
    assert chunks[0]["prompt_token_ids"] == PROMPT
    assert joined(chunks)[0]["token_ids"] == reference.greedy(PROMPT, 8)


def test_samples_are_streamed_concurrently(server) -> None:
    whole = server.post(COMPLETE, {"model": server.model, "prompt": PROMPT, "n": 3, **FIXED})["choices"]
    found = joined(server.events(COMPLETE, {"prompt": PROMPT, "n": 3, **FIXED}))
    assert [found[index]["token_ids"] for index in range(3)] == [choice["token_ids"] for choice in whole]
    assert [found[index]["text"] for index in range(3)] == [choice["text"] for choice in whole]


def test_several_prompts_are_identified_by_index(server, reference) -> None:
    prompts = [PROMPT, [30, 31], [40]]
    options = {"prompt": prompts, **FIXED, "temperature": 0, "max_tokens": 6}
    found = joined(server.events(COMPLETE, options))
    assert [found[index]["token_ids"] for index in range(3)] == [reference.greedy(prompt, 6) for prompt in prompts]


@pytest.mark.parametrize("included", [False, True])
def test_a_stop_string_across_chunks_is_never_sent(server, included) -> None:
    whole = server.complete(PROMPT, max_tokens=60, seed=2, ignore_eos=True)["choices"][0]["text"]
    stop = whole[20:25]
    options = {"prompt": PROMPT, "max_tokens": 60, "seed": 2, "ignore_eos": True, "stop": [stop, "no such"]}
    chunks = server.events(COMPLETE, options | {"include_stop_str_in_output": included})
    found = joined(chunks)[0]
    end = whole.index(stop)
    assert found["text"] == whole[: end + len(stop) if included else end]
    assert (found["finish_reason"], found["stop_reason"]) == ("stop", stop)


@pytest.mark.parametrize(("route", "content"), [(CHAT, {"messages": MESSAGES}), (COMPLETE, {"prompt": PROMPT})])
def test_the_last_chunk_has_token_counts_if_requested(server, route, content) -> None:
    *chunks, last = server.events(route, content | FIXED | {"stream_options": {"include_usage": True}})
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 40
    assert last["usage"]["total_tokens"] == last["usage"]["prompt_tokens"] + 40
    assert not any(chunk.get("usage") for chunk in chunks)


def test_every_chunk_has_token_counts_if_requested(server) -> None:
    wanted = {"include_usage": True, "continuous_usage_stats": True}
    *chunks, _ = server.events(CHAT, {"messages": MESSAGES, "stream_options": wanted, **FIXED})
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts)
    assert (counts[0], counts[-1]) == (0, 40)


def test_stream_options_without_a_stream_are_refused(server) -> None:
    body = {"model": server.model, "prompt": PROMPT, "stream_options": {"include_usage": True}}
    assert server.client.post(COMPLETE, json=body).status_code == 400


def test_a_bad_request_for_a_stream_is_an_error_and_not_a_stream(server) -> None:
    body = {"model": server.model, "prompt": [5] * 1024, "stream": True}
    answer = server.client.post(COMPLETE, json=body)
    assert answer.status_code == 400
    assert "context length" in answer.json()["error"]["message"]


def test_a_client_that_closes_its_stream_cancels_the_request(server, wait_for_load) -> None:
    body = {"model": server.model, "prompt": PROMPT, "n": 2, "max_tokens": 1000, "stream": True, "ignore_eos": True}
    sent = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(sent)}"
    head += f"\r\nauthorization: {server.client.headers['Authorization']}"
    with socket.create_connection((server.client.base_url.host, server.client.base_url.port)) as connection:
        connection.sendall(head.encode() + b"\r\n\r\n" + sent)
        assert connection.recv(1000).startswith(b"HTTP/1.1 200")
        server.post("/pause", {})
    wait_for_load(lambda load: load == 0)
