"""How rewards become advantages: sections of `orchestrator.advantage`."""

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from prime_rl.configs.ranges import Count
from prime_rl.configs.shared import ImportPath
from prime_rl.utils.pydantic_config import BaseConfig, raise_faults


class DefaultAdvantageConfig(BaseConfig):
    """Reward minus the mean of its group."""

    type: Literal["default"] = "default"
    """The default function."""

    length_weighted_mean: bool = False
    """Weight the mean by the lengths of the answers."""


class CustomAdvantageConfig(BaseConfig):
    """An advantage function of your own."""

    type: Literal["custom"] = "custom"
    """Your own function."""

    import_path: ImportPath
    """Dotted path of the function, such as `package.module.name`."""

    kwargs: dict[str, Any] = Field({})
    """Keyword arguments of the function."""


class OverlongConfig(BaseConfig):
    """DAPO's overlong penalty: lowers the reward linearly over the last tokens before the length limit."""

    max_tokens: Count
    """Length at which an answer loses the whole `penalty`; usually `sampling.max_tokens`."""

    buffer_tokens: Count
    """Number of tokens before `max_tokens` over which the penalty grows from 0."""

    penalty: float = Field(1.0, ge=0)
    """Amount subtracted from the reward at `max_tokens`."""

    @model_validator(mode="after")
    def _check_rules(self) -> "OverlongConfig":
        if self.buffer_tokens > self.max_tokens:
            raise_faults([f"buffer_tokens ({self.buffer_tokens}) is above max_tokens ({self.max_tokens})"])
        return self


class NormalizedAdvantageConfig(BaseConfig):
    """Reward minus a baseline, divided by a scale."""

    type: Literal["normalized"] = "normalized"
    """Normalised."""

    baseline: Literal["group", "leave_one_out", "batch", "none"] = "group"
    """Baseline: the mean of the group, of the other rollouts in the group, of the whole batch, or none."""

    scale: Literal["group", "batch", "none"] = "group"
    """Scale: the standard deviation of the rewards in the group, in the whole batch, or none."""

    overlong: OverlongConfig | None = None
    """Penalty for answers near the length limit. None disables it."""


AdvantageConfig = Annotated[
    DefaultAdvantageConfig | CustomAdvantageConfig | NormalizedAdvantageConfig, Field(discriminator="type")
]
