"""Published policy-gradient objectives, as functions of the trained tokens of a row's sequences.

Each objective computes the loss l_t of every token from its advantage A_t and its probabilities under three policies:
the trained one (theta), the one that sampled it (behave), and the one at the start of the step (prox). The caller
averages the losses (`average` in the config). If the policies are equal, every objective's gradient is
-A_t * grad log theta_t. `sg` is stop-gradient.
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
from prime_rl.trainer.rl.sequences import Sequences

MAX_LOG_RATIO = 20.0
"""Log-ratios are clamped to this magnitude, because an infinite ratio makes the gradient of clipping NaN."""


@dataclass(frozen=True, slots=True)
class Tokens:
    """The M trained tokens of a row; every tensor is [M]."""

    logprobs: Tensor
    """Log-probabilities under the trained policy; the only field with a gradient."""
    inference_logprobs: Tensor
    prox_logprobs: Tensor
    advantages: Tensor
    sequences: Sequences
    """The sequences that the tokens belong to."""
    teacher_logprobs: Tensor | None = None


Objective = Callable[[Tokens], tuple[Tensor, dict[str, Tensor]]]
"""Maps tokens to their losses [M] and to metrics [M] without gradient."""


def clip_objective(tokens: Tokens, config: ClipLossConfig) -> tuple[Tensor, dict[str, Tensor]]:
    """PPO's clipped surrogate: r_t = theta_t / behave_t, l_t = -min(r_t*A_t, clip(r_t, 1-low, 1+high)*A_t).

    Shared by GRPO (Shao et al. 2024, DeepSeekMath), Dr. GRPO (Liu et al. 2025, Understanding R1-Zero-Like Training),
    DAPO (Yu et al. 2025, with high > low) and REINFORCE++ (Hu et al. 2025), which differ in how they average losses and
    compute advantages.
    """
    ratio = importance_ratio(tokens.logprobs, tokens.inference_logprobs)
    return clipped_surrogate(ratio, tokens.advantages, (config.clip_low, config.clip_high), config.dual_clip)


def gspo_objective(tokens: Tokens, config: GSPOLossConfig) -> tuple[Tensor, dict[str, Tensor]]:
    """GSPO (Zheng et al. 2025, Group Sequence Policy Optimization), in its GSPO-token form.

    s = exp(mean over t of (log theta_t - log behave_t)) is the ratio of the sequence. s_t = sg(s) * theta_t /
    sg(theta_t) has the value of s and the gradient of token t; l_t = -min(s_t*A_t, clip(s_t, 1-low, 1+high)*A_t).
    """
    means_S = tokens.sequences.mean((tokens.logprobs - tokens.inference_logprobs).detach())
    sequence_log_ratio = tokens.sequences.spread(means_S)
    ratio = importance_ratio(sequence_log_ratio + tokens.logprobs, tokens.logprobs.detach())
    return clipped_surrogate(ratio, tokens.advantages, (config.clip_low, config.clip_high))


def truncated_objective(tokens: Tokens, config: TruncatedLossConfig) -> tuple[Tensor, dict[str, Tensor]]:
    """REINFORCE with truncated importance weights: l_t = -sg(clip(theta_t / behave_t, low, high)) * A_t * log theta_t.

    CISPO (MiniMax 2025, MiniMax-M1) averages it over tokens. RLOO (Ahmadian et al. 2024, Back to Basics) sums it over
    the sequence and uses leave-one-out advantages; as published, it is on-policy, so all weights are 1.
    """
    weight = importance_ratio(tokens.logprobs.detach(), tokens.inference_logprobs)
    kept = weight.clamp(config.weight_low, config.weight_high)
    return -kept * tokens.advantages * tokens.logprobs, {
        "importance_ratio": weight,
        "is_clipped": (kept != weight).float(),
    }


def decoupled_objective(tokens: Tokens, config: DecoupledLossConfig) -> tuple[Tensor, dict[str, Tensor]]:
    """Decoupled PPO (Hilton et al. 2022, Batch size-invariance for policy optimization; Fu et al. 2025, AReaL).

    rho_t = theta_t / prox_t, w_t = prox_t / behave_t (a constant; 0 above the cap),
    l_t = -w_t * min(rho_t*A_t, clip(rho_t, 1-low, 1+high)*A_t). Tokens with weight 0 still count in the average.
    """
    ratio = importance_ratio(tokens.logprobs, tokens.prox_logprobs)
    clip = (config.clip_low, config.clip_high)
    losses, metrics = clipped_surrogate(ratio, tokens.advantages, clip, config.dual_clip)
    weight = importance_ratio(tokens.prox_logprobs, tokens.inference_logprobs)
    cap = torch.inf if config.behaviour_weight_cap is None else config.behaviour_weight_cap
    kept = torch.where(weight > cap, 0.0, weight)
    return kept * losses, metrics | {"behave_weight": weight, "is_masked": (weight > cap).float()}


def importance_ratio(logprobs: Tensor, reference: Tensor) -> Tensor:
    """Ratio of probabilities from log-probabilities, clamped to exp(±MAX_LOG_RATIO)."""
    return (logprobs - reference).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def clipped_surrogate(
    ratio: Tensor, advantages: Tensor, clip: tuple[float, float], dual_clip: float | None = None
) -> tuple[Tensor, dict[str, Tensor]]:
    """-min(r*A, clip(r, 1-low, 1+high)*A), capped at `dual_clip` * |A| for negative A (dual clip, Ye et al. 2020)."""
    low, high = clip
    plain, clipped = -ratio * advantages, -ratio.clamp(1 - low, 1 + high) * advantages
    losses = torch.maximum(plain, clipped)
    if dual_clip is not None:
        losses = torch.where(advantages < 0, torch.minimum(losses, -dual_clip * advantages), losses)
    return losses, {"importance_ratio": ratio.detach(), "is_clipped": (losses > plain).float()}


def objective_of(config: SurrogateLossConfig) -> Objective:
    """The objective for a loss config."""
    match config:
        case ClipLossConfig():
            return lambda tokens: clip_objective(tokens, config)
        case GSPOLossConfig():
            return lambda tokens: gspo_objective(tokens, config)
        case TruncatedLossConfig():
            return lambda tokens: truncated_objective(tokens, config)
        case DecoupledLossConfig():
            return lambda tokens: decoupled_objective(tokens, config)
