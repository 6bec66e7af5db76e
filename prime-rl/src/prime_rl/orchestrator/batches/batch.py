"""Builds a training batch from groups: its size, filters of degenerate rollouts, samples, and the message."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from prime_rl.checks.model_files import vocab_size as vocab_size_of
from prime_rl.configs.orchestrator import FilterConfig, GibberishFilterConfig
from prime_rl.orchestrator.errors import OrchestratorError
from prime_rl.orchestrator.rollouts.rollout import Group, Rollout, to_samples
from prime_rl.transport.messages import TrainingBatch, TrainingSample
from prime_rl.utils.errors import StartFault
from prime_rl.utils.logger import count_of


@dataclass(frozen=True, slots=True)
class BatchTarget:
    """Size of a batch, in rollouts or in tokens. A rollout counts the prompt and completion of its last model call."""

    rollouts: int | None = None
    tokens: int | None = None

    @property
    def size(self) -> int:
        """Least total count of the groups in a batch."""
        return self.rollouts or 1 if self.tokens is None else self.tokens

    def count(self, group: Group) -> int:
        """Count of one group: its rollouts, or their tokens."""
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
        """Samples with at least one token to train on. Only these are sent."""
        return [sample for _, samples in self.samples for sample in samples if any(sample.completion_mask)]

    def message(self, step: int) -> TrainingBatch:
        trained = self.trained
        named = {digest for sample in trained for digest in sample.images or ()}
        shown = {each.digest: each for rollout in self.rollouts for call in rollout.trace.calls for each in call.images}
        return TrainingBatch(examples=trained, step=step, images=[shown[digest] for digest in sorted(named)])


def build_batch(groups: list[Group], *, needs_top: bool = False) -> Batch:
    """Convert the rollouts of a step to samples. `needs_top`: each has the likeliest tokens that the engine reports.

    Raises:
        OrchestratorError: one of them has not.
    """
    batch = Batch(groups, [(rollout, to_samples(rollout)) for group in groups for rollout in group.rollouts])
    for rollout, samples in batch.samples if needs_top else ():
        if any(sample.sampler_top is None and any(sample.completion_mask) for sample in samples):
            raise OrchestratorError(
                f"environment {rollout.example.env!r} returns tokens without those that the engine reported beside "
                "them, as workflows with tensors of their own do: remove orchestrator.sampling.top_k and top_logprobs"
            )
    return batch


def what_is_left_out(batch: Batch, limit: str) -> str:
    """Explain why a batch has no token to train on. `limit` names the limit on the rollouts' length."""
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


# Filters of degenerate rollouts.


class Filter(Protocol):
    """Examines a rollout's sampled tokens. With `enforce`, detected rollouts are not trained on."""

    @property
    def name(self) -> str: ...

    @property
    def enforce(self) -> bool: ...

    def detects(self, rollout: Rollout) -> bool: ...


@dataclass(frozen=True, slots=True)
class GibberishFilter:
    """Detects a token with an id above the threshold and a log-probability far below that of a uniform distribution.

    High ids are rare tokens in byte-pair vocabularies.
    """

    token_id_threshold: int
    max_logprob: float
    enforce: bool
    name: str = "gibberish"

    def detects(self, rollout: Rollout) -> bool:
        return any(
            token > self.token_id_threshold and logprob < self.max_logprob
            for call in rollout.trace.calls
            for token, logprob in zip(call.completion_ids, call.inference_logprobs, strict=True)
        )


@dataclass(frozen=True, slots=True)
class RepetitionFilter:
    """Detects `window` consecutive tokens, counted across turns, with log-probabilities above `min_logprob`."""

    window: int
    min_logprob: float
    enforce: bool
    name: str = "repetition"

    def detects(self, rollout: Rollout) -> bool:
        if sum(len(call.completion_ids) for call in rollout.trace.calls) < self.window:
            return False
        streak = 0
        for call in rollout.trace.calls:
            for logprob in call.inference_logprobs:
                streak = streak + 1 if logprob > self.min_logprob else 0
                if streak >= self.window:
                    return True
        return False


def setup_filters(configs: Sequence[FilterConfig], model_name: str) -> list[Filter]:
    """Build the configured filters, in order. The gibberish filter reads the vocabulary size from the model's config.

    Raises:
        OrchestratorError: the vocabulary size cannot be read.
    """
    return [_setup_filter(config, model_name) for config in configs]


def _setup_filter(config: FilterConfig, model_name: str) -> Filter:
    if isinstance(config, GibberishFilterConfig):
        uniform_logprob = -math.log(vocab_size(model_name))
        return GibberishFilter(config.token_id_threshold, uniform_logprob - config.logprob_offset, config.enforce)
    return RepetitionFilter(config.window, math.log(config.prob_threshold), config.enforce)


def vocab_size(model_name: str) -> int:
    """The vocabulary size in a model's `config.json`, read from its directory or from the hub.

    Raises:
        OrchestratorError: the file does not exist, or has no vocabulary size.
    """
    folder = Path(model_name)
    try:
        if not folder.is_dir():
            from huggingface_hub import hf_hub_download

            folder = Path(hf_hub_download(model_name, "config.json")).parent
        return vocab_size_of(folder)
    except (OSError, ValueError, StartFault) as error:
        # The hub's errors derive from OSError and ValueError, and their messages have several lines.
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise OrchestratorError(
            f"orchestrator.filters: the gibberish filter needs the vocabulary size of {model_name!r} ({reason}); "
            "correct orchestrator.model.name, or remove this filter"
        ) from error


def apply_filters(filters: Sequence[Filter], rollouts: Sequence[Rollout]) -> None:
    """Record the metric `filter/<name>` (0 or 1) on each rollout, and mask rollouts detected by an enforced filter.

    Only the first filter that detects a rollout counts. A masked rollout's reward still enters the group's baseline.
    """
    for rollout in rollouts:
        hit = next((each for each in filters if each.detects(rollout)), None)
        rollout.metrics = {**(rollout.metrics or {}), **{f"filter/{each.name}": float(each is hit) for each in filters}}
        if hit is not None and hit.enforce:
            rollout.masked_by = rollout.stop_condition = hit.name
