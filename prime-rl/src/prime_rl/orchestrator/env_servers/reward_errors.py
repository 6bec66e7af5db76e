"""Keeps what reward functions raise, and ends a run in which they mostly do.

verifiers counts a call that fails as 0 and only logs it.
"""

from __future__ import annotations

import functools
import inspect
import math
import traceback
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import verifiers as vf

from prime_rl.orchestrator.env_servers.rubrics import leaves
from prime_rl.orchestrator.errors import EnvironmentFault
from prime_rl.orchestrator.rollouts.rollout import REWARD_ERRORS, Rollout
from prime_rl.utils.logger import get_logger

MAX_TRACEBACK_LINES = 15
MAX_TRACEBACK_CHARS = 4000
WINDOW = 32
"""Rollouts over which the share of failures is taken."""
MIN_ROLLOUTS = 8
"""Rollouts at the start that are enough if all of them failed."""


class RewardFailure(Exception):
    """A reward function called `sys.exit`, or returned no finite number."""


def record_reward_errors(rubric: vf.Rubric | None) -> None:
    """Let each reward function of a rubric write down in the rollout's state what it raises.

    The exception then goes on to verifiers, which counts the call as 0.
    """
    for part in leaves(rubric):
        part.funcs = [_recording(function, part._is_group_func(function)) for function in part.funcs]


def _recording(function: Callable[..., Any], scores_group: bool) -> Callable[..., Any]:
    """The same function, which also asks verifiers for the rollout's `state`, or a group's `states`."""
    signature, key = inspect.signature(function), "states" if scores_group else "state"
    takes_all = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in signature.parameters.values())
    wants_key = takes_all or key in signature.parameters

    name = getattr(function, "__name__", repr(function))

    # Not a coroutine function, because a rubric of the environment's own may call it as it is.
    @functools.wraps(function)
    def recording(*args: Any, **kwargs: Any) -> Any:
        found = kwargs.get(key) if wants_key else kwargs.pop(key, None)
        states = [] if found is None else found if scores_group else [found]
        count = len(states) if scores_group else None
        with _recorded(name, states):
            value = function(*args, **kwargs)
            return _awaited(value, name, states, count) if inspect.isawaitable(value) else _checked(value, count)

    if not wants_key:
        own = inspect.Parameter(key, inspect.Parameter.KEYWORD_ONLY)
        recording.__signature__ = signature.replace(parameters=[*signature.parameters.values(), own])  # type: ignore[attr-defined]
    return recording


async def _awaited(value: Awaitable[Any], name: str, states: Sequence[vf.State], count: int | None) -> Any:
    with _recorded(name, states):
        return _checked(await value, count)


@contextmanager
def _recorded(name: str, states: Sequence[vf.State]) -> Iterator[None]:
    """Write an exception of the block into the states, and let it pass. SystemExit becomes RewardFailure."""
    try:
        yield
    except (Exception, SystemExit) as error:
        for state in states:
            state.setdefault(REWARD_ERRORS, []).append({"function": name, "traceback": _shown(error)})
        if isinstance(error, SystemExit):
            raise RewardFailure(f"it called sys.exit({error.code!r})") from error
        raise


def _checked(value: Any, count: int | None) -> Any:
    """The value. Raises RewardFailure if it is no finite number, or for a group no sequence of `count` of them."""
    wanted = "a number" if count is None else f"{count} numbers"
    try:
        numbers = [float(each) for each in ([value] if count is None else [value[index] for index in range(count)])]
    except (TypeError, ValueError, LookupError, OverflowError):
        raise RewardFailure(f"it returned {str(value)[:100]} instead of {wanted}") from None
    if not all(map(math.isfinite, numbers)):
        # Even with the weight 0 it would make the whole reward NaN.
        raise RewardFailure(f"it returned {str(value)[:100]} instead of a finite number")
    return value


def _shown(error: BaseException) -> str:
    """The end of the traceback, from the function on."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    lines = "".join(traceback.format_exception(type(error), error, trace)).splitlines()
    return "\n".join(lines[-MAX_TRACEBACK_LINES:])[-MAX_TRACEBACK_CHARS:]


class RewardErrors:
    """Warns of reward functions that fail, and ends a run in which most rollouts have no true reward."""

    def __init__(self, env: str, max_share: float) -> None:
        self.env = env
        self.max_share = max_share
        self._failed: deque[bool] = deque(maxlen=WINDOW)
        self._first: dict[str, str] = {}
        """The first traceback of each function."""

    def observe(self, rollouts: Iterable[Rollout]) -> None:
        """Raises EnvironmentFault if more than `max_share` of the last `WINDOW` rollouts failed, or all of the first
        `MIN_ROLLOUTS`."""
        for rollout in rollouts:
            self._failed.append(bool(rollout.reward_errors))
            for function, text in rollout.reward_errors.items():
                self._note(function, text)
            if self._too_many(MIN_ROLLOUTS):
                raise self._fault()

    def conclude(self) -> None:
        """Call it after the last rollout. Raises EnvironmentFault if every rollout of a short run failed."""
        if self._too_many(1):
            raise self._fault()

    def _fault(self) -> EnvironmentFault:
        function, text = next(iter(self._first.items()))
        return EnvironmentFault(
            f"environment {self.env!r}: reward functions failed in {sum(self._failed)} of the last "
            f"{len(self._failed)} rollouts (limit: max_reward_errors = {self.max_share:g} of the environment); "
            f"the first was {function!r}:\n{text}"
        )

    def _note(self, function: str, text: str) -> None:
        if function in self._first:
            return
        self._first[function] = text
        get_logger().warning(
            f"environment {self.env!r}: the reward function {function!r} failed and counts as 0: "
            f"{text.splitlines()[-1]}; metrics have the share of rollouts in which this happens"
        )

    def _too_many(self, min_rollouts: int) -> bool:
        count, failed = len(self._failed), sum(self._failed)
        enough = count == WINDOW or (count >= min_rollouts and failed == count)
        return enough and failed > self.max_share * count
