from __future__ import annotations

import pytest
import torch
from torch import nn

from prime_rl.trainer.kernels.products import (
    ONEDNN,
    PLAIN,
    Products,
    has_onednn_products,
    onednn_product,
    plain_product,
    use_lean_linears,
)

needs_the_kernels = pytest.mark.skipif(not has_onednn_products(), reason="PyTorch without oneDNN")


def outcome_and_gradients(linear: nn.Linear, x: torch.Tensor) -> list[torch.Tensor]:
    x = x.clone().requires_grad_()
    out = linear(x)
    slope = torch.linspace(-1, 2, out.numel()).view_as(out).to(out.dtype)
    trained = [parameter for parameter in linear.parameters() if parameter.requires_grad]
    return [out, *torch.autograd.grad(out, (x, *trained), slope)]


def drawn_linear(inputs: int, outputs: int, bias: bool) -> nn.Linear:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Linear(inputs, outputs, bias=bias)


@needs_the_kernels
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("inputs", "outputs"), [(48, 80), (80, 48)])
@pytest.mark.parametrize("shape", [(0,), (37,), (1, 33), (2, 3, 5)])
@pytest.mark.parametrize("products", [ONEDNN, Products(plain_product, onednn_product, plain_product)])
def test_a_lean_linear_layer_matches_the_plain_one_in_float64(
    products: Products, shape: tuple[int, ...], inputs: int, outputs: int, bias: bool
) -> None:
    x = torch.randn(*shape, inputs, generator=torch.Generator().manual_seed(1))
    linear = drawn_linear(inputs, outputs, bias)
    expected = outcome_and_gradients(drawn_linear(inputs, outputs, bias).double(), x.double())
    use_lean_linears(linear, products)
    assert "forward" in vars(linear)
    for ours, exact in zip(outcome_and_gradients(linear, x), expected, strict=True):
        assert ours.is_contiguous()
        torch.testing.assert_close(ours.double(), exact, rtol=1e-5, atol=1e-5)


def test_layers_stay_as_they_are_if_pytorch_is_faster() -> None:
    linear = drawn_linear(48, 80, bias=False)
    use_lean_linears(linear, PLAIN)
    assert "forward" not in vars(linear)


@needs_the_kernels
def test_a_frozen_weight_gets_no_gradient() -> None:
    linear = drawn_linear(48, 80, bias=False).requires_grad_(False)
    x = torch.ones(4, 48, requires_grad=True)
    use_lean_linears(linear)
    linear(x).sum().backward()
    assert linear.weight.grad is None
    torch.testing.assert_close(x.grad, linear.weight.sum(0).expand(4, -1))


def test_other_dtypes_use_pytorch() -> None:
    linear, plain = (drawn_linear(48, 80, bias=True).bfloat16() for _ in range(2))
    x = torch.ones(4, 48, dtype=torch.bfloat16)
    use_lean_linears(linear)
    for ours, theirs in zip(outcome_and_gradients(linear, x), outcome_and_gradients(plain, x), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_product_of_transposed_matrices_is_correct(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(2)
    one, other = (torch.randn(33, width, generator=generator, dtype=dtype) for width in (20, 12))
    expected = one.double().T @ other.double()
    torch.testing.assert_close(onednn_product(one.T, other.T).double(), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(onednn_product(other.T, one.T).double(), expected.T, rtol=1e-5, atol=1e-5)
