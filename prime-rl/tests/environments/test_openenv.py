"""The environment `openenv`, against a real server of openenv-core in an interpreter of its own."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from prime_rl.configs.orchestrator import EnvConfig
from prime_rl.configs.shared import ClientConfig, LogConfig
from prime_rl.environments.adapters.openenv import ActionParser, OpenEnvServer
from prime_rl.environments.adapters.options import OpenEnvConfig
from prime_rl.environments.adapters.turns import GameError, GameFault
from prime_rl.interpreters import VENVS_VARIABLE, python_of, venv_of_project
from prime_rl.orchestrator.env_checks.scripted_engine import MODEL, ScriptedEngine
from prime_rl.orchestrator.errors import EnvironmentFault
from prime_rl.orchestrator.rollouts.rollout import ExampleRef, Rollout
from prime_rl.orchestrator.servers.server import InferenceServer
from prime_rl.orchestrator.workers.environment import Environment
from prime_rl.orchestrator.workers.loading import load_environments
from prime_rl.utils.errors import RunError

PROJECT = Path(__file__).parent / "openenv_server"
SESSIONS = 2


@dataclass
class Server:
    url: str
    process: subprocess.Popen[bytes]


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        if VENVS_VARIABLE not in os.environ:
            patch.setenv(VENVS_VARIABLE, str(tmp_path_factory.mktemp("venvs") / "made"))
        try:
            return python_of(venv_of_project(PROJECT))
        except RunError as error:
            pytest.skip(f"openenv-core cannot be installed: {error}")


def started(python: Path, port: int = 0) -> Server:
    """A server that listens already, though it answers once it has imported its package."""
    listening = socket.create_server(("127.0.0.1", port))
    with listening:
        descriptor = listening.fileno()
        command = [python, PROJECT / "guessing_server.py", str(descriptor), str(SESSIONS)]
        process = subprocess.Popen(command, pass_fds=[descriptor])
        return Server(f"http://127.0.0.1:{listening.getsockname()[1]}", process)


@pytest.fixture(scope="module")
def server(python: Path) -> Iterator[Server]:
    server = started(python)
    yield server
    server.process.kill()
    server.process.wait()


def load(server: Server, **args: Any) -> Environment:
    config = EnvConfig(id="openenv", args={"url": server.url, "size": 3, "eval_size": 1, **args})
    (environment,) = load_environments([config], LogConfig(vf_level="critical")).values()
    return environment


async def attempts(environment: Environment, answers: list[str], size: int = 1) -> list[Rollout]:
    """Rollouts of a model that gives these answers, in one group."""
    engine = ScriptedEngine()
    engine.play([{"content": answer} for answer in answers], size)
    async with engine.serving():
        policy = InferenceServer(engine.base_url, ClientConfig(base_url=[engine.base_url]), MODEL)
        try:
            return await environment.evaluate(
                ExampleRef(environment.name, 0), size, policy, {"temperature": 1.0, "extra_body": {}}, 0
            )
        finally:
            await policy.close()


def test_an_episode_earns_the_sum_of_its_rewards(server: Server) -> None:
    environment = load(server)
    (message,) = environment.prompt(0)
    assert message["content"].startswith("Guess a number from 1 to ")
    assert environment.prompt(0) != environment.prompt(1), "the seed is the row's"
    (rollout,) = asyncio.run(attempts(environment, ["0", *(str(number) for number in range(1, 21))]))
    assert rollout.completion[-1]["content"] == "Right."
    assert rollout.reward == pytest.approx(1.0 - 0.1 * (rollout.num_turns - 1))


def test_more_rollouts_than_the_server_has_sessions_wait_for_each_other(server: Server) -> None:
    environment = load(server, max_turns=2, reset={"note": " Please."})
    rollouts = asyncio.run(attempts(environment, ["0"], size=3 * SESSIONS))
    assert [round(rollout.reward, 3) for rollout in rollouts] == [-0.2] * 3 * SESSIONS
    assert rollouts[0].prompt[0]["content"].endswith(" Please.")


def test_what_the_server_says_is_cleaned_and_cut(server: Server) -> None:
    (rollout,) = asyncio.run(attempts(load(server, max_turns=1, max_chars=100), ["shout"]))
    said = str(rollout.completion[-1]["content"])
    assert said.startswith("loud xxx")
    assert "The rest is left out: 1,048," in said
    assert len(said) < 200


def test_an_environment_that_fails_is_named(server: Server) -> None:
    with pytest.raises(GameError, match=r"^the environment at http\S+ failed: EXECUTION_ERROR: the environment is b"):
        asyncio.run(attempts(load(server), ["crash"]))


@pytest.mark.parametrize(
    ("schema", "args", "answer", "action"),
    [
        ({"text": {"type": "string"}, "metadata": {}}, {}, "hello", {"text": "hello"}),
        ({"id": {"type": "integer"}}, {}, " 3 ", {"id": 3}),
        ({"id": {"type": "integer"}}, {}, "three", "This is no action: a number is needed."),
        ({"tool": {}, "text": {}}, {"action": {"tool": "say"}}, "hi", {"tool": "say", "text": "hi"}),
        ({"tool": {}, "text": {}}, {"action_field": "text"}, "hi", {"text": "hi"}),
        ({"tool": {}, "text": {}}, {}, 'I say {"tool": "a", "text": "{"}.', {"tool": "a", "text": "{"}),
        ({"tool": {}, "text": {}}, {}, "[" * 10_000, "This is no action: answer with one JSON object."),
    ],
)
def test_answers_become_actions_of_the_servers_schema(
    schema: dict[str, Any], args: dict[str, Any], answer: str, action: object
) -> None:
    answers = ActionParser({"properties": schema}, OpenEnvConfig(url="http://host", **args))
    assert answers.action(answer) == action
    assert bool(answers.instruction) == (len(schema) == 2 and not args and "metadata" not in schema)


def test_a_field_that_actions_do_not_have_is_named() -> None:
    with pytest.raises(GameFault, match="action_field = 'txt': actions have the fields text"):
        ActionParser({"properties": {"text": {}}}, OpenEnvConfig(url="http://host", action_field="txt"))


def test_a_server_that_is_gone_is_named_and_one_that_comes_back_is_used(server: Server, python: Path) -> None:
    """The last test: it ends the server of the others."""

    async def run() -> None:
        client, impatient = (OpenEnvServer(OpenEnvConfig(url=server.url, step_timeout_s=limit)) for limit in (600, 0.1))
        session = await client.open()
        await session.reset(0, 0)
        server.process.kill()
        server.process.wait()
        with pytest.raises(GameError, match=f"^the OpenEnv server at {server.url} is gone"):
            await session.act('{"guess": "1"}')
        await session.close()
        with pytest.raises(GameError, match=f"^the OpenEnv server at {server.url} is gone: Cannot connect"):
            await impatient.open()
        with pytest.raises(
            EnvironmentFault, match=rf"^orchestrator.env\[0\]: url = {server.url}: no OpenEnv server answ"
        ):
            load(server)
        waiting = asyncio.create_task(client.open())
        server.process = started(python, int(server.url.rpartition(":")[2])).process
        session = await waiting
        assert (await session.reset(0, 0)).text.startswith("Guess")
        await session.close()

    asyncio.run(run())
