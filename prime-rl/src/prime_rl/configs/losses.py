"""The losses of the RL trainer: sections of `trainer.loss`. What they compute is in `prime_rl.trainer.rl`."""

from collections.abc import Iterator
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from prime_rl.configs.ranges import Count, Fraction
from prime_rl.configs.shared import ImportPath
from prime_rl.utils.pydantic_config import BaseConfig, raise_faults


class DefaultLossConfig(BaseConfig):
    """A clipped and masked policy gradient on importance ratios."""

    type: Literal["default"] = "default"
    """The default loss."""

    ratio_type: Literal["token", "sequence"] = "token"
    """Importance ratio of each token, or of its whole sequence."""

    token_mask_high: float = Field(8.0, ge=0)
    """Exclude tokens whose ratio is above this."""

    token_mask_low: float = Field(0.125, ge=0)
    """Exclude tokens whose ratio is below this."""

    sequence_clip_high: float = Field(10.0, ge=0)
    """Maximum ratio of a sequence. Larger ones are clipped to it."""

    geo_mask_high: float = Field(10.0, ge=0)
    """Exclude sequences whose geometric mean ratio is above this."""

    geo_mask_low: float = Field(0.1, ge=0)
    """Exclude sequences whose geometric mean ratio is below this."""

    sequence_mask_low: float = Field(0.0, ge=0)
    """Exclude sequences in which any token's ratio is below this."""

    sequence_mask_high: float = Field(100.0, ge=0)
    """Exclude sequences in which any token's ratio is above this."""

    adv_tau: float = Field(1.0, ge=0)
    """Weight of the advantage."""

    teacher_tau: float = Field(0.0, ge=0)
    """Weight of the teacher's log-probabilities."""

    kl_tau: float = Field(0.0, ge=0)
    """Weight of the KL term."""

    @model_validator(mode="after")
    def _check_rules(self) -> Self:
        raise_faults(self._faults())
        return self

    def _faults(self) -> Iterator[str]:
        for mask in ("token_mask", "geo_mask", "sequence_mask"):
            low, high = getattr(self, f"{mask}_low"), getattr(self, f"{mask}_high")
            if low >= high:
                yield f"{mask}_low ({low}) must be below {mask}_high ({high})"


class CustomLossConfig(BaseConfig):
    """Your own loss function."""

    type: Literal["custom"] = "custom"
    """Your own function."""

    import_path: ImportPath
    """Dotted path of the function, such as `package.module.name`."""

    kwargs: dict[str, Any] = Field({})
    """Keyword arguments of the function."""


class BaseSurrogateLossConfig(BaseConfig):
    """Keys that the published losses share."""

    average: Literal["token", "sequence", "constant"] = "token"
    """`token`: mean over all tokens of the step. `sequence`: mean over each sequence's tokens, then over sequences.
    `constant`: each sequence's sum divided by `constant_tokens`, then the mean over sequences."""

    constant_tokens: Count = 1
    """Divisor of each sequence's sum with `average = "constant"`."""


class ClipLossConfig(BaseSurrogateLossConfig):
    """PPO's clipped surrogate on the ratio to the sampling policy: GRPO, Dr. GRPO, DAPO, REINFORCE++."""

    type: Literal["clip"] = "clip"
    """Clipped surrogate."""

    clip_low: Fraction = 0.2
    """Ratios are clipped below 1 minus this."""

    clip_high: float = Field(0.2, ge=0)
    """Ratios are clipped above 1 plus this."""

    dual_clip: float | None = Field(None, gt=1)
    """Maximum ratio for tokens with a negative advantage. None sets no maximum."""


class GSPOLossConfig(BaseSurrogateLossConfig):
    """GSPO: the clipped surrogate on each sequence's geometric mean ratio."""

    type: Literal["gspo"] = "gspo"
    """Group sequence policy optimization."""

    average: Literal["token", "sequence", "constant"] = "sequence"
    """As in the other losses. `sequence` is GSPO's own."""

    clip_low: Fraction = 3e-4
    """Sequence ratios are clipped below 1 minus this."""

    clip_high: float = Field(4e-4, ge=0)
    """Sequence ratios are clipped above 1 plus this."""


class TruncatedLossConfig(BaseSurrogateLossConfig):
    """REINFORCE with truncated importance weights, so that every token keeps a gradient: CISPO, RLOO."""

    type: Literal["truncated"] = "truncated"
    """Truncated importance weights."""

    weight_low: float = Field(0.0, ge=0)
    """Minimum weight. Smaller ones are raised to it."""

    weight_high: float = Field(5.0, gt=0)
    """Maximum weight. Larger ones are truncated to it."""

    @model_validator(mode="after")
    def _check_rules(self) -> Self:
        if self.weight_low >= self.weight_high:
            raise_faults([f"weight_low ({self.weight_low}) must be below weight_high ({self.weight_high})"])
        return self


class DecoupledLossConfig(BaseSurrogateLossConfig):
    """Decoupled PPO: clips around the policy at the start of the step, and reweights to the policy that sampled."""

    type: Literal["decoupled"] = "decoupled"
    """Decoupled PPO."""

    clip_low: Fraction = 0.2
    """Ratios to the policy at the start of the step are clipped below 1 minus this."""

    clip_high: float = Field(0.2, ge=0)
    """Ratios to the policy at the start of the step are clipped above 1 plus this."""

    dual_clip: float | None = Field(None, gt=1)
    """Maximum ratio for tokens with a negative advantage. None sets no maximum."""

    behaviour_weight_cap: float | None = Field(5.0, gt=0)
    """Exclude tokens whose weight (policy at the start of the step / policy that sampled) is above this. None keeps
    all."""


SurrogateLossConfig = ClipLossConfig | GSPOLossConfig | TruncatedLossConfig | DecoupledLossConfig
LossConfig = Annotated[DefaultLossConfig | CustomLossConfig | SurrogateLossConfig, Field(discriminator="type")]
