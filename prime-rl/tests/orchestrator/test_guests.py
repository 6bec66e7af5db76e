"""Environments in an interpreter of their own: they run there, and their samples have the tokens that were sampled."""

from __future__ import annotations

import asyncio
import os
import select
import signal
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from prime_rl.configs.orchestrator import EnvConfig
from prime_rl.configs.shared import ClientConfig, LogConfig
from prime_rl.orchestrator.errors import EnvironmentFault, GroupFailed
from prime_rl.orchestrator.rollouts.rollout import ExampleRef, Rollout, to_samples
from prime_rl.orchestrator.rollouts.sampling import SamplingConfig, train_sampling_args
from prime_rl.orchestrator.servers.pool import InferencePool
from prime_rl.orchestrator.servers.server import InferenceServer
from prime_rl.orchestrator.workers.environment import Environment
from prime_rl.orchestrator.workers.loading import load_environments
from prime_rl.orchestrator.workers.process import (
    MAX_ENDS_IN_A_ROW,
    RestartingProcess,
    WorkerEnded,
    WorkerError,
    WorkerProcess,
    WorkerSpec,
)

ARGS = train_sampling_args(SamplingConfig(max_tokens=20), 0.7)
LOG = LogConfig(vf_level="warning")
EXAMPLE = ExampleRef("guest-letters", 1)

MODULE = """
import os
import signal
import sys
import verifiers as vf
from datasets import Dataset

TEXTS = ["abc", "hello"]


def text_of(completion):
    return completion[-1]["content"] if isinstance(completion, list) else completion


def reversed_text(completion, answer, **kwargs):
    return float(text_of(completion) == answer)


def broken(completion, **kwargs):
    raise KeyError("no such column")


class Twice(vf.MultiTurnEnv):
    async def env_response(self, messages, state, **kwargs):
        return [{"role": "user", "content": "again"}]


class Ends(vf.SingleTurnEnv):
    async def setup_state(self, state, **kwargs):
        sys.exit(7) if state["answer"] == "cba" else os._exit(9)


class Forks(vf.SingleTurnEnv):
    async def setup_state(self, state, **kwargs):
        if os.fork() == 0:
            while True:
                signal.pause()
        os._exit(9)


class Hangs(vf.SingleTurnEnv):
    async def setup_state(self, state, **kwargs):
        import asyncio
        await asyncio.Event().wait()


class Blocks(vf.SingleTurnEnv):
    async def setup_state(self, state, **kwargs):
        import threading
        threading.Event().wait()


class Cancels(vf.SingleTurnEnv):
    async def setup_state(self, state, **kwargs):
        import asyncio
        raise asyncio.CancelledError


def load_environment(kind="single", rows=2, funcs=("reversed_text",)):
    if kind == "fails":
        raise RuntimeError("no such dataset")
    if kind == "forgotten return":
        return None
    if kind == "exits":
        sys.exit(3)
    rows = [{"question": text, "answer": text[::-1]} for text in TEXTS[:rows]]
    classes = {"twice": Twice, "ends": Ends, "forks": Forks, "hangs": Hangs, "cancels": Cancels, "blocks": Blocks}
    extra = {"max_turns": 2} if kind == "twice" else {}
    rubric = vf.Rubric(funcs=[globals()[name] for name in funcs], weights=[1.0] * len(funcs))
    data = Dataset.from_list(rows)
    return classes.get(kind, vf.SingleTurnEnv)(dataset=data, eval_dataset=data, rubric=rubric, **extra)
"""


DAEMON = """
import os, signal
reader, writer = os.pipe()
if os.fork() == 0:
    os.setsid()
    open({file!r}, "w").write(str(os.getpid()))
    os.write(writer, b"x")
    signal.pause()
os.read(reader, 1)
os._exit(3)
"""
"""Ends after it has started a daemon that keeps the connection open."""

BABBLER = """
import socket, struct, sys

def send(body):
    connection.sendall(struct.pack("!I", len(body)) + body)

connection = socket.socket(fileno=int(sys.argv[2]))
send(b'{{"id": -1, "verifiers": "0", "python": "3"}}')
for message in ("settings", "request"):
    connection.recv(*struct.unpack("!I", connection.recv(4)), socket.MSG_WAITALL)
send({answer}) if {answer} else None
connection.shutdown(socket.SHUT_WR)
"""
"""An interpreter that greets, and answers the first request with what `answer` says."""


def babbler(folder: Path, answer: bytes) -> WorkerSpec:
    program = folder / f"python-{len(answer)}"
    program.write_text(f"#!{sys.executable}\n{BABBLER.format(answer=answer)}")
    program.chmod(0o755)
    return WorkerSpec("env[0]", program, "babbler", {}, {})


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An interpreter that has the environment, which this one lacks."""
    folder = tmp_path_factory.mktemp("guest")
    (folder / "guest_letters.py").write_text(MODULE)
    program = folder / "python"
    program.write_text(f'#!/bin/sh\nPYTHONPATH="{folder}" exec "{sys.executable}" "$@"\n')
    program.chmod(0o755)
    return program


Load = Callable[..., Environment]


@pytest.fixture
def load(python: Path) -> Iterator[Load]:
    loaded: list[Environment] = []

    def start(split: str = "train", **config: Any) -> Environment:
        config = {"id": "guest-letters", "python": python, **config}
        (environment,) = load_environments([EnvConfig(**config)], LOG, split=split).values()
        loaded.append(environment)
        return environment

    yield start
    for each in loaded:
        each.worker.process.kill()


async def run_group(
    environment: Environment, server: Any, size: int = 2, example: ExampleRef = EXAMPLE
) -> list[Rollout]:
    async with model_at(server) as model:
        try:
            return await environment.run_group(example, size, model, ARGS, 5)
        finally:
            await environment.close()


@asynccontextmanager
async def model_at(server: Any) -> AsyncIterator[InferenceServer]:
    pool = InferencePool(ClientConfig(base_url=[server.url]), "letters")
    await pool.wait_ready(use_token_client=True)
    yield pool.servers[0]
    await pool.close()


async def in_flight(environment: Environment, count: int) -> None:
    """Returns once the guest has `count` requests to answer."""
    while len(environment.worker.process._process._waiting) < count:
        await asyncio.sleep(0)


async def test_a_group_comes_back_scored_with_the_sampled_tokens_and_their_version(load: Load, policy_server) -> None:
    policy_server.version = 1
    environment = load()
    assert (len(environment), environment.reward_functions) == (2, {"reversed_text": 1.0})
    rollouts = await run_group(environment, policy_server)
    assert [rollout.reward for rollout in rollouts] == [1.0, 1.0]
    (turn,) = rollouts[0].trace.calls
    assert bytes(turn.completion_ids[:-1]) == b"olleh"
    assert turn.inference_logprobs == [-1.5] * 6
    assert (rollouts[0].version, rollouts[0].temperature) == (1, 0.7)
    assert rollouts[0].metrics["reversed_text"] == 1.0
    sent = policy_server.requests[-1]
    assert (sent["temperature"], sent["top_p"], sent["max_completion_tokens"]) == (0.7, 1.0, 20)


async def test_a_later_turn_carries_the_sampled_tokens_of_the_earlier_one(load: Load, policy_server) -> None:
    policy_server.version = 1
    (rollout,) = await run_group(load(args={"kind": "twice"}), policy_server, size=1)
    assert policy_server.requests[-1]["path"] == "/v1/chat/completions/tokens"
    (sample,) = to_samples(rollout)
    assert bytes(sample.prompt_ids) == b"user:hello\x03assistant:"
    assert bytes(sample.completion_ids) == b"olleh\x03user:again\x03assistant:niaga\x03"
    trained = [token for token, mask in zip(sample.completion_ids, sample.completion_mask, strict=True) if mask]
    assert bytes(trained) == b"olleh\x03niaga\x03"


async def test_a_reward_function_that_fails_fails_its_group(load: Load, policy_server) -> None:
    with pytest.raises(GroupFailed, match=r"the reward function 'broken' failed: .*no such column"):
        await run_group(load(args={"funcs": ["reversed_text", "broken"]}), policy_server, size=1)


@pytest.fixture
async def stuck_threads() -> AsyncIterator[None]:
    """As after environment code that keeps every thread of the event loop."""
    threads, gate = ThreadPoolExecutor(1), threading.Event()
    asyncio.get_running_loop().set_default_executor(threads)
    threads.submit(gate.wait)
    yield
    gate.set()


@pytest.mark.usefixtures("stuck_threads")
async def test_a_process_is_replaced_and_ends_while_other_environments_keep_every_thread(
    load: Load, policy_server
) -> None:
    environment = load(args={"kind": "hangs"})
    async with model_at(policy_server) as model:
        group = asyncio.create_task(environment.run_group(EXAMPLE, 2, model, ARGS, 5))
        await in_flight(environment, 1)
        os.kill(environment.worker.process._process._process.pid, signal.SIGKILL)
        with pytest.raises(WorkerEnded, match="ended with code -9"):
            await group
        described = await environment.worker.process.ask("describe", split="train")
        assert described["rows"] == 2
        await environment.close()


async def test_a_process_that_ends_whenever_it_starts_ends_the_run(tmp_path: Path) -> None:
    program = tmp_path / "python"
    program.write_text(f"#!{sys.executable} -S\n{BABBLER.format(answer=b'')}")
    program.chmod(0o755)
    spec = WorkerSpec("env[0]", program, "babbler", {}, {})
    guest = RestartingProcess(spec, WorkerProcess.start(spec))
    for _ in range(MAX_ENDS_IN_A_ROW):
        with pytest.raises(WorkerEnded, match=r"env\[0\]: the process of 'babbler' ended with code 0"):
            await guest.ask("run_group")
    with pytest.raises(EnvironmentFault, match=r"env\[0\]: the process of 'babbler' ended 5 times in a row"):
        await guest.ask("run_group")


async def test_a_process_that_its_code_blocks_is_replaced(load: Load, policy_server) -> None:
    environment = load(args={"kind": "blocks"}, timeout_s=1)
    environment.worker.process.blocked_s = 1.0
    blocked = environment.worker.process._process
    with pytest.raises(GroupFailed, match=r"it blocks its process: no answer within 1 s"):
        await run_group(environment, policy_server)
    assert blocked._process.returncode is not None


async def test_a_killed_process_fails_every_group_in_flight(load: Load, policy_server) -> None:
    environment = load(args={"kind": "hangs"})
    async with model_at(policy_server) as model:
        groups = [asyncio.create_task(environment.run_group(EXAMPLE, 2, model, ARGS, 5)) for _ in range(3)]
        await in_flight(environment, 3)
        os.kill(environment.worker.process._process._process.pid, signal.SIGKILL)
        ended = await asyncio.gather(*groups, return_exceptions=True)
    assert [type(each) for each in ended] == [WorkerEnded] * 3
    assert [each.is_of_environment for each in ended] == [True, False, False]
    assert {str(each) for each in ended} == {
        "orchestrator.env[0]: the process of 'guest-letters' ended with code -9; what it printed is in this log"
    }


async def test_an_environment_that_cancels_itself_fails_its_group(load: Load, policy_server) -> None:
    with pytest.raises(WorkerError, match="it was cancelled"):
        await run_group(load(args={"kind": "cancels"}), policy_server)


async def test_a_cancelled_group_frees_its_sessions(load: Load, policy_server) -> None:
    environment = load(args={"kind": "hangs"})
    async with model_at(policy_server) as model:
        group = asyncio.create_task(environment.run_group(EXAMPLE, 2, model, ARGS, 5))
        await in_flight(environment, 1)
        assert len(environment.worker.proxy.sessions) == 2
        group.cancel()
        await asyncio.gather(group, return_exceptions=True)
    assert len(environment.worker.proxy.sessions) == 0


async def test_a_child_that_outlives_the_process_does_not_keep_its_groups_waiting(load: Load, policy_server) -> None:
    environment = load(args={"kind": "forks"})
    with pytest.raises(WorkerEnded, match="ended with code 9"):
        await run_group(environment, policy_server, size=1)


async def test_a_daemon_that_keeps_the_connection_open_ends_with_its_process(tmp_path: Path) -> None:
    """A hostile environment: its own fork outlives it, in a session of its own, and holds the socket."""
    program = babbler(tmp_path, b"").python
    code = BABBLER.partition("send({answer})")[0].replace("{{", "{").replace("}}", "}")
    program.write_text(f"#!{sys.executable}\n{code}{DAEMON.format(file=str(tmp_path / 'pid'))}")
    process = WorkerProcess.start(WorkerSpec("env[0]", program, "babbler", {}, {}))
    with pytest.raises(EnvironmentFault, match="the process of 'babbler' ended with code 3"):
        await process.ask("run_group")
    daemon = int((tmp_path / "pid").read_text())
    ended = os.pidfd_open(daemon)
    process.kill()
    assert select.select([ended], [], [], 10)[0]
    os.close(ended)


@pytest.mark.parametrize(
    "answer",
    [
        "{}",
        '{"id": [1]}',
        '{"id": 77}',
        "[]",
        "NaN {",
        pytest.param("[" * 100_000, id="deep"),
    ],
)
async def test_a_process_whose_answers_make_no_sense_fails_its_requests(tmp_path: Path, answer: str) -> None:
    process = WorkerProcess.start(babbler(tmp_path, answer.encode()))
    try:
        for _ in range(2):
            with pytest.raises(EnvironmentFault, match=r"the process of 'babbler' .*: a message that"):
                await process.ask("run_group")
    finally:
        await process.close()


async def test_a_process_that_replaces_another_is_heard_after_the_other_is_forgotten(tmp_path: Path) -> None:
    first = WorkerProcess.start(babbler(tmp_path, b""))
    with pytest.raises(EnvironmentFault, match="ended with code 0"):
        await first.ask("run_group")
    assert first._opening is not None
    writer = first._opening.result()
    first.kill()
    second = WorkerProcess.start(babbler(tmp_path, b'{"id": 0, "value": 5}'))
    answer = asyncio.create_task(second.ask("run_group"))
    while not second._waiting:
        await asyncio.sleep(0)
    writer.close()  # what the garbage collector does at a time of its own
    assert await answer == 5
    await second.close()


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"python": "/no/such/python"}, r"env\[0\]\.python = '/no/such/python': No such file or directory"),
        (
            {"args": {"kind": "fails"}},
            r"env\[0\]: 'guest-letters' does not load in .*: RuntimeError: .*no such dataset",
        ),
        ({"args": {"kind": "exits"}}, r"env\[0\]: 'guest-letters' does not load in .*sys\.exit\(3\)"),
        (
            {"args": {"kind": "forgotten return"}},
            r"'guest-letters' does not load in .*load_environment returned None, not",
        ),
        ({"id": "absent-env"}, r"env\[0\]: 'absent-env' does not load in .*absent_env"),
        (
            {"args": {"rows": 0}},
            r"env\[0\]: (cannot build the dataset|environment 'guest-letters' has no training rows)",
        ),
    ],
)
def test_what_cannot_be_loaded_is_one_line(load: Load, config: dict[str, Any], message: str) -> None:
    with pytest.raises(EnvironmentFault, match=message) as caught:
        load(**config)
    assert "\n" not in str(caught.value)
