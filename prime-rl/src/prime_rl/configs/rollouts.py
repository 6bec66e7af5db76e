"""Environments, and how their rollouts are sampled: for training, evaluation and validation."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import AliasChoices, Field, model_validator

from prime_rl.configs.ranges import (
    LARGEST,
    Count,
    CountOrAll,
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
    """Seed of the sampler. None leaves it to the server."""

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
    """Seed of the sampler. The n-th rollout of each example uses seed + n."""

    extra_body: dict[str, Any] = Field({})
    """Additional keys of the request body."""


class EnvConfig(BaseConfig):
    """An environment of the verifiers library."""

    id: str = "reverse-text"
    """Id of the environment, with or without @version."""

    args: dict[str, Any] = Field({})
    """Arguments of its constructor."""

    name: str | None = None
    """Name in logs and metrics. None takes the id."""

    address: str | None = None
    """Address of a running environment server. None runs the environment in the orchestrator, or with `env_servers` in
    a server that the orchestrator starts."""

    python: Path | None = None
    """Python interpreter of the environment, such as `envs/medqa/.venv/bin/python`: it then runs in a process of its
    own, with the packages of that interpreter. verifiers 0.1.5 to 0.3 may be installed there. None takes the run's
    own."""

    extra_env_kwargs: dict[str, Any] = Field({})
    """Attributes to set on the environment. The orchestrator adds `seq_len` and `score_rollouts`."""

    max_reward_errors: Fraction = 0.5
    """End the run if reward functions fail in more than this fraction of the last 32 rollouts, in all of the first 8,
    or in all of a shorter run. 1 never does."""

    @model_validator(mode="after")
    def _check_place(self) -> Self:
        if self.python is not None and self.address is not None:
            raise ValueError("python and address exclude each other: at an address, a server runs already")
        return self


class EvalEnvConfig(EnvConfig):
    """An environment to evaluate on."""

    num_examples: CountOrAll | None = None
    """Number of examples. None or 0 takes the value of `eval`."""

    rollouts_per_example: WholeNumber | None = None
    """Rollouts per example. None or 0 takes the value of `eval`."""

    skip_first: WholeNumber = 0
    """Number of examples to skip at the start."""

    max_retries: WholeNumber = 0
    """Number of retries after a failed rollout."""


def repeated_names(key: str, envs: Sequence[EnvConfig]) -> Iterator[str]:
    """One line for each name that several environments share, in logs and metrics."""
    names = [env.name or env.id for env in envs]
    for name in sorted({name for name in names if names.count(name) > 1}):
        yield f"{key}: several environments are called {name!r}: set `name`"


class EvalConfig(BaseConfig):
    """Evaluation during training."""

    env: list[EvalEnvConfig] = Field([EvalEnvConfig()])
    """The environments."""

    sampling: EvalSamplingConfig = EvalSamplingConfig()
    """How rollouts are sampled."""

    num_examples: CountOrAll = -1
    """Examples per environment. -1 is all of them."""

    rollouts_per_example: Count = 1
    """Rollouts per example."""

    interval: Count = 100
    """Policy versions between two evaluations. The last version is always evaluated."""

    eval_base_model: bool = True
    """Also evaluate before the first step."""

    skip_eval_on_resume: bool = Field(
        True, validation_alias=AliasChoices("skip_eval_on_resume", "skip_eval_on_restart")
    )
    """Do not evaluate right after a resume. Also written `skip_eval_on_restart`."""

    cancel_inflight_rollouts_on_eval: bool = False
    """Cancel training rollouts in flight before an evaluation."""


class EvalSaveHFConfig(BaseConfig):
    """A dataset on the Hugging Face hub for evaluation results. No config has this section."""

    dataset_name: str | None = None
    """Dataset."""

    dataset_subset: str | None = None
    """Subset."""

    dataset_split: str | None = None
    """Split."""

    private: bool = False
    """Make the dataset private."""


class ValConfig(BaseConfig):
    """Validation: rolls out the same evaluation examples each time, with the sampling settings of training."""

    num_examples: Count = 16
    """Number of examples."""

    rollouts_per_example: Count = 1
    """Rollouts per example."""

    interval: Count = 10
    """Steps between two validations."""


class KeepRolloutsConfig(BaseConfig):
    """Which rollouts stay on disk, in `RUN/samples`: some of each step, and all of evaluations."""

    per_step: Count = 32
    """Rollouts of each step, in whole groups: one at random, the worst, the best, and more at random. One group is kept
    even if it is larger."""

    max_total_mib: Count = 1024
    """Size of all kept files in MiB. Beyond it steps between the first and the newest are deleted, evenly."""

    max_chars: Annotated[int, Field(ge=1000, le=LARGEST)] = 200_000
    """Characters of the messages of a rollout. Longer messages are cut in their middle."""

    max_tokens: Count = 32_768
    """Tokens of a rollout whose ids, log-probabilities and texts are kept."""
