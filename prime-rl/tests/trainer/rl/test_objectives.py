"""Published objectives: values and gradients match their formulas, computed by hand or in NumPy."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from prime_rl.configs.algorithms import LOSS, PRESETS, MaskedLossConfig, SoftLossConfig, preset
from prime_rl.configs.trainer import (
    ClipLossConfig,
    DecoupledLossConfig,
    DefaultLossConfig,
    GSPOLossConfig,
    TrainerConfig,
    TruncatedLossConfig,
)
from prime_rl.trainer.rl.loss import (
    LossInputs,
    Tokens,
    kl_in_rewards,
    largest_kept_square,
    loglinear_proximal,
    objective_of,
    setup_loss,
    surrogate_losses,
    top_divergence,
)
from prime_rl.trainer.rl.rows import RowLayout, Sequences

THETA, PROX, BEHAVE, ADVANTAGES = [-1, -0.5, -2, -0.1], [-1.2, -0.5, -1, -0.6], [-1.3, -0.9, -1, -3], [1, -1, -1, 1]
"""Inputs of the reference values for decoupled PPO."""


EVERY_LOSS = [
    ClipLossConfig(),
    GSPOLossConfig(),
    SoftLossConfig(),
    MaskedLossConfig(),
    MaskedLossConfig(measure="kl", ratio_cap=20),
    TruncatedLossConfig(),
    DecoupledLossConfig(),
]


def tokens_of(theta=THETA, behave=BEHAVE, advantages=ADVANTAGES, prox=PROX) -> Tokens:
    logprobs = torch.tensor(theta, dtype=torch.float64, requires_grad=True)
    others = (torch.tensor(values, dtype=torch.float64) for values in (behave, prox, advantages))
    return Tokens(logprobs, *others, Sequences.of_lengths([len(theta)], torch.device("cpu")))


def losses_of(config, tokens: Tokens) -> list[float]:
    return objective_of(config)(tokens)[0].tolist()


def test_decoupled_ppo_gives_the_reference_values() -> None:
    every = DecoupledLossConfig(behaviour_weight_cap=None)
    assert losses_of(every, tokens_of()) == pytest.approx([-1.32621, 1.49182, 0.8, -13.22781], abs=1e-5)
    means = {
        -3.065548: every,
        -3.291925: DecoupledLossConfig(behaviour_weight_cap=None, clip_high=0.28),
        0.241405: DecoupledLossConfig(behaviour_weight_cap=5.0),
    }
    for expected, config in means.items():
        assert np.mean(losses_of(config, tokens_of())) == pytest.approx(expected, abs=1e-6)


def test_decoupled_ppo_around_the_sampling_policy_is_the_clipped_surrogate() -> None:
    tokens = tokens_of(prox=BEHAVE)
    assert losses_of(DecoupledLossConfig(), tokens) == pytest.approx(losses_of(ClipLossConfig(), tokens))


def test_the_clipped_surrogate_by_hand() -> None:
    """Ratios 1.5, 0.5, 1.5, 0.5 with advantages 2, 2, -2, -2: only gains are clipped, never losses."""
    theta = [math.log(ratio) for ratio in (1.5, 0.5, 1.5, 0.5)]
    tokens = tokens_of(theta, behave=[0] * 4, advantages=[2, 2, -2, -2])
    assert losses_of(ClipLossConfig(), tokens) == pytest.approx([-2.4, -1.0, 3.0, 1.6])
    assert losses_of(ClipLossConfig(clip_high=0.28), tokens) == pytest.approx([-2.56, -1.0, 3.0, 1.6])
    _, metrics = objective_of(ClipLossConfig())(tokens)
    assert metrics["is_clipped"].tolist() == [1, 0, 0, 1]


def test_the_dual_clip_bounds_what_a_negative_advantage_can_cost() -> None:
    tokens = tokens_of(theta=[2, 2], behave=[0, 0], advantages=[-1, 1], prox=[0, 0])
    assert losses_of(ClipLossConfig(dual_clip=3), tokens) == pytest.approx([3, -1.2])


@pytest.mark.parametrize(("difference", "ratio"), [(0.5, 1.6487), (1.0, 2.7183)])
def test_gspo_uses_the_geometric_mean_ratio_of_the_sequence(difference, ratio) -> None:
    config = GSPOLossConfig(clip_high=9.0)
    tokens = tokens_of(theta=[0.0, -1.0], behave=[-difference - 0.25, -1 - difference + 0.25], advantages=[1, 1])
    assert losses_of(config, tokens) == pytest.approx([-ratio] * 2, abs=5e-5)
    objective_of(config)(tokens)[0].mean().backward()
    # d/d theta_t of -s*A is -s*A / M: every token moves the whole sequence's ratio.
    assert tokens.logprobs.grad.tolist() == pytest.approx([-ratio / 2] * 2, abs=5e-5)


def test_gspo_clips_whole_sequences() -> None:
    tokens = tokens_of(theta=[-1.0, -1.0], behave=[-1.002, -1.0], advantages=[1, 1])
    assert losses_of(GSPOLossConfig(), tokens) == pytest.approx([-1.0004] * 2)


def test_truncated_weights_keep_the_gradient_of_every_token() -> None:
    theta = [math.log(ratio) for ratio in (0.25, 1.0, 30.0)]
    tokens = tokens_of(theta, behave=[0] * 3, advantages=[2, -1, 1])
    losses, metrics = objective_of(TruncatedLossConfig(weight_low=0.5, weight_high=5.0))(tokens)
    assert losses.tolist() == pytest.approx([-0.5 * 2 * theta[0], 1.0 * theta[1], -5 * theta[2]])
    losses.sum().backward()
    assert tokens.logprobs.grad.tolist() == pytest.approx([-0.5 * 2, 1.0, -5.0])
    assert metrics["is_clipped"].tolist() == [1, 0, 1]


@pytest.mark.parametrize("config", EVERY_LOSS)
def test_with_equal_policies_the_gradient_is_the_plain_policy_gradient(config) -> None:
    tokens = tokens_of(THETA, THETA, [0.7] * 4, THETA)
    losses = objective_of(config)(tokens)[0]
    losses.sum().backward()
    assert tokens.logprobs.grad.tolist() == pytest.approx([-0.7] * 4)


@pytest.mark.parametrize("config", EVERY_LOSS)
def test_an_impossible_ratio_leaves_no_nan(config) -> None:
    tokens = tokens_of(theta=[-1, -800], behave=[-900, -1], advantages=[1, -1], prox=[-1, -1])
    objective_of(config)(tokens)[0].sum().backward()
    assert tokens.logprobs.grad.isfinite().all()


LENGTHS = (3, 5)
RNG = np.random.default_rng(0)
LOGPROBS, BEHAVIOUR = (-RNG.random(8) * 2 for _ in range(2))
ADVANTAGE_OF = (0.9, -0.4)


def clip(ratio, advantage, low, high):
    return -np.minimum(ratio * advantage, np.clip(ratio, 1 - low, 1 + high) * advantage)


def by_sequence(token_losses) -> list[np.ndarray]:
    return np.split(token_losses, [LENGTHS[0]])


@pytest.mark.parametrize(
    ("estimator", "importance"), [("k1", False), ("k2", False), ("k2", True), ("k3", False), ("k3", True)]
)
def test_the_penalty_on_the_divergence_from_a_reference_has_the_value_and_gradient_of_its_formula(
    estimator: str, importance: bool
) -> None:
    reference = [-1.1, -0.4, -2.5, -0.9]
    config = ClipLossConfig(kl_coef=0.3, kl_estimator=estimator, kl_importance=importance, average="sequence")
    tokens = dataclasses.replace(tokens_of(), reference_logprobs=torch.tensor(reference, dtype=torch.float64))
    result = surrogate_losses(tokens, objective_of(config), config)
    (found,) = torch.autograd.grad(result.losses_S.sum(), tokens.logprobs)

    def loss(theta: np.ndarray, at: np.ndarray) -> float:
        """`at` is the value of theta where it counts as a constant."""
        gap, ratio, advantage = theta - reference, np.exp(theta - BEHAVE), np.array(ADVANTAGES, dtype=float)
        if estimator == "k1":
            return float(np.mean(clip(ratio, advantage - 0.3 * (at - reference), 0.2, 0.2)))
        penalty = gap**2 / 2 if estimator == "k2" else np.exp(-gap) + gap - 1
        return float(np.mean(clip(ratio, advantage, 0.2, 0.2) + 0.3 * penalty * (ratio if importance else 1)))

    theta, step = np.array(THETA, dtype=float), 1e-6
    assert result.losses_S.sum().item() == pytest.approx(loss(theta, theta), rel=1e-9)
    slopes = [(loss(theta + h, theta) - loss(theta - h, theta)) / (2 * step) for h in np.eye(4) * step]
    assert found.tolist() == pytest.approx(slopes, rel=1e-6, abs=1e-9)
    gap = theta - reference
    assert result.metrics["reference_kl"].item() == pytest.approx(np.mean(np.exp(-gap) + gap - 1))


@pytest.mark.parametrize(
    ("settings", "fault"),
    [
        ({"kl_importance": True}, "no effect with kl_coef = 0"),
        ({"kl_target": 0.1}, "kl_target adapts kl_coef, which is 0"),
        ({"kl_importance": True, "kl_coef": 0.1, "kl_in": "token_reward"}, "no effect with kl_in = 'token_reward'"),
        ({"kl_in": "sequence_reward"}, "kl_in = 'sequence_reward' has no effect with kl_coef = 0"),
        ({"kl_in": "token_reward", "kl_coef": 0.1, "sft_coef": 0.1}, "the advantages by which sft_coef tells"),
        ({"kl_in": "token_reward", "kl_coef": 0.1, "type": "default", "adv_tau": 0.5}, "adv_tau \\(0.5\\) would"),
        ({"type": "decoupled", "rejection": {"high": 0.0}}, "needs high above 1"),
        ({"type": "decoupled", "rejection": {"low": 1.5}}, "low from 0 to below 1"),
        ({"type": "decoupled", "rejection": {"measure": "k3", "high": 0.0}}, "'k3' needs high above 0"),
        ({"kl_importance": True, "kl_coef": 0.1, "kl_estimator": "k1"}, "no effect with kl_estimator = 'k1'"),
    ],
)
def test_a_setting_of_a_loss_that_cannot_work_is_refused(settings: dict[str, object], fault: str) -> None:
    with pytest.raises(ValidationError, match=fault):
        TrainerConfig(loss={"type": "clip", **settings})


# Every loss: value and gradient against formulas written from the papers in float64, without the trainer's code.
# The row has two sequences, of 3 and 5 tokens, the second one with turns of 2 and 3 tokens.

TURNS = (3, 2, 3)
PROXIMAL = LOGPROBS + 0.3 * RNG.standard_normal(8)
REFERENCE = -RNG.random(8) * 2
AGES = np.repeat([2.0, 5.0], LENGTHS)
A = np.repeat(ADVANTAGE_OF, LENGTHS)
DIVERGENCE = np.array([0.01, 0.2, 0.16, 0.04, 0.3, 0.06, 0.14, 0.5])


def level_ratio(theta, at, anchor, parts):
    """The geometric mean ratio of each part, with the gradient of each token."""
    means = [np.full(len(own), own.mean()) for own in np.split(at - anchor, np.cumsum(parts)[:-1])]
    return np.exp(np.concatenate(means)) * np.exp(theta - at)


def by_part(values, parts, aggregate):
    return np.concatenate([np.full(len(own), aggregate(own)) for own in np.split(values, np.cumsum(parts)[:-1])])


def tokens_mean(losses):
    return losses.mean()


def sequences_mean(losses):
    return np.mean([part.mean() for part in by_sequence(losses)])


def dropped_by_dppo(theta, divergence, limit):
    ratio = np.exp(theta - BEHAVIOUR)
    away = np.where(A > 0, ratio > 1, ratio < 1)
    return away & (divergence > limit)


def binary_kl(p, q):
    return p * np.log(p / q) + (1 - p) * np.log((1 - p) / (1 - q))


def kept_by_m2po(squares, limit):
    """Leave out the largest until the mean of the rest is below the limit."""
    order = list(np.argsort(squares))
    while len(order) > 1 and squares[order].mean() >= limit:
        order.pop()
    return np.isin(np.arange(len(squares)), order)


def decoupled(theta, proximal, weight):
    return weight * clip(np.exp(theta - proximal), A, 0.2, 0.2)


def loglinear(at):
    return BEHAVIOUR + (AGES - 1) / AGES * (at - BEHAVIOUR)


W = np.exp(PROXIMAL - BEHAVIOUR)
LOG_W = PROXIMAL - BEHAVIOUR
D = "decoupled"

# Config; loss of each token from theta and from its value where it counts as a constant; average.
LOSSES = {
    "grpo": ("grpo", {}, lambda x, at: clip(np.exp(x - BEHAVIOUR), A, 0.2, 0.2), sequences_mean),
    "dr_grpo": (
        "dr_grpo",
        {},
        lambda x, at: clip(np.exp(x - BEHAVIOUR), A, 0.2, 0.2),
        lambda losses: losses.sum() / 2 / 40,
    ),
    "dapo": ("dapo", {}, lambda x, at: clip(np.exp(x - BEHAVIOUR), A, 0.2, 0.28), tokens_mean),
    "gdpo": ("gdpo", {}, lambda x, at: clip(np.exp(x - BEHAVIOUR), A, 0.2, 0.2), sequences_mean),
    "maxrl": ("maxrl", {}, lambda x, at: clip(np.exp(x - BEHAVIOUR), A, 0.2, 0.2), tokens_mean),
    "lite_ppo": ("lite_ppo", {}, lambda x, at: clip(np.exp(x - BEHAVIOUR), A, 0.2, 0.2), tokens_mean),
    "reinforce_pp": ("reinforce_pp", {}, lambda x, at: clip(np.exp(x - BEHAVIOUR), A, 0.2, 0.2), tokens_mean),
    "rloo": ("rloo", {}, lambda x, at: -np.minimum(np.exp(at - BEHAVIOUR), 2) * A * x, lambda losses: losses.sum() / 2),
    "cispo": ("cispo", {}, lambda x, at: -np.minimum(np.exp(at - BEHAVIOUR), 5) * A * x, tokens_mean),
    "aipo": ("aipo", {"weight_high": 1.5}, lambda x, at: -np.minimum(np.exp(at - BEHAVIOUR), 1.5) * A * x, tokens_mean),
    "gspo": (
        "gspo",
        {"clip_low": 0.9, "clip_high": 0.01},
        lambda x, at: clip(level_ratio(x, at, BEHAVIOUR, LENGTHS), A, 0.9, 0.01),
        sequences_mean,
    ),
    "clip by turn": (
        "grpo",
        {"level": "turn"},
        lambda x, at: clip(level_ratio(x, at, BEHAVIOUR, TURNS), A, 0.2, 0.2),
        sequences_mean,
    ),
    "sapo": (
        "sapo",
        {},
        lambda x, at: (
            -4 / np.where(A > 0, 1, 1.05) / (1 + np.exp(np.where(A > 0, 1, 1.05) * (1 - np.exp(x - BEHAVIOUR)))) * A
        ),
        sequences_mean,
    ),
    "dppo_tv": (
        "dppo_tv",
        {},
        lambda x, at: np.where(
            dropped_by_dppo(at, abs(np.exp(at) - np.exp(BEHAVIOUR)), 0.15), 0, -np.exp(x - BEHAVIOUR) * A
        ),
        tokens_mean,
    ),
    "dppo_kl": (
        "dppo_kl",
        {},
        lambda x, at: np.where(
            dropped_by_dppo(at, binary_kl(np.exp(BEHAVIOUR), np.exp(at)), 0.05), 0, -np.exp(x - BEHAVIOUR) * A
        ),
        tokens_mean,
    ),
    "dppo_top_k_tv": (
        "dppo_top_k_tv",
        {},
        lambda x, at: np.where(dropped_by_dppo(at, DIVERGENCE, 0.15), 0, -np.exp(x - BEHAVIOUR) * A),
        tokens_mean,
    ),
    "dppo_top_k_kl": (
        "dppo_top_k_kl",
        {},
        lambda x, at: np.where(dropped_by_dppo(at, DIVERGENCE, 0.05), 0, -np.exp(x - BEHAVIOUR) * A),
        tokens_mean,
    ),
    "m2po": (
        "m2po",
        {},
        lambda x, at: np.where(kept_by_m2po((at - BEHAVIOUR) ** 2, 0.04), -np.exp(x - BEHAVIOUR) * A, 0),
        tokens_mean,
    ),
    "decoupled_ppo": ("decoupled_ppo", {}, lambda x, at: decoupled(x, PROXIMAL, np.where(W > 5, 0, W)), tokens_mean),
    "decoupled by sequence": (
        "decoupled_ppo",
        {"level": "sequence"},
        lambda x, at: np.where(W > 5, 0, W) * clip(level_ratio(x, at, PROXIMAL, LENGTHS), A, 0.2, 0.2),
        tokens_mean,
    ),
    "icepop": (
        "icepop",
        {"behaviour_weight_cap": 2.0},
        lambda x, at: decoupled(x, PROXIMAL, np.where((W > 2) | (W < 0.5), 0, W)),
        sequences_mean,
    ),
    "loglinear_ppo": (
        "loglinear_ppo",
        {},
        lambda x, at: decoupled(
            x, loglinear(at), np.where(loglinear(at) - BEHAVIOUR > np.log(5), 0, np.exp(loglinear(at) - BEHAVIOUR))
        ),
        tokens_mean,
    ),
    # The objective of PPO; its advantages are in test_critic.py.
    "ppo": ("ppo", {}, lambda x, at: clip(np.exp(x - BEHAVIOUR), A, 0.2, 0.2), tokens_mean),
    "reject turns by their ratio": (
        "decoupled_ppo",
        {"rejection": {"level": "turn", "aggregate": "sum", "low": 0.4, "high": 2.0}},
        lambda x, at: decoupled(
            x,
            PROXIMAL,
            np.where(abs(np.exp(by_part(LOG_W, TURNS, np.sum)) - 1.2) > 0.8, 0, np.exp(by_part(LOG_W, TURNS, np.sum))),
        ),
        tokens_mean,
    ),
    "clamp weights": (
        "decoupled_ppo",
        {"rejection": {"action": "clamp", "low": 0.8, "high": 1.3}},
        lambda x, at: decoupled(x, PROXIMAL, np.clip(W, 0.8, 1.3)),
        tokens_mean,
    ),
    "reject sequences by their largest k3": (
        "decoupled_ppo",
        {"rejection": {"level": "sequence", "measure": "k3", "aggregate": "max", "high": 0.9}},
        lambda x, at: decoupled(x, PROXIMAL, np.where(by_part(W - LOG_W - 1, LENGTHS, np.max) > 0.9, 0, W)),
        tokens_mean,
    ),
    "reject tokens by k1": (
        "decoupled_ppo",
        {"rejection": {"measure": "k1", "low": -0.5, "high": 0.5}},
        lambda x, at: decoupled(x, PROXIMAL, np.where(abs(LOG_W) > 0.5, 0, W)),
        tokens_mean,
    ),
    "sampled entropy": (
        "grpo",
        {"entropy_coef": 0.2, "entropy_estimator": "sampled", "clip_low": 0.9, "clip_high": 99.0},
        lambda x, at: -np.exp(x - BEHAVIOUR) * (A - 0.2 * at),
        sequences_mean,
    ),
    "sft on good rollouts": (
        "dapo",
        {"sft_coef": 0.3},
        lambda x, at: clip(np.exp(x - BEHAVIOUR), A, 0.2, 0.28) - 0.3 * np.where(A > 0, x, 0),
        tokens_mean,
    ),
    "k3 with importance": (
        "dapo",
        {"kl_coef": 0.3, "kl_importance": True},
        lambda x, at: (
            clip(np.exp(x - BEHAVIOUR), A, 0.2, 0.28)
            + 0.3 * np.exp(x - BEHAVIOUR) * (np.exp(REFERENCE - x) + x - REFERENCE - 1)
        ),
        tokens_mean,
    ),
}


def row_of(theta: torch.Tensor, **more: torch.Tensor) -> tuple[LossInputs, RowLayout]:
    """The row with a prompt token before each turn."""
    mask = torch.cat([torch.arange(1 + turn) > 0 for turn in TURNS])
    lengths = [1 + TURNS[0], 2 + TURNS[1] + TURNS[2]]

    def whole(values) -> torch.Tensor:
        placed = torch.zeros(len(mask), dtype=torch.float64)
        return placed.index_put((mask.nonzero().flatten(),), torch.as_tensor(values))

    inputs = LossInputs(
        trainer_logprobs=whole(theta),
        inference_logprobs=whole(BEHAVIOUR),
        teacher_logprobs=None,
        advantages=whole(A),
        loss_mask=mask,
        proximal_logprobs=whole(PROXIMAL),
        reference_logprobs=whole(REFERENCE),
        age=whole(AGES),
        **{name: whole(values) for name, values in more.items()},
    )
    return inputs, RowLayout.of_mask(mask, lengths, torch.device("cpu"))


@pytest.mark.parametrize("name", LOSSES)
def test_value_and_gradient_of_every_loss_are_those_of_its_paper(name: str) -> None:
    algorithm, changed, of_tokens, average = LOSSES[name]
    loss = setup_loss(TrainerConfig(loss=preset(algorithm, max_tokens=40, seq_len=64)[LOSS] | changed).loss)
    theta = torch.tensor(LOGPROBS, requires_grad=True)
    inputs, layout = row_of(theta, **({"divergence": DIVERGENCE} if loss.top_measure else {}))
    if loss.max_second_moment is not None:
        squares = (inputs.trainer_logprobs.detach() - inputs.inference_logprobs).square()
        cutoff = largest_kept_square(squares[layout.trained_M], loss.max_second_moment)
        inputs = dataclasses.replace(inputs, is_dropped=squares > cutoff)
    outputs = loss.row_losses(inputs, layout)
    assert (outputs.metrics["mismatch_kl"] > 0).all()
    total = outputs.losses_S.sum() / (sum(LENGTHS) if loss.per_token else len(LENGTHS))
    total.backward()

    def expected(x):
        return average(of_tokens(x, LOGPROBS))

    steps = np.eye(8) * 1e-6
    slopes = [(expected(LOGPROBS + step) - expected(LOGPROBS - step)) / 2e-6 for step in steps]
    assert total.item() == pytest.approx(expected(LOGPROBS), rel=1e-9)
    assert theta.grad.tolist() == pytest.approx(slopes, rel=1e-6, abs=1e-9)
    assert any(slopes)


def test_the_divergence_over_likeliest_tokens_is_that_of_the_paper() -> None:
    """DPPO: over the k likeliest tokens of the sampling policy, the sampled one, and all others as one outcome."""
    logits = np.random.default_rng(5).standard_normal((2, 6, 12)) * 2
    behave, theta = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    sampled, k = [0, 3, 5, 7, 9, 11], 3
    expected, given = {"top_k_tv": [], "top_k_kl": []}, []
    for place, token in enumerate(sampled):
        chosen = sorted({*np.argsort(-behave[place])[:k].tolist(), token})
        p, q = ([*each[place, chosen], 1 - each[place, chosen].sum()] for each in (behave, theta))
        expected["top_k_tv"].append(sum(abs(a - b) for a, b in zip(p, q, strict=True)) / 2)
        expected["top_k_kl"].append(sum(a * math.log(a / b) for a, b in zip(p, q, strict=True)))
        reported = [token, *(each for each in np.argsort(-behave[place]).tolist() if each != token)][: k + 3]
        given.append([np.log(each[place, reported]).tolist() for each in (behave, theta)])
    own = [torch.tensor(each, dtype=torch.float64) for each in zip(*given, strict=True)]
    for measure, values in expected.items():
        assert top_divergence(*own, measure, k).tolist() == pytest.approx(values, rel=1e-12)


def test_every_preset_stands_in_the_table() -> None:
    assert {algorithm for algorithm, *_ in LOSSES.values()} == set(PRESETS) - {"default"}


# Golden values of AReaL.


@pytest.mark.parametrize(
    ("rejection", "expected"),
    [
        ({"level": "token", "high": 5}, 0.241405),
        ({"level": "token", "action": "clamp", "high": 5}, -1.258595),
        ({"level": "sequence", "high": 2}, 0.0),
        ({"level": "sequence", "high": 5}, -0.30971),
        ({"level": "sequence", "action": "clamp", "high": 2}, -0.3),
    ],
)
def test_rejection_gives_the_reference_values(rejection, expected) -> None:
    config = DecoupledLossConfig(rejection=rejection)
    assert np.mean(losses_of(config, tokens_of())) == pytest.approx(expected, abs=2e-6)


def test_the_loglinear_proximal_policy_gives_the_reference_values() -> None:
    """Ages of versions -1 (unknown), 1, 4, 5 and 3 under version 5."""
    tokens = tokens_of(theta=[-1] * 5, behave=[-2] * 5, advantages=[1] * 5, prox=[0] * 5)
    tokens = dataclasses.replace(tokens, age=torch.tensor([0.0, 4, 1, 0, 2], dtype=torch.float64))
    assert loglinear_proximal(tokens).tolist() == pytest.approx([-2, -1.25, -2, -2, -1.5])


@pytest.mark.parametrize(
    ("squares", "limit", "expected"),
    [([0, 0.01, 0.25, 0], 0.04, 0.01), ([0.5, 0.3], 0.04, 0.3), ([0.01, 0.02], 0.04, 0.02)],
)
def test_the_second_moment_drops_as_few_tokens_as_possible(squares, limit, expected) -> None:
    assert largest_kept_square(torch.tensor(squares), limit) == pytest.approx(expected)


def test_a_soft_gate_has_slope_one_at_ratio_one() -> None:
    for tau in (0.3, 1.0, 1.05, 4.0):
        config = SoftLossConfig(tau_positive=tau, tau_negative=tau)
        tokens = tokens_of(THETA, THETA, [1.0] * 4)
        assert losses_of(config, tokens) == pytest.approx([-2 / tau] * 4)


@pytest.mark.parametrize(("ratio_type", "divisors"), [("token", [1] * 8), ("sequence", [3] * 3 + [5] * 5)])
def test_the_exact_entropy_bonus_is_subtracted_from_the_loss_with_its_gradient(
    ratio_type: str, divisors: list[int]
) -> None:
    """With ratios of sequences it is a mean over the sequence's tokens, as the rest of the loss."""
    bare = DefaultLossConfig(ratio_type=ratio_type)
    loss, bare = setup_loss(bare.model_copy(update={"entropy_coef": 0.5})), setup_loss(bare)
    assert loss.trains_entropy
    entropy = torch.rand(8, dtype=torch.float64, requires_grad=True)
    inputs, layout = row_of(torch.tensor(LOGPROBS), entropy=entropy)
    with_bonus, without = (each.row_losses(inputs, layout).losses_S.sum() for each in (loss, bare))
    expected = [0.5 / each for each in divisors]
    assert (without - with_bonus).item() == pytest.approx((torch.tensor(expected) * entropy).sum().item())
    with_bonus.backward()
    assert entropy.grad.tolist() == pytest.approx([-each for each in expected])


@pytest.mark.parametrize("kl_in", ["token_reward", "sequence_reward"])
@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_a_penalty_in_the_reward_is_what_the_sequence_still_pays(estimator: str, kl_in: str) -> None:
    inputs, layout = row_of(torch.tensor(LOGPROBS))
    config = ClipLossConfig(kl_coef=0.1, kl_estimator=estimator, kl_in=kl_in)
    x = BEHAVIOUR - REFERENCE
    own = by_sequence({"k1": x, "k2": x**2 / 2, "k3": np.exp(-x) - 1 + x}[estimator])
    whole = [np.full(len(part), part.sum()) for part in own]
    to_go = [part[::-1].cumsum()[::-1] for part in own]
    expected = np.concatenate(to_go if kl_in == "token_reward" else whole)
    found = kl_in_rewards(inputs.inference_logprobs, inputs.reference_logprobs, layout, config)
    assert found.tolist() == pytest.approx(expected)
    bare = setup_loss(ClipLossConfig()).row_losses(inputs, layout).losses_S
    assert setup_loss(config).row_losses(inputs, layout).losses_S.tolist() == bare.tolist()
