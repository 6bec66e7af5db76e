"""Published objectives: values and gradients match their formulas, computed by hand or in NumPy."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from prime_rl.configs.algorithms import LOSS, preset
from prime_rl.configs.trainer import (
    ClipLossConfig,
    DecoupledLossConfig,
    GSPOLossConfig,
    TrainerConfig,
    TruncatedLossConfig,
)
from prime_rl.trainer.rl.loss import LossInputs, Tokens, objective_of, setup_loss, surrogate_losses
from prime_rl.trainer.rl.rows import RowLayout, Sequences

THETA, PROX, BEHAVE, ADVANTAGES = [-1, -0.5, -2, -0.1], [-1.2, -0.5, -1, -0.6], [-1.3, -0.9, -1, -3], [1, -1, -1, 1]
"""Inputs of the reference values for decoupled PPO."""


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


@pytest.mark.parametrize("config", [ClipLossConfig(), GSPOLossConfig(), TruncatedLossConfig(), DecoupledLossConfig()])
def test_with_equal_policies_the_gradient_is_the_plain_policy_gradient(config) -> None:
    tokens = tokens_of(THETA, THETA, [0.7] * 4, THETA)
    losses = objective_of(config)(tokens)[0]
    losses.sum().backward()
    assert tokens.logprobs.grad.tolist() == pytest.approx([-0.7] * 4)


@pytest.mark.parametrize("config", [ClipLossConfig(), GSPOLossConfig(), TruncatedLossConfig(), DecoupledLossConfig()])
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
        ({"kl_importance": True, "kl_coef": 0.1, "kl_estimator": "k1"}, "no effect with kl_estimator = 'k1'"),
    ],
)
def test_a_setting_of_the_penalty_without_effect_is_refused(settings: dict[str, object], fault: str) -> None:
    with pytest.raises(ValidationError, match=fault):
        ClipLossConfig(**settings)


def numpy_loss(algorithm: str) -> float:
    """Loss of a step with two sequences, implemented from the papers without the trainer's code."""
    ratio, advantage = np.exp(LOGPROBS - BEHAVIOUR), np.repeat(ADVANTAGE_OF, LENGTHS)
    match algorithm:
        case "grpo":
            return np.mean([part.mean() for part in by_sequence(clip(ratio, advantage, 0.2, 0.2))])
        case "dr_grpo":
            return clip(ratio, advantage, 0.2, 0.2).sum() / 2 / 40
        case "dapo":
            return clip(ratio, advantage, 0.2, 0.28).sum() / 8
        case "reinforce_pp":
            return clip(ratio, advantage, 0.2, 0.2).sum() / 8
        case "rloo":
            return np.sum(-np.minimum(ratio, 2.0) * advantage * LOGPROBS) / 2
        case "cispo":
            return np.mean(-np.minimum(ratio, 5.0) * advantage * LOGPROBS)
        case "gspo":
            ratios = [np.exp(part.mean()) for part in by_sequence(LOGPROBS - BEHAVIOUR)]
            return np.mean([clip(r, a, 3e-4, 4e-4) for r, a in zip(ratios, ADVANTAGE_OF, strict=True)])
        case "decoupled_ppo":  # the first update of a step: the proximal policy is the trained one, so rho is 1
            return np.mean(np.where(ratio > 5, 0, ratio) * -advantage)
    raise AssertionError(algorithm)


@pytest.mark.parametrize(
    "algorithm", ["grpo", "dr_grpo", "dapo", "reinforce_pp", "rloo", "cispo", "gspo", "decoupled_ppo"]
)
def test_the_loss_of_a_step_matches_the_paper(algorithm) -> None:
    loss = setup_loss(TrainerConfig(loss=preset(algorithm, max_tokens=40, seq_len=64)[LOSS]).loss)
    with_prompts = [np.concatenate([np.zeros(1), part]) for part in by_sequence(LOGPROBS)]
    lengths = [len(part) for part in with_prompts]
    inputs = LossInputs(
        trainer_logprobs=torch.tensor(np.concatenate(with_prompts)),
        inference_logprobs=torch.tensor(
            np.concatenate([np.concatenate([[0], part]) for part in by_sequence(BEHAVIOUR)])
        ),
        teacher_logprobs=None,
        advantages=torch.tensor(np.repeat(ADVANTAGE_OF, lengths)),
        loss_mask=torch.cat([torch.arange(length) > 0 for length in lengths]),
    )
    outputs = loss.row_losses(inputs, RowLayout.of_mask(inputs.loss_mask, lengths, torch.device("cpu")))
    assert (outputs.metrics["mismatch_kl"] > 0).all()
    total = outputs.losses_S.sum().item()
    assert total / (sum(LENGTHS) if loss.per_token else len(LENGTHS)) == pytest.approx(numpy_loss(algorithm), rel=1e-6)
