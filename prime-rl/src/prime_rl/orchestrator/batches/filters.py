"""Filters that detect degenerate rollouts: gibberish and repetition loops."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from prime_rl.checks.model_files import vocab_size as vocab_size_of
from prime_rl.checks.start_dir import StartFault
from prime_rl.configs.orchestrator import FilterConfig, GibberishFilterConfig
from prime_rl.orchestrator.errors import OrchestratorError
from prime_rl.orchestrator.rollouts.rollout import Rollout


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


def apply_filters(filters: Sequence[Filter], rollouts: Sequence[Rollout]) -> None:
    """Record the metric `filter/<name>` (0 or 1) on each rollout, and mask rollouts detected by an enforced filter.

    Only the first filter that detects a rollout counts. A masked rollout's reward still enters the group's baseline.
    """
    for rollout in rollouts:
        hit = next((each for each in filters if each.detects(rollout)), None)
        rollout.metrics = {**(rollout.metrics or {}), **{f"filter/{each.name}": float(each is hit) for each in filters}}
        if hit is not None and hit.enforce:
            rollout.masked_by = rollout.stop_condition = hit.name


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


def _setup_filter(config: FilterConfig, model_name: str) -> Filter:
    if isinstance(config, GibberishFilterConfig):
        uniform_logprob = -math.log(vocab_size(model_name))
        return GibberishFilter(config.token_id_threshold, uniform_logprob - config.logprob_offset, config.enforce)
    return RepetitionFilter(config.window, math.log(config.prob_threshold), config.enforce)
