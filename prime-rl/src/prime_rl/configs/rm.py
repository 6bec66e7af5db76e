"""Training of a reward model on preferences: root of `rm`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from pydantic import Field

from prime_rl.configs.data import SFTDataConfig
from prime_rl.configs.dpo import PreferenceConfig
from prime_rl.utils.pydantic_config import BaseConfig


class RewardLossConfig(BaseConfig):
    """The loss of a pair, Bradley-Terry's: -log sigma(r(chosen) - r(rejected) - margin). `margin` is a column of the
    data, and 0 without it. Names are TRL's."""

    center_rewards_coefficient: float | None = Field(None, ge=0, le=1000)
    """Weight of the mean of (r(chosen) + r(rejected))^2, which keeps rewards near 0. None has none; 0.01 is usual."""

    score_margin: float = Field(0.0, ge=0, le=1000)
    """The margin of a row without `margin` is this times score_chosen - score_rejected, as in UltraFeedback. 0 gives
    none."""


class RewardModelConfig(PreferenceConfig):
    """Training of a reward model on preferences. Read by `rm`. It has every key of `SFTConfig`, with the same meaning,
    and those below. `model.name` is a language model, which gets a new head `score`, or a reward model. An answer, with
    its prompt, has at most `data.seq_len` tokens, and a packed row has room for two of that length."""

    component: ClassVar[str] = "rm"

    loss: RewardLossConfig = RewardLossConfig()  # type: ignore[assignment]  # in place of SFT's
    """The loss of a pair."""

    def _hold(self, data: SFTDataConfig) -> None:
        data.hold_pairs(are_scored=True, score_margin=self.loss.score_margin)

    def _preference_faults(self) -> Iterator[str]:
        yield from super()._preference_faults()
        if self.eval is not None:
            yield "[eval] runs rollouts, and a reward model writes no text: remove it, and validate with [val]"


__all__ = ["RewardLossConfig", "RewardModelConfig"]
