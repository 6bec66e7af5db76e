"""How rollouts are sampled: for training and for evaluation."""

from typing import Any, Literal

from pydantic import Field

from prime_rl.configs.ranges import (
    LARGEST,
    Count,
    EvalTemperature,
    Fraction,
    RepetitionPenalty,
    Seed,
    TrainTemperature,
    WholeNumber,
)
from prime_rl.utils.pydantic_config import BaseConfig


class TemperatureSchedulerConfig(BaseConfig):
    """A temperature that changes over the run."""

    type: Literal["linear", "cosine"] = "linear"
    """Shape of the curve."""

    start_temperature: TrainTemperature
    """Temperature at step 0."""

    end_temperature: TrainTemperature
    """Temperature at the last step. Above 0, because the trainer divides logits by it."""

    total_steps: Count | None = None
    """Number of steps. None takes `max_steps`."""


class SamplingConfig(BaseConfig):
    """How training rollouts are sampled. `top_p` is always 1, `top_k` -1 and `min_p` 0."""

    temperature: TrainTemperature | None = None
    """Temperature, by which the trainer divides logits. None is 1.0, unless `temp_scheduler` is set."""

    temp_scheduler: TemperatureSchedulerConfig | None = None
    """Schedule of the temperature. None keeps it constant."""

    repetition_penalty: RepetitionPenalty = 1.0
    """Penalty for repeated tokens. 1 is no penalty."""

    max_tokens: Count | None = None
    """Maximum tokens per turn. None leaves it to the server."""

    min_tokens: WholeNumber = 0
    """Minimum tokens per turn."""

    seed: Seed | None = None
    """Seed of the sampler. Each group of rollouts starts from a hash of it and of the example that was drawn, and its
    rollouts differ. None leaves it to the server."""

    extra_body: dict[str, Any] = Field({})
    """Additional keys of the request body."""


class EvalSamplingConfig(BaseConfig):
    """How evaluation rollouts are sampled. None leaves a value to the server.

    Evaluation during training takes `max_tokens`, `min_tokens`, `repetition_penalty` and `extra_body` from
    `orchestrator.sampling` if it does not set them itself.
    """

    temperature: EvalTemperature | None = None
    """Temperature."""

    repetition_penalty: RepetitionPenalty | None = None
    """Penalty for repeated tokens. 1 is no penalty."""

    top_p: float | None = Field(None, gt=0, le=1)
    """Sample from the smallest set of tokens whose probabilities sum to at least this."""

    top_k: int | None = Field(None, ge=-1, le=LARGEST)
    """Sample from the k most likely tokens. -1 and 0 sample from all."""

    min_p: Fraction | None = None
    """Exclude tokens below this fraction of the most likely token's probability."""

    max_tokens: Count | None = None
    """Maximum tokens per turn."""

    min_tokens: WholeNumber | None = None
    """Minimum tokens per turn."""

    reasoning_effort: Literal["minimal", "low", "medium", "high"] | None = None
    """Reasoning effort."""

    seed: Seed | None = None
    """Seed of the sampler. Each rollout uses a hash of it and of the rollout's environment, row and number, so rollouts
    differ, and another evaluation with the seed repeats them."""

    extra_body: dict[str, Any] = Field({})
    """Additional keys of the request body."""
