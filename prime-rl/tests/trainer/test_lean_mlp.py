from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaMLP

from prime_rl.trainer.kernels.lean_layers import use_lean_mlps
from prime_rl.trainer.kernels.products import ONEDNN, PLAIN, Products, onednn_product, plain_product

WIDTH = 64


def llama_mlp(**settings: bool | str) -> LlamaMLP:
    torch.manual_seed(0)
    return LlamaMLP(LlamaConfig(hidden_size=WIDTH, intermediate_size=80, **settings))


def outcome_and_gradients(mlp: nn.Module, x: Tensor) -> list[Tensor]:
    x = x.clone().requires_grad_()
    out = mlp(x)
    slope = torch.linspace(-1, 2, out.numel()).view_as(out).to(out.dtype)
    return [out, *torch.autograd.grad(out, (x, *mlp.parameters()), slope)]


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize(
    ("shape", "products"),
    [
        ((2, 7, WIDTH), ONEDNN),
        ((1, 33, WIDTH), Products(onednn_product, onednn_product, plain_product)),
        ((33, WIDTH), PLAIN),
    ],
)
def test_a_lean_mlp_matches_transformers(
    dtype: torch.dtype, tolerance: float, shape: tuple[int, ...], products: Products
) -> None:
    mlp = llama_mlp().to(dtype)
    x = (torch.randn(shape, generator=torch.Generator().manual_seed(0)) * 3).to(dtype)
    expected = outcome_and_gradients(mlp, x)
    use_lean_mlps(mlp, products)
    assert "forward" in vars(mlp)
    for ours, theirs in zip(outcome_and_gradients(mlp, x), expected, strict=True):
        assert ours.dtype == dtype
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance * float(theirs.detach().abs().max()))


def test_frozen_projections_get_no_gradient() -> None:
    mlp = llama_mlp()
    use_lean_mlps(mlp)
    mlp.up_proj.requires_grad_(False)
    mlp(torch.randn(2, 3, WIDTH)).sum().backward()
    assert mlp.up_proj.weight.grad is None
    assert mlp.gate_proj.weight.grad is not None


class Scaled(LlamaMLP):
    """A layer with the same submodules but another formula."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


def adapted_mlp() -> LlamaMLP:
    mlp = llama_mlp()
    mlp.up_proj.register_forward_hook(lambda module, inputs, output: output + 1)
    return mlp


@pytest.mark.parametrize(
    "mlp",
    [
        llama_mlp(mlp_bias=True),
        llama_mlp(hidden_act="gelu"),
        adapted_mlp(),
        Scaled(LlamaConfig(hidden_size=WIDTH, intermediate_size=80)),
    ],
    ids=["biases", "another activation", "adapters", "another formula"],
)
def test_other_layers_are_not_replaced(mlp: nn.Module) -> None:
    use_lean_mlps(mlp)
    assert "forward" not in vars(mlp)
