"""A trace gives the same training samples whether an environment's client fills it or raw replies do."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from prime_rl.configs.orchestrator import EnvConfig, SamplingConfig
from prime_rl.configs.shared import ClientConfig, LogConfig
from prime_rl.orchestrator.errors import InferenceFault, MalformedRollout
from prime_rl.orchestrator.proxy.recording import Session
from prime_rl.orchestrator.rollouts.replies import Reported, check_reply, decode_chat_reply
from prime_rl.orchestrator.rollouts.rollout import ExampleRef, Rollout, read_rollout, to_samples
from prime_rl.orchestrator.rollouts.sampling import train_sampling_args
from prime_rl.orchestrator.rollouts.trace import ModelCall, Prompt, TokenTrace, likeliest_of
from prime_rl.orchestrator.servers.channel import ChatChannel, ServerAnswered
from prime_rl.orchestrator.servers.pool import InferencePool
from prime_rl.orchestrator.workers.environment import Environment
from prime_rl.orchestrator.workers.inside.blocking import LoopWatch
from prime_rl.orchestrator.workers.loading import load_environments
from prime_rl.orchestrator.workers.port import PortClient, listening, serve_port
from prime_rl.orchestrator.workers.remote import RemoteWorker, Service, packed, unpacked
from prime_rl.transport.messages import ImageReference, TrainingSample

EXAMPLE = ExampleRef("letters-env", 1)
TEMPERATURE = 0.7


def reply_of(**changes: Any) -> bytes:
    """A chat completion of two tokens, as an OpenAI server with token ids writes it."""
    choice = {
        "index": 0,
        "message": {"role": "assistant", "content": "ab"},
        "finish_reason": "length",
        "token_ids": [97, 98],
        "logprobs": {"content": [{"token": "a", "logprob": -0.5}, {"token": "b", "logprob": -0.25}]},
        "weight_versions": [{"version": 4, "start": 0, "end": 1}, {"version": 5, "start": 1, "end": 2}],
    }
    reply = {"id": "x", "object": "chat.completion", "prompt_token_ids": [1, 2, 3], "choices": [choice | changes]}
    return json.dumps(reply).encode()


def test_a_reply_is_recorded_with_tokens_versions_finish_reason_and_time() -> None:
    trace = TokenTrace()
    call = trace.record(decode_chat_reply(reply_of(), started_s=10.0, ended_s=12.5))
    assert trace.calls == [call]
    assert (call.prompt_ids, call.prompt_mask) == ([1, 2, 3], [False] * 3)
    assert (call.completion_ids, call.completion_mask) == ([97, 98], [True, True])
    assert call.inference_logprobs == [-0.5, -0.25]
    assert [(span.version, span.start, span.end) for span in call.details.weight_versions] == [(4, 0, 1), (5, 1, 2)]
    assert (call.details.finish_reason, call.details.started_s, call.details.ended_s) == ("length", 10.0, 12.5)
    assert trace.oldest_version == 4


def test_a_token_without_alternative_is_not_taken_for_one_of_the_environment() -> None:
    """With `top_p` an engine may keep one token, of log-probability 0, which marks in samples what was not sampled."""
    logprobs = {"content": [{"token": "a", "logprob": 0.0}, {"token": "b", "logprob": -0.0}]}
    call = TokenTrace().record(decode_chat_reply(reply_of(logprobs=logprobs), 0.0, 0.0))
    assert call is not None
    marked = torch.tensor(call.inference_logprobs, dtype=torch.float32)
    assert (marked != 0).all()
    assert torch.equal(marked.exp(), torch.ones(2))
    assert torch.equal(marked - 1e-30, torch.full((2,), -1e-30))


@pytest.mark.parametrize("missing", ["token_ids", "logprobs"])
def test_a_reply_without_tokens_is_not_recorded(missing: str) -> None:
    trace = TokenTrace()
    assert trace.record(decode_chat_reply(reply_of(**{missing: None}), 0.0, 0.0)) is None
    assert trace.calls == []
    assert trace.oldest_version is None


def test_a_reply_whose_tokens_and_log_probabilities_disagree_is_refused() -> None:
    with pytest.raises(MalformedRollout, match="3 tokens, 3 mask entries and 2 log-probabilities"):
        TokenTrace().record(decode_chat_reply(reply_of(token_ids=[97, 98, 99]), 0.0, 0.0))


def load() -> Environment:
    config = EnvConfig(id="letters-env", args={"kind": "twice"})
    return load_environments([config], LogConfig(vf_level="warning"))[config.id]


async def converse(environment: Environment, policy_server, use_tokens: bool) -> Rollout:
    """A conversation of two turns."""
    pool = InferencePool(ClientConfig(base_url=[policy_server.url]), "letters")
    await pool.wait_ready(use_token_client=use_tokens)
    policy_server.answers.clear()  # the pool's own question
    try:
        args = train_sampling_args(SamplingConfig(), TEMPERATURE)
        (rollout,) = await environment.run_group(EXAMPLE, 1, pool.servers[0], args, version=0)
    finally:
        await pool.close()
    return rollout


def samples_of_raw_replies(bodies: list[bytes], rollout: Rollout) -> list[TrainingSample]:
    """What an agent's proxy makes of the replies that it passed on, with the scores of `rollout`."""
    trace = TokenTrace()
    for body in bodies:
        trace.record(decode_chat_reply(body, time.time(), time.time()))
    version = trace.oldest_version
    assert version is not None
    proxied = Rollout(EXAMPLE, rollout.reward, trace, TEMPERATURE, version, advantage=rollout.advantage)
    return to_samples(proxied)


@pytest.mark.usefixtures("importable_environments")
@pytest.mark.parametrize("use_tokens", [True, False], ids=["turns as tokens", "turns as text"])
async def test_raw_replies_give_the_samples_of_the_environment_that_received_them(
    policy_server, use_tokens: bool
) -> None:
    """The weights change between the two turns."""

    def reply(messages: list[dict[str, Any]], version: int) -> str:
        if messages[-1]["content"] == "hello":
            policy_server.version = 2
        return f"answer {len(messages)}"

    policy_server.reply, policy_server.version = reply, 1
    rollout = await converse(load(), policy_server, use_tokens)
    rollout.advantage = 0.25
    samples = to_samples(rollout)
    assert samples == samples_of_raw_replies(policy_server.answers, rollout)
    assert [sample.version for sample in samples] == [1]
    assert samples[0].inference_logprobs[0] == -1.5
    assert samples[0].inference_logprobs[-1] == -2.5


@pytest.mark.usefixtures("importable_environments")
async def test_a_trace_comes_whole_out_of_an_environment_server(policy_server, unused_tcp_port: int) -> None:
    address = f"tcp://127.0.0.1:{unused_tcp_port}"
    service = Service(load().worker.served)
    environment = load()
    environment.worker = RemoteWorker("letters-env", environment.worker.served, PortClient("letters-env", address))
    async with listening(address) as socket:
        serving = asyncio.create_task(serve_port(service, socket, LoopWatch({})))
        await environment.connect()
        rollout = await converse(environment, policy_server, use_tokens=True)
        await environment.close()
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)
    await service.close()
    assert to_samples(rollout) == samples_of_raw_replies(policy_server.answers, rollout)
    first, second = (call.details for call in rollout.trace.calls)
    assert (first.finish_reason, second.finish_reason) == ("stop", "stop")
    assert first.started_s <= first.ended_s <= second.started_s <= second.ended_s


def calls_of(count: int, first: int = 1) -> list[ModelCall]:
    """The calls of a conversation: each prompt adds two tokens to all that was said before."""
    said, calls = [first], []
    for turn in range(count):
        prompt, answer = [*said, 1000 + turn, 7], [2000 + turn, 3]
        calls.append(ModelCall(Prompt.of(prompt), answer, [-0.5, -0.5], [True, True]))
        said = prompt + answer
    return calls


def session_of(calls: list[ModelCall]) -> Session:
    session = Session("key", server=None, model="letters", sampling={})
    for number, call in enumerate(calls):
        session.keep((), {}, call, str(number))
    return session


def test_a_rollout_keeps_each_token_of_a_conversation_once() -> None:
    calls = calls_of(50)
    kept = read_rollout({"reward": 1.0}, session_of(calls).recorded, EXAMPLE, TEMPERATURE, 0).trace.calls
    assert sum(len(call.prompt.added) + len(call.completion_ids) for call in kept) == kept[-1].total_tokens
    assert [call.prompt_ids for call in kept] == [call.prompt_ids for call in calls]


def test_calls_of_two_conversations_share_with_their_own_alone() -> None:
    calls = [call for pair in zip(calls_of(3), calls_of(3, first=9), strict=True) for call in pair]
    rollout = read_rollout({"reward": 1.0}, session_of(calls).recorded, EXAMPLE, TEMPERATURE, 0)
    assert [call.prompt_ids for call in rollout.trace.calls] == [call.prompt_ids for call in calls]
    assert [sample.prompt_ids[0] for sample in to_samples(rollout)] == [1, 9]
    assert sum(len(call.prompt.added) for call in rollout.trace.calls) == 2 * (3 + 2 + 2)


def test_calls_come_out_of_a_message_as_they_went_in() -> None:
    calls = [call for pair in zip(calls_of(3), calls_of(3, first=9), strict=True) for call in pair]
    sent = session_of(calls).recorded
    received = unpacked(json.loads(json.dumps(packed(sent))))
    assert received == sent


@pytest.mark.parametrize(
    ("turns", "prompts", "completions", "masks"),
    [
        pytest.param([{"id": "1"}], [7], [[2001, 3]], [[True, True]], id="one answer of two"),
        pytest.param([{"id": "0", "cut": [3, 1]}], [3], [[2000]], [[True]], id="an answer that is cut"),
        pytest.param([{"id": "0", "cut": [2, 0]}], [2], [[]], [[]], id="a prompt that is cut"),
        pytest.param([{"id": "0", "cut": [0, 0]}, {"id": "of another client"}], [], [], [], id="nothing"),
        pytest.param(
            [{"id": "0", "completion_mask": [0, 1]}, {"id": "1"}],
            [3, 7],
            [[2000, 3], [2001, 3]],
            [[False, True], [True, True]],
            id="an answer that is masked",
        ),
    ],
)
def test_a_rollout_has_the_answers_that_its_environment_kept(
    turns: list[dict[str, Any]], prompts: list[int], completions: list[list[int]], masks: list[list[bool]]
) -> None:
    recorded = session_of(calls_of(2)).recorded
    calls = read_rollout({"reward": 1.0, "turns": turns}, recorded, EXAMPLE, TEMPERATURE, 0).trace.calls
    assert [call.completion_ids for call in calls] == completions
    assert [call.completion_mask for call in calls] == masks
    assert [len(call.prompt_ids) for call in calls] == prompts


def test_a_prompt_that_is_cut_is_left_out_if_it_has_images() -> None:
    (call,) = (replace(each, images=(ImageReference("0", "a.png", 2, 2),)) for each in calls_of(1))
    turn = {"id": "0", "cut": [2, 0]}  # maybe inside of the image
    assert not read_rollout({"reward": 1.0, "turns": [turn]}, [("0", call)], EXAMPLE, TEMPERATURE, 0).trace.calls


def test_a_prompt_keeps_the_mask_that_an_environment_gave_it() -> None:
    turns = [{"id": "0"}, {"id": "1", "prompt_mask": [False, True, *[False] * 5]}]
    recorded = session_of(calls_of(2)).recorded
    first, second = read_rollout({"reward": 1.0, "turns": turns}, recorded, EXAMPLE, TEMPERATURE, 0).trace.calls
    assert (first.prompt_mask, second.prompt_mask) == ([False] * 3, [False, True, *[False] * 5])


def test_likeliest_tokens_stay_with_their_token_and_environments_have_none() -> None:
    """Of calls that another process recorded, the first of which the environment cut. Nonsense is one line."""
    reported = Reported(2, is_support=True)
    tops = [{"token_id:5": -1.0, "token_id:3": -0.5, "token_id:4": -9999.0}, {"token_id:6": -0.1}, {"token_id:7": -0.2}]
    first = ModelCall(
        Prompt.of([1]), [5, 6], [-1.0, -0.1], [True] * 2, top=reported.read([5, 6], [-1.0, -0.1], tops[:2])
    )
    second = ModelCall(Prompt.of([1, 5, 8, 9]), [7], [-0.2], [True], top=reported.read([7], [-0.2], tops[2:]))
    turns = [{"id": "0", "cut": [1, 1]}, {"id": "1"}]
    recorded = unpacked(json.loads(json.dumps(packed(session_of([first, second]).recorded))))
    (sample,) = to_samples(read_rollout({"reward": 1.0, "turns": turns}, recorded, EXAMPLE, TEMPERATURE, 0))
    top = sample.sampler_top
    assert (sample.completion_ids, top.fault(4, "")) == ([5, 8, 9, 7], None)
    assert np.frombuffer(top.ids, "<i4").tolist() == [5, 3, 0, 0, 0, 0, 7, 0]
    nothing = -np.inf
    expected = np.array([-1.0, -0.5, *[nothing] * 4, -0.2, nothing], "<f4")
    assert np.frombuffer(top.logprobs, "<f4").tolist() == expected.tolist()
    assert np.frombuffer(top.weights, "<f4").tolist() == [1, 0, 0, 1]
    for wrong in ([{}], [None], [{"x": -1.0}], [{"token_id:9999999999": -1.0}], []):
        with pytest.raises(MalformedRollout, match="malformed top_logprobs"):
            likeliest_of(reported, [5], [-1.0], wrong)


async def test_the_numbers_of_a_prompt_of_tokens_are_kept_once(policy_server) -> None:
    channel = ChatChannel(policy_server.url, {}, timeout_s=3600, max_retries=0)
    body = {"messages": [{"role": "user", "content": "a"}], "tokens": [1001, 1002]}
    try:
        reply = await channel.post("/chat/completions/tokens", body=body)
    finally:
        await channel.close()
    assert reply.prompt_token_ids is body["tokens"]


@pytest.mark.parametrize("path", ["/chat/completions", "/chat/completions/tokens"])
async def test_a_reply_that_is_no_completion_is_an_error_with_the_server_and_what_it_said(policy_server, path) -> None:
    policy_server.page = "<html>Bad gateway</html>"
    channel = ChatChannel(policy_server.url, {}, timeout_s=3600, max_retries=0)
    try:
        with pytest.raises(ServerAnswered, match=f"{policy_server.url}{path} answered 200: .*<html>Bad gateway</html>"):
            await channel.post(path, body={"messages": [{"role": "user", "content": "a"}]})
    finally:
        await channel.close()


def test_a_server_that_answers_without_choices_is_refused_by_name() -> None:
    with pytest.raises(InferenceFault, match="http://here answers a chat request without an answer"):
        check_reply(decode_chat_reply(b'{"choices": []}', 0.0, 0.0), "http://here")
