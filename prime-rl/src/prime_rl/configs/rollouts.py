"""Environments, and how rollouts in them are sampled: for training, evaluation and validation."""

from typing import Any, Literal

from pydantic import AliasChoices, Field

from prime_rl.utils.pydantic_config import BaseConfig


class TemperatureSchedulerConfig(BaseConfig):
    """A temperature that changes over the run."""

    type: Literal["linear", "cosine"] = "linear"
    """Shape of the curve."""

    start_temperature: float = Field(ge=0)
    """At step 0."""

    end_temperature: float = Field(ge=0)
    """At the last step."""

    total_steps: int | None = Field(None, ge=1)
    """Length; None is `max_steps`."""


class SamplingConfig(BaseConfig):
    """How training rollouts are sampled. `top_p` is always 1, `top_k` -1 and `min_p` 0."""

    temperature: float | None = Field(None, ge=0)
    """Temperature; None is 1.0 without `temp_scheduler`."""

    temp_scheduler: TemperatureSchedulerConfig | None = None
    """A changing temperature; None keeps it constant."""

    repetition_penalty: float = Field(1.0, ge=0)
    """Penalty of repeated tokens; 1 is none."""

    max_tokens: int | None = None
    """Tokens of one turn; None leaves it to the server."""

    min_tokens: int = Field(0, ge=0)
    """Fewest tokens of one turn."""

    seed: int | None = None
    """Seed of the sampler; None leaves it to the server."""

    extra_body: dict[str, Any] = Field({})
    """More keys for the request."""


class EvalSamplingConfig(BaseConfig):
    """How eval rollouts are sampled. None leaves a value to the server."""

    temperature: float | None = Field(None, ge=0)
    """Temperature."""

    repetition_penalty: float | None = Field(None, ge=0)
    """Penalty of repeated tokens; 1 is none."""

    top_p: float | None = None
    """Sample from the smallest set of tokens with this probability."""

    top_k: int | None = None
    """Sample from the k likeliest tokens."""

    min_p: float | None = None
    """Leave out tokens below this fraction of the likeliest one's probability."""

    max_tokens: int | None = None
    """Tokens of one turn."""

    min_tokens: int | None = None
    """Fewest tokens of one turn."""

    reasoning_effort: Literal["minimal", "low", "medium", "high"] | None = None
    """Reasoning effort."""

    seed: int | None = None
    """Seed of the sampler: the n-th rollout of each example gets seed + n."""

    extra_body: dict[str, Any] = Field({})
    """More keys for the request."""


class EnvConfig(BaseConfig):
    """An environment of the verifiers library."""

    id: str = "reverse-text"
    """Id of the environment, with or without @version."""

    args: dict[str, Any] = Field({})
    """Arguments of its constructor."""

    name: str | None = None
    """Name in logs and metrics; None is the id."""

    address: str | None = None
    """A running environment server; None starts one with `env_servers`, and else runs it in the orchestrator."""

    extra_env_kwargs: dict[str, Any] = Field({})
    """Arguments that the system sets: `seq_len` and `score_rollouts` come from the orchestrator."""


class EvalEnvConfig(EnvConfig):
    """An environment to evaluate on."""

    num_examples: int | None = None
    """Examples; None or 0 is the value of `eval`."""

    rollouts_per_example: int | None = None
    """Rollouts of an example; None or 0 is the value of `eval`."""

    skip_first: int = Field(0, ge=0)
    """Examples to skip at the start."""

    max_retries: int = Field(0, ge=0)
    """Attempts after a failed rollout."""


class EvalConfig(BaseConfig):
    """Evaluation during training."""

    env: list[EvalEnvConfig] = Field([EvalEnvConfig()])
    """The environments."""

    sampling: EvalSamplingConfig = EvalSamplingConfig()
    """How rollouts are sampled."""

    num_examples: int = -1
    """Examples of an environment; -1 is all."""

    rollouts_per_example: int = Field(1, ge=1)
    """Rollouts of an example."""

    interval: int = Field(100, ge=1)
    """Policy versions between two evaluations; the last version is evaluated in any case."""

    eval_base_model: bool = True
    """Evaluate before the first step too."""

    skip_eval_on_resume: bool = Field(
        True, validation_alias=AliasChoices("skip_eval_on_resume", "skip_eval_on_restart")
    )
    """Do not evaluate right after a resume. Also written `skip_eval_on_restart`."""

    cancel_inflight_rollouts_on_eval: bool = False
    """Cancel training rollouts first."""


class EvalSaveHFConfig(BaseConfig):
    """Where evaluation results go on the Hugging Face hub. No key holds one."""

    dataset_name: str | None = None
    """Dataset."""

    dataset_subset: str | None = None
    """Subset."""

    dataset_split: str | None = None
    """Split."""

    private: bool = False
    """Make the dataset private."""


class ValConfig(BaseConfig):
    """Validation: rollouts of the environments' rows for evaluation, sampled as for training, the same each time."""

    num_examples: int = Field(16, ge=1)
    """Examples."""

    rollouts_per_example: int = Field(1, ge=1)
    """Rollouts of an example."""

    interval: int = Field(10, ge=1)
    """Steps between two validations."""
