"""The proxy as agent SDKs, foreign processes and strangers use it: `openai`, `openai-agents`, plain HTTP."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import aiohttp
import pytest
from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    RunConfig,
    Runner,
    function_tool,
)
from openai import AsyncOpenAI, AuthenticationError, BadRequestError, NotFoundError, RateLimitError

from prime_rl.configs.shared import ClientConfig
from prime_rl.orchestrator.proxy.recording import Session
from prime_rl.orchestrator.proxy.routes import MAX_BODY_BYTES, RecordingProxy
from prime_rl.orchestrator.rollouts.sampling import SamplingConfig, train_sampling_args
from prime_rl.orchestrator.servers.pool import InferencePool

ARGS = train_sampling_args(SamplingConfig(max_tokens=20), 0.7)
HELLO = [{"role": "user", "content": "hello"}]
QUIET = RunConfig(tracing_disabled=True)
CALL = {"id": "call-1", "type": "function", "function": {"name": "look", "arguments": '{"word": "abc"}'}}


@pytest.fixture
async def proxy(policy_server) -> AsyncIterator[RecordingProxy]:
    proxy = RecordingProxy()
    await proxy.open()
    yield proxy
    await proxy.close()


@pytest.fixture
async def pool(policy_server) -> AsyncIterator[InferencePool]:
    pool = InferencePool(ClientConfig(base_url=[policy_server.url]), "letters")
    await pool.wait_ready(use_token_client=True)
    yield pool
    await pool.close()


@pytest.fixture
def session(proxy, pool) -> Any:
    with proxy.sessions.opened(1, pool.servers[0], ARGS) as (session,):
        yield session


@pytest.fixture
async def client(proxy, session) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(base_url=proxy.base_url, api_key=session.key, max_retries=0) as client:
        yield client


def calls_then_tells(policy_server) -> None:
    """The model calls its tool, and then repeats what the tool said."""

    def reply(messages: list[dict[str, Any]], version: int) -> Any:
        last = messages[-1]
        return f"told {last['content']}" if last["role"] == "tool" else {"content": None, "tool_calls": [CALL]}

    policy_server.reply = reply


@pytest.mark.parametrize("kind", [OpenAIResponsesModel, OpenAIChatCompletionsModel])
@pytest.mark.parametrize("streams", [False, True])
async def test_openai_agents_uses_its_tool_in_one_line_of_conversation(
    policy_server, client, session, kind: Callable[..., Any], streams: bool
) -> None:
    calls_then_tells(policy_server)

    @function_tool
    def look(word: str) -> str:
        """Look a word up."""
        return word.upper()

    agent = Agent(
        name="reader", tools=[look], model=kind("letters", client), model_settings=ModelSettings(max_tokens=9)
    )
    if streams:
        running = Runner.run_streamed(agent, "abc?", run_config=QUIET)
        kinds = {event.data.type async for event in running.stream_events() if event.type == "raw_response_event"}
        assert "response.completed" in kinds
        said = running.final_output
    else:
        said = (await Runner.run(agent, "abc?", run_config=QUIET)).final_output
    assert said == "told ABC"
    first, second = (call.tokens for call in session.calls)
    sampled = first.prompt_ids + first.completion_ids
    assert second.prompt_ids[: len(sampled)] == sampled
    assert policy_server.requests[-1]["path"] == "/v1/chat/completions/tokens"


async def test_a_response_continues_another_by_its_id_and_says_when_it_was_cut_off(client, session) -> None:
    first = await client.responses.create(model="any", input="hello", instructions="be brief")
    second = await client.responses.create(model="any", input="more", previous_response_id=first.id)
    assert (first.output_text, second.output_text, second.status) == ("hello", "more", "completed")
    assert [message.text for message in session.calls[1].conversation] == ["hello", "hello", "more", "more"]
    assert second.usage.total_tokens == second.usage.input_tokens + second.usage.output_tokens
    with pytest.raises(NotFoundError, match="has no response"):
        await client.responses.create(model="any", input="more", previous_response_id="resp_1")


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({"input": 5}, "input: a list"),
        ({"input": [5]}, r"input\[0\]: an item"),
        ({"input": [{"type": "computer_call"}]}, "are not supported"),
        ({"input": "x", "tools": [{"type": "web_search"}]}, "only functions"),
        ({"input": "x", "conversation": "c"}, "conversation: not kept"),
        ({"input": "x", "text": {"format": {"type": "json_schema", "name": "a", "schema": {}}}}, "response_format"),
        ({"input": []}, "messages: a list of messages"),
    ],
)
async def test_a_response_that_cannot_be_given_is_refused_by_name(client, body: dict[str, Any], says: str) -> None:
    with pytest.raises(BadRequestError, match=says):
        await client.post("/responses", body={"model": "any", **body}, cast_to=object)


async def test_each_of_n_answers_is_recorded_and_may_have_its_own_reward(client, session) -> None:
    completion = await client.chat.completions.create(model="any", messages=HELLO, n=3)
    assert [choice.index for choice in completion.choices] == [0, 1, 2]
    await client.post("/rl/set_reward", body={"completion_id": completion.id, "reward": 1}, cast_to=object)
    given = {"completion_id": completion.id, "choice": 2, "reward": True}
    await client.post("/rl/set_reward", body=given | {"reward": 5}, cast_to=object)
    assert session.rewards == [1.0, 1.0, 5.0]
    for wrong in ({"choice": 3}, {"choice": "0"}, {"completion_id": 1}, {"reward": "5"}, {"reward": None}):
        with pytest.raises(BadRequestError):
            await client.post("/rl/set_reward", body=given | wrong, cast_to=object)


async def test_a_foreign_process_starts_a_session_sets_its_reward_and_ends_it(proxy, pool) -> None:
    with proxy.sessions.opened(1, pool.servers[0], ARGS) as (session,):
        offered = asyncio.create_task(proxy.offers.run(session, {"text": "abc"}))
        async with AsyncOpenAI(base_url=proxy.base_url, api_key=proxy.starter_key, max_retries=0) as starter:
            started = await starter.post("/rl/start_session", body={"wait_s": 60}, cast_to=dict[str, Any])
            assert (started["task"], started["base_url"]) == ({"text": "abc"}, proxy.base_url)
            with pytest.raises(RateLimitError, match="no attempt is waiting"):
                await starter.post("/rl/start_session", body={}, cast_to=object)
        async with AsyncOpenAI(base_url=started["base_url"], api_key=started["api_key"], max_retries=0) as agent:
            completion = await agent.chat.completions.create(model=started["model"], messages=HELLO)
            await agent.post("/rl/end_session", body={"reward": {completion.id: 0.5}}, cast_to=object)
            await offered
            with pytest.raises(AuthenticationError, match="it has ended"):
                await agent.chat.completions.create(model="any", messages=HELLO)
    assert session.rewards == [0.5]


async def test_an_abandoned_session_leaves_nothing_behind(proxy, pool) -> None:
    with proxy.sessions.opened(2, pool.servers[0], ARGS) as (taken, waiting):
        running = [asyncio.create_task(proxy.offers.run(each, {})) for each in (taken, waiting)]
        offer = await proxy.offers.take(wait_s=3600)
        assert offer is not None
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
    assert (len(proxy.offers), len(proxy.sessions)) == (0, 0)


STRANGERS = ["", "Bearer ", "Bearer EMPTY", "Bearer x", "Basic x", "Bearer \udcff"]


@pytest.mark.parametrize(
    "path", ["chat/completions", "responses", "rl/generate", "rl/set_reward", "rl/end_session", "rl/start_session"]
)
async def test_a_stranger_gets_401_everywhere_and_learns_nothing(policy_server, proxy, session, path: str) -> None:
    before = len(policy_server.requests)
    async with aiohttp.ClientSession() as http:
        for key in STRANGERS:
            # A body that nobody would read to its end.
            async with http.post(
                f"{proxy.base_url}/{path}", data=b"[" * 1000, headers={"Authorization": key}
            ) as answer:
                assert answer.status == 401
                text = await answer.text()
                assert session.key not in text
                assert proxy.starter_key not in text
        async with http.get(f"{proxy.base_url}/models") as answer:
            assert answer.status == 401
    assert len(policy_server.requests) == before


async def test_keys_open_only_their_own_doors(proxy, session, client) -> None:
    async with AsyncOpenAI(base_url=proxy.base_url, api_key=proxy.starter_key, max_retries=0) as starter:
        with pytest.raises(AuthenticationError):
            await starter.chat.completions.create(model="any", messages=HELLO)
    with pytest.raises(AuthenticationError):
        await client.post("/rl/start_session", body={}, cast_to=object)
    assert session.key not in repr(session)
    assert len({session.key, proxy.starter_key}) == 2
    assert min(len(session.key), len(proxy.starter_key)) == 48


async def test_a_body_above_the_limit_is_refused(proxy, session) -> None:
    headers = {"Authorization": f"Bearer {session.key}", "Content-Type": "application/json"}
    async with aiohttp.ClientSession() as http:
        body = b'"' + b"x" * MAX_BODY_BYTES + b'"'
        async with http.post(f"{proxy.base_url}/chat/completions", data=body, headers=headers) as answer:
            assert answer.status == 413


async def test_a_thousand_sessions_at_once_keep_their_tokens_and_rewards_apart(policy_server, proxy, pool) -> None:
    connector = aiohttp.TCPConnector(limit=128)
    with proxy.sessions.opened(1000, pool.servers[0], ARGS) as sessions:
        async with aiohttp.ClientSession(connector=connector) as http:

            async def post(session: Session, path: str, body: dict[str, Any]) -> dict[str, Any]:
                headers = {"Authorization": f"Bearer {session.key}"}
                async with http.post(f"{proxy.base_url}/{path}", json=body, headers=headers) as answer:
                    assert answer.status == 200
                    return json.loads(await answer.read())

            async def converse(number: int, session: Session) -> None:
                message = {"role": "user", "content": str(number)}
                answer = await post(session, "chat/completions", {"messages": [message]})
                rewarded = {"completion_id": answer["id"], "reward": number}
                await post(session, "rl/set_reward", rewarded)

            await asyncio.gather(*(converse(number, session) for number, session in enumerate(sessions)))
        for number, session in enumerate(sessions):
            assert session.rewards == [float(number)]
            assert bytes(session.calls[0].tokens.completion_ids) == f"{number}\x03".encode()
    assert len(proxy.sessions) == 0
