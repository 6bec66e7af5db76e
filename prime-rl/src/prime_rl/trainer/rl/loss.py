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
    ReferenceKLConfig,
    SurrogateLossConfig,
    TruncatedLossConfig,
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
# The caller averages the losses (`average` in the config). If the policies are equal, every objective's gradient is
# -A_t * grad log theta_t. `sg` is stop-gradient.


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
    reference_logprobs: Tensor | None = None


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


def reference_kl(tokens: Tokens, config: ReferenceKLConfig) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """The penalty on KL(theta || reference): what it adds to advantages and losses, both [M], and metrics.

    With d = log theta_t - log ref_t, Schulman 2020 (Approximating KL Divergence) estimates a token's divergence by
    k1 = d, k2 = d^2 / 2 and k3 = exp(-d) + d - 1. The gradient of k1 as a loss is zero on average, so k1 lowers the
    advantage instead (Ouyang et al. 2022, InstructGPT). k2 and k3 are losses (k3: Shao et al. 2024, DeepSeekMath).
    `kl_importance` multiplies these by theta_t / behave_t (DeepSeek-AI 2025, DeepSeek-V3.2).
    """
    none = torch.zeros_like(tokens.advantages)
    if tokens.reference_logprobs is None or config.kl_coef == 0:
        return none, none, {}
    difference = (tokens.logprobs - tokens.reference_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    k3 = (-difference).exp() + difference - 1
    metrics = {"reference_kl": tokens.sequences.mean(k3.detach())}
    if config.kl_estimator == "k1":
        return -config.kl_coef * difference.detach(), none, metrics
    divergence = k3 if config.kl_estimator == "k3" else difference.square() / 2
    if config.kl_importance:
        divergence = divergence * importance_ratio(tokens.logprobs, tokens.inference_logprobs)
    return none, config.kl_coef * divergence, metrics


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
    if isinstance(config, DefaultLossConfig):
        of_tokens = functools.partial(default_losses, config=config)
        return Loss(_on_tokens(of_tokens), per_token=config.ratio_type == "token", masked_in_only=True)
    of_tokens = functools.partial(surrogate_losses, objective=objective_of(config), config=config)
    per_token, needs_proximal = config.average == "token", isinstance(config, DecoupledLossConfig)
    return Loss(_on_tokens(of_tokens), per_token, masked_in_only=True, needs_proximal=needs_proximal)


def _on_tokens(losses: Callable[[Tokens], RowLosses]) -> Callable[[LossInputs, RowLayout], RowLosses]:
    return lambda inputs, layout: losses(tokens_of(inputs, layout))


def tokens_of(inputs: LossInputs, layout: RowLayout) -> Tokens:
    """The trained tokens of a row."""

    def trained(values_T: Tensor) -> Tensor:
        return values_T.index_select(0, layout.trained_M)

    logprobs = trained(inputs.trainer_logprobs)
    proximal, teacher, reference = inputs.proximal_logprobs, inputs.teacher_logprobs, inputs.reference_logprobs
    return Tokens(
        logprobs,
        trained(inputs.inference_logprobs),
        logprobs.detach() if proximal is None else trained(proximal),
        trained(inputs.advantages),
        layout.sequences,
        None if teacher is None else trained(teacher),
        None if reference is None else trained(reference),
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


def surrogate_losses(tokens: Tokens, objective: Objective, config: BaseSurrogateLossConfig) -> RowLosses:
    """Losses for a published objective, before division by the step's tokens or sequences."""
    to_advantages, to_losses, of_reference = reference_kl(tokens, config)
    losses, metrics = objective(dataclasses.replace(tokens, advantages=tokens.advantages + to_advantages))
    sums_S = tokens.sequences.sum(losses + to_losses)
    if config.average == "sequence":
        sums_S = sums_S / tokens.sequences.lengths_S
    elif config.average == "constant":
        sums_S = sums_S / config.constant_tokens
    mismatch = mismatch_kl(tokens.logprobs.detach() - tokens.inference_logprobs)
    return RowLosses(sums_S, {"mismatch_kl": tokens.sequences.mean(mismatch), **of_reference, **metrics})


def default_losses(tokens: Tokens, config: DefaultLossConfig) -> RowLosses:
    """Default losses, before division by the step's tokens or sequences. Formula: see the module."""
    sequences = tokens.sequences
    log_ratio = tokens.logprobs.detach() - tokens.inference_logprobs
    ratio = log_ratio.exp()
    dropped, metrics = _trust_region_mask(tokens, log_ratio, ratio, config)
    to_advantages, to_losses, of_reference = reference_kl(tokens, config)
    bonus = config.adv_tau * tokens.advantages + to_advantages
    metrics |= of_reference
    if tokens.teacher_logprobs is not None:
        teacher_gap = tokens.teacher_logprobs - tokens.logprobs.detach()
        bonus = bonus + config.teacher_tau * teacher_gap
        metrics["teacher_kl"] = sequences.mean(teacher_gap)
    weight = bonus - config.kl_tau * log_ratio
    if config.ratio_type == "sequence":
        clipped = sequences.sum(log_ratio).clamp(max=MAX_LOG_SEQUENCE_RATIO).exp().clamp(max=config.sequence_clip_high)
        weight = sequences.spread(clipped / sequences.lengths_S) * weight
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
