"""The orchestrator's errors. Each message is one line that says what is wrong and what to do next.

OrchestratorError
├── EnvironmentFault      an environment cannot be imported, has no rows, or its server does not answer
├── JudgeFault            a judge does not answer, refuses its key, or nothing has started it
├── TeacherFault          the teacher does not answer, or cannot score a sample
├── InferenceFault        a server is down, never becomes ready, sends unusable replies, or rejects weights
├── TrainerFault          the trainer publishes no further policy version
├── GroupFailed           a group failed, and is retried
│   ├── GroupTimeout      it took longer than its environment's limit (in workers/failures.py)
│   └── MalformedRollout  a rollout cannot be trained on, whatever its reward
├── TooManyFailures       too many groups failed in a row
├── NothingToTrain        several batches in a row have no token to train on, or no example is left
└── ResumeFault           a checkpoint or its weights are missing or unreadable
"""

from __future__ import annotations


class OrchestratorError(Exception):
    """Ends the run with exit code 1 and this message, without a traceback."""


class EnvironmentFault(OrchestratorError):
    """An environment cannot be used."""


class JudgeFault(OrchestratorError):
    """A judge cannot be used: rewards without it would be made up."""


class TeacherFault(OrchestratorError):
    """The teacher cannot be used: its part of the loss would be missing."""


class InferenceFault(OrchestratorError):
    """An inference server cannot be used."""


class TrainerFault(OrchestratorError):
    """The trainer does not continue."""


class GroupFailed(OrchestratorError):
    """A group of rollouts failed. It is retried."""

    def __init__(self, message: str, reason: str = "", detail: str = "", is_of_environment: bool = True) -> None:
        super().__init__(message)
        self.reason = reason or type(self).__name__
        """Its name in metrics."""
        self.detail = detail
        """The traceback, if there is one."""
        self.is_of_environment = is_of_environment
        """Whether the environment failed it, and not the model or its engine."""


class MalformedRollout(GroupFailed):
    """A rollout lacks data that training needs."""


class TooManyFailures(OrchestratorError):
    """Too many rollout groups failed in a row."""


class NothingToTrain(OrchestratorError):
    """There is nothing left to train on."""


class ResumeFault(OrchestratorError):
    """A run cannot be resumed from its checkpoint."""
