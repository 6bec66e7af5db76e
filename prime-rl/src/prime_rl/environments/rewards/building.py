"""Builds reward functions from specs: `build(["math"]).rubric()` is the rubric of a verifiers environment.

`build` resolves names, has a worker import each function, and makes a `Part` of it. `Rewards` calls the parts: in a
worker process, or here if a function is async or takes an object of this process.
"""

from __future__ import annotations

import asyncio
import functools
import json
import re
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import verifiers as vf
from pydantic import TypeAdapter, ValidationError

from prime_rl.environments.rewards.model import SCORES, RewardModel
from prime_rl.environments.rewards.pool import RewardError, RewardPool, RewardTimeout, release, shared_pool
from prime_rl.environments.rewards.registry import OnTimeout, Reward, RewardFault, RewardSpec, resolve
from prime_rl.environments.rewards.text import text_of
from prime_rl.environments.rewards.worker import HERE_ONLY, arguments, checked, load
from prime_rl.utils.logger import get_logger

TIMEOUTS = "reward_timeouts"
"""Key of a rollout's state: number of calls that timed out, by part."""
_AREAL = frozenset({"prompt", "completions", "prompt_ids", "completion_ids"})
"""Arguments of AReaL's signature."""
_VERIFIERS_OWN = {"prompt", "completion", "answer", "info", "state", "task", *HERE_ONLY}


class Part:
    """One reward function, ready to be called."""

    def __init__(
        self,
        spec: RewardSpec,
        path: str,
        timeout_s: float,
        description: Mapping[str, Any],
        model: RewardModel | None = None,
    ) -> None:
        self.name = spec.metric
        self.weight = spec.weight
        self.path = path
        self.timeout_s = timeout_s
        self.args = spec.args
        self.parameters: list[str] = description["parameters"]
        self.note: str = description["note"]
        is_known = spec.is_registered or _AREAL.issubset(self.parameters)
        self.on_timeout: OnTimeout = spec.on_timeout or ("zero" if is_known else "fail")
        runs_here = description["is_async"] or any(name in HERE_ONLY for name in self.parameters)
        self.model = model
        self.function: Callable[..., Any] | None = load(path) if runs_here else None if model is None else model.reward
        """Set if it runs in this process: an async function, or one that takes an object of this process; also if it
        asks a reward model, which runs in another."""


class Rewards:
    """The parts of a reward, and the pool that calls them. Close it when done: shared pools count their users."""

    def __init__(self, parts: Sequence[Part], pool: RewardPool) -> None:
        self.parts = list(parts)
        self.pool = pool
        self._is_closed = False
        self._warned: set[str] = set()

    async def score(self, prompt: Any, completion: Any, row: Mapping[str, Any], **more: Any) -> dict[str, float]:
        """Score one completion: the value of each part by name, and their weighted sum as `reward`.

        `more` may have `prompt_ids` and `completion_ids`.

        Raises:
            RewardError: a part failed. A part that times out counts as 0, or fails with `on_timeout = "fail"`.
        """
        state: dict[str, Any] = {"prompt": prompt, "completion": completion, "input": dict(row), **more}
        objects = {"prompt": prompt, "completion": completion, "state": state, **row}
        values = await asyncio.gather(*(self._value(part, objects) for part in self.parts))
        named = {part.name: value for part, value in zip(self.parts, values, strict=True)}
        return {**named, "reward": sum(part.weight * named[part.name] for part in self.parts)}

    def functions(self) -> list[tuple[Callable[..., Awaitable[float]], float]]:
        """Each part as an async function for a verifiers rubric, with its weight, and functions that count timeouts."""
        counted = [part for part in self.parts if part.on_timeout == "zero"]
        parts = [(self._function(part), part.weight) for part in self.parts]
        return [*parts, *((self._timeouts(part), 0.0) for part in counted)]

    def rubric(self) -> vf.Rubric:
        """A rubric of these parts, which closes them at its teardown."""
        return PooledRubric(self)

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            for pool in (self.pool, *(part.model.pool for part in self.parts if part.model is not None)):
                release(pool)

    def _function(self, part: Part) -> Callable[..., Awaitable[float]]:
        async def reward(state: Any, **objects: Any) -> float:
            return await self._value(part, {**objects, "state": state})

        reward.__name__ = reward.__qualname__ = part.name  # verifiers names metrics after functions
        return reward

    @staticmethod
    def _timeouts(part: Part) -> Callable[..., Awaitable[float]]:
        async def timeouts(state: Any, **_: Any) -> float:
            return float(state.get(TIMEOUTS, {}).get(part.name, 0))

        timeouts.__name__ = timeouts.__qualname__ = timeouts_of(part.name)
        return timeouts

    async def _value(self, part: Part, objects: Mapping[str, Any]) -> float:
        given = _given(part, objects)
        try:
            if part.function is not None:
                return await _called_here(part, part.function, {**objects, **given})
            return await asyncio.wrap_future(self.pool.call(part.path, given, part.timeout_s))
        except RewardTimeout as error:
            counts = objects["state"].setdefault(TIMEOUTS, Counter())
            counts[part.name] += 1
            if part.on_timeout == "fail":
                raise RewardTimeout(f'{error}; on_timeout = "zero" would count it as 0') from error
            if part.name not in self._warned:
                self._warned.add(part.name)
                get_logger().warning(
                    f"the reward {part.name!r} counts as 0: {error}; {timeouts_of(part.name)} counts them"
                )
            return 0.0


def build(specs: Sequence[Any], workers: int | None = None, pool: RewardPool | None = None) -> Rewards:
    """Make reward functions of names, paths and tables (`RewardSpec`).

    `workers` is the number of worker processes; `build` calls with equal numbers share a pool. `pool` is a pool that
    the caller owns.

    Raises:
        RewardFault: a spec is malformed, a name unknown, a function not importable, or two parts have one name.
    """
    parsed = _parsed(specs)
    resolved = [resolve(spec) for spec in parsed]
    own = pool is None
    pool = shared_pool(workers) if pool is None else pool
    models: dict[int, RewardModel] = {}
    try:
        for at, (spec, (_, timeout_s)) in enumerate(zip(parsed, resolved, strict=True)):
            if spec.model is not None:
                models[at] = RewardModel(spec.model, spec.args, timeout_s)
        described = [
            models[at].pool.describe(SCORES, models[at].args) if at in models else pool.describe(path, spec.args)
            for at, (spec, (path, _)) in enumerate(zip(parsed, resolved, strict=True))
        ]
        parts: list[Part] = []
        for at, (spec, (path, timeout_s)) in enumerate(zip(parsed, resolved, strict=True)):
            try:
                parts.append(Part(spec, path, timeout_s, described[at].result(), models.get(at)))
            except (RewardError, RewardFault) as error:
                raise RewardFault(f"reward {spec.fn!r}: {str(error).splitlines()[-1]}") from error
    except RewardFault:
        for each in (*([pool] if own else []), *(model.pool for model in models.values())):
            release(each)
        raise
    for note in dict.fromkeys(part.note for part in parts if part.note):
        _log_once(note)
    return Rewards(parts, pool)


@functools.cache
def _log_once(note: str) -> None:
    get_logger().info(note)


def _parsed(specs: Sequence[Any]) -> list[RewardSpec]:
    if not specs:
        raise RewardFault('no reward is given: name at least one, for example `rewards = ["math"]`')
    try:
        parsed: list[RewardSpec] = TypeAdapter(list[Reward]).validate_python(list(specs))
    except ValidationError as error:
        first = error.errors()[0]
        place = "".join(f"[{each}]" if isinstance(each, int) else f".{each}" for each in first["loc"])
        raise RewardFault(f"rewards{place}: {first['msg'].removeprefix('Value error, ')}") from error
    names = [name for spec in parsed for name in (spec.metric, timeouts_of(spec.metric))]
    if repeated := next((name for name in names if names.count(name) > 1), None):
        raise RewardFault(f"two parts of the reward have the name {repeated!r}: give one of them a `name`")
    return parsed


def _given(part: Part, objects: Mapping[str, Any]) -> dict[str, Any]:
    """The values that a function may ask for: those that its signature names, and the columns of the row."""
    state = objects["state"]
    prompt, completion = objects.get("prompt"), objects.get("completion")
    row = {**_columns(objects.get("info")), **{name: objects[name] for name in objects if name not in _VERIFIERS_OWN}}
    if objects.get("answer") not in (None, ""):
        row.setdefault("answer", objects["answer"])
    tokens = _tokens(state)
    given: dict[str, Any] = {
        "row": row,
        "args": part.args,
        "prompt_text": text_of(prompt),
        "completion_text": text_of(completion, role="assistant"),
        "prompt_ids": list(tokens.get("prompt_ids") or ()),
        "completion_ids": list(tokens.get("completion_ids") or ()),
    }
    if part.function is None:
        wanted = {"prompt": prompt, "completion": completion, "answer": row.get("answer"), "info": objects.get("info")}
        wanted["task"] = objects.get("task")
        given |= {name: value for name, value in wanted.items() if name in part.parameters}
        if "state" in part.parameters:
            given["state"] = {name: state[name] for name in ("prompt", "completion", "answer", "info") if name in state}
    return given


def _columns(info: Any) -> dict[str, Any]:
    """The columns in `info`, which may be JSON text."""
    if isinstance(info, str) and re.match(r"\s*\{", info):
        try:
            info = json.loads(info)
        except ValueError:
            return {}
    return dict(info) if isinstance(info, Mapping) else {}


def _tokens(state: Any) -> Mapping[str, Any]:
    """The token ids of the last model call, if the engine sent them; else those that `score` was given."""
    trajectory = state.get("trajectory") or []
    return (trajectory[-1].get("tokens") or {}) if trajectory else state


async def _called_here(part: Part, function: Callable[..., Any], given: Mapping[str, Any]) -> float:
    """Call a function in this process.

    Raises:
        RewardTimeout: an async function exceeded its time. A function that blocks cannot be interrupted.
        RewardError: it does not return a number.
    """
    try:
        positional, keywords = arguments(function, given)
        value = function(*positional, **keywords)
        if asyncio.iscoroutine(value):
            value = await _within(part.timeout_s, value)
        return checked(value)
    except RewardFault as error:
        raise RewardError(str(error)) from error


async def _within(timeout_s: float, value: Awaitable[Any]) -> Any:
    """Await with a limit. Raises RewardTimeout at the limit; a TimeoutError that the function raises stays one."""
    try:
        async with asyncio.timeout(timeout_s) as limit:
            return await value
    except TimeoutError as error:
        if not limit.expired():
            raise
        raise RewardTimeout(f"it ran for {timeout_s:g} s and was ended") from error


def timeouts_of(name: str) -> str:
    """Name of the metric that counts the timeouts of a part."""
    return f"{name}_timeouts"


class PooledRubric(vf.Rubric):  # type: ignore[misc]
    """A verifiers rubric whose functions run in worker processes. Each part is a metric."""

    def __init__(self, rewards: Rewards) -> None:
        functions = rewards.functions()
        super().__init__(funcs=[each for each, _ in functions], weights=[weight for _, weight in functions])
        self.rewards = rewards

    @vf.teardown  # type: ignore[untyped-decorator]
    async def let_go(self) -> None:
        """End the worker processes, unless another environment uses them."""
        self.rewards.close()
