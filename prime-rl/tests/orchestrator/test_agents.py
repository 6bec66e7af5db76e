"""Agents and workflows as environments: a user's code in a process of its own, against a server without a model."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from prime_rl.configs.orchestrator import BufferConfig, EnvConfig, OrchestratorConfig
from prime_rl.configs.shared import ClientConfig, LogConfig
from prime_rl.environments.agents import context
from prime_rl.environments.agents.datasets import read_dataset
from prime_rl.environments.agents.returns import BadTensors, InvalidReward, checked_reward, discounted, read_sequences
from prime_rl.environments.agents.targets import BadTarget, load_target
from prime_rl.orchestrator.errors import EnvironmentFault, GroupFailed
from prime_rl.orchestrator.proxy.routes import RecordingProxy
from prime_rl.orchestrator.rollouts.rollout import ExampleRef, Group, Rollout, to_samples
from prime_rl.orchestrator.rollouts.sampling import SamplingConfig, train_sampling_args
from prime_rl.orchestrator.servers.pool import InferencePool
from prime_rl.orchestrator.workers.agents import AgentWorker, agent_spec, rollout_of
from prime_rl.orchestrator.workers.environment import Environment, GroupRequest
from prime_rl.orchestrator.workers.inside.agent import Attempts
from prime_rl.orchestrator.workers.loading import load_environments
from prime_rl.orchestrator.workers.process import RestartingProcess, WorkerProcess

ARGS = train_sampling_args(SamplingConfig(max_tokens=20), 0.7)
LOG = LogConfig(vf_level="warning")

MODULE = '''
import asyncio
import json
import os
import sys
import threading
import time

from prime_rl.environments.agents import context
from prime_rl.environments.agents.attempting import GenerationConfig, ModelRequest

MESSAGES = [{"role": "user", "content": "hello"}]


async def ask(client, messages=MESSAGES, **arguments):
    completion = await client.chat.completions.create(model="any", messages=messages, **arguments)
    return completion.id, [*messages, completion.choices[0].message.model_dump(exclude_none=True)]


async def echo(task, client):
    _, said = await ask(client, [{"role": "user", "content": task["text"]}])
    return float(said[-1]["content"] == task["text"])


async def turns(task, client):
    how = task["how"]
    ids, messages = [], MESSAGES
    for turn in range(3):
        name, messages = await ask(client, messages)
        ids.append(name)
        messages.append({"role": "user", "content": f"again {turn}"})
    if how == "float":
        return 1
    if how == "by id":
        return {ids[0]: 0.25, ids[2]: 1.0}
    for number, name in enumerate(ids):
        await client.post("/rl/set_reward", body={"completion_id": name, "reward": number}, cast_to=object)
    if how == "over http":
        await client.post("/rl/set_reward", body={"reward": 10}, cast_to=object)


async def rewrites(task, client):
    _, messages = await ask(client)
    await ask(client, [*messages, {"role": "user", "content": "more"}])
    await ask(client, [{"role": "user", "content": "summary"}])
    return 1.0


async def dispatch(task, client):
    return await globals()[task["do"]](task, client)


async def misbehaves(task, client):
    how = task["how"]
    await ask(client)
    if how == "raises":
        raise KeyError("no such\\n column")
    if how == "nan":
        return float("nan")
    if how == "text":
        return "1.0"
    if how == "exits":
        sys.exit(3)
    if how == "unknown":
        return {"chatcmpl-x": 1.0}
    if how == "prints":
        os.write(1, b"x" * 3_000_000)
        sys.stderr.write("y" * 3_000_000)
        return 1.0
    if how == "hangs":
        await asyncio.Event().wait()
    if how == "a hundred calls":
        for _ in range(100):
            await ask(client)
        return 1.0
    if how == "none":
        return None


COUNT = []


async def some_fail(task, client):
    COUNT.append(task)
    number = len(COUNT)
    await ask(client)
    if number % 2:
        raise RuntimeError("odd")
    return 1.0


async def crashes_once(task, client):
    if not os.path.exists(task["mark"]):
        open(task["mark"], "w").close()
        os._exit(9)
    return 0.5


ALL = threading.Barrier(40)


def together(task):
    ALL.wait(3600)
    return 1.0


class Waits:
    may_end, calls = threading.Event(), []

    def run(self, data):
        self.calls.append(data)
        self.may_end.wait()
        return 1.0


def plain(task, base_url, api_key):
    return len(api_key) > 20 and base_url.startswith("http://127.0.0.1:")


class Chatty:
    def __init__(self, bonus=0.0):
        self.bonus = bonus

    async def run(self, data, **extra):
        response = await extra["client"].responses.create(model="any", input=data["text"])
        here = context.get()
        return float(response.output_text == data["text"]) + self.bonus + (100 if here.is_eval else 0)


class Tokens:
    """A workflow: two sequences of unequal length, the second with tokens of the environment in the middle."""

    async def arun_episode(self, engine, data):
        if data["text"] == "reject":
            return None
        prompt = [ord(letter) for letter in "user:abc"]
        first = await engine.agenerate(ModelRequest(input_ids=prompt, gconfig=GenerationConfig(max_new_tokens=5)))
        told = [1, 2]
        second = await engine.agenerate(ModelRequest(input_ids=prompt + first.output_tokens + told))
        long = prompt + first.output_tokens + told + second.output_tokens
        short = prompt + first.output_tokens
        n, m, k = len(prompt), first.output_len, second.output_len
        pad = [0] * (len(long) - len(short))
        return {
            "input_ids": [short + pad, long],
            "attention_mask": [[1] * len(short) + pad, [1] * len(long)],
            "loss_mask": [[0] * n + [1] * m + pad, [0] * n + [1] * m + [0, 0] + [1] * k],
            "logprobs": [
                [0.0] * n + first.output_logprobs + pad,
                [0.0] * n + first.output_logprobs + [0.0, 0.0] + second.output_logprobs,
            ],
            "versions": [
                [-1] * n + first.output_versions + pad,
                [-1] * n + first.output_versions + [-1, -1] + second.output_versions,
            ],
            "rewards": [0.0, 1.0],
        }


def rows():
    return [{"text": "abc"}, {"text": "hello"}]


def conversations():
    return [{"messages": [{"role": "user", "content": "abc"}]}]


async def second_time(text, row):
    return text.startswith("Your answer")
'''


TURNS = [
    ("float", 1.0, 1.0, None),
    ("float", 0.5, 1.0, [0.25, 0.5, 1.0]),
    ("float", 0.0, 1.0, [0.0, 0.0, 1.0]),
    ("by id", 0.0, 1.25, [0.25, 0.0, 1.0]),
    ("by id", 0.5, 1.25, [0.5, 0.5, 1.0]),
    ("by id", 1.0, 1.25, [1.25, 1.0, 1.0]),
    ("over http", 1.0, 13.0, [13.0, 13.0, 12.0]),
    ("over http, by completion", 0.0, 3.0, [0.0, 1.0, 2.0]),
]
"""What an agent returns, the discount, the rollout's reward, and what each of three calls is worth."""

MISBEHAVIOUR = [
    ("raises", "KeyError: 'no such\\n column'"),
    ("nan", "the reward nan is not a finite number"),
    ("text", "the reward '1.0' is not a finite number"),
    ("exits", "it called sys.exit(3)"),
    ("unknown", "this session has no completion 'chatcmpl-x'"),
    ("none", "the agent returned no reward"),
    ("hangs", "did not end within 1 s"),
]
Attempted = list[Rollout] | Exception


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The working directory, with the module `my_agents` and a dataset, as a user has them."""
    folder = tmp_path_factory.mktemp("agents")
    (folder / "my_agents.py").write_text(MODULE)
    rows = [
        {"do": "echo", "text": "abc"},
        {"do": "rewrites"},
        {"do": "some_fail"},
        {"do": "crashes_once", "mark": str(folder / "mark")},
        {"do": "misbehaves", "how": "prints"},
        *({"do": "turns", "how": how} for how, *_ in TURNS),
        *({"do": "misbehaves", "how": how} for how, _ in MISBEHAVIOUR),
    ]
    (folder / "rows.jsonl").write_text("\n\n".join(map(json.dumps, rows)))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.syspath_prepend(str(folder))
        yield folder


@pytest.fixture(scope="module")
def attempted(folder: Path, module_server) -> Iterator[Callable[..., Attempted]]:
    """What the attempts at a row gave, under other keys if a test says so. One process makes them all."""
    keys = EnvConfig(workflow="my_agents:dispatch", agent_dataset="rows.jsonl", agent_timeout_s=60.0).agent_keys
    rows = read_dataset(keys.dataset)
    spec = agent_spec("env[0]", keys.target, {})
    guest = RestartingProcess(spec, WorkerProcess.start(spec))
    proxy = RecordingProxy()
    with asyncio.Runner() as runner:
        pool = InferencePool(ClientConfig(base_url=[module_server.url]), "letters")
        runner.run(pool.wait_ready(use_token_client=True))

        def attempt(row: dict[str, Any], size: int = 1, retries: int = 0, **changed: Any) -> Attempted:
            changed_keys = dataclasses.replace(keys, **changed)
            made = Environment("dispatch", AgentWorker("dispatch", changed_keys, {"train": rows}, guest, proxy))
            example = ExampleRef("dispatch", rows.index(row))
            try:
                return runner.run(made.evaluate(example, size, pool.servers[0], ARGS, 5, retries))
            except GroupFailed as error:
                return error

        yield attempt
        runner.run(AgentWorker("dispatch", keys, {"train": rows}, guest, proxy).close())
        runner.run(pool.close())


@pytest.fixture
async def in_process(folder: Path, policy_server) -> AsyncIterator[Callable[..., Any]]:
    """Makes an attempt with a target in this process; returns what it gave, and its session."""
    pool, proxy = InferencePool(ClientConfig(base_url=[policy_server.url]), "letters"), RecordingProxy()
    await pool.wait_ready(use_token_client=True)
    await proxy.open()

    async def attempt(target: str, row: dict[str, Any], is_eval: bool = False, **args: Any) -> Any:
        made = Attempts(load_target(target, args))
        with proxy.sessions.opened(1, pool.servers[0], ARGS) as (session,):
            given = {"base_url": proxy.base_url, "api_key": session.key, "model": "letters", "timeout_s": 60.0}
            return await made.make(row, given, context.Attempt("7", is_eval)), session

    yield attempt
    await proxy.close()
    await pool.close()


def test_a_function_is_an_environment_whose_samples_have_the_sampled_tokens(attempted) -> None:
    rollouts = attempted({"do": "echo", "text": "abc"}, 2)
    assert [rollout.reward for rollout in rollouts] == [1.0, 1.0]
    for rollout in rollouts:
        (sample,) = to_samples(rollout)
        assert bytes(sample.prompt_ids) == b"user:abc\x03assistant:"
        assert bytes(sample.completion_ids) == b"abc\x03"
        assert (rollout.version, rollout.temperature, rollout.num_turns) == (0, 0.7, 1)
        assert rollout.prompt == [{"role": "user", "content": "abc"}]
        assert rollout.completion == [{"role": "assistant", "content": "abc"}]


@pytest.mark.parametrize(("how", "discount", "reward", "worth"), TURNS)
def test_each_call_is_worth_its_reward_and_the_discounted_ones_after_it(
    attempted, how: str, discount: float, reward: float, worth: list[float] | None
) -> None:
    (rollout,) = attempted({"do": "turns", "how": how}, turn_discount=discount)
    assert (rollout.reward, rollout.call_rewards) == (reward, worth)
    (sample,) = to_samples(rollout)
    assert sum(sample.completion_mask) == len("hello\x03again 0\x03again 1\x03")


def test_samples_are_lines_of_conversation_or_single_calls(attempted) -> None:
    (lines,) = attempted({"do": "rewrites"})
    assert [bytes(sample.completion_ids) for sample in to_samples(lines)] == [
        b"hello\x03user:more\x03assistant:more\x03",
        b"summary\x03",
    ]
    (single,) = attempted({"do": "rewrites"}, samples="separate")
    answers = [b"hello\x03", b"more\x03", b"summary\x03"]
    assert [bytes(sample.completion_ids) for sample in to_samples(single)] == answers


@pytest.mark.parametrize(("how", "says"), MISBEHAVIOUR)
def test_code_that_misbehaves_costs_its_attempts_and_says_why(attempted, how: str, says: str) -> None:
    failed = attempted({"do": "misbehaves", "how": how}, 2, timeout_s=1.0 if how == "hangs" else 3600.0)
    assert isinstance(failed, GroupFailed)
    assert says in str(failed)


def test_megabytes_of_output_disturb_nothing(attempted, capfd) -> None:
    rollouts = attempted({"do": "misbehaves", "how": "prints"}, 2)
    capfd.readouterr()
    assert [rollout.reward for rollout in rollouts] == [1.0, 1.0]


def test_a_buffer_that_skips_rewards_is_refused_for_an_agent() -> None:
    agent = EnvConfig(name="mine", workflow="my_agents:echo", agent_dataset="rows.jsonl")
    with pytest.raises(ValueError, match="skip_verification cannot be used with workflow: the agent of 'mine' gives"):
        OrchestratorConfig(env=[agent], buffer=BufferConfig(skip_verification=True), advantage=None)


def test_a_failed_attempt_is_not_trained_on_and_compared_with_nothing(attempted) -> None:
    rollouts = attempted({"do": "some_fail"}, 4)
    failed = [rollout for rollout in rollouts if rollout.is_rejected]
    assert failed
    assert {rollout.error for rollout in failed} == {"RuntimeError"}
    assert not any(rollout.trains for rollout in failed)
    group = Group(rollouts)
    assert (group.mean_reward, set(group.compared_rewards)) == (1.0, {1.0})


def test_a_process_that_ends_costs_its_attempts_and_starts_again(attempted, folder: Path) -> None:
    (rollout,) = attempted({"do": "crashes_once", "mark": str(folder / "mark")}, retries=1)
    assert rollout.reward == 0.5


async def test_plain_functions_and_classes_are_agents_too(in_process) -> None:
    assert (await in_process("my_agents:plain", {}))[0] == {"reward": 1.0}
    assert (await in_process("my_agents.Chatty", {"text": "abc"}, bonus=2.0))[0] == {"reward": 3.0}
    assert (await in_process("my_agents:Chatty", {"text": "abc"}, is_eval=True))[0] == {"reward": 101.0}


async def test_plain_functions_do_not_wait_for_each_other(in_process) -> None:
    """Each of them ends when all of them run."""
    made = await asyncio.gather(*(in_process("my_agents:together", {}) for _ in range(40)))
    assert [outcome for outcome, _ in made] == [{"reward": 1.0}] * 40


@pytest.fixture
def waiting(folder: Path) -> Iterator[Any]:
    """Attempts with a plain function that waits for `may_end`, one at a time."""
    target = load_target("my_agents:Waits", {})
    made = Attempts(target, max_threads=1)
    agent = sys.modules["my_agents"].Waits
    agent.may_end.clear()
    agent.calls.clear()
    yield made, agent
    agent.may_end.set()


def begin(attempts: Attempts, timeout_s: float) -> asyncio.Task[dict[str, Any]]:
    session = {"base_url": "", "api_key": "", "model": "", "timeout_s": timeout_s}
    return asyncio.create_task(attempts.make({}, session, context.Attempt("7", False)))


async def test_a_plain_function_that_has_not_started_ends_with_its_attempt_and_hangs_nowhere(waiting) -> None:
    attempts, agent = waiting
    first = begin(attempts, 60.0)
    while not agent.calls:
        await asyncio.sleep(0)
    others = [begin(attempts, 60.0) for _ in range(10)]
    await asyncio.sleep(0)
    for each in others:
        each.cancel()
    await asyncio.gather(*others, return_exceptions=True)
    assert attempts.hung_threads == 0
    agent.may_end.set()
    assert await first == {"reward": 1.0}
    assert len(agent.calls) == 1


async def test_a_plain_function_that_exceeds_its_time_limit_hangs_until_it_ends(waiting) -> None:
    attempts, agent = waiting
    assert (await begin(attempts, 0.0))["error"] == "SessionTimeout"
    assert attempts.hung_threads == 1
    agent.may_end.set()
    while attempts.hung_threads:
        await asyncio.sleep(0)


async def test_a_workflow_returns_its_own_sequences_each_with_its_reward(in_process) -> None:
    outcome, session = await in_process("my_agents:Tokens", {"text": "abc"})
    keys = EnvConfig(workflow="my_agents:Tokens", agent_dataset="rows.jsonl").agent_keys
    example = ExampleRef("tokens", 0)
    group = GroupRequest(example, "train", {}, 1, session.server, ARGS, 5, 0, timeout_s=None, vocab_size=128)
    rollout = rollout_of(session, outcome, keys, group)
    assert (rollout.reward, rollout.call_rewards, rollout.version) == (0.5, [0.0, 1.0], 0)
    short, long = to_samples(rollout)
    assert bytes(short.prompt_ids) == b"user:abc"
    assert bytes(short.completion_ids) == b"abc\x03"
    assert bytes(long.completion_ids) == b"abc\x03\x01\x02abcabc\x03"
    assert long.completion_mask == [True] * 4 + [False] * 2 + [True] * 7
    assert long.inference_logprobs == [-0.5] * 4 + [0.0] * 2 + [-0.5] * 7
    assert (await in_process("my_agents:Tokens", {"text": "reject"}))[0] == {"is_rejected": True}


async def test_multi_turn_tries_again_and_discounts_the_whole_conversation(in_process) -> None:
    row = {"messages": [{"role": "user", "content": "abc"}]}
    args = {"reward_fn": "my_agents:second_time", "max_turns": 3, "turn_discount": 0.5}
    outcome, session = await in_process("prime_rl.environments.agents.multi_turn:MultiTurn", row, **args)
    assert outcome == {"reward": 0.5}
    assert [call.conversation[-1].text[:11] for call in session.calls] == ["abc", "Your answer"]
    assert session.calls[1].tokens.prompt_ids[: len(b"user:abc\x03assistant:abc\x03")] == [
        *b"user:abc\x03assistant:abc\x03"
    ]


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"agent_dataset": "nowhere.jsonl"}, "nowhere.jsonl cannot be read"),
        ({"agent_dataset": "my_agents:MESSAGES"}, "is not a function"),
        ({"agent_dataset": "my_agents:plain"}, "failed: TypeError"),
        ({"workflow": "my_agents:nobody"}, "'my_agents' has no 'nobody'"),
    ],
)
def test_what_cannot_be_loaded_ends_the_start(folder: Path, config: dict[str, Any], says: str) -> None:
    config = {"workflow": "my_agents:echo", "agent_dataset": "rows.jsonl", **config}
    with pytest.raises(EnvironmentFault, match=says):
        load_environments([EnvConfig(**config)], LOG)


@pytest.mark.parametrize(
    ("target", "args", "says"),
    [
        ("no_such_module:agent", {}, "'no_such_module' does not import"),
        ("my_agents:MESSAGES", {}, "is not a function"),
        ("my_agents:Chatty", {"malus": 1}, "cannot be made with"),
        ("my_agents", {}, "names no object"),
    ],
)
def test_a_target_that_is_none_is_named(folder: Path, target: str, args: dict[str, Any], says: str) -> None:
    with pytest.raises(BadTarget, match=says):
        load_target(target, args)


def test_returns_follow_the_formula_of_rewards_to_go() -> None:
    rewards = [None, 10.0, None, 3.0]
    reference = [sum(0.9 ** (k - i) * (rewards[k] or 0.0) for k in range(i, 4)) for i in range(4)]
    assert discounted(rewards, 0.9) == pytest.approx(reference)
    assert discounted([None, None, 10.0], 0.9) == pytest.approx([8.1, 9.0, 10.0])


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e16, "1", None, [1], {}, object(), 10**400])
def test_what_is_no_reward_is_refused(value: Any) -> None:
    with pytest.raises(InvalidReward):
        checked_reward(value)


TRAJECTORY = {
    "input_ids": [[1, 2, 3]],
    "attention_mask": [[1, 1, 1]],
    "loss_mask": [[0, 1, 1]],
    "logprobs": [[0.0, -1.0, -1.0]],
    "rewards": [1.0],
}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"input_ids": None}, r"input_ids does not have the shape \[B, L\]"),
        ({"loss_mask": [[0, 1]]}, "loss_mask and input_ids differ in shape"),
        ({"rewards": [1.0, 2.0]}, "rewards has 2 values for 1 sequences"),
        ({"rewards": [float("nan")]}, "not a finite number"),
        ({"logprobs": [[0.0, float("nan"), 0.0]]}, "logprobs: finite numbers"),
        ({"input_ids": [[1, -2, 3]]}, "input_ids: whole numbers"),
        ({"attention_mask": [[0, 0, 0]]}, "at least one in each sequence"),
        ({"multi_modal_input": []}, "images"),
    ],
)
def test_a_trajectory_that_cannot_be_trained_on_is_refused(change: dict[str, Any], says: str) -> None:
    assert read_sequences(TRAJECTORY)[0]["versions"] == [-1, -1, -1]
    with pytest.raises(BadTensors, match=says):
        read_sequences(TRAJECTORY | change)
