"""The command `medarc_train lm-eval`."""

from __future__ import annotations

from medarc_rl.lm_eval.options import LmEvalOptions


def lm_eval(options: LmEvalOptions) -> int:
    """Evaluate weights with lm-evaluation-harness: each checkpoint of a run next to its base model.

    Start the command again to continue.
    """
    from medarc_rl.lm_eval.command import lm_eval as run

    return run(options)
