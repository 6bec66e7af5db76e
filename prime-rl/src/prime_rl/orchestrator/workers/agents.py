"""Agents and workflows as environments: attempts at rows of a dataset, by code in a process of its own or elsewhere."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from prime_rl.configs.rollouts.environments import EXTERNAL, AgentKeys, EnvConfig
from prime_rl.environments.agents.datasets import BadRows, read_dataset
from prime_rl.environments.agents.returns import UNKNOWN_VERSION, InvalidReward, call_rewards
from prime_rl.environments.agents.targets import BadTarget
from prime_rl.orchestrator.errors import EnvironmentFault, GroupFailed, MalformedRollout
from prime_rl.orchestrator.proxy.continuation import Message
from prime_rl.orchestrator.proxy.recording import Session
from prime_rl.orchestrator.proxy.routes import RecordingProxy
from prime_rl.orchestrator.rollouts.rollout import Rollout, read_rollout
from prime_rl.orchestrator.rollouts.trace import CallDetails, ModelCall, Prompt, sampled_logprob
from prime_rl.orchestrator.workers.blocked import Report
from prime_rl.orchestrator.workers.environment import Described, GroupRequest, Split, TextRows
from prime_rl.orchestrator.workers.failures import GroupTimeout, in_time
from prime_rl.orchestrator.workers.process import (
    BLOCKED_S,
    INSIDE,
    ProcessPool,
    RestartingProcess,
    WorkerEnded,
    WorkerError,
    WorkerProcess,
    WorkerSpec,
    pool_of,
)
from prime_rl.utils.engine_keys import published_key
from prime_rl.utils.images import image_parts
from prime_rl.utils.logger import count_of, get_logger

KEY_SERVICE = "agents"
"""Under this name, the key for starting sessions is kept in a file that only this user can read."""
REJECTED = "Rejected"
"""The error of a rollout that its agent gave no reward."""
_QUIET = {"OPENAI_AGENTS_DISABLE_TRACING": "1", "OPENAI_AGENTS_DONT_LOG_MODEL_DATA": "1"}
"""Agents send no traces, unless they ask for it themselves."""


class AgentWorker:
    """Has an agent attempt rows. It asks the model through a proxy of this process, with the key of its session."""

    def __init__(
        self,
        name: str,
        keys: AgentKeys,
        rows: Mapping[Split, Sequence[dict[str, Any]]],
        process: RestartingProcess | ProcessPool | None,
        proxy: RecordingProxy,
    ) -> None:
        """Without a process, attempts are offered to agents that start sessions over HTTP."""
        self.name = name
        self.process = process
        self.proxy = proxy
        self._keys = keys
        self._rows = rows
        self._opened = contextlib.ExitStack()
        self._opening = asyncio.Lock()

    def describe(self, split: Split) -> Described:
        """What the model is asked, and with which tools, is decided by the agent when it runs."""
        rows = TextRows([json.dumps(row, default=str) for row in self._rows[split]])
        return Described(rows, tools=None, prompt_columns=("messages", "prompt", "question"))

    def waits_for(self) -> str:
        if self.process is not None:
            return ""
        started = count_of("session", self.proxy.offers.num_started)
        return f"for agents at {self.proxy.base_url} ({started} started so far)"

    async def open(self) -> None:
        """Open the proxy. Raises EnvironmentFault if its port is taken."""
        async with self._opening:
            if self.proxy.base_url:
                return
            try:
                await self.proxy.open()
            except OSError as error:
                raise EnvironmentFault(
                    f"agent_port = {self._keys.port}: cannot listen on this port: {error.strerror}; choose another, or "
                    "leave it out for a free one"
                ) from error
            if self.process is None:
                port = int(self.proxy.base_url.rpartition(":")[2].removesuffix("/v1"))
                file = self._opened.enter_context(published_key(port, self.proxy.starter_key, KEY_SERVICE))
                where = f"at {self.proxy.base_url} with the key in {file}"
                get_logger().info(f"Agents of environment {self.name!r} start sessions {where}")

    def report_to(self, report: Report) -> None:
        if self.process is not None:
            self.process.report = report

    async def roll_out(self, group: GroupRequest) -> list[Rollout]:
        """An attempt that fails is made again up to `max_retries` times.

        Raises:
            GroupFailed: every attempt failed or was rejected.
            GroupTimeout: it took longer than `timeout_s` of the environment.
            EnvironmentFault: the agent's process ends whenever it is started.
        """
        await self.open()
        count = group.size * (group.max_retries + 1)
        chosen = contextlib.nullcontext() if self.process is None else self.process.chosen()
        with self.proxy.sessions.opened(count, group.server, group.sampling_args) as sessions, chosen as process:
            for session in sessions:
                session.files = [part.source for part in image_parts(group.row.get("prompt"))]
            attempts = (self._one(group, process, sessions[at :: group.size]) for at in range(group.size))
            try:
                async with in_time(group.timeout_s, group.example.env, group.example.row):
                    rollouts = await _all_of(attempts)
            except GroupTimeout:
                if process is not None:
                    # A process that does not answer is blocked by the agent's code, and is replaced.
                    await process.ask("ping", process.blocked_s)
                raise
        if all(rollout.is_rejected for rollout in rollouts):
            failed = next((each for each in rollouts if each.error != REJECTED), rollouts[-1])
            why = failed.error_detail or "the agent rejected each"
            is_fault = failed.error != REJECTED
            raise GroupFailed(f"no attempt of the group has a reward: {why}", failed.error or REJECTED, "", is_fault)
        return rollouts

    async def _one(
        self, group: GroupRequest, process: RestartingProcess | None, sessions: Sequence[Session]
    ) -> Rollout:
        for session in sessions:
            started_s = time.perf_counter()
            outcome = await self._outcome(group, process, session)
            rollout = rollout_of(session, outcome, self._keys, group)
            rollout.generation_ms = 1e3 * (time.perf_counter() - started_s)
            if rollout.error is None:
                break
            where = f"Environment {self.name!r}, row {group.example.row}"
            get_logger().debug(f"{where}: {rollout.error}: {rollout.error_detail}")
        return rollout

    async def _outcome(
        self, group: GroupRequest, process: RestartingProcess | None, session: Session
    ) -> dict[str, Any]:
        """What the agent returned (`Attempts.make`), with its rewards set in the session."""
        try:
            if process is None:
                async with asyncio.timeout(self._keys.timeout_s):
                    await self.proxy.offers.run(session, group.row)
                outcome: dict[str, Any] = {} if session.is_rewarded else {"is_rejected": True}
            else:
                outcome = await process.ask(
                    "attempt",
                    self._keys.timeout_s + BLOCKED_S,
                    row=group.row,
                    session={
                        "base_url": self.proxy.base_url,
                        "api_key": session.key,
                        "model": session.model,
                        "timeout_s": self._keys.timeout_s,
                    },
                    task_id=str(group.row.get("id", group.example.row)),
                    is_eval=group.split == "eval",
                )
            session.set_rewards(outcome.get("reward"))
        except TimeoutError:
            return {"error": "SessionTimeout", "detail": f"no agent ended it within {self._keys.timeout_s:g} s"}
        except InvalidReward as error:
            return {"error": "InvalidReward", "detail": str(error)}
        except WorkerEnded as error:
            return {"error": "AgentFailed", "detail": str(error)}
        except WorkerError as error:  # what it returned cannot be sent
            return {"error": error.kind, "detail": str(error).removeprefix(f"{error.kind}: ")}
        # An agent that returns nothing may have set rewards over HTTP.
        return {} if outcome.get("is_rejected") and session.is_rewarded else outcome

    async def close(self) -> None:
        # First the process: the proxy waits for its open requests.
        if self.process is not None:
            await self.process.close()
        await self.proxy.close()
        self._opened.close()


async def _all_of(attempts: Iterator[Any]) -> list[Rollout]:
    """The results of coroutines. The first error cancels the others."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(each) for each in attempts]
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0]  # noqa: B904 - keep the error's own cause, not the group
    return [task.result() for task in tasks]


def start_agent(config: EnvConfig, place: str, python: Path | None) -> AgentWorker:
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
    process: RestartingProcess | ProcessPool | None = None
    if keys.target != EXTERNAL:
        spec = agent_spec(place, keys.target, config.args, python, config.judge)
        process = pool_of([spec] * (config.num_workers or 1), WorkerProcess.start(spec))
    return AgentWorker(config.name or config.id, keys, rows, process, RecordingProxy(keys.port or 0))


def agent_spec(
    place: str, target: str, args: Mapping[str, Any], python: Path | None = None, judge: str | None = None
) -> WorkerSpec:
    """What to start, in the interpreter `python` or in this one. `place` is the config key, for messages."""
    ours = [entry for entry in sys.path if entry] if python is None else []
    attributes = {"path": [str(Path.cwd()), *ours]}
    program = (str(INSIDE / "__main__.py"), "--agent")
    return WorkerSpec(
        place, python or Path(sys.executable), target, args, attributes, judge, program=program, added=_QUIET
    )


def rollout_of(session: Session, outcome: Mapping[str, Any], keys: AgentKeys, group: GroupRequest) -> Rollout:
    """The rollout of a finished session.

    Each call is worth its reward and the discounted ones of the calls after it. A workflow's own sequences replace what
    the session recorded, and each has its own reward.

    Raises:
        MalformedRollout: a token or a log-probability is none.
    """
    sequences: Sequence[Mapping[str, Any]] | None = outcome.get("sequences")
    worth: list[float] | None
    if sequences is None:
        recorded, rewards = session.recorded, session.rewards
        worth = call_rewards(rewards, keys.turn_discount)
        total = math.fsum(reward or 0.0 for reward in rewards) if rewards else session.reward or 0.0
    else:
        recorded = [("", _call_of(each)) for each in sequences]
        worth = [each["reward"] for each in sequences] if len(sequences) > 1 else None
        total = math.fsum(each["reward"] for each in sequences) / len(sequences)
    error, detail = outcome.get("error"), outcome.get("detail")
    if outcome.get("is_rejected"):
        error, detail = REJECTED, "the agent returned no reward"
    output = {
        "reward": total,
        "error": {"error": error, "error_chain_repr": f"{error}: {detail}"} if error else None,
        "is_truncated": session.is_cut_off,
        **_conversation(session),
    }
    rollout = read_rollout(output, recorded, group.example, group.temperature, group.version, group.vocab_size)
    rollout.call_rewards = worth
    rollout.separate_calls = keys.samples == "separate" or sequences is not None
    rollout.is_rejected = error is not None
    return rollout


def _call_of(sequence: Mapping[str, Any]) -> ModelCall:
    """A workflow's sequence as one call: the prompt ends where the first trained token begins."""
    mask = sequence["loss_mask"]
    if True not in mask:
        raise MalformedRollout("a workflow returned a sequence without a token to train on: its loss_mask has no True")
    start = mask.index(True)
    # Masked tokens have the log-probability 0; a version tells those that an engine sampled.
    logprobs = [
        sampled_logprob(value) if is_trained or version != UNKNOWN_VERSION else value
        for value, is_trained, version in zip(sequence["logprobs"], mask, sequence["versions"], strict=True)
    ]
    spans, at = [], 0
    for version, run in groupby(sequence["versions"][start:]):
        end = at + len(list(run))
        if version != UNKNOWN_VERSION:
            spans.append({"version": version, "start": at, "end": end})
        at = end
    return ModelCall(
        prompt=Prompt.of(sequence["ids"][:start]),
        completion_ids=sequence["ids"][start:],
        inference_logprobs=logprobs[start:],
        completion_mask=mask[start:],
        details=CallDetails.from_builtins({"weight_versions": spans}),
    )


def _conversation(session: Session) -> dict[str, Any]:
    """The last conversation as messages: what was asked first, and what followed."""
    conversations = [call.conversation for call in session.calls if call.conversation]
    if not conversations:
        return {"prompt": None, "completion": None}
    last = conversations[-1]
    start = next((at for at, message in enumerate(last) if message.role == "assistant"), len(last))
    messages = [_message(message) for message in last]
    return {"prompt": messages[:start], "completion": messages[start:]}


def _message(message: Message) -> dict[str, Any]:
    shown: dict[str, Any] = {"role": message.role, "content": message.text}
    if message.calls:
        shown["tool_calls"] = [
            {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
            for call_id, name, arguments in message.calls
        ]
    if message.answers_call:
        shown["tool_call_id"] = message.answers_call
    return shown
