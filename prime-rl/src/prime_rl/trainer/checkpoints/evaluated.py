"""Exports for the evaluation that runs next to a training: when one is due, and who deletes it."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist

from prime_rl.run.evaluations import EvaluatedSteps
from prime_rl.run.paths import RunPaths
from prime_rl.trainer.process.world import Process


@dataclass(frozen=True, slots=True)
class EvaluationQueue:
    """The exports that wait for an evaluation."""

    paths: RunPaths
    process: Process
    interval: int

    def is_due(self, step: int) -> bool:
        """Whether somebody waits for the weights after `step` updates. The same on all processes. Collective."""
        if step % self.interval != 0:
            return False
        # Read once: an evaluation may end at any time.
        found = [self.process.is_main and not self.paths.evaluation_lost.is_file()]
        if self.process.world_size > 1:
            dist.broadcast_object_list(found, src=0)
        return found[0]

    def leave(self, step: int) -> bool:
        """Let the evaluator delete an export. False if it waits for none or has evaluated it: then delete it here."""
        is_waited_for = step % self.interval == 0 and not self.paths.evaluation_lost.is_file()
        return is_waited_for and EvaluatedSteps(self.paths).leave(step)
