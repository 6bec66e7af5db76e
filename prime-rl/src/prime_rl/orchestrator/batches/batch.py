"""Builds a training batch: decides when it is full, and converts its rollouts to samples."""

from __future__ import annotations

from dataclasses import dataclass

from prime_rl.orchestrator.rollouts.rollout import Group, Rollout
from prime_rl.orchestrator.rollouts.trajectories import to_samples
from prime_rl.transport.messages import TrainingBatch, TrainingSample
from prime_rl.utils.logger import count_of


@dataclass(frozen=True, slots=True)
class BatchTarget:
    """Size of a batch, in rollouts or in tokens. A rollout counts the prompt and completion of its last model call."""

    rollouts: int | None = None
    tokens: int | None = None

    @property
    def size(self) -> int:
        """What the groups of a batch count together, at least."""
        return self.rollouts or 1 if self.tokens is None else self.tokens

    def count(self, group: Group) -> int:
        """What a group counts: its rollouts, or their tokens."""
        if self.tokens is None:
            return len(group.rollouts)
        return sum(rollout.total_tokens for rollout in group.rollouts)


@dataclass(frozen=True, slots=True)
class Batch:
    """The rollouts of one step, and the samples built from each."""

    groups: list[Group]
    samples: list[tuple[Rollout, list[TrainingSample]]]

    @property
    def rollouts(self) -> list[Rollout]:
        return [rollout for rollout, _ in self.samples]

    @property
    def trained(self) -> list[TrainingSample]:
        """Samples with at least one token to train on. The trainer would gain nothing from the others."""
        return [sample for _, samples in self.samples for sample in samples if any(sample.completion_mask)]

    def message(self, step: int) -> TrainingBatch:
        return TrainingBatch(examples=self.trained, step=step)


def build_batch(groups: list[Group]) -> Batch:
    """Convert the rollouts of a step to samples."""
    return Batch(groups, [(rollout, to_samples(rollout)) for group in groups for rollout in group.rollouts])


def what_is_left_out(batch: Batch, limit: str) -> str:
    """What became of the rollouts of a batch without a token to train on. `limit` is what limits their length."""
    rollouts = batch.rollouts
    failed = [rollout for rollout in rollouts if rollout.error is not None]
    whole = [rollout for rollout in rollouts if rollout.error is None]
    cut = sum(rollout.is_truncated for rollout in whole)
    masked = sum(not rollout.trains for rollout in whole)
    empty = sum(rollout.trains and not rollout.is_truncated for rollout in whole)
    first = f" (the first with {failed[0].error_detail or failed[0].error})" if failed else ""
    counts = (
        (len(failed), f"ended with an error{first}"),
        (cut, f"were cut off ({limit})"),
        (masked, "were masked by filters"),
        (empty, "have no answer"),
    )
    words = [f"{count} {what}" for count, what in counts if count]
    return f"of {count_of('rollout', len(rollouts))} {', '.join(words)}"
