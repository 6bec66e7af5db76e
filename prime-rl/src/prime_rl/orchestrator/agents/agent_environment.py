"""Agents and workflows as environments of the orchestrator."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from prime_rl.configs.rollouts.agents import EXTERNAL, AgentKeys
from prime_rl.configs.rollouts.environments import EnvConfig
from prime_rl.environments.agents.datasets import BadRows, read_dataset
from prime_rl.environments.agents.returns import InvalidReward
from prime_rl.environments.agents.targets import BadTarget
from prime_rl.orchestrator.agents.agent_process import AgentFailed, AgentProcess, agent_guest
from prime_rl.orchestrator.agents.attempted import REJECTED, rollout_of
from prime_rl.orchestrator.env_servers.environments import Environment, GroupRequest, Split
from prime_rl.orchestrator.env_servers.failures import Failures
from prime_rl.orchestrator.env_servers.group_limits import GroupTimeout, in_time
from prime_rl.orchestrator.errors import EnvironmentFault, GroupFailed
from prime_rl.orchestrator.proxy.recording import Session
from prime_rl.orchestrator.proxy.routes import RecordingProxy
from prime_rl.orchestrator.rollouts.images import ADVICE, has_image
from prime_rl.orchestrator.rollouts.rollout import ExampleRef, Rollout
from prime_rl.orchestrator.scheduling.buffer import fingerprint
from prime_rl.utils.engine_keys import published_key
from prime_rl.utils.logger import count_of, get_logger

KEY_SERVICE = "agents"
"""Under this name, the key for starting sessions is kept in a file that only this user can read."""


class AgentEnvironment(Environment):
    """Attempts are made by an agent, in a process of its own or in one that somebody else started."""

    def __init__(
        self,
        name: str,
        keys: AgentKeys,
        rows: Mapping[Split, Sequence[dict[str, Any]]],
        process: AgentProcess | None,
        proxy: RecordingProxy,
        split: Split = "train",
        max_failed_groups: float = 0.5,
    ) -> None:
        """Without a process, attempts are offered to agents that start sessions over HTTP."""
        self.name = name
        self.address = "the process of its agent"
        self.vocab_size = None
        self.timeout_s = None
        self.failures = Failures(name, max_failed_groups)
        self.reward_functions: dict[str, float] = {}
        self._keys = keys
        self._all_rows = rows
        self._process = process
        self._proxy = proxy
        self._split: Split = split
        # As texts, which need less memory than dictionaries.
        self._texts = [json.dumps(row, default=str) for row in rows[split]]
        self._opened = contextlib.ExitStack()
        self._opening = asyncio.Lock()

    def __len__(self) -> int:
        return len(self._texts)

    @property
    def num_rows(self) -> int | None:
        return len(self._texts)

    def held_out(self) -> Self:
        share = self.failures.max_share
        other = type(self)(self.name, self._keys, self._all_rows, self._process, self._proxy, "eval", share)
        other.timeout_s = self.timeout_s
        return other

    def prompt(self, row: int) -> Any:
        """What the row asks, as far as its columns say so: the agent decides what the model is asked."""
        content = self.content(row)
        for name in ("messages", "prompt", "question"):
            if isinstance(content.get(name), str | list):
                return content[name]
        return self._texts[row]

    def tools(self, row: int) -> list[dict[str, Any]]:
        """None that is known before the agent runs."""
        return []

    def refuse_images(self) -> None:
        for row in range(len(self)):
            if has_image(self.prompt(row)):
                raise EnvironmentFault(f"environment {self.name!r}: the prompt of row {row} has an image, and {ADVICE}")

    def fingerprint(self, row: int, keys: Sequence[str]) -> str:
        return fingerprint(self.name, self.content(row), keys)

    def content(self, row: int) -> dict[str, Any]:
        content: dict[str, Any] = json.loads(self._texts[row])
        return content

    def waits_for(self) -> str:
        if self._process is not None:
            return ""
        started = count_of("session", self._proxy.offers.num_started)
        return f"for agents at {self._proxy.base_url} ({started} started so far)"

    async def connect(self) -> None:
        """Open the proxy. Raises EnvironmentFault if its port is taken."""
        async with self._opening:
            if self._proxy.base_url:
                return
            try:
                await self._proxy.open()
            except OSError as error:
                raise EnvironmentFault(f"agent_port = {self._keys.port}: {error.strerror}") from error
            if self._process is None:
                port = int(self._proxy.base_url.rpartition(":")[2].removesuffix("/v1"))
                file = self._opened.enter_context(published_key(port, self._proxy.starter_key, KEY_SERVICE))
                where = f"at {self._proxy.base_url} with the key in {file}"
                get_logger().info(f"Agents of environment {self.name!r} start sessions {where}")

    async def _roll_out(self, request: GroupRequest) -> list[Rollout]:
        """An attempt that fails is made again up to `max_retries` times.

        Raises:
            GroupFailed: every attempt failed or was rejected.
            GroupTimeout: it took longer than `timeout_s` of the environment.
            EnvironmentFault: the agent's process ends whenever it is started.
        """
        await self.connect()
        count = request.size * (request.max_retries + 1)
        with self._proxy.sessions.opened(count, request.server, request.sampling_args) as sessions:
            attempts = (self._one(request, sessions[at :: request.size]) for at in range(request.size))
            try:
                async with in_time(self.timeout_s, self.name, request.example.row):
                    rollouts = await _all_of(attempts)
            except GroupTimeout:
                if self._process is not None:
                    await self._process.refuse_blocked()
                raise
        if all(rollout.is_rejected for rollout in rollouts):
            failed = next((each for each in rollouts if each.error != REJECTED), rollouts[-1])
            why = failed.error_detail or "the agent rejected each"
            is_fault = failed.error != REJECTED
            raise GroupFailed(f"no attempt of the group has a reward: {why}", failed.error or REJECTED, "", is_fault)
        return rollouts

    async def _one(self, request: GroupRequest, sessions: Sequence[Session]) -> Rollout:
        example, sampled = request.example, (request.temperature, request.version)
        for session in sessions:
            started_s = time.perf_counter()
            outcome = await self._outcome(example, session)
            rollout = rollout_of(session, outcome, self._keys, example, sampled, self.vocab_size)
            rollout.prompt_id = self.prompt_id(example.row)
            rollout.generation_ms = 1e3 * (time.perf_counter() - started_s)
            if rollout.error is None:
                break
            get_logger().debug(f"Environment {self.name!r}, row {example.row}: {rollout.error}: {rollout.error_detail}")
        return rollout

    async def _outcome(self, example: ExampleRef, session: Session) -> dict[str, Any]:
        """What the agent returned, with its rewards set in the session."""
        try:
            if self._process is None:
                async with asyncio.timeout(self._keys.timeout_s):
                    await self._proxy.offers.run(session, self.content(example.row))
                outcome: dict[str, Any] = {} if session.is_rewarded else {"is_rejected": True}
            else:
                outcome = await self._asked(self._process, example, session)
            session.set_rewards(outcome.get("reward"))
        except TimeoutError:
            return {"error": "SessionTimeout", "detail": f"no agent ended it within {self._keys.timeout_s:g} s"}
        except (AgentFailed, InvalidReward) as error:
            return {"error": type(error).__name__, "detail": str(error)}
        # An agent that returns nothing may have set rewards over HTTP.
        return {} if outcome.get("is_rejected") and session.is_rewarded else outcome

    async def _asked(self, process: AgentProcess, example: ExampleRef, session: Session) -> dict[str, Any]:
        row = self.content(example.row)
        return await process.attempt(
            self._keys.timeout_s,
            row=row,
            session={
                "base_url": self._proxy.base_url,
                "api_key": session.key,
                "model": session.model,
                "timeout_s": self._keys.timeout_s,
            },
            task_id=str(row.get("id", example.row)),
            is_eval=self._split == "eval",
        )

    async def close(self) -> None:
        if self._process is not None:
            await self._process.close()
        await self._proxy.close()
        self._opened.close()


async def _all_of(attempts: Iterator[Any]) -> list[Rollout]:
    """The results of coroutines. The first error cancels the others."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(each) for each in attempts]
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0]  # noqa: B904 - keep the error's own cause, not the group
    return [task.result() for task in tasks]


def start_agent(config: EnvConfig, place: str, split: Split, python: Path | None) -> AgentEnvironment:
    """Read the dataset of an agent, and load it in a process of its own: that of `python`, or of this interpreter.

    Raises:
        EnvironmentFault: the dataset cannot be read, or the agent does not load.
    """
    keys = config.agent_keys
    rows: dict[Split, Sequence[dict[str, Any]]] = {}
    try:
        rows["train"] = read_dataset(keys.dataset)
        rows["eval"] = rows["train"] if keys.eval_dataset is None else read_dataset(keys.eval_dataset)
    except (BadRows, BadTarget) as error:
        raise EnvironmentFault(f"{place}.agent_dataset: {error}") from error
    name = config.name or config.id
    process = None
    if keys.target != EXTERNAL:
        process = AgentProcess(agent_guest(place, keys.target, config.args, python, config.judge))
    return AgentEnvironment(name, keys, rows, process, RecordingProxy(keys.port or 0), split, config.max_failed_groups)
