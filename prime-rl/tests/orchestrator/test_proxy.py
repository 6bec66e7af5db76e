"""The proxy of environments with their own interpreter, as an agent and an attacker use it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest

from prime_rl.configs.orchestrator import EvalSamplingConfig, SamplingConfig
from prime_rl.configs.shared import ClientConfig
from prime_rl.orchestrator.proxy.recording import MAX_CALLS, Session
from prime_rl.orchestrator.proxy.routes import RecordingProxy
from prime_rl.orchestrator.rollouts.rollout import ExampleRef
from prime_rl.orchestrator.rollouts.sampling import eval_sampling_args, train_sampling_args
from prime_rl.orchestrator.servers.pool import InferencePool

ARGS = train_sampling_args(SamplingConfig(max_tokens=20), 0.7)
HELLO = [{"role": "user", "content": "hello"}]
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
