"""Losses of preferences, as functions of the log-probabilities of P pairs, or of N answers with labels.

With the policy's log-probabilities of the chosen and the rejected answer w and l, those of the reference, and the
lengths of both in tokens, the margin is

    delta = (log pi(w) - log ref(w)) - (log pi(l) - log ref(l))

and sigma is the logistic function. Each function returns the losses [P]; the caller averages them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from prime_rl.configs.dpo import PreferenceLossConfig


@dataclass(frozen=True, slots=True)
class PairLogprobs:
    """Sums over the answers' tokens. Every tensor is [P]; the first two have a gradient."""

    chosen: Tensor
    rejected: Tensor
    chosen_tokens: Tensor
    rejected_tokens: Tensor
    ref_chosen: Tensor
    """0 for a loss without reference."""
    ref_rejected: Tensor
    margins: Tensor | float = 0.0
    """How much better the chosen answer is, by the data (`loss.score_margin`)."""

    @property
    def chosen_ratio(self) -> Tensor:
        """log pi(w) - log ref(w)"""
        return self.chosen - self.ref_chosen

    @property
    def rejected_ratio(self) -> Tensor:
        return self.rejected - self.ref_rejected


def sigmoid(pairs: PairLogprobs, config: PreferenceLossConfig) -> Tensor:
    """DPO (Rafailov et al. 2023, Direct Preference Optimization): -log sigma(beta*delta).

    With label smoothing e (Mitchell 2023, cDPO): -(1-e)*log sigma(beta*delta) - e*log sigma(-beta*delta). A pair's
    margin is subtracted from beta*delta (Amini et al. 2024, Direct Preference Optimization with an Offset).
    """
    logits = config.beta * (pairs.chosen_ratio - pairs.rejected_ratio) - pairs.margins
    return _smoothed(logits, config.label_smoothing)


def hinge(pairs: PairLogprobs, config: PreferenceLossConfig) -> Tensor:
    """SLiC (Zhao et al. 2023, SLiC-HF), normalized as in RSO (Liu et al. 2023): max(0, 1 - beta*delta)."""
    return torch.relu(1 - config.beta * (pairs.chosen_ratio - pairs.rejected_ratio))


def ipo(pairs: PairLogprobs, config: PreferenceLossConfig) -> Tensor:
    """IPO (Azar et al. 2023, A General Theoretical Paradigm): (d - 1/(2*beta))^2.

    d is the margin of the means over tokens, so that a pair's length does not scale its loss; TRL does the same.
    """
    return (_mean_delta(pairs) - 1 / (2 * config.beta)) ** 2


def robust(pairs: PairLogprobs, config: PreferenceLossConfig) -> Tensor:
    """Robust DPO (Chowdhury et al. 2024, Provably Robust DPO), an unbiased estimate if a share e of pairs is flipped:

    (-(1-e)*log sigma(beta*delta) + e*log sigma(-beta*delta)) / (1 - 2*e)
    """
    share, logits = config.label_smoothing, config.beta * (pairs.chosen_ratio - pairs.rejected_ratio)
    return (-(1 - share) * logsigmoid(logits) + share * logsigmoid(-logits)) / (1 - 2 * share)


def simpo(pairs: PairLogprobs, config: PreferenceLossConfig) -> Tensor:
    """SimPO (Meng et al. 2024): -log sigma(beta*(log pi(w)/|w| - log pi(l)/|l|) - gamma), smoothed as DPO is."""
    delta = pairs.chosen / pairs.chosen_tokens - pairs.rejected / pairs.rejected_tokens
    return _smoothed(config.beta * delta - config.simpo_gamma, config.label_smoothing)


def cpo(pairs: PairLogprobs, config: PreferenceLossConfig) -> Tensor:
    """CPO (Xu et al. 2024, Contrastive Preference Optimization): -log sigma(beta*(log pi(w) - log pi(l))).

    Its SFT term is `rpo_alpha`.
    """
    return _smoothed(config.beta * (pairs.chosen - pairs.rejected), config.label_smoothing)


def orpo(pairs: PairLogprobs, config: PreferenceLossConfig) -> Tensor:
    """ORPO (Hong et al. 2024, Monolithic Preference Optimization): -beta*log sigma(log odds(w) - log odds(l)).

    odds(y) = p / (1 - p) with log p = log pi(y)/|y|. Its SFT term is `rpo_alpha`, and beta is the paper's lambda.
    """
    chosen, rejected = pairs.chosen / pairs.chosen_tokens, pairs.rejected / pairs.rejected_tokens
    return -config.beta * logsigmoid(_log_odds(chosen) - _log_odds(rejected))


def sigmoid_norm(pairs: PairLogprobs, config: PreferenceLossConfig) -> Tensor:
    """DPO with means over tokens instead of sums (as Tulu 3, Lambert et al. 2024)."""
    return -logsigmoid(config.beta * _mean_delta(pairs))


def apo_zero(pairs: PairLogprobs, config: PreferenceLossConfig) -> Tensor:
    """APO-zero (D'Oosterlinck et al. 2024, Anchored Preference Optimization): 1 - sigma(beta*r(w)) + sigma(beta*r(l)).

    r is the ratio to the reference. For chosen answers that are better than the model's own.
    """
    return torch.sigmoid(-config.beta * pairs.chosen_ratio) + torch.sigmoid(config.beta * pairs.rejected_ratio)


def apo_down(pairs: PairLogprobs, config: PreferenceLossConfig) -> Tensor:
    """APO-down: sigma(beta*r(w)) + 1 - sigma(beta*delta), for chosen answers that are worse than the model's own."""
    delta = pairs.chosen_ratio - pairs.rejected_ratio
    return torch.sigmoid(config.beta * pairs.chosen_ratio) + torch.sigmoid(-config.beta * delta)


def sppo_hard(pairs: PairLogprobs, config: PreferenceLossConfig) -> Tensor:
    """SPPO (Wu et al. 2024, Self-Play Preference Optimization) if the chosen answer surely wins:

    (r(w) - 1/(2*beta))^2 + (r(l) + 1/(2*beta))^2
    """
    return (pairs.chosen_ratio - 0.5 / config.beta) ** 2 + (pairs.rejected_ratio + 0.5 / config.beta) ** 2


def nca_pair(pairs: PairLogprobs, config: PreferenceLossConfig) -> Tensor:
    """NCA (Chen et al. 2024, Noise Contrastive Alignment of Language Models with Explicit Rewards), for a pair:

    -log sigma(beta*r(w)) - log sigma(-beta*r(w))/2 - log sigma(-beta*r(l))/2
    """
    chosen, rejected = config.beta * pairs.chosen_ratio, config.beta * pairs.rejected_ratio
    return -logsigmoid(chosen) - 0.5 * logsigmoid(-chosen) - 0.5 * logsigmoid(-rejected)


def bco_pair(pairs: PairLogprobs, config: PreferenceLossConfig) -> Tensor:
    """BCO (Jung et al. 2024, Binary Classifier Optimization) without its shift:

    -log sigma(beta*r(w)) - log sigma(-beta*r(l))
    """
    return -logsigmoid(config.beta * pairs.chosen_ratio) - logsigmoid(-config.beta * pairs.rejected_ratio)


def exo_pair(pairs: PairLogprobs, config: PreferenceLossConfig) -> Tensor:
    """EXO (Ji et al. 2024, Towards Efficient Exact Optimization): KL of (q, 1 - q) from (1 - e, e).

    q = sigma(beta*delta), and the share e of flipped pairs is `label_smoothing`.
    """
    share, logits = config.label_smoothing, config.beta * (pairs.chosen_ratio - pairs.rejected_ratio)
    wins = torch.sigmoid(logits) * (logsigmoid(logits) - math.log1p(-share))
    return wins + torch.sigmoid(-logits) * (logsigmoid(-logits) - math.log(share))


def discopop(pairs: PairLogprobs, config: PreferenceLossConfig) -> Tensor:
    """DiscoPOP (Lu et al. 2024, Discovering Preference Optimization Algorithms with LLMs), x = beta*delta:

    -(1 - m)*log sigma(x) + m*exp(-x) with m = sigma(x/tau), the paper's tau of 0.05
    """
    logits = config.beta * (pairs.chosen_ratio - pairs.rejected_ratio)
    mixed = torch.sigmoid(logits / 0.05)
    # m*exp(-x) with one exponential: for a very negative x, m is 0 and exp(-x) infinite.
    return -(1 - mixed) * logsigmoid(logits) + torch.exp(logsigmoid(logits / 0.05) - logits)


LOSSES: Mapping[str, Callable[[PairLogprobs, PreferenceLossConfig], Tensor]] = {
    each.__name__: each
    for each in (
        *(sigmoid, hinge, ipo, robust, simpo, cpo, orpo, sigmoid_norm, apo_zero, apo_down, sppo_hard, nca_pair),
        *(bco_pair, exo_pair, discopop),
    )
}
"""By `loss.type`."""


def kto(ratios_N: Tensor, is_desirable_N: Tensor, kl: Tensor, config: PreferenceLossConfig) -> Tensor:
    """KTO (Ethayarajh et al. 2024, Model Alignment as Prospect Theoretic Optimization), of r = log pi(y) - log ref(y):

    1 - sigma(beta*(r - kl)) of a good answer and 1 - sigma(beta*(kl - r)) of a bad one, weighted. With a `kl` of 0 it
    is the unpaired form of APO-zero (D'Oosterlinck et al. 2024).
    """
    sign = torch.where(is_desirable_N, 1.0, -1.0)
    weight = torch.where(is_desirable_N, config.desirable_weight, config.undesirable_weight)
    return weight * torch.sigmoid(-config.beta * sign * (ratios_N - kl))


def rewards(pairs: PairLogprobs, config: PreferenceLossConfig) -> tuple[Tensor, Tensor]:
    """The rewards of chosen and rejected answers that the loss compares, without gradient."""
    chosen, rejected = pairs.chosen_ratio.detach(), pairs.rejected_ratio.detach()
    if config.type in ("simpo", "orpo"):
        chosen, rejected = chosen / pairs.chosen_tokens, rejected / pairs.rejected_tokens
    return config.beta * chosen, config.beta * rejected


def _smoothed(logits: Tensor, share: float) -> Tensor:
    """The logistic loss, with a share of the pairs flipped."""
    loss = -logsigmoid(logits)
    return loss if share == 0 else (1 - share) * loss - share * logsigmoid(-logits)


def _mean_delta(pairs: PairLogprobs) -> Tensor:
    """The margin of the means over tokens."""
    return pairs.chosen_ratio / pairs.chosen_tokens - pairs.rejected_ratio / pairs.rejected_tokens


def _log_odds(logprob: Tensor) -> Tensor:
    """log(p / (1 - p)). Near p = 1 expm1 keeps the digits of 1 - p, and near p = 0 log1p does."""
    # Both branches of `where` have a gradient, so each sees only values at which it is finite.
    near_one = logprob > -0.6931472
    of_large = (-torch.expm1(torch.where(near_one, logprob, -1.0).clamp(max=-1e-7))).log()
    of_small = torch.log1p(-torch.where(near_one, -1.0, logprob).exp())
    return logprob - torch.where(near_one, of_large, of_small)
