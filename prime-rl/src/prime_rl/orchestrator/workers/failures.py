"""Groups that an environment fails: which rollouts do, the counts by reason, and the end of a run in which most do."""

from __future__ import annotations

import asyncio
import re
import traceback
from collections import Counter, deque
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager

from prime_rl.orchestrator.errors import EnvironmentFault, GroupFailed, JudgeFault, OrchestratorError
from prime_rl.orchestrator.rollouts.rollout import Rollout
from prime_rl.orchestrator.workers.inside.reward_records import MAX_TRACEBACK_CHARS, MAX_TRACEBACK_LINES

WINDOW = 32
"""Groups over which the share of failures is taken. Twice those that run, if that is more."""
MIN_GROUPS = 8
"""Groups at the start that are enough if all of them failed."""
MAX_REASONS = 32
"""Reasons that are counted by their own names; further ones are `other`."""

MODEL_ERRORS = frozenset(
    {
        *("ModelError", "InvalidModelResponseError", "EmptyModelResponseError", "OverlongPromptError"),
        *("ToolError", "ToolParseError", "ToolCallError", "ProviderError"),
    }
)
"""Errors of verifiers with which an answer of the model, or its engine, ends a rollout. Such a rollout has a reward."""


def refuse_failed(rollouts: Sequence[Rollout]) -> None:
    """Raises GroupFailed if the environment's code ended a rollout, or if a reward function failed: a reward of such a
    group would be made up."""
    for rollout in rollouts:
        if rollout.error is not None and rollout.error not in MODEL_ERRORS and not rollout.is_rejected:
            raise GroupFailed(f"a rollout ended with {rollout.error_detail or rollout.error}", rollout.error)
    if (failed := reward_failure(rollouts)) is not None:
        raise failed


def reward_failure(rollouts: Sequence[Rollout]) -> GroupFailed | None:
    """The first failure of a reward function. What ended with an error may have no answer that could be scored."""
    for rollout in rollouts:
        for function, text in rollout.reward_errors.items():
            if rollout.error is None:
                message = f"the reward function {function!r} failed: {text.splitlines()[-1]}"
                return GroupFailed(message, f"reward.{function}", text)
    return None


class Failures:
    """Counts the groups of one environment. Ends the run if too many of them failed."""

    def __init__(self, env: str, max_share: float) -> None:
        self.env = env
        self.max_share = max_share
        self._failed: deque[str | None] = deque()
        """Reason of each of the last groups; None for one that did not fail."""
        self._running = 0
        self._first: dict[str, str] = {}
        """The first error of each reason, with its traceback if there is one."""
        self._groups = 0
        self._counts: Counter[str] = Counter()
        """Groups, and failed ones by reason, since `take_counts`."""

    @contextmanager
    def group(self, lost: asyncio.Event) -> Iterator[None]:
        """Count one group, which the block runs. A group that loses its inference server is not counted.

        Raises:
            EnvironmentFault: more than `max_share` of the last `WINDOW` groups failed, or all of the first
                `MIN_GROUPS`. Other errors of the block pass.
        """
        self._running += 1
        try:
            try:
                yield
            finally:
                self._running -= 1
        except (EnvironmentFault, JudgeFault):
            raise
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            itself = GroupFailed("the environment's code cancelled itself", type(error).__name__)
            self._fail(itself)
            raise itself from error
        except Exception as error:
            if not lost.is_set():
                self._fail(error)
            raise
        self._succeed()

    def observe_scored(self, rollouts: Sequence[Rollout]) -> None:
        """Count a group of an evaluation, which keeps its rollouts. It counts those that ended with an error itself.

        Raises:
            EnvironmentFault: as `group`.
        """
        failed = reward_failure(rollouts)
        self._succeed() if failed is None else self._fail(failed)

    def conclude(self) -> None:
        """Call it after the last group. Raises EnvironmentFault if every group of a short run failed."""
        self._refuse(min_groups=1)

    def take_counts(self) -> tuple[int, Counter[str]]:
        """Groups since the last call, and how many of them failed for each reason."""
        taken = self._groups, self._counts
        self._groups, self._counts = 0, Counter()
        return taken

    def _succeed(self) -> None:
        self._groups += 1
        self._ended(None)

    def _fail(self, error: Exception) -> None:
        reason = reason_of(error)
        if reason not in self._first and len(self._first) >= MAX_REASONS:
            reason = "other"
        self._groups += 1
        self._counts[reason] += 1
        if isinstance(error, GroupFailed) and not error.is_of_environment:
            return
        self._first.setdefault(reason, _shown(error))
        self._ended(reason)
        self._refuse(MIN_GROUPS)

    def _ended(self, reason: str | None) -> None:
        self._failed.append(reason)
        while len(self._failed) > max(WINDOW, 2 * self._running):
            self._failed.popleft()

    def _refuse(self, min_groups: int) -> None:
        count, reasons = len(self._failed), Counter(filter(None, self._failed))
        failed = reasons.total()
        if not (count >= WINDOW or (count >= min_groups and failed == count)):
            return
        # Groups that fail at once end before all others. With many in flight, the first hundreds may all be of those,
        # so those that still run count as good.
        if failed <= self.max_share * (count + self._running):
            return
        named = ", ".join(f"{number} {reason}" for reason, number in reasons.most_common(5))
        (first, _), *_ = reasons.most_common()
        raise EnvironmentFault(
            f"environment {self.env!r}: {failed} of the last {count} groups failed (limit: max_failed_groups = "
            f"{self.max_share:g} of the environment): {named}; the first {first}: {self._first[first]}"
        )


def reason_of(error: BaseException) -> str:
    """A name for what failed a group, as metrics have it."""
    found = getattr(error, "reason", None) or getattr(error, "kind", None) or type(error).__name__
    return re.sub(r"[^\w.-]", "_", str(found))[:64]


def _shown(error: Exception) -> str:
    """What happened, with the traceback if it is one of the environment's code."""
    if isinstance(error, OrchestratorError):
        detail = getattr(error, "detail", "")
        return f"{error}:\n{detail}" if detail else f"{error}"
    lines = "".join(traceback.format_exception(error)).splitlines()
    return "\n".join([f"{type(error).__name__}:", *lines[-MAX_TRACEBACK_LINES:]])[-MAX_TRACEBACK_CHARS:]


def failure_metrics(counts: dict[str, tuple[int, Counter[str]]]) -> dict[str, float]:
    """`failed_groups/*`: the share of groups that failed since the last record, and their number by environment and
    reason. `counts` are what `Failures.take_counts` gave for each environment."""
    groups = sum(number for number, _ in counts.values())
    failed = sum(reasons.total() for _, reasons in counts.values())
    named = {
        f"failed_groups/{env}/{reason}": float(number)
        for env, (_, reasons) in counts.items()
        for reason, number in reasons.items()
    }
    return {"failed_groups/share": failed / max(groups, 1), **named}


class GroupTimeout(GroupFailed):
    """A group took longer than its environment's limit."""


@asynccontextmanager
async def in_time(limit_s: float | None, env: str, row: int) -> AsyncIterator[None]:
    """Cancel the block after `limit_s` seconds. None sets no limit.

    Raises:
        GroupTimeout: the limit was reached. A TimeoutError of the environment's own code passes.
    """
    limit = asyncio.timeout(limit_s)
    try:
        async with limit:
            yield
    except TimeoutError as error:
        if not limit.expired():
            raise
        raise GroupTimeout(
            f"environment {env!r}, row {row}: the group takes longer than timeout_s = {limit_s:g} of the environment"
        ) from error
