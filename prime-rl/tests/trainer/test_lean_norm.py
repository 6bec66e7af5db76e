from __future__ import annotations

import pytest
import torch
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from prime_rl.trainer.kernels.lean_layers import use_lean_norms

WIDTH = 96


def outcome_and_gradients(norm: torch.nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    x = x.clone().requires_grad_()
    out = norm(x)
    slope = torch.linspace(-1, 2, out.numel()).view_as(out).to(out.dtype)
    return [out, *torch.autograd.grad(out, (x, norm.weight), slope)]


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("shape", [(2, 7, WIDTH), (1, 5, 3, WIDTH), (1, 2000, 4, WIDTH)])
def test_a_lean_norm_matches_transformers(dtype: torch.dtype, tolerance: float, shape: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(0)
    norm = Qwen3RMSNorm(WIDTH)
    norm.weight.data = 1 + torch.randn(WIDTH, generator=generator) / 4
    x = (torch.randn(shape, generator=generator) * 3).to(dtype)
    expected = outcome_and_gradients(norm.to(torch.float32), x.float())
    norm.to(dtype)
    use_lean_norms(norm)
    for ours, theirs in zip(outcome_and_gradients(norm, x), expected, strict=True):
        assert ours.dtype == dtype
        torch.testing.assert_close(
            ours.float(), theirs, rtol=tolerance, atol=tolerance * float(theirs.detach().abs().max())
        )


def test_norms_with_another_formula_are_not_replaced() -> None:
    class CenteredRMSNorm(torch.nn.Module):
        """Gemma's RMSNorm, which multiplies by 1 + weight."""

        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(WIDTH))
            self.eps = 1e-6

    norm = CenteredRMSNorm()
    use_lean_norms(norm)
    assert "forward" not in vars(norm)
