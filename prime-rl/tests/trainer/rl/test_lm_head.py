"""Fused head: equals a full softmax in value and gradient, for any vocabulary chunk size."""

from __future__ import annotations

import pytest
import torch

from prime_rl.trainer.kernels.heads import fused_logprobs

TOKENS, WIDTH, VOCABULARY = 17, 8, 50


@pytest.fixture
def problem():
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(TOKENS, WIDTH, generator=generator, dtype=torch.float64).float().requires_grad_()
    weight = (2 * torch.randn(VOCABULARY, WIDTH, generator=generator)).requires_grad_()
    labels = torch.randint(0, VOCABULARY, (TOKENS,), generator=generator)
    temperatures = torch.rand(TOKENS, generator=generator) + 0.5
    return hidden, weight, labels, temperatures


def full_softmax(hidden, weight, labels, temperatures):
    logprobs = torch.log_softmax(hidden @ weight.T / temperatures[:, None], dim=-1)
    return logprobs.gather(1, labels[:, None]).squeeze(1), -(logprobs.exp() * logprobs).sum(-1)


@pytest.mark.parametrize("vocab_chunk", [1, 7, 50, 8192])
def test_values_and_gradients_equal_the_full_softmax(problem, vocab_chunk) -> None:
    hidden, weight, labels, temperatures = problem
    upstream = torch.linspace(-1, 2, TOKENS)
    expected, expected_entropy = full_softmax(*problem)
    expected_grads = torch.autograd.grad((expected * upstream).sum(), [hidden, weight])
    actual, entropy = fused_logprobs(hidden, weight, labels, temperatures, vocab_chunk)
    grads = torch.autograd.grad((actual * upstream).sum(), [hidden, weight])
    assert torch.allclose(actual, expected, atol=1e-5)
    assert torch.allclose(entropy, expected_entropy, atol=1e-5)
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(grads, expected_grads, strict=True))


def test_huge_logits_do_not_overflow(problem) -> None:
    hidden, weight, labels, temperatures = problem
    logprobs, entropy = fused_logprobs(hidden * 1e4, weight, labels, temperatures, 7)
    assert logprobs.isfinite().all()
    assert entropy.isfinite().all()


@pytest.mark.parametrize("vocab_chunk", [7, 8192])
def test_the_gradient_of_the_entropy_is_exact_and_free_where_it_is_not_used(problem, vocab_chunk) -> None:
    hidden, weight, *_ = problem
    upstream = torch.linspace(-1, 2, TOKENS)
    for of_logprobs in (0.0, 1.0):
        grads = []
        for logprobs, entropy in (full_softmax(*problem), fused_logprobs(*problem, vocab_chunk)):
            total = (of_logprobs * logprobs * upstream + entropy * upstream.flip(0)).sum()
            grads.append(torch.autograd.grad(total, [hidden, weight]))
        assert all(torch.allclose(a, b, rtol=1e-4, atol=1e-4) for a, b in zip(*grads, strict=True))
    _, entropy = fused_logprobs(*problem, vocab_chunk)
    (alone,) = torch.autograd.grad((entropy * upstream).sum(), [hidden])
    assert alone.abs().sum() > 0


def test_a_frozen_head_gets_no_gradient(problem) -> None:
    hidden, weight, labels, temperatures = problem
    fused_logprobs(hidden, weight.detach(), labels, temperatures, 7)[0].sum().backward()
    assert hidden.grad is not None


def test_zero_tokens_give_a_zero_gradient(problem) -> None:
    hidden, weight, labels, temperatures = problem
    logprobs, _ = fused_logprobs(hidden[:0], weight, labels[:0], temperatures[:0], 7)
    logprobs.sum().backward()
    assert weight.grad.abs().sum() == 0
