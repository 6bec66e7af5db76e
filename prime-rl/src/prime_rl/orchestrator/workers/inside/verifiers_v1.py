"""One environment behind the v1 interface of verifiers 0.3 and 0.4: a taskset, and one agent that plays its tasks."""

from __future__ import annotations

import asyncio
import functools
import inspect
import itertools
import os
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from typing import Any

from .frames import finite
from .model_client import session_name
from .reward_records import KEY as REWARD_ERRORS
from .reward_records import checked, shown
from .scripts import run_scripts_here

KEY_VARIABLE = "PRIME_RL_PROXY_API_KEY"
"""Holds the proxy's key. Programs of the subprocess runtime get no variable with API_KEY in its name."""
MOST_TASKS = 1_000_000
"""A taskset with more is read as an endless one."""
KEPT_TASKS = 4096
"""Tasks of an endless taskset that are kept. An older one is asked for again only after a resume."""

_ERRORS: ContextVar[list[dict[str, str]]] = ContextVar("errors")
"""What reward functions raised in the current rollout."""


class Served:
    """A taskset and its agent as the orchestrator asks for them."""

    def __init__(self, start: dict[str, Any]) -> None:
        from verifiers.v1.utils.loaders import default_harness_id, env_config_type, load_environment, resolve_env_config

        taskset = {"id": start["module"], **start["taskset"]}
        config = {**start["args"], "taskset": taskset}
        if start["agent"] or "agent" in env_config_type(taskset["id"], config.get("id") or "").model_fields:
            own = default_harness_id(taskset["id"])
            # verifiers' defaults are a shell for the model, and a sandbox of Prime Intellect.
            defaults = {"harness": {"id": own if own == taskset["id"] else "null"}, "runtime": {"type": "subprocess"}}
            limits = {"max_total_tokens": start["attributes"].get("max_seq_len")}
            config["agent"] = {**limits, **defaults, **start["agent"]}
        self.env = load_environment(resolve_env_config(config))
        _refuse_other_agents(self.env)
        run_scripts_here()
        _contain(type(self.env.taskset).task_type())
        self._tasks = Tasks(self.env.taskset)
        self._serving = Serving(self.env)

    def describe(self, split: str) -> dict[str, Any]:
        """Like the other interface. `rows` is null for an endless taskset."""
        count = self._tasks.count
        functions = {} if count == 0 else dict(_weights(self._tasks[0]))
        # The tools of a task are known once its servers run.
        return {"rows": count, "functions": functions, "tools": []}

    def rows(self, split: str, start: int, stop: int) -> list[dict[str, Any]]:
        count = self._tasks.count
        stop = stop if count is None else min(stop, count)
        return [_row(self._tasks[row].data) for row in range(start, stop)]

    async def run_group(
        self, split: str, row: int, base_url: str, model: str, sampling_args: dict[str, Any], sessions: list[str],
        proxy_key: str,
    ) -> list[dict[str, Any]]:  # fmt: skip
        """One episode for each session. Rewards compare no rollouts of a group with each other."""
        from verifiers.v1.clients import ModelContext
        from verifiers.v1.configs.client import EvalClientConfig

        os.environ[KEY_VARIABLE] = proxy_key
        await self._serving.begin()
        context = ModelContext(model=model, client=EvalClientConfig(base_url=base_url, api_key_var=KEY_VARIABLE))
        episodes = [asyncio.create_task(self._episode(self._tasks[row], context, key)) for key in sessions]
        try:
            return list(await asyncio.gather(*episodes))
        finally:
            for episode in episodes:
                episode.cancel()
            await asyncio.gather(*episodes, return_exceptions=True)

    async def _episode(self, task: Any, context: Any, key: str) -> dict[str, Any]:
        errors: list[dict[str, str]] = []
        _ERRORS.set(errors)
        attempts = 0

        def minted(trace: Any) -> None:
            nonlocal attempts
            attempts += 1
            # verifiers sends the id of a trace with each of its requests.
            trace.id = session_name(key)

        episode = await self.env.run_episode(task, context, on_trace=minted)
        return {"session": key, **_output(episode, errors, attempts)}

    def after_answer(self) -> None:
        """Nothing ends the process."""

    async def close(self) -> None:
        await self._serving.end()


class Tasks:
    """The tasks of a taskset by their numbers. An endless taskset is read as far as it is asked for."""

    def __init__(self, taskset: Any) -> None:
        self._taskset = taskset
        self._stream: Iterator[Any] = iter(taskset)
        self._next = 0
        self._kept: dict[int, Any] = {}
        if not getattr(taskset, "INFINITE", False):
            self._kept = dict(enumerate(itertools.islice(self._stream, MOST_TASKS + 1)))
            self._next = len(self._kept)
        is_endless = getattr(taskset, "INFINITE", False) or self._next > MOST_TASKS
        self.count = None if is_endless else self._next

    def __getitem__(self, row: int) -> Any:
        """Raises LookupError if the taskset ends before."""
        if row not in self._kept and row < self._next:
            self._stream, self._next, self._kept = iter(self._taskset), 0, {}
        while row not in self._kept:
            task = next(self._stream, None)
            if task is None:
                raise LookupError(f"the taskset has only {self._next:,} tasks")
            self._kept[self._next] = task
            self._next += 1
            if self.count is None and len(self._kept) > KEPT_TASKS:
                del self._kept[next(iter(self._kept))]
        return self._kept[row]


class Serving:
    """What an environment keeps running for all rollouts, held by one task: its tool servers, the server in between."""

    def __init__(self, env: Any) -> None:
        self._env = env
        self._holder: asyncio.Task[None] | None = None
        self._is_up: asyncio.Future[None] | None = None
        self._end = asyncio.Event()

    async def begin(self) -> None:
        """Returns once all of it runs. Raises what its start raises."""
        if self._holder is None:
            self._is_up = asyncio.get_running_loop().create_future()
            self._holder = asyncio.create_task(self._hold(self._is_up))
        assert self._is_up is not None
        await asyncio.shield(self._is_up)

    async def _hold(self, is_up: asyncio.Future[None]) -> None:
        try:
            async with self._env.serving():
                is_up.set_result(None)
                await self._end.wait()
        except Exception as error:
            if is_up.done():
                raise
            is_up.set_exception(error)

    async def end(self) -> None:
        self._end.set()
        if self._holder is not None:
            await asyncio.gather(self._holder, return_exceptions=True)


def _refuse_other_agents(env: Any) -> None:
    from verifiers.v1.configs.agent import AgentConfig

    policies = [name for name, agent in env.config if isinstance(agent, AgentConfig) and agent.client is None]
    if len(policies) != 1:
        raise RuntimeError(
            f"its agents {', '.join(policies) or '(none)'} use the trained model, but exactly one may: "
            "give each of the others its own client"
        )


def _contain(task_type: Any) -> None:
    """Let reward functions and hooks of a task write down what they raise; sys.exit becomes an error."""
    if hasattr(task_type, "hooks"):  # since 0.4, where a config may add functions
        hooks = task_type.hooks
        task_type.hooks = lambda task, kind: [_contained(each, kind == "reward") for each in hooks(task, kind)]
    else:
        marked = [(name, each) for name, each in inspect.getmembers(task_type) if _kinds(each)]
        for name, each in marked:
            setattr(task_type, name, _contained(each, "reward" in _kinds(each)))
    for name in ("setup", "finalize"):
        setattr(task_type, name, _contained(getattr(task_type, name), False))


def _contained(function: Callable[..., Any], is_reward: bool) -> Callable[..., Any]:
    @functools.wraps(function)
    async def contained(*args: Any, **kwargs: Any) -> Any:
        try:
            value = function(*args, **kwargs)
            value = await value if inspect.isawaitable(value) else value
            if is_reward:  # a mapping holds several rewards
                checked(list(value.values()) if isinstance(value, Mapping) else value, isinstance(value, Mapping))
            return value
        except (Exception, SystemExit) as error:
            if is_reward:
                name = getattr(function, "__name__", repr(function))
                _ERRORS.get([]).append({"function": name, "traceback": shown(error, __file__)})
            if isinstance(error, SystemExit):
                raise RuntimeError(f"it called sys.exit({error.code!r})") from error
            raise

    return contained


def _weights(task: Any) -> Iterator[tuple[str, float]]:
    own = dict(inspect.getmembers(type(task)))
    for name, function in own.items():
        for kind in _kinds(function):
            yield name, float(getattr(function, "_vf_weight", 1.0)) if kind == "reward" else 0.0
    for name, plugged in getattr(task.config, "rewards", {}).items():
        weight = plugged.weight if plugged.weight is not None else getattr(own.get(name), "_vf_weight", 1.0)
        yield name, float(weight)
    for judge in task.plugged_judges():
        yield judge.reward_name, float(judge.config.weight)


def _kinds(member: Any) -> list[str]:
    """Whether a member of a task's class is a reward or a metric: verifiers marks both with an attribute."""
    return [kind for kind in ("reward", "metric") if inspect.isfunction(member) and getattr(member, kind, False)]


def _row(data: Any) -> dict[str, Any]:
    """A task as a row: its prompt as messages, and all of its data under `data`."""
    content = data.model_dump(mode="json", exclude_none=True)
    said = content.get("prompt") or []
    messages = [{"role": "user", "content": said}] if isinstance(said, str) else said
    if content.get("system_prompt"):
        messages = [{"role": "system", "content": content["system_prompt"]}, *messages]
    return {"prompt": messages, "data": content}


def _output(episode: Any, errors: list[dict[str, str]], attempts: int) -> dict[str, Any]:
    """What the orchestrator reads of a rollout."""
    found = [*(error for trace in episode.traces for error in trace.errors), *episode.errors]
    if errors:  # verifiers reports what a reward function raised as an error of the task, without the function's name
        found = [each for each in found if each.type != "TaskError"]
    error = {"error": found[-1].type, "error_chain_repr": found[-1].message} if found else None
    if attempts > 1 and error is None:
        message = f"{attempts} runs of the agent in one episode, and one rollout is one run: set no retries"
        error = {"error": "SeveralRuns", "error_chain_repr": message}
    if not episode.traces:
        return {"reward": 0.0, "metrics": {}, "error": error, REWARD_ERRORS: errors}
    trace = episode.traces[-1]
    scores = {name: reward.score for name, reward in trace.rewards.items() if reward is not None}
    metrics = {name: finite(value) for name, value in {**trace.metrics, **scores}.items()}
    messages = _messages(trace)
    asked = next((at for at, each in enumerate(messages) if each.get("role") == "assistant"), len(messages))
    return {
        "reward": trace.reward,
        "metrics": {name: value for name, value in metrics.items() if value is not None},
        "error": error,
        "timing": {"generation": _span(trace.timing.agent), "scoring": _span(trace.timing.scoring)},
        "is_truncated": False,
        "stop_condition": trace.stop_condition,
        "prompt": messages[:asked],
        "completion": messages[asked:],
        REWARD_ERRORS: errors,
    }


def _messages(trace: Any) -> list[dict[str, Any]]:
    from verifiers.v1.dialects.chat import message_to_wire

    branches = trace.branches
    return [dict(message_to_wire(message)) for message in branches[-1].messages] if branches else []


def _span(span: Any) -> dict[str, float]:
    start, end = float(span.start or 0.0), float(span.end or 0.0)
    return {"start": start, "end": end, "duration": max(end - start, 0.0)}
