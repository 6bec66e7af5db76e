"""The proxy of environments with their own interpreter, as an agent and an attacker use it."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from PIL import Image

from prime_rl.configs.orchestrator import EvalSamplingConfig, SamplingConfig
from prime_rl.configs.shared import ClientConfig
from prime_rl.orchestrator.proxy.recording import MAX_CALLS, Session
from prime_rl.orchestrator.proxy.routes import RecordingProxy
from prime_rl.orchestrator.rollouts.rollout import ExampleRef
from prime_rl.orchestrator.rollouts.sampling import eval_sampling_args, train_sampling_args
from prime_rl.orchestrator.servers.pool import InferencePool
from prime_rl.utils.images import ImageFault, ImageLimits, ShownImages, image_parts, located_url, read_image

ARGS = train_sampling_args(SamplingConfig(max_tokens=20), 0.7)
HELLO = [{"role": "user", "content": "hello"}]
PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAAAAAA6fptVAAAACklEQVR4nGNgAAAAAgABSK+kcQAAAABJRU5ErkJggg=="
TOOL = {"type": "function", "function": {"name": "look", "parameters": {}}}


class Agent:
    """Asks in the name of one session."""

    def __init__(self, http: aiohttp.ClientSession, url: str, session: Session) -> None:
        self.session = session
        self._http, self._url = http, url

    def post(self, body: dict[str, Any]) -> Any:
        headers = {"Authorization": f"Bearer {self.session.key}"}
        return self._http.post(f"{self._url}/chat/completions", json=body, headers=headers)

    async def ask(self, messages: Any = HELLO, **arguments: Any) -> tuple[int, dict[str, Any]]:
        async with self.post({"model": "any", "messages": messages, **arguments}) as response:
            return response.status, await response.json()

    async def turn(self, messages: list[dict[str, Any]], **arguments: Any) -> list[dict[str, Any]]:
        """The conversation with the model's answer."""
        status, answer = await self.ask(messages, **arguments)
        assert status == 200, answer
        return [*messages, answer["choices"][0]["message"]]


@asynccontextmanager
async def agent_of(server: Any, sampling_args: dict[str, Any] = ARGS) -> AsyncIterator[Agent]:
    pool, proxy = InferencePool(ClientConfig(base_url=[server.url]), "letters"), RecordingProxy()
    await pool.wait_ready(use_token_client=True)
    await proxy.open()
    try:
        async with aiohttp.ClientSession() as http:
            with proxy.sessions.opened(1, pool.servers[0], sampling_args) as (session,):
                yield Agent(http, proxy.base_url, session)
    finally:
        await proxy.close()
        await pool.close()


async def test_an_agent_does_not_set_how_tokens_are_sampled(policy_server) -> None:
    async with agent_of(policy_server) as agent:
        await agent.ask(temperature=0.1, top_p=0.5, top_k=1, logit_bias={"5": 100}, seed=1, max_tokens=7, model="other")
    sent = policy_server.requests[-1]
    assert (sent["temperature"], sent["top_p"], sent["top_k"], sent["model"]) == (0.7, 1.0, -1, "letters")
    assert sent["max_completion_tokens"] == 7
    assert not {"logit_bias", "seed", "max_tokens"} & sent.keys()


async def test_an_agent_that_asks_the_same_again_in_an_evaluation_gets_another_sample(policy_server) -> None:
    seeds, sampling_args = [], eval_sampling_args(EvalSamplingConfig(seed=7), ExampleRef("env", 4), 0)
    for _ in range(2):
        async with agent_of(policy_server, sampling_args) as agent:
            policy_server.requests.clear()
            await agent.ask(n=2)
            await agent.ask()
            await agent.ask()
            seeds.append([request["seed"] for request in policy_server.requests])
    first = seeds[0][0]
    assert seeds == [[first, first + 2, first + 3]] * 2


@pytest.mark.parametrize(
    "mask",
    [
        {"response_format": {"type": "json_object"}},
        {"tools": [TOOL], "tool_choice": "required"},
        {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "look"}}},
    ],
)
async def test_training_refuses_what_hides_tokens_from_sampling(policy_server, mask: dict[str, Any]) -> None:
    async with agent_of(policy_server) as agent:
        status, answer = await agent.ask(**mask)
        assert (status, "in training" in answer["error"]["message"]) == (400, True)
        agent.session.sampling = {"temperature": 0.7}  # as in an evaluation
        assert (await agent.ask(**mask))[0] == 200


async def test_training_refuses_an_image_by_its_message(policy_server) -> None:
    shown = [*HELLO, {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}]
    async with agent_of(policy_server) as agent:
        status, answer = await agent.ask(shown)
    assert status == 400
    assert answer["error"]["message"].startswith("messages: message 2 has an image: the model reads text alone")


async def test_images_reach_the_engine_as_pixels_and_the_trainer_by_name_and_hash(
    policy_server, tmp_path: Path
) -> None:
    turned, plain = tmp_path / "turned.jpg", tmp_path / "plain.png"
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.new("RGB", (4, 2), "red").save(turned, exif=exif)
    Image.new("RGB", (4, 2), "blue").save(plain)
    others: Any = ({"type": "image_url", "image_url": {"url": str(plain)}}, {"type": "image", "image": str(turned)})
    text = {"type": "text", "text": "?"}
    async with agent_of(policy_server) as agent:
        agent.session.server.images = ShownImages(ImageLimits(max_images=2))
        policy_server.reply = lambda messages, version: "ok"
        first = await agent.turn([{"role": "user", "content": [others[0], text]}])
        await agent.turn([*first, {"role": "user", "content": [others[1], text]}])
        status, answer = await agent.ask([{"role": "user", "content": [*others, *others]}])
        assert (status, "at most 2 are read" in answer["error"]["message"]) == (400, True)
        missing = [{"role": "user", "content": [{"type": "image", "image": str(tmp_path / "7.png")}]}]
        status, answer = await agent.ask(missing)
        assert (status, "7.png: no such file in" in answer["error"]["message"]) == (400, True)
        calls = [call.tokens for call in agent.session.calls]
    assert [[each.source for each in call.images] for call in calls] == [[str(plain)], [str(plain), str(turned)]]
    seen = calls[1].images
    assert [(each.height, each.width) for each in seen] == [(2, 4), (4, 2)], "upright"
    assert [each.digest for each in seen] == [hashlib.sha256(file.read_bytes()).hexdigest() for file in (plain, turned)]
    urls = [part.source for part in image_parts(policy_server.requests[-1]["messages"])]
    assert base64.b64decode(urls[0].partition(",")[2]) == plain.read_bytes(), "as it is"
    assert read_image(urls[1], tmp_path, ImageLimits()).size == (2, 4)
    assert urls[1].startswith("data:image/png;base64,"), "as pixels"
    assert "tokens" not in policy_server.requests[-1], "the engine writes the tokens of images"
    held = located_url({"bytes": plain.read_bytes(), "path": None}, tmp_path)
    assert read_image(held, tmp_path, ImageLimits(), digest=seen[0].digest).size == (4, 2)
    async with agent_of(policy_server) as agent:
        agent.session.server.images = ShownImages(ImageLimits(max_images=2))
        agent.session.files = [str(plain)]  # as an agent's, whose row has this image
        assert (await agent.ask([{"role": "user", "content": [others[0], {"type": "image", "base64": PIXEL}]}]))[
            0
        ] == 200
        status, answer = await agent.ask([{"role": "user", "content": [others[1]]}])
        assert (status, "message 1 names an image that its row" in answer["error"]["message"]) == (400, True)


async def test_shown_images_are_kept_up_to_a_number_of_bytes(tmp_path: Path) -> None:
    shown = ShownImages(ImageLimits(), most_bytes=500)
    for number in range(4):
        Image.new("RGB", (2, 2), (number, 0, 0)).save(tmp_path / f"{number}.png")
    files = [str(tmp_path / f"{at % 4}.png") for at in range(8)]
    asked = [{"role": "user", "content": [{"type": "image", "image": each}]} for each in files]
    digests = [(await shown.of([each]))[0].digest for each in asked]
    assert digests[:4] == digests[4:]
    assert len(set(digests)) == 4
    assert len(shown._read) < 4

    # Written again alike it is the same image; a tool that draws another one under its name is told.
    content = Path(files[3]).read_bytes()
    for changed in (content, Path(files[2]).read_bytes()):
        await shown.of([asked[3]])
        Path(files[3]).unlink()
        Path(files[3]).write_bytes(changed)
        os.utime(files[3], ns=(1, 1))
        if changed == content:
            assert (await shown.of([asked[3]]))[0].digest == digests[3]
    with pytest.raises(
        ImageFault, match=r"3\.png: it has changed since it was shown: give each image a name of its own"
    ):
        await shown.of([asked[3]])


@pytest.mark.parametrize("changed", [{"tools": [TOOL]}, {"chat_template_kwargs": {"enable_thinking": False}}])
async def test_other_tools_or_template_arguments_begin_a_new_prompt(policy_server, changed: dict[str, Any]) -> None:
    async with agent_of(policy_server) as agent:
        first = await agent.turn(HELLO)
        second = await agent.turn([*first, *HELLO], **changed)
        assert "tokens" not in policy_server.requests[-1]
        await agent.turn([*second, *HELLO], **changed)
    assert "tokens" in policy_server.requests[-1]
    assert {name: policy_server.tokenized[-1].get(name) for name in changed} == changed


async def test_a_template_that_refuses_the_added_messages_alone_renders_all_of_them(policy_server) -> None:
    async with agent_of(policy_server) as agent:
        first = await agent.turn(HELLO)
        policy_server.tokenize_refusal = (400, "conversation roles must alternate user/assistant/user/…")
        await agent.turn([*first, *HELLO])
    assert policy_server.requests[-1]["path"] == "/v1/chat/completions"


@pytest.mark.parametrize(
    "messages",
    [
        [],
        "hello",
        ["hello"],
        [{"role": "assistant", "tool_calls": 5}],
        [{"role": "assistant", "tool_calls": ["call"]}],
        [{"role": "assistant", "tool_calls": [{"function": "f"}]}],
    ],
)
async def test_what_is_no_conversation_is_refused_by_name(policy_server, messages: Any) -> None:
    async with agent_of(policy_server) as agent:
        status, answer = await agent.ask(messages)
    assert status == 400
    assert answer["error"]["message"].startswith("messages: ")


@pytest.mark.parametrize("body", [b"", b"[1]", b'{"messages": NaN}', b'{"a": "\\ud800"}', b"[" * 100_000, b"\xff"])
async def test_a_body_that_is_no_json_object_is_refused(policy_server, body: bytes) -> None:
    async with agent_of(policy_server) as agent:
        headers = {"Authorization": f"Bearer {agent.session.key}"}
        async with agent._http.post(f"{agent._url}/chat/completions", data=body, headers=headers) as response:
            assert response.status == 400


async def test_an_answer_that_cannot_be_read_is_the_servers_fault(policy_server) -> None:
    async with agent_of(policy_server) as agent:
        policy_server.drops = ("choices",)
        status, answer = await agent.ask()
    assert (status, answer["error"]["type"]) == (502, "server_error")


async def test_the_answers_of_a_session_are_counted_before_they_are_sampled(policy_server) -> None:
    async with agent_of(policy_server) as agent:
        before = len(policy_server.requests)
        assert (await agent.ask(n=MAX_CALLS + 1))[0] == 429
        assert len(policy_server.requests) == before
        agent.session.num_asked = MAX_CALLS - 1
        assert [(await agent.ask())[0] for _ in range(2)] == [200, 429]


async def test_a_stream_has_all_of_the_answer_and_its_usage_only_if_asked(policy_server) -> None:
    async def chunks(**arguments: Any) -> list[dict[str, Any]]:
        async with agent.post({"messages": HELLO, "stream": True, **arguments}) as response:
            lines = (await response.text()).splitlines()
        assert lines[-2] == "data: [DONE]"
        return [json.loads(line.removeprefix("data: ")) for line in lines[:-2] if line]

    async with agent_of(policy_server) as agent:
        policy_server.reasoning = "reversed"
        first, last = await chunks()
        assert first["choices"][0]["delta"] == {
            "role": "assistant", "content": "hello", "reasoning_content": "reversed"
        }  # fmt: skip
        assert last["choices"][0]["finish_reason"] == "stop"
        assert (await chunks(stream_options={"include_usage": True}))[-1]["usage"]["completion_tokens"] == 6


async def test_a_request_ends_with_its_agent(policy_server) -> None:
    async with agent_of(policy_server) as agent:
        policy_server.gate.clear()
        asked = asyncio.create_task(agent.ask())
        while not policy_server.waiting:
            await asyncio.sleep(0)
        asked.cancel()
        await asyncio.gather(asked, return_exceptions=True)
        while policy_server.waiting:
            await asyncio.sleep(0)
    assert not agent.session.calls


async def test_a_page_in_place_of_a_completion_is_the_servers_error_for_the_agent(policy_server) -> None:
    async with agent_of(policy_server) as agent:
        policy_server.page = "<html>Bad gateway</html>"
        status, answer = await agent.ask()
    assert (status, answer["error"]["type"]) == (502, "server_error")
    assert "<html>Bad gateway</html>" in answer["error"]["message"]


WRONG: list[Any] = [True, -1, 1.5, 10**30, "x", "", [], [1], [[]], ["x"], [{}], {}, {"a": [1]}, {"name": [1]}]
ITEM = {"type": "message", "role": "user", "content": "hello"}
CALL = {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"}
OUTPUT = {"type": "function_call_output", "call_id": "c", "output": "seen"}
TOKENS = {"input_ids": [1, 2]}
# Route, whole body, fields that no body needs.
DOORS: list[tuple[str, dict[str, Any], tuple[str, ...]]] = [
    ("chat/completions", {"messages": HELLO}, ("n", "max_tokens", "max_completion_tokens", "stop", "stream_options",
     "chat_template_kwargs", "tools", "tool_choice", "response_format", "parallel_tool_calls", "logprobs")),
    ("responses", {"input": [ITEM]}, ("instructions", "previous_response_id", "conversation", "max_output_tokens",
     "tools", "tool_choice", "text", "metadata", "temperature", "parallel_tool_calls", "chat_template_kwargs")),
    ("rl/generate", TOKENS, ("max_new_tokens", "stop", "stop_token_ids")),
    ("rl/set_reward", {"reward": 1.0}, ("completion_id", "choice")),
]  # fmt: skip


def wrong_bodies() -> list[tuple[str, dict[str, Any]]]:
    """Every field of every route with values of other types, and every field of an item of the responses API."""
    cases = [
        (route, {**body, name: wrong}) for route, body, more in DOORS for name in (*body, *more) for wrong in WRONG
    ]
    for item in (ITEM, CALL, OUTPUT):
        cases += [("responses", {"input": [ITEM, {**item, name: wrong}]}) for name in item for wrong in WRONG]
    parts = [{"type": wrong, "text": wrong} for wrong in WRONG]
    cases += [("responses", {"input": [{**ITEM, "content": [part]}]}) for part in parts]
    cases += [("chat/completions", {"messages": [{"role": wrong, "content": wrong}]}) for wrong in WRONG]
    return cases


async def test_no_field_of_a_wrong_type_is_a_fault_of_ours(policy_server, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("WARNING", "prime_rl")
    faults, refused = [], 0
    async with agent_of(policy_server) as agent:
        headers = {"Authorization": f"Bearer {agent.session.key}"}
        for route, body in wrong_bodies():
            agent.session.num_asked = 0
            async with agent._http.post(f"{agent._url}/{route}", json=body, headers=headers) as response:
                text = await response.text()
            refused += response.status == 400
            is_one_line = response.status == 200 or "\\n" not in text
            if response.status not in (200, 400, 404, 429) or not is_one_line:
                faults.append((route, body, response.status, text[:100]))
    assert (faults, caplog.records) == ([], [])
    assert refused > 100


async def test_what_a_field_must_be_is_said(policy_server) -> None:
    cases: list[tuple[str, dict[str, Any], str]] = [
        ("responses", {"input": "a", "previous_response_id": ["x"]}, "previous_response_id: a text"),
        ("responses", {"input": [{"type": ["x"]}]}, "input[0].type: a text"),
        ("responses", {"input": [{**CALL, "arguments": {}}]}, "input[0].arguments: a text"),
        ("responses", {"input": [{"content": "a"}]}, "input[0].role: missing"),
        ("chat/completions", {"messages": HELLO, "max_tokens": "9"}, "max_tokens: a whole number"),
        ("chat/completions", {"messages": HELLO * 4097}, "messages: 4097 entries; at most 4096 are allowed"),
        ("responses", {"input": [ITEM] * 4097}, "input: 4097 entries; at most 4096 are allowed"),
    ]
    async with agent_of(policy_server) as agent:
        headers = {"Authorization": f"Bearer {agent.session.key}"}
        for route, body, message in cases:
            async with agent._http.post(f"{agent._url}/{route}", json=body, headers=headers) as response:
                assert (response.status, (await response.json())["error"]["message"]) == (400, message)
        # 1.5 million messages in 42 MB: counted before anything is parsed.
        raw = b'{"messages":[' + b'{"role":"user","content":""},' * 1_500_000 + b"{}]}"
        async with agent._http.post(f"{agent._url}/chat/completions", data=raw, headers=headers) as response:
            assert (response.status, "at most 500000" in await response.text()) == (400, True)


async def test_requests_that_are_not_http_are_one_line_in_the_log(
    policy_server, caplog: pytest.LogCaptureFixture
) -> None:
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\n"
    raws = [
        b"garbage\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00",
        b"GET / HTTP/9.9\r\n\r\n",
        head + b"Content-Length: -5\r\n\r\n",
        head + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"GET /" + b"a" * 20_000 + b" HTTP/1.1\r\n\r\n",
    ]
    caplog.set_level("WARNING", "prime_rl")
    async with agent_of(policy_server) as agent:
        port = int(agent._url.split(":")[2].split("/")[0])
        for raw in raws * 3:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(raw)
            assert b" 400 " in await reader.readline()
            writer.close()
        # A body that is compressed wrongly comes from someone with a key.
        squeezed = {"Authorization": f"Bearer {agent.session.key}", "Content-Encoding": "gzip", "Connection": "close"}
        async with agent._http.post(f"{agent._url}/chat/completions", data=b"abcd", headers=squeezed) as response:
            assert response.status == 400
        assert (await agent.ask())[0] == 200
    (record,) = caplog.records
    assert record.getMessage().startswith("recording proxy: a malformed request was refused: ")
    assert record.exc_info is None
