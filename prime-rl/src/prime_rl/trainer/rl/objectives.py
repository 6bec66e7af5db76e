"""The published policy-gradient objectives, each a function of one sequence's trained tokens.

With log-probabilities of the policy that is trained (theta), of the one that sampled (behave) and of the one that the
step began with (prox), and the advantage A_t, each gives the loss l_t of every token; how they are averaged is the
caller's affair (`average` in the config). Every objective is at its simplest where the policies agree: its gradient is
then -A_t * grad log theta_t.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from prime_rl.configs.losses import (
    ClipLossConfig,
    DecoupledLossConfig,
    GSPOLossConfig,
    SurrogateLossConfig,
    TruncatedLossConfig,
)

MAX_LOG_RATIO = 20.0
"""Log-ratios are cut here: an infinite ratio would make the gradient of its own clipping NaN."""


@dataclass(frozen=True, slots=True)
class Tokens:
    """The M trained tokens of one sequence; every tensor is [M]."""

    logprobs: Tensor
    """Of the policy that is trained; the only one with a gradient."""
    behave_logprobs: Tensor
    prox_logprobs: Tensor
    advantages: Tensor


Objective = Callable[[Tokens], tuple[Tensor, dict[str, Tensor]]]
"""From the tokens to their losses [M] and to metrics, scalars or [M], without a gradient."""


def clip_objective(tokens: Tokens, config: ClipLossConfig) -> tuple[Tensor, dict[str, Tensor]]:
    """PPO's clipped surrogate: r_t = theta_t / behave_t, l_t = -min(r_t*A_t, clip(r_t, 1-low, 1+high)*A_t).

    GRPO (Shao et al. 2024, DeepSeekMath), Dr. GRPO (Liu et al. 2025, Understanding R1-Zero-Like Training), DAPO (Yu et
    al. 2025, with high > low) and REINFORCE++ (Hu et al. 2025) share it; they differ in how losses are averaged and
    advantages made.
    """
    ratio = ratio_of(tokens.logprobs, tokens.behave_logprobs)
    return clipped_surrogate(ratio, tokens.advantages, (config.clip_low, config.clip_high), config.dual_clip)


def gspo_objective(tokens: Tokens, config: GSPOLossConfig) -> tuple[Tensor, dict[str, Tensor]]:
    """GSPO (Zheng et al. 2025, Group Sequence Policy Optimization), its GSPO-token form.

    s = exp(mean over t of log theta_t - log behave_t) is the whole sequence's ratio, and s_t = sg(s) * theta_t /
    sg(theta_t) has its value and token t's gradient; l_t = -min(s_t*A_t, clip(s_t, 1-low, 1+high)*A_t).
    """
    sequence_log_ratio = (tokens.logprobs - tokens.behave_logprobs).detach().mean()
    ratio = ratio_of(sequence_log_ratio + tokens.logprobs, tokens.logprobs.detach())
    return clipped_surrogate(ratio, tokens.advantages, (config.clip_low, config.clip_high))


def truncated_objective(tokens: Tokens, config: TruncatedLossConfig) -> tuple[Tensor, dict[str, Tensor]]:
    """REINFORCE with truncated importance weights: l_t = -sg(clip(theta_t / behave_t, low, high)) * A_t * log theta_t.

    CISPO (MiniMax 2025, MiniMax-M1) averages it over tokens. RLOO (Ahmadian et al. 2024, Back to Basics) sums it over
    the sequence, with leave-one-out advantages; it was published for tokens of the current policy, whose weight is 1.
    """
    weight = ratio_of(tokens.logprobs.detach(), tokens.behave_logprobs)
    kept = weight.clamp(config.weight_low, config.weight_high)
    return -kept * tokens.advantages * tokens.logprobs, {
        "importance_ratio": weight,
        "is_clipped": (kept != weight).float(),
    }


def decoupled_objective(tokens: Tokens, config: DecoupledLossConfig) -> tuple[Tensor, dict[str, Tensor]]:
    """Decoupled PPO (Hilton et al. 2022, Batch size-invariance for policy optimization; Fu et al. 2025, AReaL).

    rho_t = theta_t / prox_t, w_t = prox_t / behave_t (a constant; 0 above the cap),
    l_t = -w_t * min(rho_t*A_t, clip(rho_t, 1-low, 1+high)*A_t). Tokens of weight 0 still count in the average.
    """
    ratio = ratio_of(tokens.logprobs, tokens.prox_logprobs)
    clip = (config.clip_low, config.clip_high)
    losses, metrics = clipped_surrogate(ratio, tokens.advantages, clip, config.dual_clip)
    weight = ratio_of(tokens.prox_logprobs, tokens.behave_logprobs)
    cap = torch.inf if config.behaviour_weight_cap is None else config.behaviour_weight_cap
    kept = torch.where(weight > cap, 0.0, weight)
    return kept * losses, metrics | {"behave_weight": weight, "is_masked": (weight > cap).float()}


def ratio_of(logprobs: Tensor, reference: Tensor) -> Tensor:
    return (logprobs - reference).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def clipped_surrogate(
    ratio: Tensor, advantages: Tensor, clip: tuple[float, float], dual_clip: float | None = None
) -> tuple[Tensor, dict[str, Tensor]]:
    """-min(r*A, clip(r, 1-low, 1+high)*A), cut to `dual_clip` * |A| where A is negative (Ye et al. 2020)."""
    low, high = clip
    plain, clipped = -ratio * advantages, -ratio.clamp(1 - low, 1 + high) * advantages
    losses = torch.maximum(plain, clipped)
    if dual_clip is not None:
        losses = torch.where(advantages < 0, torch.minimum(losses, -dual_clip * advantages), losses)
    return losses, {"importance_ratio": ratio.detach(), "is_clipped": (losses > plain).float()}


def objective_of(config: SurrogateLossConfig) -> Objective:
    """The objective of a loss section."""
    match config:
        case ClipLossConfig():
            return lambda tokens: clip_objective(tokens, config)
        case GSPOLossConfig():
            return lambda tokens: gspo_objective(tokens, config)
        case TruncatedLossConfig():
            return lambda tokens: truncated_objective(tokens, config)
        case DecoupledLossConfig():
            return lambda tokens: decoupled_objective(tokens, config)
