"""When a batch is full, and what of it travels to the trainer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from prime_rl.orchestrator.rollouts.rollout import Group, Rollout
from prime_rl.orchestrator.rollouts.trajectories import to_samples
from prime_rl.transport.messages import TrainingBatch, TrainingSample


@dataclass(frozen=True, slots=True)
class BatchTarget:
    """How much a step needs: rollouts, or tokens, where a rollout counts those of its last model call."""

    rollouts: int | None = None
    tokens: int | None = None

    def reached(self, groups: Sequence[Group]) -> bool:
        rollouts = [rollout for group in groups for rollout in group.rollouts]
        if self.tokens is not None:
            return sum(rollout.total_tokens for rollout in rollouts) >= self.tokens
        return len(rollouts) >= (self.rollouts or 1)


@dataclass(frozen=True, slots=True)
class Batch:
    """A step's rollouts, each with the samples made from it."""

    groups: list[Group]
    samples: list[tuple[Rollout, list[TrainingSample]]]

    @property
    def rollouts(self) -> list[Rollout]:
        return [rollout for rollout, _ in self.samples]

    @property
    def trained(self) -> list[TrainingSample]:
        """The samples with at least one token to train on; others would only cost the trainer a forward pass."""
        return [sample for _, samples in self.samples for sample in samples if any(sample.completion_mask)]

    def message(self, step: int) -> TrainingBatch:
        return TrainingBatch(examples=self.trained, step=step)


def build_batch(groups: list[Group]) -> Batch:
    """Turn the rollouts of a step into samples."""
    return Batch(groups, [(rollout, to_samples(rollout)) for group in groups for rollout in group.rollouts])
