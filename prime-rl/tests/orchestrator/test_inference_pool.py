from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import socket
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from starlette.responses import JSONResponse
from verifiers.errors import ModelError, OverlongPromptError
from verifiers.types import AssistantMessage, UserMessage

from prime_rl.configs.orchestrator import EvalSamplingConfig, SamplingConfig
from prime_rl.configs.shared import ClientConfig
from prime_rl.orchestrator.errors import InferenceFault
from prime_rl.orchestrator.proxy.recording import Session
from prime_rl.orchestrator.rollouts.replies import VersionSpan
from prime_rl.orchestrator.rollouts.rollout import ExampleRef
from prime_rl.orchestrator.rollouts.sampling import eval_sampling_args, train_sampling_args
from prime_rl.orchestrator.servers.channel import KEEPALIVE_S, ChatChannel, Connections
from prime_rl.orchestrator.servers.pool import WATCH_INTERVAL_S, InferencePool
from prime_rl.orchestrator.servers.server import InferenceServer
from prime_rl.orchestrator.workers.in_memory import SessionClient

ARGS = train_sampling_args(SamplingConfig(max_tokens=8), 0.7)
PROMPT = [UserMessage(content="abc")]


def make_pool(*servers, model: str = "letters", adapter: str | None = None, **config) -> InferencePool:
    return InferencePool(ClientConfig(base_url=[server.url for server in servers], **config), model, adapter)


def client_of(server: InferenceServer) -> SessionClient:
    return SessionClient(Session("", server, server.model, {}), server.takes_tokens)


async def test_a_pool_is_ready_once_its_servers_answer_as_training_needs(policy_server) -> None:
    pool = make_pool(policy_server)
    assert await pool.wait_ready(use_token_client=True) == 0
    assert pool.servers[0].takes_tokens
    await pool.close()


async def test_a_server_that_answers_503_is_not_ready(policy_server) -> None:
    pool = make_pool(policy_server)
    policy_server.ready = False
    assert not await pool.servers[0].is_ready()
    policy_server.ready = True
    assert await pool.servers[0].is_ready()
    await pool.close()


async def test_a_server_without_a_health_route_is_ready(serve, policy_server) -> None:
    class Foreign(type(policy_server)):
        async def _health(self, request):
            return JSONResponse({}, 404)

    pool = make_pool(serve(Foreign()))
    await pool.wait_served()
    assert not await pool.servers[0].is_gone()
    await pool.close()


@pytest.mark.parametrize("is_ours", [True, False])
async def test_the_wait_for_a_server_that_never_comes_ends_by_name(
    is_ours: bool, unused_tcp_port: int, tmp_path: Path
) -> None:
    url = f"http://127.0.0.1:{unused_tcp_port}"
    pool = InferencePool(ClientConfig(base_url=[f"{url}/v1"], startup_timeout=1), "letters")
    with pytest.raises(InferenceFault) as caught:
        await pool.wait_served(tmp_path / "inference.log" if is_ours else None)
    await pool.close()
    advice = f"its log is {tmp_path}/inference.log"
    if not is_ours:
        command = f"inference --model.name letters --server.port {unused_tcp_port}"
        advice = f"start it with `{command}`, or name a running one in client.base_url"
    assert str(caught.value).startswith(f"waited for the inference server {url} since ")
    assert str(caught.value).endswith(f"(limit: client.startup_timeout = 1 s): {advice}")


async def test_weights_of_an_earlier_run_are_noticed(policy_server) -> None:
    policy_server.version = 7
    pool = make_pool(policy_server)
    assert await pool.wait_ready(use_token_client=False) == 7
    await pool.close()


async def test_a_model_that_is_not_served_is_one_line_that_names_what_is(policy_server) -> None:
    pool = make_pool(policy_server, model="numbers")
    with pytest.raises(InferenceFault, match="does not serve 'numbers' but 'letters'"):
        await pool.wait_ready(use_token_client=False)
    await pool.close()


async def test_a_server_without_token_ids_is_refused_at_the_start(policy_server) -> None:
    policy_server.drops = ("prompt_token_ids", "token_ids")
    pool = make_pool(policy_server)
    with pytest.raises(InferenceFault, match=r"without prompt_token_ids and choices\[0\].token_ids"):
        await pool.wait_ready(use_token_client=False)
    await pool.close()


async def test_without_the_token_route_later_turns_travel_as_text(serve, policy_server) -> None:
    plain = type(policy_server)(token_route=False)
    pool = make_pool(serve(plain))
    await pool.wait_ready(use_token_client=True)
    assert not pool.servers[0].takes_tokens
    await pool.close()


async def test_weights_reach_every_server(serve, policy_server, tmp_path: Path) -> None:
    other = serve(type(policy_server)())
    pool = make_pool(policy_server, other)
    await pool.update_weights(tmp_path / "step_3")
    assert policy_server.loaded == other.loaded == [str(tmp_path / "step_3")]
    assert policy_server.version == other.version == 3
    await pool.close()


async def test_with_an_adapter_updates_load_it_and_requests_name_it_from_then_on(policy_server, tmp_path) -> None:
    pool = make_pool(policy_server, adapter="r16-a32.0")
    (server,) = pool.servers
    assert await pool.wait_ready(use_token_client=False) == 0
    assert server.model == "letters"
    await pool.update_weights(tmp_path / "step_1")
    assert policy_server.loaded == [str(tmp_path / "step_1")]
    assert (policy_server.adapters, policy_server.version, server.model) == ({"r16-a32.0": 1}, 0, "r16-a32.0")
    await pool.update_weights(None)
    assert (policy_server.loaded[-1], server.model) == (None, "letters")
    await pool.close()


async def test_an_adapter_that_the_server_does_not_see_yet_is_loaded_a_moment_later(policy_server, tmp_path) -> None:
    pool = make_pool(policy_server, adapter="r16-a32.0")
    pauses: list[float] = []

    async def pause(seconds: float) -> None:
        pauses.append(seconds)

    pool.servers[0].sleep = pause
    policy_server.missing_adapters = 3
    await pool.update_weights(tmp_path / "step_2")
    assert (policy_server.adapters, pauses) == ({"r16-a32.0": 2}, [1, 2, 4])
    policy_server.missing_adapters = 100
    with pytest.raises(InferenceFault, match=r"did not load the weights .*step_3: .* answered 404: no adapter_config"):
        await pool.update_weights(tmp_path / "step_3")
    assert len(pauses) == 3 + 9
    await pool.close()


async def test_a_server_that_refuses_weights_is_one_line(serve, policy_server) -> None:
    pool = make_pool(policy_server)
    pool.servers[0].root_url += "/elsewhere"
    with pytest.raises(InferenceFault, match=r"did not load the weights .*step_1: .* answered 404"):
        await pool.update_weights(Path("step_1"))
    await pool.close()


async def test_a_server_that_refuses_weights_is_left_out_while_another_serves(serve, policy_server) -> None:
    other = serve(type(policy_server)())
    pool = make_pool(policy_server, other)
    first, second = pool.servers
    first.root_url += "/elsewhere"
    lost = []
    pool.on_lost.append(lost.append)
    await pool.update_weights(Path("step_1"))
    assert pool.serving == [second]
    assert lost == [first]
    assert pool.least_loaded() is second
    await pool.close()


async def test_a_server_comes_back_once_it_is_healthy_and_holds_what_the_others_hold(serve, policy_server) -> None:
    other = serve(type(policy_server)())
    pool = make_pool(policy_server, other)
    changed = asyncio.Condition()
    pauses: list[float] = []

    async def pause(seconds: float) -> None:
        pauses.append(seconds)
        async with changed:
            changed.notify_all()
        await asyncio.sleep(0)

    async def until(condition) -> None:
        async with changed:
            await changed.wait_for(condition)

    pool.sleep = pause
    watchers = [asyncio.create_task(each) for each in pool.watchers()]
    other.ready = False
    await until(lambda: len(pool.serving) == 1)
    await pool.update_weights(Path("step_4"))
    assert (policy_server.version, other.version) == (4, 0)
    await until(lambda: max(pauses) > WATCH_INTERVAL_S)
    other.ready = True
    await until(lambda: len(pool.serving) == 2)
    assert other.version == 4
    for task in watchers:
        task.cancel()
    await asyncio.gather(*watchers, return_exceptions=True)
    await pool.close()


async def test_the_last_server_that_is_gone_ends_the_run(policy_server) -> None:
    pool = make_pool(policy_server)
    policy_server.ready = False
    pool.sleep = lambda seconds: asyncio.sleep(0)
    (watcher,) = pool.watchers()
    with pytest.raises(InferenceFault, match="does not respond any more; see its log"):
        await watcher
    await pool.close()


async def test_a_closed_port_is_a_server_that_is_gone(policy_server, unused_tcp_port) -> None:
    pool = make_pool(policy_server)
    assert not await pool.servers[0].is_gone()
    pool.servers[0].root_url = f"http://127.0.0.1:{unused_tcp_port}"
    assert await pool.servers[0].is_gone()
    await pool.close()


async def test_an_answer_carries_tokens_logprobs_and_the_policy_version(policy_server) -> None:
    policy_server.version = 2
    server = make_pool(policy_server).servers[0]
    session = Session("", server, server.model, {})
    response = await SessionClient(session, server.takes_tokens).get_response(PROMPT, server.model, ARGS)
    tokens = response.message.tokens
    assert response.message.content == "cba"
    assert tokens.completion_ids == [*map(ord, "cba"), 3]
    assert tokens.completion_logprobs == [-2.5] * 4
    ((completion_id, call),) = session.recorded
    assert (completion_id, call.completion_ids) == (response.id, tokens.completion_ids)
    details = call.details
    assert (details.weight_versions, details.finish_reason) == ((VersionSpan(version=2, start=0, end=4),), "stop")
    assert details.started_s <= details.ended_s
    (request,) = policy_server.requests
    assert (request["max_completion_tokens"], request["temperature"], request["top_k"]) == (8, 0.7, -1)
    assert request["messages"] == [{"role": "user", "content": "abc"}]
    await server.close()


async def test_an_answer_of_end_of_text_alone_is_an_answer(policy_server) -> None:
    policy_server.reply = lambda messages, version: ""
    server = make_pool(policy_server).servers[0]
    response = await client_of(server).get_response(PROMPT, server.model, ARGS)
    assert response.message.content == ""
    assert response.message.tokens.completion_ids == [3]
    await server.close()


async def test_each_request_gets_a_seed_of_its_own(policy_server) -> None:
    server = make_pool(policy_server).servers[0]
    for _ in range(3):
        await client_of(server).get_response(PROMPT, server.model, ARGS | {"seed": 40})
    assert [request["seed"] for request in policy_server.requests] == [40, 41, 42]
    await server.close()


@pytest.mark.parametrize("use_token_client", [False, True])
async def test_each_call_of_an_evaluations_rollout_has_a_seed_of_its_own_which_the_next_evaluation_repeats(
    policy_server, use_token_client: bool
) -> None:
    pool = make_pool(policy_server)
    await pool.wait_ready(use_token_client)
    (server,) = pool.servers
    args = eval_sampling_args(EvalSamplingConfig(seed=7), ExampleRef("env", 4), 0)
    policy_server.requests.clear()
    for number in (0, 1, 2, 0, 1, 2):
        state = {"trajectory": [{"prompt": [], "tokens": None}] * number, "model": server.model}
        await client_of(server).get_response(PROMPT, server.model, args, state=state)
    seeds = [request["seed"] for request in policy_server.requests]
    assert seeds[:3] == seeds[3:]
    assert len(set(seeds)) == 3
    await pool.close()


async def test_an_answer_outside_of_the_trajectory_gives_the_next_call_another_seed(policy_server) -> None:
    """A game asks the model for the answers of its other seats so."""
    server = make_pool(policy_server).servers[0]
    args = eval_sampling_args(EvalSamplingConfig(seed=7), ExampleRef("env", 4), 0)
    for prompt in (PROMPT, [*PROMPT, AssistantMessage(content="cba"), *PROMPT]):
        await client_of(server).get_response(prompt, server.model, args, state={"trajectory": []})
    first, second = (request["seed"] for request in policy_server.requests)
    assert first != second
    await server.close()


async def test_a_server_is_found_by_name_when_environment_code_keeps_every_thread_of_the_event_loop(
    policy_server,
) -> None:
    threads, gate = ThreadPoolExecutor(1), threading.Event()
    asyncio.get_running_loop().set_default_executor(threads)
    threads.submit(gate.wait)
    try:
        url = policy_server.url.replace("127.0.0.1", "localhost")
        pool = InferencePool(ClientConfig(base_url=[url]), "letters")
        await pool.wait_ready(use_token_client=True)
        await pool.update_weights(None)
        assert [server.base_url for server in pool.servers] == [url]
        await pool.close()
        assert threads._work_queue.empty()  # nothing waits for the thread that is kept
    finally:
        gate.set()


async def test_requests_for_several_answers_share_no_seed_with_others(policy_server) -> None:
    """The server samples answer i with seed + i."""
    channel = ChatChannel(policy_server.url, {}, timeout_s=60, max_retries=0)
    messages = [{"role": "user", "content": "abc"}]
    for count in (3, None, 2, 1):
        await channel.exchange("/chat/completions", {"messages": messages, "seed": 40, "n": count})
    assert [request["seed"] for request in policy_server.requests] == [40, 43, 44, 46]
    await channel.close()


async def test_a_prompt_that_does_not_fit_ends_a_rollout_without_an_error_of_the_model(policy_server) -> None:
    policy_server.refusal = (400, "This model's maximum context length is 128 tokens")
    server = make_pool(policy_server).servers[0]
    with pytest.raises(OverlongPromptError):
        await client_of(server).get_response(PROMPT, server.model, ARGS)
    await server.close()


async def test_a_refusal_names_the_route_the_status_and_the_servers_words(policy_server) -> None:
    policy_server.refusal = (422, "temperature must be positive")
    server = make_pool(policy_server).servers[0]
    with pytest.raises(ModelError) as fault:
        await client_of(server).get_response(PROMPT, server.model, ARGS)
    assert str(fault.value.__cause__).endswith("/v1/chat/completions answered 422: temperature must be positive")
    assert len(policy_server.requests) == 1
    await server.close()


async def test_a_busy_server_is_asked_again(policy_server) -> None:
    policy_server.refusal = (503, "busy")
    channel = ChatChannel(policy_server.url, {}, timeout_s=3600, max_retries=3)
    pauses: list[float] = []

    async def pause(seconds: float) -> None:
        pauses.append(seconds)
        policy_server.refusal = None if len(pauses) == 2 else policy_server.refusal

    channel.sleep = pause
    reply = await channel.post("/chat/completions", body={"messages": [{"role": "user", "content": "a"}]})
    assert reply.choices[0].message.content == "a"
    assert pauses == [0.5, 1.0]
    await channel.close()


class Echo:
    """A server that returns each body, and counts the connections that it accepts."""

    def __init__(self, on_call: Callable[[], None] = lambda: None) -> None:
        self.connections: list[asyncio.StreamWriter] = []
        self._on_call = on_call

    async def start(self, host: str = "127.0.0.1") -> int:
        """Returns the port."""
        self._server = await asyncio.start_server(self._answer_all, host)
        return self._server.sockets[0].getsockname()[1]

    async def _answer_all(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections.append(writer)
        with contextlib.suppress(asyncio.IncompleteReadError):  # the channel has closed its connection
            while head := await reader.readuntil(b"\r\n\r\n"):
                length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
                body = await reader.readexactly(length)
                self._on_call()
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))
        writer.close()

    def close(self) -> None:
        self._server.close()


async def numbers_from(channels: Sequence[ChatChannel], count: int) -> list[int]:
    """What the servers of some channels return for as many calls at once, which the channels make in turn."""
    turns = zip(range(count), itertools.cycle(channels), strict=False)
    calls = [channel.exchange("/echo", {"number": number}) for number, channel in turns]
    return [json.loads(answer.body)["number"] for answer in await asyncio.gather(*calls)]


async def test_calls_beyond_the_connections_to_a_server_wait_and_are_all_answered() -> None:
    server = Echo()
    channel = ChatChannel(f"http://127.0.0.1:{await server.start()}", {}, 3600, max_retries=0)
    channel.max_connections = 3
    assert await numbers_from([channel], 20) == list(range(20))
    assert len(server.connections) == 3
    await channel.close()
    server.close()


def open_connections_to(host: str) -> int:
    """Open sockets of this process that are connected to an IPv4 address, from the kernel's tables."""
    rows = [row.split() for row in Path("/proc/self/net/tcp").read_text(encoding="utf-8").splitlines()[1:]]
    address = socket.inet_aton(host)[::-1].hex().upper()
    connected = {f"socket:[{row[9]}]" for row in rows if row[2].startswith(address)}
    mine = set()
    for descriptor in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # the descriptor that listed the folder
            mine.add(str(descriptor.readlink()))
    return len(connected & mine)


@pytest.mark.parametrize("keepalive_s", [KEEPALIVE_S, 0.0001], ids=["kept-idle", "idle-for-too-long"])
async def test_connections_to_all_servers_together_stay_within_the_limit(keepalive_s: float) -> None:
    host = "127.0.0.7"  # of this test alone
    most_open = 0

    def count() -> None:
        nonlocal most_open
        most_open = max(most_open, open_connections_to(host))

    servers = [Echo(count) for _ in range(6)]
    shared, channels = Connections(8, keepalive_s), []
    for server in servers:
        channels.append(ChatChannel(f"http://{host}:{await server.start(host)}", {}, 3600, max_retries=0))
        channels[-1].connections = shared
    assert await numbers_from(channels, 60) == list(range(60))
    for channel in channels:
        assert await numbers_from([channel], 10) == list(range(10))
    assert 2 <= most_open <= 8
    assert all(len(server.connections) >= 2 for server in servers), "a quarter of 8 at once"
    for channel, server in zip(channels, servers, strict=True):
        await channel.close()
        server.close()
    assert open_connections_to(host) == 0


async def test_connections_outlast_a_channel_that_is_closed_while_others_use_them() -> None:
    server = Echo()
    url = f"http://127.0.0.1:{await server.start()}"
    first, second = [ChatChannel(url, {}, 3600, max_retries=0) for _ in range(2)]
    assert await numbers_from([first, second], 4) == list(range(4))
    await first.close()
    await first.close()
    assert await numbers_from([second], 4) == list(range(4))
    assert (await second.exchange("/echo", {"number": 4})).body == b'{"number":4}'
    await second.close()
    server.close()


async def test_the_api_key_and_configured_headers_go_with_every_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LETTERS_KEY", "secret")
    config = ClientConfig(api_key_var="LETTERS_KEY", headers={"X-Team": "med"})
    (server,) = InferencePool(config, "letters").servers
    assert server.headers == {"Authorization": "Bearer secret", "X-Team": "med"}


@pytest.mark.parametrize("models", [[1], {"data": 3}, {"data": ["letters"]}, "letters"], ids=str)
async def test_a_list_of_models_in_another_form_is_a_fault_of_the_server(policy_server, models: Any) -> None:
    policy_server.models = models
    pool = InferencePool(ClientConfig(base_url=[policy_server.url]), "letters")
    try:
        with pytest.raises(InferenceFault, match=f"{policy_server.url} does not list its models"):
            await pool.wait_ready(use_token_client=True)
    finally:
        await pool.close()
