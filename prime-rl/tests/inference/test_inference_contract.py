"""HTTP contract of both engines: the same tests run against each."""

from __future__ import annotations

import json
import socket
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

PROMPT = [12, 9, 16, 16, 19]


def prompts(count: int) -> list[list[int]]:
    """Prompts of different lengths, as token ids."""
    return [[5 + (7 * index + 3 * place) % 90 for place in range(3 + index * 2)] for index in range(count)]


def assert_close(found: list[float], expected: list[float]) -> None:
    torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), atol=1e-4, rtol=1e-4)


def test_the_model_is_listed_with_its_context_length(server) -> None:
    assert server.client.get("/health").status_code == 200
    (entry,) = server.client.get("/v1/models").json()["data"]
    assert (entry["id"], entry["max_model_len"]) == (server.model, 1024)


def test_metrics_are_served_in_prometheus_format(server, engine) -> None:
    def gauges() -> dict[str, float]:
        lines = server.client.get("/metrics").text.splitlines()
        pairs = [line.rsplit(" ", 1) for line in lines if line and not line.startswith("#")]
        return {name: float(value) for name, value in pairs}

    before = gauges()
    server.complete(PROMPT, max_tokens=5, ignore_eos=True)
    after = gauges()
    if engine == "vllm":
        assert any(name.startswith("vllm:generation_tokens_total") for name in after)
        return
    assert after["inference_generated_tokens"] - before["inference_generated_tokens"] >= 5
    assert (after["inference_paused"], after["inference_samples_running"]) == (0, 0)
    listed = (Path(__file__).parents[3] / "docs" / "monitors.md").read_text(encoding="utf-8")
    assert all(f"`{name}`" in listed for name in after)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_chat_logprobs_are_those_of_transformers_at_the_same_temperature(server, reference, temperature) -> None:
    answer = server.chat("Hello", max_tokens=24, temperature=temperature, top_k=-1, seed=1)
    (choice,) = answer["choices"]
    found = [entry["logprob"] for entry in choice["logprobs"]["content"]]
    assert_close(found, reference.logprobs(answer["prompt_token_ids"], choice["token_ids"], temperature))
    assert answer["usage"]["completion_tokens"] == len(choice["token_ids"])


def test_completion_logprobs_are_those_of_transformers(server, reference) -> None:
    (choice,) = server.complete(PROMPT, max_tokens=24, seed=1)["choices"]
    assert choice["prompt_token_ids"] == PROMPT
    assert_close(choice["logprobs"]["token_logprobs"], reference.logprobs(PROMPT, choice["token_ids"]))


def test_logprobs_are_normalised_over_the_tokens_that_top_p_keeps(server) -> None:
    (choice,) = server.complete(PROMPT, max_tokens=16, top_k=1, seed=1)["choices"]
    assert_close(choice["logprobs"]["token_logprobs"], [0.0] * len(choice["token_ids"]))


def test_greedy_answers_are_those_of_transformers(server, reference) -> None:
    (choice,) = server.complete(PROMPT, max_tokens=32, temperature=0, ignore_eos=True)["choices"]
    assert choice["token_ids"] == reference.greedy(PROMPT, 32)
    assert choice["finish_reason"] == "length"


def test_sixteen_concurrent_requests_get_the_same_completions_as_alone(server, reference) -> None:
    choices = server.complete_all(prompts(16), max_tokens=24, temperature=0, ignore_eos=True)
    assert [choice["token_ids"] for choice in choices] == [reference.greedy(prompt, 24) for prompt in prompts(16)]


def test_a_seed_gives_the_same_completion_regardless_of_other_requests(server) -> None:
    alone = server.complete(PROMPT, max_tokens=24, seed=11, ignore_eos=True)["choices"][0]
    together = server.complete_all([PROMPT, *prompts(7)], max_tokens=24, seed=11, ignore_eos=True)[0]
    other = server.complete(PROMPT, max_tokens=24, seed=12, ignore_eos=True)["choices"][0]
    assert together["token_ids"] == alone["token_ids"] != other["token_ids"]


def test_n_samples_of_a_prompt_are_different_and_all_scored(server, reference) -> None:
    choices = server.complete(PROMPT, n=4, max_tokens=16, seed=5, ignore_eos=True)["choices"]
    assert [choice["index"] for choice in choices] == [0, 1, 2, 3]
    assert len({tuple(choice["token_ids"]) for choice in choices}) == 4
    for choice in choices:
        assert_close(choice["logprobs"]["token_logprobs"], reference.logprobs(PROMPT, choice["token_ids"]))


def test_top_logprobs_are_asked_for_by_number(server) -> None:
    (choice,) = server.chat("Hello", max_tokens=3, top_logprobs=4)["choices"]
    for entry in choice["logprobs"]["content"]:
        values = [top["logprob"] for top in entry["top_logprobs"]]
        assert len(values) == 4
        assert max(values) >= entry["logprob"]


def test_prompt_logprobs_are_raw(server, reference) -> None:
    answer = server.complete(PROMPT, max_tokens=1, prompt_logprobs=0, temperature=0.5)
    rows = answer["choices"][0]["prompt_logprobs"]
    assert rows[0] is None
    found = [row[str(token)]["logprob"] for row, token in zip(rows[1:], PROMPT[1:], strict=True)]
    assert_close(found, reference.logprobs(PROMPT[:1], PROMPT[1:]))


@pytest.mark.parametrize("max_tokens", [0, 1, 3])
def test_an_echoed_prompt_is_scored_like_in_transformers_before_its_completion(server, reference, max_tokens) -> None:
    options = {"echo": True, "logprobs": 1, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
    (choice,) = server.complete(PROMPT, **options)["choices"]
    logprobs, tokens = choice["logprobs"], [*PROMPT, *reference.greedy(PROMPT, max_tokens)] if max_tokens else PROMPT
    assert {len(values) for values in logprobs.values()} == {len(tokens)}
    assert (logprobs["token_logprobs"][0], logprobs["top_logprobs"][0]) == (None, None)
    assert_close(logprobs["token_logprobs"][1:], reference.logprobs(tokens[:1], tokens[1:]))
    likeliest = [max(top.values()) for top in logprobs["top_logprobs"][1:]]
    assert_close(likeliest, reference.best_logprobs(tokens))
    # vLLM leaves a prompt that was sent as token ids out of the text.
    assert "".join(logprobs["tokens"]).endswith(choice["text"])


def test_prompts_of_one_request_are_echoed_in_order(server, reference, engine) -> None:
    if engine == "vllm":
        pytest.skip("vLLM 0.32 for the CPU: its engine ends on several scored prompts in one request")
    asked = prompts(4)
    body = {"model": server.model, "prompt": asked, "echo": True, "logprobs": 0, "max_tokens": 1}
    for prompt, choice in zip(asked, server.post("/v1/completions", body)["choices"], strict=True):
        assert_close(choice["logprobs"]["token_logprobs"][1:-1], reference.logprobs(prompt[:1], prompt[1:]))


def test_a_text_is_echoed_as_it_was_sent(server, engine) -> None:
    if engine == "vllm":
        pytest.skip("vLLM 0.32 leaves the prompt out of the text")
    (choice,) = server.complete("Hello there", echo=True, max_tokens=0, logprobs=None)["choices"]
    assert (choice["text"], choice["logprobs"]) == ("Hello there", None)


def test_the_tokens_route_continues_the_given_tokens(server, reference) -> None:
    body = {"model": server.model, "messages": [{"role": "user", "content": "ignored"}], "tokens": PROMPT}
    options = {"max_completion_tokens": 8, "temperature": 0, "logprobs": True, "return_token_ids": True}
    answer = server.post("/v1/chat/completions/tokens", body | options | {"ignore_eos": True})
    assert answer["prompt_token_ids"] == PROMPT
    assert answer["choices"][0]["token_ids"] == reference.greedy(PROMPT, 8)


def test_tokenize_gives_the_ids_that_a_chat_starts_from(server) -> None:
    messages = [{"role": "system", "content": "Be brief"}, {"role": "user", "content": "Hi"}]
    counted = server.post("/tokenize", {"messages": messages, "add_generation_prompt": True})
    answer = server.chat("", messages=messages, max_tokens=1)
    assert counted["tokens"] == answer["prompt_token_ids"]
    assert (counted["count"], counted["max_model_len"]) == (len(counted["tokens"]), 1024)
    assert server.post("/tokenize", {"prompt": "Hi"})["count"] == 2


def test_a_stop_token_ends_the_answer_and_stays_out_of_the_text(server, reference) -> None:
    expected = reference.greedy(PROMPT, 12)
    stop = expected[5]
    end = expected.index(stop) + 1
    (choice,) = server.complete(PROMPT, max_tokens=12, temperature=0, ignore_eos=True, stop_token_ids=[stop])["choices"]
    assert choice["token_ids"] == expected[:end]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop)
    assert len(choice["text"]) < end


def test_a_stop_string_ends_the_answer_before_itself(server) -> None:
    whole = server.complete(PROMPT, max_tokens=60, seed=2, ignore_eos=True)["choices"][0]["text"]
    stop = whole[20:22]
    (choice,) = server.complete(PROMPT, max_tokens=60, seed=2, ignore_eos=True, stop=[stop, "no such"])["choices"]
    assert choice["text"] == whole[: whole.index(stop)]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop)


def test_new_weights_change_the_completions_and_null_restores_the_initial_weights(
    server, reference, next_reference, next_weights
) -> None:
    def scored() -> tuple[list[int], list[float], list[dict[str, int]]]:
        (choice,) = server.complete(PROMPT, max_tokens=20, temperature=0, ignore_eos=True)["choices"]
        return choice["token_ids"], choice["logprobs"]["token_logprobs"], choice["weight_versions"]

    server.post("/update_weights", {"weight_dir": str(next_weights)})
    tokens, logprobs, versions = scored()
    assert tokens == next_reference.greedy(PROMPT, 20)
    assert_close(logprobs, next_reference.logprobs(PROMPT, tokens))
    assert versions == [{"version": 3, "start": 0, "end": 20}]

    server.post("/update_weights", {"weight_dir": None})
    tokens, logprobs, versions = scored()
    assert_close(logprobs, reference.logprobs(PROMPT, tokens))
    assert versions == [{"version": 0, "start": 0, "end": 20}]


def test_running_requests_survive_weight_updates_and_say_which_weights_made_each_token(
    server, next_weights, wait_for_load
) -> None:
    spans: list[dict[str, int]] = []
    with ThreadPoolExecutor(1) as pool:
        while {span["version"] for span in spans} != {0, 3}:  # the request ended before the updates: once more
            server.post("/pause", {})
            running = pool.submit(server.complete, PROMPT, max_tokens=900, ignore_eos=True, seed=1)
            wait_for_load(lambda load: load == 1)
            server.post("/resume", {})
            for directory in (str(next_weights), None) * 10:
                server.post("/update_weights", {"weight_dir": directory})
            (choice,) = running.result()["choices"]
            spans = choice["weight_versions"]
            assert [span["start"] for span in spans[1:]] == [span["end"] for span in spans[:-1]]
            assert (spans[0]["start"], spans[-1]["end"], len(choice["token_ids"])) == (0, 900, 900)


def wrong_shapes(directory: Path) -> None:
    save_file({"model.embed_tokens.weight": torch.zeros(3, 3)}, directory / "model.safetensors")


def nothing(directory: Path) -> None:
    """An empty directory."""


@pytest.mark.parametrize("fill", [wrong_shapes, nothing])
def test_unfit_weights_are_refused_and_the_old_ones_stay(server, reference, tmp_path, fill) -> None:
    fill(tmp_path)
    answer = server.client.post("/update_weights", json={"weight_dir": str(tmp_path)})
    assert 400 <= answer.status_code < 600
    assert answer.json()["error"]["message"]
    (choice,) = server.complete(PROMPT, max_tokens=8, temperature=0, ignore_eos=True)["choices"]
    assert choice["token_ids"] == reference.greedy(PROMPT, 8)


def test_a_missing_weight_directory_is_named(server) -> None:
    answer = server.client.post("/update_weights", json={"weight_dir": "nowhere/step_1"})
    assert answer.status_code == 400
    assert "nowhere/step_1" in answer.json()["error"]["message"]


def test_a_server_that_loads_weights_from_files_does_not_join_a_group(server) -> None:
    body = {"host": "127.0.0.1", "port": 9, "server_rank": 0, "num_inference_server": 1, "timeout": 1}
    answer = server.client.post("/init_broadcaster", json=body)
    assert answer.status_code == 400
    assert 'start it with weight_broadcast.type = "nccl"' in answer.json()["error"]["message"]


def test_a_paused_server_responds_after_resume(server) -> None:
    server.post("/pause", {})
    assert server.client.get("/is_paused").json() == {"is_paused": True}
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(server.complete, PROMPT, max_tokens=4, ignore_eos=True)
        server.post("/resume", {})
        assert len(waiting.result()["choices"][0]["token_ids"]) == 4


def test_a_sleeping_server_wakes_up_with_new_weights(server, next_reference, next_weights) -> None:
    before = server.complete(PROMPT, max_tokens=4, temperature=0, ignore_eos=True)["choices"][0]
    for _ in range(2):
        server.post("/sleep", {})
        assert server.client.get("/is_sleeping").json() == {"is_sleeping": True}
        for path in ("/pause", "/resume"):
            assert "sleeps until the next weights" in server.client.post(path).text
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(server.complete, PROMPT, max_tokens=8, temperature=0, ignore_eos=True)
            assert server.client.get("/health").status_code == 200
            server.post("/update_weights", {"weight_dir": str(next_weights)})
            (choice,) = waiting.result()["choices"]
        assert choice["token_ids"] == next_reference.greedy(PROMPT, 8)
        assert choice["weight_versions"] == [{"version": 3, "start": 0, "end": 8}]
        assert server.client.get("/is_sleeping").json() == {"is_sleeping": False}
    server.post("/pause", {})
    assert "POST /resume first" in server.client.post("/sleep").text
    server.post("/resume", {})
    server.post("/sleep", {})
    server.post("/reload_weights", {})
    again = server.complete(PROMPT, max_tokens=4, temperature=0, ignore_eos=True)["choices"][0]
    assert again["token_ids"] == before["token_ids"]


def test_a_pause_under_load_holds_every_request_where_it_is(server, reference, wait_for_load) -> None:
    def running() -> list[tuple[list[int], Future[dict[str, Any]]]]:
        """Four requests that have begun and are paused before any of them has ended."""
        while True:
            server.post("/pause", {})
            ask = [(each, pool.submit(server.complete, each, max_tokens=500, ignore_eos=True)) for each in prompts(4)]
            wait_for_load(lambda load: load == 4)
            server.post("/resume", {})
            server.post("/pause", {})
            if server.client.get("/load").json()["server_load"] == 4:
                return ask
            server.post("/resume", {})
            wait([answer for _, answer in ask])

    with ThreadPoolExecutor(5) as pool:
        ask = running()
        ask.append((PROMPT, pool.submit(server.complete, PROMPT, max_tokens=8, ignore_eos=True)))
        wait_for_load(lambda load: load == 5)
        assert server.client.get("/health").status_code == 200
        assert not any(answer.done() for _, answer in ask)
        server.post("/resume", {})
        for prompt, answer in ask:
            (choice,) = answer.result()["choices"]
            assert len(choice["token_ids"]) == (8 if prompt is PROMPT else 500)
            assert_close(choice["logprobs"]["token_logprobs"], reference.logprobs(prompt, choice["token_ids"]))


def test_a_server_is_healthy_while_its_weights_are_replaced(server, next_weights) -> None:
    def replace() -> None:
        for directory in (str(next_weights), None) * 5:
            server.post("/update_weights", {"weight_dir": directory})

    with ThreadPoolExecutor(1) as pool:
        replacing = pool.submit(replace)
        while not replacing.done():
            assert server.client.get("/health").status_code == 200
        replacing.result()


def chat_body(**changes: Any) -> bytes:
    return json.dumps({"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4} | changes).encode()


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b'{"messages": [', 400),
        (b"[]", 400),
        (chat_body(messages=[]), 400),
        (chat_body(messages="Hi"), 400),
        (chat_body(messages=[{"content": "Hi"}]), 400),
        (chat_body(max_tokens=-1), 400),
        (chat_body(temperature="hot"), 400),
        (chat_body(temperature=-0.5), 400),
        (chat_body(top_p=0), 400),
        (chat_body(n=0), 400),
        (chat_body(top_logprobs=-2, logprobs=True), 400),
        (chat_body(top_logprobs=2), 400),
        (chat_body(stop=["a", ""]), 400),
        (chat_body(model="another"), 404),
    ],
    ids=str,
)
def test_a_bad_request_is_answered_with_an_error_object(server, body, status) -> None:
    headers = {"content-type": "application/json"}
    answer = server.client.post("/v1/chat/completions", content=body, headers=headers)
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert error["message"]
    assert error["type"]
    assert error["code"] == status


def test_a_prompt_beyond_the_context_is_refused_with_the_message_that_clients_match(server) -> None:
    answer = server.client.post("/v1/completions", json={"model": server.model, "prompt": [5] * 1024})
    assert answer.status_code == 400
    assert "context length" in answer.json()["error"]["message"]


def test_max_tokens_is_capped_at_the_context(server) -> None:
    body = {"tokens": [5] * 1000, "max_completion_tokens": 900, "ignore_eos": True, "return_token_ids": True}
    messages = [{"role": "user", "content": "ignored"}]
    answer = server.post("/v1/chat/completions/tokens", body | {"model": server.model, "messages": messages})
    (choice,) = answer["choices"]
    assert (len(choice["token_ids"]), choice["finish_reason"]) == (24, "length")


def test_a_client_disconnect_cancels_its_request(server, wait_for_load) -> None:
    server.post("/pause", {})
    body = json.dumps({"model": server.model, "prompt": PROMPT, "n": 3, "max_tokens": 1000}).encode()
    key = server.client.headers["Authorization"]
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\nauthorization: {key}\r\ncontent-length: {len(body)}"
    head += "\r\ncontent-type: application/json"
    with socket.create_connection((server.client.base_url.host, server.client.base_url.port)) as connection:
        connection.sendall(head.encode() + b"\r\n\r\n" + body)
        wait_for_load(lambda load: load == 3)
    wait_for_load(lambda load: load == 0)
    server.post("/resume", {})
    assert server.client.get("/load").json()["server_load"] == 0
