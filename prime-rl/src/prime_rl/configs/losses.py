"""The losses of the RL trainer: sections of `trainer.loss`. What they compute is in `prime_rl.trainer.rl`."""

from collections.abc import Iterator
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from prime_rl.utils.pydantic_config import BaseConfig, raise_faults


class DefaultLossConfig(BaseConfig):
    """The RL loss: a clipped and masked policy gradient on importance ratios."""

    type: Literal["default"] = "default"
    """The built-in loss."""

    ratio_type: Literal["token", "sequence"] = "token"
    """Importance ratio of a token, or of its whole sequence."""

    token_mask_high: float = Field(8.0, ge=0)
    """Leave out tokens whose ratio is above."""

    token_mask_low: float = Field(0.125, ge=0)
    """Leave out tokens whose ratio is below."""

    sequence_clip_high: float = Field(10.0, ge=0)
    """Largest ratio of a sequence; a larger one is cut to it."""

    geo_mask_high: float = Field(10.0, ge=0)
    """Leave out sequences whose geometric mean ratio is above."""

    geo_mask_low: float = Field(0.1, ge=0)
    """Leave out sequences whose geometric mean ratio is below."""

    sequence_mask_low: float = Field(0.0, ge=0)
    """Leave out sequences with any token's ratio below."""

    sequence_mask_high: float = Field(100.0, ge=0)
    """Leave out sequences with any token's ratio above."""

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
    """A loss of your own."""

    type: Literal["custom"] = "custom"
    """Your own."""

    import_path: str
    """Dotted path of the function."""

    kwargs: dict[str, Any] = Field({})
    """Keyword arguments for it."""


class BaseSurrogateLossConfig(BaseConfig):
    """What the published losses share."""

    average: Literal["token", "sequence", "constant"] = "token"
    """Mean over all tokens of the step; mean over the tokens of each sequence, then over sequences; or each sequence's
    sum divided by `constant_tokens`, then the mean over sequences."""

    constant_tokens: int = Field(1, ge=1)
    """Tokens that each sequence counts as, with `average = "constant"`."""


class ClipLossConfig(BaseSurrogateLossConfig):
    """PPO's clipped surrogate on the ratio to the sampling policy: GRPO, Dr. GRPO, DAPO, REINFORCE++."""

    type: Literal["clip"] = "clip"
    """Clipped surrogate."""

    clip_low: float = Field(0.2, ge=0, le=1)
    """Ratios below 1 minus this gain nothing more."""

    clip_high: float = Field(0.2, ge=0)
    """Ratios above 1 plus this gain nothing more."""

    dual_clip: float | None = Field(None, gt=1)
    """Largest ratio that a negative advantage counts with; None sets no bound."""


class GSPOLossConfig(BaseSurrogateLossConfig):
    """GSPO: the clipped surrogate on a sequence's geometric mean ratio."""

    type: Literal["gspo"] = "gspo"
    """Group sequence policy optimization."""

    average: Literal["token", "sequence", "constant"] = "sequence"
    """As in the other losses; GSPO's own is `sequence`."""

    clip_low: float = Field(3e-4, ge=0, le=1)
    """Sequence ratios below 1 minus this gain nothing more."""

    clip_high: float = Field(4e-4, ge=0)
    """Sequence ratios above 1 plus this gain nothing more."""


class TruncatedLossConfig(BaseSurrogateLossConfig):
    """REINFORCE with truncated importance weights, so that every token keeps its gradient: CISPO, RLOO."""

    type: Literal["truncated"] = "truncated"
    """Truncated importance weights."""

    weight_low: float = Field(0.0, ge=0)
    """Smaller weights are raised to this."""

    weight_high: float = Field(5.0, gt=0)
    """Larger weights are cut to this."""

    @model_validator(mode="after")
    def _check_rules(self) -> Self:
        if self.weight_low >= self.weight_high:
            raise_faults([f"weight_low ({self.weight_low}) must be below weight_high ({self.weight_high})"])
        return self


class DecoupledLossConfig(BaseSurrogateLossConfig):
    """Decoupled PPO: clipped around the policy of the step's start, weighted back to the policy that sampled."""

    type: Literal["decoupled"] = "decoupled"
    """Decoupled PPO."""

    clip_low: float = Field(0.2, ge=0, le=1)
    """Ratios to the policy of the step's start below 1 minus this gain nothing more."""

    clip_high: float = Field(0.2, ge=0)
    """Ratios to the policy of the step's start above 1 plus this gain nothing more."""

    dual_clip: float | None = Field(None, gt=1)
    """Largest ratio that a negative advantage counts with; None sets no bound."""

    behaviour_weight_cap: float | None = Field(5.0, gt=0)
    """Tokens with a larger weight, from the sampling policy to that of the step's start, are left out; None keeps
    all."""


SurrogateLossConfig = ClipLossConfig | GSPOLossConfig | TruncatedLossConfig | DecoupledLossConfig
LossConfig = Annotated[DefaultLossConfig | CustomLossConfig | SurrogateLossConfig, Field(discriminator="type")]
