"""Evaluation and validation during training."""

from pydantic import AliasChoices, Field

from prime_rl.configs.ranges import Count, CountOrAll
from prime_rl.configs.rollouts.environments import EvalEnvConfig
from prime_rl.configs.rollouts.sampling import EvalSamplingConfig
from prime_rl.utils.pydantic_config import BaseConfig


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
    """Do not evaluate right after a resume, even if a stop has cut an evaluation short. The last version is evaluated
    nevertheless, unless it has been. Also written `skip_eval_on_restart`."""

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
