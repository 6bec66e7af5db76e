"""How rewards become advantages: sections of `orchestrator.advantage`."""

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from prime_rl.utils.pydantic_config import BaseConfig, raise_faults


class DefaultAdvantageConfig(BaseConfig):
    """Reward less the mean of its group."""

    type: Literal["default"] = "default"
    """The built-in one."""

    length_weighted_mean: bool = False
    """Weight the mean by the lengths of the answers."""


class CustomAdvantageConfig(BaseConfig):
    """An advantage function of your own."""

    type: Literal["custom"] = "custom"
    """Your own."""

    import_path: str
    """Dotted path of the function."""

    kwargs: dict[str, Any] = Field({})
    """Keyword arguments for it."""


class OverlongConfig(BaseConfig):
    """DAPO's soft punishment: the reward falls linearly over the last tokens before an answer is cut off."""

    max_tokens: int = Field(ge=1)
    """Length at which an answer loses `penalty`; usually `sampling.max_tokens`."""

    buffer_tokens: int = Field(ge=1)
    """Tokens before that over which the penalty grows from 0."""

    penalty: float = Field(1.0, ge=0)
    """Taken off the reward at `max_tokens`."""

    @model_validator(mode="after")
    def _check_rules(self) -> "OverlongConfig":
        if self.buffer_tokens > self.max_tokens:
            raise_faults([f"buffer_tokens ({self.buffer_tokens}) is above max_tokens ({self.max_tokens})"])
        return self


class NormalizedAdvantageConfig(BaseConfig):
    """Reward less a baseline, divided by a scale."""

    type: Literal["normalized"] = "normalized"
    """Normalised."""

    baseline: Literal["group", "leave_one_out", "batch", "none"] = "group"
    """What is taken off: the mean of the group, of the others in the group, of the whole batch, or nothing."""

    scale: Literal["group", "batch", "none"] = "group"
    """What divides: the standard deviation in the group, in the whole batch, or nothing."""

    overlong: OverlongConfig | None = None
    """Penalty of answers that are almost cut off; None has none."""


AdvantageConfig = Annotated[
    DefaultAdvantageConfig | CustomAdvantageConfig | NormalizedAdvantageConfig, Field(discriminator="type")
]
