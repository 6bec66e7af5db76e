"""The orchestrator's errors. Each message is one line that says what is wrong and what to do next.

OrchestratorError         ends the run with exit code 1, for example because a checkpoint cannot be resumed
├── EnvironmentFault      an environment cannot be imported, has no rows, or its server does not answer
├── JudgeFault            a judge does not answer, refuses its key, or nothing has started it
├── InferenceFault        a server is down, never becomes ready, sends unusable replies, or rejects weights
├── GroupFailed           a group failed, and is retried
│   ├── GroupTimeout      it took longer than its environment's limit (in workers/failures.py)
│   └── MalformedRollout  a rollout cannot be trained on, whatever its reward
└── TooManyFailures       too many groups failed in a row
"""

from __future__ import annotations

from prime_rl.utils.errors import RunError


class OrchestratorError(RunError):
    """Ends the run with exit code 1 and this message, without a traceback."""


class EnvironmentFault(OrchestratorError):
    """An environment cannot be used."""


class JudgeFault(OrchestratorError):
    """A judge cannot be used. Rewards without it would be wrong."""


class InferenceFault(OrchestratorError):
    """An inference server cannot be used."""


class GroupFailed(OrchestratorError):
    """A group of rollouts failed. It is retried."""

    def __init__(self, message: str, reason: str = "", detail: str = "", is_of_environment: bool = True) -> None:
        super().__init__(message)
        self.reason = reason or type(self).__name__
        """Name of the failure in metrics."""
        self.detail = detail
        """The traceback, if there is one."""
        self.is_of_environment = is_of_environment
        """Whether the environment caused the failure, not the model or its engine."""


class MalformedRollout(GroupFailed):
    """A rollout lacks data that training needs."""


class TooManyFailures(OrchestratorError):
    """Too many rollout groups failed in a row."""
