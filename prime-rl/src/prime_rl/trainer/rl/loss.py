"""Sequence losses: the default loss, published objectives, and user-defined losses.

The default loss is an importance-weighted policy gradient, which drops tokens whose importance ratio is outside a trust
region. Per sequence, with trainer log-probability p_t, inference log-probability q_t, d_t = p_t - q_t and
r_t = exp(d_t):

    L = - sum over kept t of  R_t * (adv_tau*A_t + teacher_tau*(teacher_t - p_t) - kl_tau*d_t) * p_t

where R_t is r_t or the sequence's clipped ratio, and only the last p_t has a gradient.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise

from torch import Tensor

from prime_rl.configs.losses import (
    BaseSurrogateLossConfig,
    DecoupledLossConfig,
    DefaultLossConfig,
    LossConfig,
)
from prime_rl.monitors.stats import Stats
from prime_rl.trainer.process.errors import TrainerError
from prime_rl.trainer.rl.objectives import Objective, Tokens, objective_of

MAX_LOG_SEQUENCE_RATIO = 10.0
"""Maximum of a sequence's summed log-ratio, so that its exponential stays finite."""


@dataclass(frozen=True, slots=True)
class LossInputs:
    """Inputs of a loss for one sequence of T tokens. Entry t of every field belongs to token t."""

    trainer_logprobs: Tensor
    """[T], with gradient. Outside the mask, built-in losses get values of a uniform distribution, custom losses the
    real ones."""
    inference_logprobs: Tensor
    teacher_logprobs: Tensor | None
    advantages: Tensor
    loss_mask: Tensor
    """[T], bool."""
    proximal_logprobs: Tensor | None = None
    """Log-probabilities under the policy at the start of the step; None if that is still the trained policy."""


@dataclass(frozen=True, slots=True)
class LossOutputs:
    """The summed loss of one sequence, and its metrics: scalars or 1-D tensors without gradient."""

    loss: Tensor
    metrics: dict[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Loss:
    """A loss per sequence, and how its sum over a step is normalized."""

    sequence_loss: Callable[[LossInputs], LossOutputs]
    per_token: bool
    """Divide by the number of masked-in tokens in the step over all ranks; if false, by the number of sequences."""
    masked_in_only: bool
    """Uses only log-probabilities inside the mask, so that others need not be computed."""
    needs_proximal: bool = False
    """Uses the log-probabilities of the policy at the start of the step."""
    stats: Stats | None = None
    """What a custom loss with a parameter `stats` records."""


class BadLoss(TrainerError):
    """`loss.import_path` does not name an importable function."""


def setup_loss(config: LossConfig) -> Loss:
    """Create the configured loss.

    Raises:
        BadLoss: the import path of a custom loss does not name an importable function.
    """
    if config.type == "custom":
        imported = import_function(config.import_path)
        stats = Stats() if "stats" not in config.kwargs and _takes_stats(imported) else None
        function = functools.partial(imported, **config.kwargs, **({} if stats is None else {"stats": stats}))
        sequence_loss = functools.partial(custom_loss, function=function)
        return Loss(sequence_loss, per_token=False, masked_in_only=False, stats=stats)
    if isinstance(config, DefaultLossConfig):
        function = functools.partial(default_loss, config=config)
        return Loss(function, per_token=config.ratio_type == "token", masked_in_only=True)
    function = functools.partial(surrogate_loss, objective=objective_of(config), config=config)
    per_token, needs_proximal = config.average == "token", isinstance(config, DecoupledLossConfig)
    return Loss(function, per_token, masked_in_only=True, needs_proximal=needs_proximal)


def import_function(path: str) -> Callable[..., LossOutputs]:
    """The function that `package.module.name` names."""
    module, _, name = path.rpartition(".")
    try:
        function = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise BadLoss(f"loss.import_path: cannot import {path!r}: {error}") from error
    if not callable(function):
        raise BadLoss(f"loss.import_path: {path!r} is a {type(function).__name__}, not a function")
    return function


def _takes_stats(function: Callable[..., LossOutputs]) -> bool:
    try:
        return "stats" in inspect.signature(function).parameters
    except (TypeError, ValueError):  # a function of an extension module may have no signature
        return False


def custom_loss(inputs: LossInputs, function: Callable[[LossInputs], LossOutputs]) -> LossOutputs:
    """The user's loss, plus the mismatch KL between trainer and inference as a metric."""
    outputs = function(inputs)
    log_ratio = (inputs.trainer_logprobs.detach() - inputs.inference_logprobs)[inputs.loss_mask]
    return LossOutputs(outputs.loss, {"mismatch_kl": mismatch_kl(log_ratio).mean(), **outputs.metrics})


def surrogate_loss(inputs: LossInputs, objective: Objective, config: BaseSurrogateLossConfig) -> LossOutputs:
    """Loss of one sequence for a published objective, before division by the step's tokens or sequences."""
    mask = inputs.loss_mask
    logprobs, behave_logprobs = inputs.trainer_logprobs[mask], inputs.inference_logprobs[mask]
    if logprobs.numel() == 0:
        return LossOutputs(logprobs.sum())
    proximal = inputs.proximal_logprobs
    prox_logprobs = logprobs.detach() if proximal is None else proximal[mask]
    losses, metrics = objective(Tokens(logprobs, behave_logprobs, prox_logprobs, inputs.advantages[mask]))
    divisor = {"token": 1, "sequence": logprobs.numel(), "constant": config.constant_tokens}[config.average]
    mismatch = mismatch_kl(logprobs.detach() - behave_logprobs).mean()
    return LossOutputs(losses.sum() / divisor, {"mismatch_kl": mismatch, **metrics})


def default_loss(inputs: LossInputs, config: DefaultLossConfig) -> LossOutputs:
    """Default loss of one sequence, before division by the step's tokens or sequences. Formula: see the module."""
    mask = inputs.loss_mask
    logprobs = inputs.trainer_logprobs[mask]
    if logprobs.numel() == 0:
        return LossOutputs(logprobs.sum())
    log_ratio = logprobs.detach() - inputs.inference_logprobs[mask]
    ratio = log_ratio.exp()
    dropped, metrics = _trust_region_mask(log_ratio, ratio, config)
    bonus = config.adv_tau * inputs.advantages[mask]
    if inputs.teacher_logprobs is not None:
        teacher_gap = inputs.teacher_logprobs[mask] - logprobs.detach()
        bonus = bonus + config.teacher_tau * teacher_gap
        metrics["teacher_kl"] = teacher_gap.mean()
    if config.ratio_type == "sequence":
        sequence_ratio = log_ratio.sum().clamp(max=MAX_LOG_SEQUENCE_RATIO).exp().clamp(max=config.sequence_clip_high)
        weight = sequence_ratio / mask.sum() * (bonus - config.kl_tau * log_ratio)
    else:
        weight = ratio * (bonus - config.kl_tau * log_ratio)
    # Select instead of multiplying by a mask: a dropped ratio may be infinite, and infinity times 0 is NaN.
    kept = ~dropped
    return LossOutputs(-(weight[kept] * logprobs[kept]).sum(), metrics)


def _trust_region_mask(log_ratio: Tensor, ratio: Tensor, config: DefaultLossConfig) -> tuple[Tensor, dict[str, Tensor]]:
    """Boolean mask over masked-in tokens of those that the trust region drops, and its metrics."""
    geo_ratio = log_ratio.mean().exp()
    low, high = ratio < config.token_mask_low, ratio > config.token_mask_high
    geo_low, geo_high = geo_ratio < config.geo_mask_low, geo_ratio > config.geo_mask_high
    sequence_low, sequence_high = ratio.min() < config.sequence_mask_low, ratio.max() > config.sequence_mask_high
    dropped = low | high | geo_low | geo_high | sequence_low | sequence_high
    mismatch = mismatch_kl(log_ratio)
    return dropped, {
        "mismatch_kl": mismatch.mean(),
        "masked_mismatch_kl": mismatch[dropped].sum() / dropped.sum().clamp(min=1),
        "unmasked_mismatch_kl": mismatch[~dropped].sum() / (~dropped).sum().clamp(min=1),
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


def sequence_lengths(position_ids: Tensor) -> list[int]:
    """Lengths of the sequences packed in a row of T tokens.

    A sequence starts at a position 0 that follows a nonzero position and precedes a 1. A sequence of one token is
    therefore counted as part of the sequence before it.
    """
    before, here, after = position_ids[:-2], position_ids[1:-1], position_ids[2:]
    starts = ((here == 0) & (before != 0) & (after == 1)).nonzero().flatten() + 1
    return [end - start for start, end in pairwise([0, *starts.tolist(), len(position_ids)])]


def split_inputs(row: LossInputs, lengths: list[int]) -> list[LossInputs]:
    """Split the inputs of a packed row into sequences."""
    fields = (getattr(row, field.name) for field in dataclasses.fields(LossInputs))
    columns = [[None] * len(lengths) if values is None else values.split(lengths) for values in fields]
    return [LossInputs(*sequence) for sequence in zip(*columns, strict=True)]
