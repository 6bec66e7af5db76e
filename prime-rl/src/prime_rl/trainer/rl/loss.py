"""Losses: the default loss, published objectives, and user-defined losses.

The default loss is an importance-weighted policy gradient, which drops tokens whose importance ratio is outside a trust
region. Per sequence, with trainer log-probability p_t, inference log-probability q_t, d_t = p_t - q_t and
r_t = exp(d_t):

    L = - sum over kept t of  R_t * (adv_tau*A_t + teacher_tau*(teacher_t - p_t) - kl_tau*d_t) * p_t

where R_t is r_t or the sequence's clipped ratio, and only the last p_t has a gradient.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from prime_rl.configs.algorithms import (
    BaseSurrogateLossConfig,
    ClipLossConfig,
    CustomLossConfig,
    DecoupledLossConfig,
    DefaultLossConfig,
    GSPOLossConfig,
    LossConfig,
    MaskedLossConfig,
    PenaltiesConfig,
    SoftLossConfig,
    SurrogateLossConfig,
    TopMeasure,
    TruncatedLossConfig,
    top_measure_of,
)
from prime_rl.monitors.stats import Stats
from prime_rl.trainer.process.errors import TrainerError
from prime_rl.trainer.rl.rows import RowLayout, Sequences
from prime_rl.utils.errors import UserError
from prime_rl.utils.imports import import_function

# Published policy-gradient objectives, as functions of the trained tokens of a row's sequences.
#
# Each objective computes the loss l_t of every token from its advantage A_t and its probabilities under three
# policies: the trained one (theta), the one that sampled it (behave), and the one at the start of the step (prox).
# An objective is made of parts that the config chooses one by one: the level of the ratio (`ratio_at`), what happens
# with the ratio (one function for each `type`), the weight of stale samples (`behaviour_weight`), and terms for KL and
# entropy (`penalties`). The caller averages the losses (`average`). If the policies are equal, every objective's
# gradient is -A_t * grad log theta_t. `sg` is stop-gradient.


MAX_LOG_RATIO = 20.0
"""Log-ratios are clamped to this magnitude, because an infinite ratio makes the gradient of clipping NaN."""


@dataclass(frozen=True, slots=True)
class Tokens:
    """The M trained tokens of a row; every tensor is [M]."""

    logprobs: Tensor
    """Log-probabilities under the trained policy; with `entropy`, the only field with a gradient."""
    inference_logprobs: Tensor
    prox_logprobs: Tensor
    advantages: Tensor
    sequences: Sequences
    """The sequences that the tokens belong to."""
    teacher_logprobs: Tensor | None = None
    reference_logprobs: Tensor | None = None
    turns: Sequences | None = None
    """The turns that the tokens belong to. None: every sequence is one turn."""
    age: Tensor | None = None
    """Number of updates since the policy that sampled the token; 0 if unknown."""
    entropy: Tensor | None = None
    is_dropped: Tensor | None = None
    """Tokens that the second moment of the whole update excludes; None if it is not limited."""
    divergence: Tensor | None = None
    """Of the sampling policy from the trained one, over the sampler's likeliest tokens; None if it is not limited."""

    def parts(self, level: Literal["turn", "sequence"]) -> Sequences:
        return self.sequences if level == "sequence" or self.turns is None else self.turns


Objective = Callable[[Tokens], tuple[Tensor, dict[str, Tensor]]]
"""Maps tokens to their losses [M] and to metrics [M] without gradient."""


def importance_ratio(logprobs: Tensor, reference: Tensor) -> Tensor:
    """Ratio of probabilities from log-probabilities, clamped to exp(±MAX_LOG_RATIO)."""
    return (logprobs - reference).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def ratio_at(tokens: Tokens, anchor: Tensor, level: Literal["token", "turn", "sequence"]) -> Tensor:
    """Ratio of theta to the policy with log-probabilities `anchor`.

    Above tokens: s = exp(mean over t of (log theta_t - anchor_t)) is the ratio of a turn or sequence, and its token t
    has sg(s) * theta_t / sg(theta_t), with the value of s and the gradient of token t (Zheng et al. 2025, GSPO-token).
    """
    if level == "token":
        return importance_ratio(tokens.logprobs, anchor)
    parts = tokens.parts(level)
    mean_log_ratio = parts.spread(parts.mean((tokens.logprobs - anchor).detach()))
    return importance_ratio(mean_log_ratio + tokens.logprobs, tokens.logprobs.detach())


def clip_objective(tokens: Tokens, config: ClipLossConfig | GSPOLossConfig) -> tuple[Tensor, dict[str, Tensor]]:
    """PPO's clipped surrogate: r_t = theta_t / behave_t, l_t = -min(r_t*A_t, clip(r_t, 1-low, 1+high)*A_t).

    Shared by GRPO (Shao et al. 2024, DeepSeekMath), Dr. GRPO (Liu et al. 2025, Understanding R1-Zero-Like Training),
    DAPO (Yu et al. 2025, with high > low), REINFORCE++ (Hu et al. 2025), Lite PPO (Liu et al. 2025, Tricks or Traps?),
    GDPO (Liu et al. 2026) and MaxRL (Tajwar et al. 2026), which differ in how they average losses and compute
    advantages; and by GSPO (Zheng et al. 2025, Group Sequence Policy Optimization), at the level of the sequence.
    """
    ratio = ratio_at(tokens, tokens.inference_logprobs, config.level)
    return clipped_surrogate(ratio, tokens.advantages, (config.clip_low, config.clip_high), config.dual_clip)


def soft_objective(tokens: Tokens, config: SoftLossConfig) -> tuple[Tensor, dict[str, Tensor]]:
    """SAPO (Gao et al. 2025, Soft Adaptive Policy Optimization): l_t = -(4 / tau) * sigmoid(tau * (r_t - 1)) * A_t.

    tau is `tau_positive` where A_t > 0, else `tau_negative`. At r_t = 1 the slope is 1 for every tau.
    """
    ratio = ratio_at(tokens, tokens.inference_logprobs, config.level)
    positive, negative = (tokens.advantages.new_tensor(tau) for tau in (config.tau_positive, config.tau_negative))
    tau = torch.where(tokens.advantages > 0, positive, negative)
    gate = (4 / tau) * torch.sigmoid(tau * (ratio - 1))
    return -gate * tokens.advantages, {"importance_ratio": ratio.detach()}


def masked_objective(tokens: Tokens, config: MaskedLossConfig) -> tuple[Tensor, dict[str, Tensor]]:
    """The ratio inside of a trust region: l_t = -M_t * r_t * A_t, r_t = theta_t / behave_t.

    - M2PO (Zheng et al. 2025, Prosperity before Collapse): M_t by `largest_kept_square` over the whole update.
    - DPPO (Qi et al. 2026, Rethinking the Trust Region in LLM Reinforcement Learning): M_t is 0 if the divergence of
      theta from behave exceeds the limit and the loss would increase it: r_t > 1 with A_t > 0, or r_t < 1 with A_t < 0.
      The divergence is that of two events, the token and all others, with p = behave_t and q = theta_t:
      |p - q| (total variation), or p*log(p/q) + (1-p)*log((1-p)/(1-q)) (KL). With `top_k_tv` and `top_k_kl`, it is
      that over the sampler's likeliest tokens (`top_divergence`).
    """
    ratio = importance_ratio(tokens.logprobs, tokens.inference_logprobs)
    own = ratio.detach()
    if config.measure == "second_moment":
        is_dropped = torch.zeros_like(own, dtype=torch.bool) if tokens.is_dropped is None else tokens.is_dropped
    else:
        divergence = tokens.divergence
        if divergence is None:
            p, q = tokens.inference_logprobs.exp(), tokens.logprobs.detach().exp()
            divergence = (p - q).abs() if config.measure == "tv" else binary_kl(p, q)
        moves_away = torch.where(tokens.advantages > 0, own > 1, (own < 1) & (tokens.advantages < 0))
        is_dropped = (divergence > config.limit) & moves_away
    if config.ratio_cap is not None:
        ratio = ratio.clamp(max=config.ratio_cap)
    losses = (-ratio * tokens.advantages).masked_fill(is_dropped, 0)
    return losses, {"importance_ratio": own, "is_masked": is_dropped.float()}


def binary_kl(p: Tensor, q: Tensor) -> Tensor:
    """KL divergence between two events with probabilities p and 1 - p, and q and 1 - q."""
    tiny = torch.finfo(q.dtype).tiny  # a probability of 0 or 1 has a large divergence, not NaN
    others = torch.xlogy(1 - p, 1 - p) - (1 - p) * (1 - q).clamp(min=tiny).log()
    return torch.xlogy(p, p) - p * q.clamp(min=tiny).log() + others


def top_divergence(behave_MK: Tensor, own_MK: Tensor, measure: TopMeasure, top_k: int) -> Tensor:
    """The divergence [M] of theta from behave over the k likeliest tokens of behave, the token itself, and all others
    as one outcome: half the sum of |p - q|, or the sum of p*log(p/q), p of behave and q of theta (DPPO's top-k forms).

    Both are given by log-probabilities of more than k tokens, the token itself and then others from the likeliest on;
    minus infinity is no token.
    """
    behave_MK, own_MK = behave_MK[:, : top_k + 1], own_MK[:, : top_k + 1]
    # Where the token is one of the k likeliest, the last of the others is not.
    is_other_MK = torch.zeros_like(behave_MK, dtype=torch.bool)
    is_other_MK[:, -1] = behave_MK[:, 0] >= behave_MK[:, -1]
    p, q = (each.masked_fill(is_other_MK, -torch.inf).exp() for each in (behave_MK, own_MK))
    p, q = (torch.cat([each, (1 - each.sum(-1, keepdim=True)).clamp(min=0)], -1) for each in (p, q))
    if measure == "top_k_tv":
        return (p - q).abs().sum(-1) / 2
    return (torch.xlogy(p, p) - p * q.clamp(min=torch.finfo(q.dtype).tiny).log()).sum(-1)


def largest_kept_square(squares: Tensor, limit: float) -> float:
    """The largest squared log-ratio that stays if the mean of those that stay must be below `limit`.

    The largest are left out, as few as possible; the smallest always stays (M2PO as AReaL implements it).
    """
    ascending = squares.double().sort().values
    means = ascending.cumsum(0) / torch.arange(1, len(ascending) + 1, dtype=torch.float64, device=squares.device)
    # The means of ascending values ascend too.
    return ascending[max(int((means < limit).sum()), 1) - 1].item()


def truncated_objective(tokens: Tokens, config: TruncatedLossConfig) -> tuple[Tensor, dict[str, Tensor]]:
    """REINFORCE with truncated importance weights: l_t = -sg(clip(theta_t / behave_t, low, high)) * A_t * log theta_t.

    CISPO (MiniMax 2025, MiniMax-M1) averages it over tokens. RLOO (Ahmadian et al. 2024, Back to Basics) sums it over
    the sequence and uses leave-one-out advantages; as published, it is on-policy, so all weights are 1. AIPO (Wu et al.
    2025, LlamaRL) truncates above only.
    """
    weight = ratio_at(tokens, tokens.inference_logprobs, config.level).detach()
    kept = weight.clamp(config.weight_low, config.weight_high)
    return -kept * tokens.advantages * tokens.logprobs, {
        "importance_ratio": weight,
        "is_clipped": (kept != weight).float(),
    }


def decoupled_objective(tokens: Tokens, config: DecoupledLossConfig) -> tuple[Tensor, dict[str, Tensor]]:
    """Decoupled PPO (Hilton et al. 2022, Batch size-invariance for policy optimization; Fu et al. 2025, AReaL).

    rho_t = theta_t / prox_t, w_t = prox_t / behave_t (a constant; see `behaviour_weight`),
    l_t = -w_t * min(rho_t*A_t, clip(rho_t, 1-low, 1+high)*A_t). Tokens with weight 0 still count in the average.
    With weights kept between two bounds it is IcePop (Ling Team 2025, Every Step Evolves).
    """
    if config.proximal == "loglinear":
        tokens = dataclasses.replace(tokens, prox_logprobs=loglinear_proximal(tokens))
    ratio = ratio_at(tokens, tokens.prox_logprobs, config.level)
    clip = (config.clip_low, config.clip_high)
    losses, metrics = clipped_surrogate(ratio, tokens.advantages, clip, config.dual_clip)
    weight, of_weight = behaviour_weight(tokens, config)
    return weight * losses, metrics | of_weight


def loglinear_proximal(tokens: Tokens) -> Tensor:
    """Log-probabilities of the policy one update ago, between behave and theta by the sample's age d: log behave_t +
    (d-1)/d * (log theta_t - log behave_t), and log behave_t for d = 0 (AReaL's `loglinear`)."""
    if tokens.age is None:
        return tokens.inference_logprobs
    share = ((tokens.age - 1) / tokens.age.clamp(min=1)).clamp(0, 1)
    return tokens.inference_logprobs + share * (tokens.logprobs.detach() - tokens.inference_logprobs)


def behaviour_weight(tokens: Tokens, config: DecoupledLossConfig) -> tuple[Tensor, dict[str, Tensor]]:
    """The weight of stale tokens, w_t = prox_t / behave_t, after `config.rejection`, and its metrics.

    With a ratio of turns or sequences, all of their tokens have that weight. With a KL estimate, the bounds decide
    which tokens stay, and each keeps the weight of its own.
    """
    log_weight = (tokens.prox_logprobs - tokens.inference_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    rule = config.rejection
    if rule is None:
        weight = log_weight.exp()
        cap = torch.inf if config.behaviour_weight_cap is None else config.behaviour_weight_cap
        is_out = (weight > cap) | (weight < config.behaviour_weight_floor)
        return torch.where(is_out, 0.0, weight), {"behave_weight": weight, "is_masked": is_out.float()}

    def of_parts(values: Tensor) -> Tensor:
        if rule.level == "token":
            return values
        parts = tokens.parts(rule.level)
        aggregate = {"mean": parts.mean, "sum": parts.sum, "max": parts.max}[rule.aggregate]
        return parts.spread(aggregate(values))

    if rule.measure == "ratio":
        bounded = weight = of_parts(log_weight).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    else:
        weight = log_weight.exp()
        estimates = {"k1": -log_weight, "k2": log_weight.square() / 2, "k3": weight - log_weight - 1}
        bounded = of_parts(estimates[rule.measure])
    low = -torch.inf if rule.low is None else rule.low
    high = torch.inf if rule.high is None else rule.high
    is_out = (bounded < low) | (bounded > high)
    kept = weight.clamp(max(low, 0.0), high) if rule.action == "clamp" else torch.where(is_out, 0.0, weight)
    name = "is_clamped" if rule.action == "clamp" else "is_masked"
    return kept, {"behave_weight": weight, name: is_out.float()}


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


@dataclass(slots=True)
class KLWeight:
    """The weight of the KL penalty, which a target adapts from step to step."""

    coef: float
    target: float | None = None
    gain: float = 0.1

    @classmethod
    def of(cls, config: PenaltiesConfig) -> KLWeight:
        return cls(config.kl_coef, config.kl_target, config.kl_gain)

    def adapt(self, divergence: float) -> None:
        """Raise the weight if the divergence of a step is above the target, or lower it (Ziegler et al. 2019,
        Fine-Tuning Language Models from Human Preferences)."""
        if self.target is not None:
            self.coef *= 1 + self.gain * min(0.2, max(-0.2, divergence / self.target - 1))


def kl_in_rewards(
    inference_logprobs: Tensor, reference_logprobs: Tensor, layout: RowLayout, config: PenaltiesConfig
) -> Tensor:
    """Estimates of the KL divergence that a reward pays for each of the M trained tokens: the sum over its sequence, or
    from the token to the end of its sequence. Stiennon et al. 2020 and Ouyang et al. 2022 pay it so.

    The policy is the one that sampled the tokens, so the estimates are constants.
    """
    behave, reference = (each.index_select(0, layout.trained_M) for each in (inference_logprobs, reference_logprobs))
    difference = (behave - reference).clamp(-10, 10)
    estimates = {"k1": difference, "k2": difference.square() / 2, "k3": (-difference).exp() + difference - 1}
    own, sequences = estimates[config.kl_estimator], layout.sequences
    whole = sequences.spread(sequences.sum(own))
    if config.kl_in == "sequence_reward":
        return whole
    return whole - sequences.sum_before(own)


def penalties(tokens: Tokens, config: PenaltiesConfig, coef: float) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """What KL penalty, entropy bonus and SFT loss add to advantages and losses, both [M], and metrics.

    With d = log theta_t - log ref_t, Schulman 2020 (Approximating KL Divergence) estimates a token's divergence by
    k1 = d, k2 = d^2 / 2 and k3 = exp(-d) + d - 1. The gradient of k1 as a loss is zero on average, so k1 lowers the
    advantage instead (Ouyang et al. 2022, InstructGPT). k2 and k3 are losses (k3: Shao et al. 2024, DeepSeekMath).
    `kl_importance` multiplies these by theta_t / behave_t (DeepSeek-AI 2025, DeepSeek-V3.2). `coef` is the weight.

    The entropy of a token's distribution has the gradient -E[log theta_t * grad log theta_t] over sampled tokens. So
    `sampled` adds -log theta_t to the advantage, and `exact` subtracts the entropy itself from the loss.

    `sft_coef` adds the cross-entropy of the tokens whose advantage is above 0, as in self-imitation (Oh et al. 2018).
    """
    to_advantages = to_losses = torch.zeros_like(tokens.advantages)
    metrics = {}
    if tokens.reference_logprobs is not None and config.kl_coef > 0:
        difference = (tokens.logprobs - tokens.reference_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        k3 = (-difference).exp() + difference - 1
        metrics["reference_kl"] = tokens.sequences.mean(k3.detach())
        # With another `kl_in`, `kl_in_rewards` has lowered the advantages.
        if config.kl_in == "loss" and config.kl_estimator == "k1":
            to_advantages = -coef * difference.detach()
        elif config.kl_in == "loss":
            divergence = k3 if config.kl_estimator == "k3" else difference.square() / 2
            if config.kl_importance:
                divergence = divergence * importance_ratio(tokens.logprobs, tokens.inference_logprobs)
            to_losses = coef * divergence
    if config.entropy_coef > 0:
        if config.entropy_estimator == "sampled":
            to_advantages = to_advantages - config.entropy_coef * tokens.logprobs.detach()
        elif tokens.entropy is not None:
            to_losses = to_losses - config.entropy_coef * tokens.entropy
    if config.sft_coef > 0:
        is_good = tokens.advantages > 0
        to_losses = to_losses - config.sft_coef * torch.where(is_good, tokens.logprobs, 0.0)
        metrics["sft_loss"] = -tokens.logprobs.detach()[is_good]
    return to_advantages, to_losses, metrics


def objective_of(config: SurrogateLossConfig) -> Objective:
    """The objective for a loss config."""
    match config:
        case ClipLossConfig() | GSPOLossConfig():
            return lambda tokens: clip_objective(tokens, config)
        case SoftLossConfig():
            return lambda tokens: soft_objective(tokens, config)
        case MaskedLossConfig():
            return lambda tokens: masked_objective(tokens, config)
        case TruncatedLossConfig():
            return lambda tokens: truncated_objective(tokens, config)
        case DecoupledLossConfig():
            return lambda tokens: decoupled_objective(tokens, config)


MAX_LOG_SEQUENCE_RATIO = 10.0
"""Maximum of a sequence's summed log-ratio, so that its exponential stays finite."""


@dataclass(frozen=True, slots=True)
class LossInputs:
    """Inputs of a custom loss for one sequence of T tokens, or of a whole row. Entry t of every field belongs to token
    t."""

    trainer_logprobs: Tensor
    """[T], with gradient. Custom losses get the real values also outside the mask."""
    inference_logprobs: Tensor
    teacher_logprobs: Tensor | None
    advantages: Tensor
    loss_mask: Tensor
    """[T], bool."""
    proximal_logprobs: Tensor | None = None
    """Log-probabilities under the policy at the start of the step; None if that is still the trained policy."""
    reference_logprobs: Tensor | None = None
    """Log-probabilities under the model that `[trainer.reference]` chooses; None without that section."""
    age: Tensor | None = None
    """Number of updates since the policy that sampled the token; 0 if unknown."""
    entropy: Tensor | None = None
    """Entropy of the distribution that each token is drawn from. It has a gradient if `entropy_coef` needs one."""
    is_dropped: Tensor | None = None
    """Tokens that the second moment of the whole update excludes; None if it is not limited."""
    divergence: Tensor | None = None
    """Of the sampling policy from the trained one, for `measure = "top_k_tv"` and `"top_k_kl"`; otherwise None."""


@dataclass(frozen=True, slots=True)
class LossOutputs:
    """Result of a custom loss for one sequence: its summed loss, and scalars or 1-D tensors without gradient."""

    loss: Tensor
    metrics: dict[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RowLosses:
    """The summed losses of a row's sequences, without those that have no trained token, and their metrics."""

    losses_S: Tensor
    metrics: dict[str, Tensor]
    """One value per sequence, or per trained token, without gradient."""


@dataclass(frozen=True, slots=True)
class Loss:
    """A loss of each sequence of a row, and how the sum over a step is normalized."""

    row_losses: Callable[[LossInputs, RowLayout], RowLosses]
    """For rows with at least one trained token."""
    per_token: bool
    """Divide by the number of masked-in tokens in the step over all ranks; if false, by the number of sequences."""
    masked_in_only: bool
    """Uses only log-probabilities inside the mask, so that others need not be computed."""
    needs_proximal: bool = False
    """Uses the log-probabilities of the policy at the start of the step."""
    top_measure: TopMeasure | None = None
    """Uses this divergence over the likeliest tokens of the policy that sampled, `top_k` of them."""
    top_k: int = 0
    max_second_moment: float | None = None
    """Limit of the mean squared log-ratio of an update, which decides before it which tokens are dropped."""
    trains_entropy: bool = False
    """Uses the gradient of the entropy."""
    penalties: PenaltiesConfig | None = None
    """The configured penalties; None for a custom loss."""
    kl: KLWeight | None = None
    """The current weight of the KL penalty; None for a custom loss."""
    stats: Stats | None = None
    """Values that a custom loss with a parameter `stats` records."""


def setup_loss(config: LossConfig) -> Loss:
    """Create the configured loss.

    Raises:
        TrainerError: the import path of a custom loss does not name an importable function.
    """
    if config.type == "custom":
        function, stats = custom_function(config)
        row_losses = functools.partial(custom_losses, function=function)
        return Loss(row_losses, per_token=False, masked_in_only=False, stats=stats)
    trains_entropy, kl = config.entropy_coef > 0 and config.entropy_estimator == "exact", KLWeight.of(config)
    if isinstance(config, DefaultLossConfig):
        of_tokens = functools.partial(default_losses, config=config, kl=kl)
        return Loss(
            _on_tokens(of_tokens),
            per_token=config.ratio_type == "token",
            masked_in_only=True,
            trains_entropy=trains_entropy,
            penalties=config,
            kl=kl,
        )
    of_tokens = functools.partial(surrogate_losses, objective=objective_of(config), config=config, kl=kl)
    limit = config.limit if isinstance(config, MaskedLossConfig) and config.measure == "second_moment" else None
    return Loss(
        _on_tokens(of_tokens),
        per_token=config.average == "token",
        masked_in_only=True,
        needs_proximal=isinstance(config, DecoupledLossConfig) and config.proximal == "recomputed",
        top_measure=top_measure_of(config),
        top_k=config.top_k if isinstance(config, MaskedLossConfig) else 0,
        max_second_moment=limit,
        trains_entropy=trains_entropy,
        penalties=config,
        kl=kl,
    )


def _on_tokens(losses: Callable[[Tokens], RowLosses]) -> Callable[[LossInputs, RowLayout], RowLosses]:
    return lambda inputs, layout: losses(tokens_of(inputs, layout))


def tokens_of(inputs: LossInputs, layout: RowLayout) -> Tokens:
    """The trained tokens of a row."""

    def trained(values_T: Tensor) -> Tensor:
        return values_T.index_select(0, layout.trained_M)

    def if_given(values_T: Tensor | None) -> Tensor | None:
        return None if values_T is None else trained(values_T)

    logprobs = trained(inputs.trainer_logprobs)
    return Tokens(
        logprobs,
        trained(inputs.inference_logprobs),
        logprobs.detach() if inputs.proximal_logprobs is None else trained(inputs.proximal_logprobs),
        trained(inputs.advantages),
        layout.sequences,
        if_given(inputs.teacher_logprobs),
        if_given(inputs.reference_logprobs),
        layout.turns,
        if_given(inputs.age),
        if_given(inputs.entropy),
        if_given(inputs.is_dropped),
        if_given(inputs.divergence),
    )


def custom_function(config: CustomLossConfig) -> tuple[Callable[[LossInputs], LossOutputs], Stats | None]:
    """The user's function with its keyword arguments, and the `Stats` that it records in, if it takes one.

    Raises:
        TrainerError: it cannot be imported.
    """
    try:
        imported = import_function(config.import_path)
    except UserError as fault:
        raise TrainerError(f"trainer.loss.import_path: {fault}") from fault
    stats = Stats() if "stats" not in config.kwargs and _takes_stats(imported) else None
    return functools.partial(imported, **config.kwargs, **({} if stats is None else {"stats": stats})), stats


def _takes_stats(function: Callable[..., LossOutputs]) -> bool:
    try:
        return "stats" in inspect.signature(function).parameters
    except (TypeError, ValueError):  # a function of an extension module may have no signature
        return False


def custom_losses(inputs: LossInputs, layout: RowLayout, function: Callable[[LossInputs], LossOutputs]) -> RowLosses:
    """The user's loss of each sequence, and the mismatch KL between trainer and inference as a metric."""
    outputs = [
        custom_loss(sequence, function)
        for sequence, is_trained in zip(split_inputs(inputs, layout.lengths), layout.num_trained, strict=True)
        if is_trained
    ]
    names = dict.fromkeys(name for output in outputs for name in output.metrics)
    values = {name: [o.metrics[name].reshape(-1) for o in outputs if name in o.metrics] for name in names}
    losses_S = torch.stack([output.loss.reshape(()) for output in outputs])
    return RowLosses(losses_S, {name: torch.cat(parts) for name, parts in values.items()})


def custom_loss(inputs: LossInputs, function: Callable[[LossInputs], LossOutputs]) -> LossOutputs:
    """The user's loss of one sequence, and its mismatch KL."""
    outputs = function(inputs)
    log_ratio = (inputs.trainer_logprobs.detach() - inputs.inference_logprobs)[inputs.loss_mask]
    return LossOutputs(outputs.loss, {"mismatch_kl": mismatch_kl(log_ratio).mean(), **outputs.metrics})


def surrogate_losses(
    tokens: Tokens, objective: Objective, config: BaseSurrogateLossConfig, kl: KLWeight | None = None
) -> RowLosses:
    """Losses for a published objective, before division by the step's tokens or sequences."""
    to_advantages, to_losses, of_penalties = penalties(tokens, config, config.kl_coef if kl is None else kl.coef)
    losses, metrics = objective(dataclasses.replace(tokens, advantages=tokens.advantages + to_advantages))
    sums_S = tokens.sequences.sum(losses + to_losses)
    if config.average == "sequence":
        sums_S = sums_S / tokens.sequences.lengths_S
    elif config.average == "constant":
        sums_S = sums_S / config.constant_tokens
    mismatch = mismatch_kl(tokens.logprobs.detach() - tokens.inference_logprobs)
    return RowLosses(sums_S, {"mismatch_kl": tokens.sequences.mean(mismatch), **of_penalties, **metrics})


def default_losses(tokens: Tokens, config: DefaultLossConfig, kl: KLWeight | None = None) -> RowLosses:
    """Default losses, before division by the step's tokens or sequences. Formula: see the module."""
    sequences = tokens.sequences
    log_ratio = tokens.logprobs.detach() - tokens.inference_logprobs
    ratio = log_ratio.exp()
    dropped, metrics = _trust_region_mask(tokens, log_ratio, ratio, config)
    to_advantages, to_losses, of_penalties = penalties(tokens, config, config.kl_coef if kl is None else kl.coef)
    bonus = config.adv_tau * tokens.advantages + to_advantages
    metrics |= of_penalties
    if tokens.teacher_logprobs is not None:
        teacher_gap = tokens.teacher_logprobs - tokens.logprobs.detach()
        bonus = bonus + config.teacher_tau * teacher_gap
        metrics["teacher_kl"] = sequences.mean(teacher_gap)
    weight = bonus - config.kl_tau * log_ratio
    if config.ratio_type == "sequence":
        clipped = sequences.sum(log_ratio).clamp(max=MAX_LOG_SEQUENCE_RATIO).exp().clamp(max=config.sequence_clip_high)
        weight = sequences.spread(clipped / sequences.lengths_S) * weight
        # The policy term is a mean over the sequence's tokens, so penalties are one too.
        to_losses = to_losses / sequences.spread(sequences.lengths_S)
    else:
        weight = ratio * weight
    # Select instead of multiplying by a mask: a dropped ratio may be infinite, and infinity times 0 is NaN.
    kept_weight = weight.masked_fill(dropped, 0)
    return RowLosses(sequences.sum(to_losses - kept_weight * tokens.logprobs), metrics)


def _trust_region_mask(
    tokens: Tokens, log_ratio: Tensor, ratio: Tensor, config: DefaultLossConfig
) -> tuple[Tensor, dict[str, Tensor]]:
    """Boolean mask [M] of the tokens that the trust region drops, and its metrics."""
    sequences = tokens.sequences
    geo_ratio = sequences.mean(log_ratio).exp()
    low, high = ratio < config.token_mask_low, ratio > config.token_mask_high
    geo_low, geo_high = geo_ratio < config.geo_mask_low, geo_ratio > config.geo_mask_high
    sequence_low = sequences.min(ratio) < config.sequence_mask_low
    sequence_high = sequences.max(ratio) > config.sequence_mask_high
    dropped = low | high | sequences.spread(geo_low | geo_high | sequence_low | sequence_high)
    mismatch = mismatch_kl(log_ratio)
    num_dropped = sequences.sum(dropped.float())
    return dropped, {
        "mismatch_kl": sequences.mean(mismatch),
        "masked_mismatch_kl": sequences.sum(mismatch.masked_fill(~dropped, 0)) / num_dropped.clamp(min=1),
        "unmasked_mismatch_kl": sequences.sum(mismatch.masked_fill(dropped, 0))
        / (sequences.lengths_S - num_dropped).clamp(min=1),
        "is_masked": dropped.float(),
        "is_masked_low": low.float(),
        "is_masked_high": high.float(),
        "sequence_masked_low": sequence_low.float(),
        "sequence_masked_high": sequence_high.float(),
        "geo_masked_low": geo_low.float(),
        "geo_masked_high": geo_high.float(),
        "geo_seq_ratio": geo_ratio,
    }


def mismatch_kl(log_ratio: Tensor) -> Tensor:
    """Per token `r - log r - 1`. Its mean over sampled tokens estimates KL(inference || trainer): k3, Schulman 2020."""
    return log_ratio.exp() - log_ratio - 1


def split_inputs(row: LossInputs, lengths: list[int]) -> list[LossInputs]:
    """Split the inputs of a packed row into sequences."""
    fields = (getattr(row, field.name) for field in dataclasses.fields(LossInputs))
    columns = [[None] * len(lengths) if values is None else values.split(lengths) for values in fields]
    return [LossInputs(*sequence) for sequence in zip(*columns, strict=True)]
