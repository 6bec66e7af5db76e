"""The orchestrator's errors. Each message is one line that says what is wrong and what to do next.

OrchestratorError
├── EnvironmentFault      an environment does not import, has no rows, or its server does not answer
├── InferenceFault        a server is missing, never becomes ready, answers oddly, or refuses weights
├── MalformedRollout      a rollout that cannot be trained on, whatever its reward
├── TooManyFailures       group after group fails and none succeeds
├── NothingToTrain        batch after batch without a single trainable token
└── ResumeFault           the parts of a checkpoint do not stand at the same step
"""

from __future__ import annotations


class OrchestratorError(Exception):
    """Ends the run with exit code 1 and this message, without a traceback."""


class EnvironmentFault(OrchestratorError):
    """An environment cannot be used."""


class InferenceFault(OrchestratorError):
    """An inference server cannot be used."""


class MalformedRollout(OrchestratorError):
    """A rollout came back without what training needs. Fails its group, and the run only when no group succeeds."""


class TooManyFailures(OrchestratorError):
    """Rollout groups fail one after the other."""


class NothingToTrain(OrchestratorError):
    """Batches stay empty."""


class ResumeFault(OrchestratorError):
    """A resumed run lacks a part of its checkpoint."""
