"""The evaluation's own errors; servers and environments have theirs in `prime_rl.orchestrator.errors`.

EvalError
├── OtherEvaluation   the output directory holds results that were made with other settings
├── MissingSteps      a checkpoint that is asked for is not there, or not complete
└── ServerLost        the server that was started for the evaluation has ended
"""

from __future__ import annotations


class EvalError(Exception):
    """Ends the evaluation with this one line."""


class OtherEvaluation(EvalError):
    """Results of different settings must not be mixed."""


class MissingSteps(EvalError):
    """There are no such weights."""


class ServerLost(EvalError):
    """Nothing is left to evaluate with."""
