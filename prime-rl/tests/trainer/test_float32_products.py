"""Products of bfloat16 matrices in float32 have the results of bfloat16 products, rounded no more often."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, Qwen2Config

from prime_rl.configs.trainer import ModelConfig
from prime_rl.trainer.kernels.heads import ChunkSizes, fused_logprobs, linear_cross_entropy_sum
from prime_rl.trainer.kernels.product_choice import LayerLibraries, Library, ProductChoice
from prime_rl.trainer.kernels.products import (
    ONEDNN,
    PLAIN,
    Products,
    has_onednn_products,
    head_product,
    in_float32,
    plain_product,
    use_lean_linears,
)
from prime_rl.trainer.model.build import setup_model
from prime_rl.trainer.model.scoring import cross_entropy_sum, score_tokens
from prime_rl.trainer.process.mesh import Mesh

CONVERTING = in_float32(plain_product)
ROUNDING = 2**-8
"""Largest relative error of a number rounded to bfloat16."""


def drawn(*size: int, seed: int = 0) -> Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed)).bfloat16()


@pytest.mark.parametrize("most_elements", [1, 40, 1 << 22])
@pytest.mark.parametrize("is_transposed", [False, True])
@pytest.mark.parametrize(("rows", "columns", "inner"), [(5, 7, 3), (40, 6, 7), (6, 40, 7), (5, 7, 90), (1, 1, 1)])
def test_a_product_is_exact_but_for_one_rounding(
    rows: int, columns: int, inner: int, is_transposed: bool, most_elements: int
) -> None:
    a, b = (
        (drawn(inner, rows).t(), drawn(inner, columns, seed=1).t())
        if is_transposed
        else (drawn(rows, inner), drawn(columns, inner, seed=1))
    )
    found = in_float32(plain_product, most_elements)(a, b)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.double(), a.double() @ b.double().t(), rtol=ROUNDING, atol=1e-5)


def test_other_dtypes_are_left_alone() -> None:
    a, b = drawn(3, 4).double(), drawn(5, 4).double()
    assert torch.equal(in_float32(plain_product)(a, b), a @ b.t())


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    "products",
    [
        PLAIN,
        pytest.param(ONEDNN, marks=pytest.mark.skipif(not has_onednn_products(), reason="PyTorch without oneDNN")),
    ],
)
def test_a_linear_layer_and_its_gradients_are_those_in_float64(products: Products, bias: bool) -> None:
    x, slope = drawn(2, 3, 48), drawn(2, 3, 80, seed=1)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        linear = nn.Linear(48, 80, bias=bias).bfloat16()
    found = []
    for dtype in (torch.float64, torch.bfloat16):
        if dtype == torch.bfloat16:
            linear = linear.bfloat16()
            use_lean_linears(linear, products.for_bfloat16())
        else:
            linear = linear.double()
        wanted = x.to(dtype).requires_grad_()
        out = linear(wanted)
        found.append([out, *torch.autograd.grad(out, (wanted, *linear.parameters()), slope.to(dtype))])
    for exact, ours in zip(*found, strict=True):
        assert ours.dtype == torch.bfloat16
        # The bias is added after rounding, as one more rounding; its gradient is a sum in float32.
        torch.testing.assert_close(ours.double(), exact, rtol=3 * ROUNDING, atol=3 * ROUNDING)


@pytest.mark.parametrize("logits", [60, 1 << 20])
def test_a_loss_in_parts_has_the_gradients_of_float64(logits: int) -> None:
    targets = torch.arange(9) % 30
    found = []
    for dtype, product in ((torch.float64, plain_product), (torch.bfloat16, in_float32(plain_product, 64))):
        hidden, weight = drawn(9, 16).to(dtype).requires_grad_(), drawn(30, 16, seed=1).to(dtype).requires_grad_()
        loss = linear_cross_entropy_sum(hidden, weight, targets, ChunkSizes(logits=logits), product)
        found.append([loss, *torch.autograd.grad(loss, (hidden, weight))])
    for exact, ours in zip(*found, strict=True):
        torch.testing.assert_close(ours.double(), exact.double(), rtol=0.03, atol=0.03)


def test_logprobs_in_slices_have_the_gradients_of_float64() -> None:
    labels, temperatures = torch.arange(9) % 30, torch.full((9,), 0.7)
    found = []
    for dtype, product in ((torch.float64, plain_product), (torch.bfloat16, in_float32(plain_product))):
        hidden, weight = drawn(9, 16).to(dtype).requires_grad_(), drawn(30, 16, seed=1).to(dtype).requires_grad_()
        logprobs, entropies = fused_logprobs(hidden, weight, labels, temperatures, 8, product)
        found.append([logprobs, entropies, *torch.autograd.grad(logprobs.sum(), (hidden, weight))])
    for exact, ours in zip(*found, strict=True):
        torch.testing.assert_close(ours.double(), exact.double(), rtol=0.03, atol=0.05)


@pytest.mark.parametrize("is_tied", [False, True])
def test_a_whole_model_has_the_gradients_of_one_that_multiplies_in_bfloat16(
    is_tied: bool, tmp_path: Path, mesh: Mesh
) -> None:
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    AutoModelForCausalLM.from_config(Qwen2Config(**sizes, **heads, tie_word_embeddings=is_tied)).save_pretrained(
        tmp_path
    )
    pytorch = LayerLibraries.only(Library.PYTORCH)

    def gradients(dtype: str, in_float32: bool) -> dict[str, Tensor]:
        choice = ProductChoice(pytorch, pytorch, in_float32)
        config = ModelConfig.model_validate({"name": str(tmp_path), "attn": "sdpa", "compute_dtype": dtype})
        model = setup_model(config, mesh, products=choice)
        is_converting = head_product(model.get_output_embeddings()) == CONVERTING
        assert is_converting is (in_float32 and dtype == "bfloat16")
        tokens = torch.randint(64, (300,), generator=torch.Generator().manual_seed(0))
        loss = score_tokens(
            model,
            tokens[None],
            torch.arange(300)[None],
            lambda hidden, logits_of: cross_entropy_sum(hidden[:-1], tokens[1:], logits_of, 64),
        )
        (loss / 300).backward()
        return {name: parameter.grad.full_tensor() for name, parameter in model.named_parameters()}

    exact = gradients("float32", False)

    def errors(found: dict[str, Tensor]) -> dict[str, float]:
        # A bias of keys shifts all scores of a query alike, so its gradient is rounding in any dtype.
        kept = (name for name in exact if "k_proj.bias" not in name)
        return {name: float((found[name] - exact[name]).norm() / exact[name].norm()) for name in kept}

    ours, theirs = errors(gradients("bfloat16", True)), errors(gradients("bfloat16", False))
    assert {name: error for name, error in ours.items() if error > 1.5 * theirs[name] + 1e-3} == {}
