"""PPO's critic: advantages and losses equal to AReaL's and to sums in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from prime_rl.configs.critic import CriticConfig
from prime_rl.configs.trainer import ModelConfig, TokenizerConfig, TrainerConfig
from prime_rl.trainer.kernels.product_choice import ProductChoice
from prime_rl.trainer.model.tokenizer import setup_tokenizer
from prime_rl.trainer.process.errors import ModelError
from prime_rl.trainer.rl.critic import advantages_of, value_losses
from prime_rl.trainer.rl.rows import Estimates, RowLayout
from prime_rl.trainer.rl.run import setup_critic


@pytest.mark.parametrize(
    ("gamma", "gae_lambda", "values", "expected"),
    [
        (1.0, 1.0, [0.0, 0.0, 0.0], [1.0, 1.0, 1.0]),
        (0.9, 0.95, [0.0, 0.0, 0.0], [0.7310, 0.8550, 1.0]),
        (0.9, 0.95, [0.2, 0.3, 0.4], [0.5599, 0.5730, 0.6000]),
    ],
)
def test_advantages_are_those_of_areal(gamma: float, gae_lambda: float, values: list[float], expected) -> None:
    """A sequence of 5 tokens, of which the last three were sampled, with reward 1."""
    layout = RowLayout.of_mask(torch.tensor([0, 0, 1, 1, 1]).bool(), [5], torch.device("cpu"))
    config = CriticConfig(gamma=gamma, gae_lambda=gae_lambda)
    advantages, returns = advantages_of(torch.ones(3), torch.tensor(values), layout, config)
    assert advantages.tolist() == pytest.approx(expected, abs=5e-5)
    assert returns.tolist() == pytest.approx([a + v for a, v in zip(expected, values, strict=True)], abs=5e-5)


def test_the_value_loss_is_that_of_areal_and_clips_only_what_would_grow() -> None:
    estimates = Estimates(torch.tensor([0.0, 0.1]), torch.tensor([2.0, 0.0]))
    losses, is_clipped = value_losses(torch.tensor([1.0, 0.2]), estimates, 0.5)
    assert losses.mean().item() == pytest.approx(0.5725)
    assert is_clipped.tolist() == [1, 0]
    assert value_losses(torch.tensor([1.0, 0.2]), estimates, None)[0].tolist() == pytest.approx([0.5, 0.02])


MASK = "..xxx..xxxx.x" + ".xxxxxxx" + "...." + ".x"
LENGTHS = [13, 8, 4, 2]
"""Three turns, one turn, no trained token, one token."""


def slow_gae(steps: list[tuple[float, float]], gamma: float, gae_lambda: float) -> np.ndarray:
    """From the last (reward, value) to the first, as the papers write it."""
    advantages, following, advantage = [], 0.0, 0.0
    for reward, value in reversed(steps):
        advantage = reward + gamma * following - value + gamma * gae_lambda * advantage
        following = value
        advantages.append(advantage)
    return np.array(advantages[::-1])


@pytest.mark.parametrize("level", ["token", "turn"])
@pytest.mark.parametrize("gae_lambda", [0.0, 0.7, 1.0])
def test_advantages_are_the_sums_of_the_paper(level: str, gae_lambda: float) -> None:
    """The calls of the first sequence are worth 0.25, 1 and 0.5: what a call adds is the difference to the next."""
    rng, gamma = np.random.default_rng(0), 0.9
    layout = RowLayout.of_mask(torch.tensor([each == "x" for each in MASK]), LENGTHS, torch.device("cpu"))
    sizes, worths = [[3, 4, 1], [7], [1]], [[0.25, 1.0, 0.5], [2.0], [-1.0]]
    rewards = [[-0.75, 0.5, 0.5], [2.0], [-1.0]]
    values, expected, returns = [], [], []
    for of_turns, own in zip(sizes, rewards, strict=True):
        ends = np.cumsum(of_turns) - 1
        paid = np.zeros(sum(of_turns))
        paid[ends] = own
        steps = paid if level == "token" else own
        value = rng.normal(size=len(steps))
        found = slow_gae(list(zip(steps, value, strict=True)), gamma, gae_lambda)
        values += value.tolist()
        returns += (found + value).tolist()
        expected += (found if level == "token" else np.repeat(found, of_turns)).tolist()
    config = CriticConfig(gamma=gamma, gae_lambda=gae_lambda, level=level)
    worth_M = np.concatenate([np.repeat(own, of) for own, of in zip(worths, sizes, strict=True)])
    inputs = (torch.from_numpy(worth_M), torch.tensor(values, dtype=torch.float64))
    advantages_M, returns_P = advantages_of(*inputs, layout, config)
    assert advantages_M.tolist() == pytest.approx(expected, rel=1e-9)
    assert returns_P.tolist() == pytest.approx(returns, rel=1e-9)


def test_a_critic_with_another_tokenizer_is_refused_before_it_is_loaded(tiny_model_dir, mesh) -> None:
    model = ModelConfig(name=str(tiny_model_dir))
    config = TrainerConfig(model=model, critic={"name": str(tiny_model_dir)})
    tokenizer = setup_tokenizer(TokenizerConfig(add_tokens=["<other>"]), model)
    with pytest.raises(ModelError, match=r"trainer\.critic\.name = .*: its tokenizer has another id for '<other>'"):
        setup_critic(config, tokenizer, mesh, ProductChoice.without_measuring())
