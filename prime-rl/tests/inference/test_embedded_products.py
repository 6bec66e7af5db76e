"""Merged linear layers equal PyTorch's own, on every kernel, and follow weight updates."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.functional import linear, silu
from transformers import AutoModelForCausalLM

from prime_rl.inference.embedded.engine.fused import MergedLinear, uses_onednn
from prime_rl.inference.embedded.engine.lora import Adapter, LowRank, StepAdapters
from prime_rl.inference.embedded.engine.model import ModelRunner, load_model
from prime_rl.inference.embedded.engine.weights import read_weights

SITE = ("first", "second")
NUM_TOKENS = (1, 3, 200)
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


@pytest.fixture(autouse=True)
def no_gradients():
    with torch.inference_mode():
        yield


def layers(dtype: torch.dtype = torch.float32, bias: bool = False) -> list[nn.Linear]:
    """Two layers with 32 inputs and a total of 48 outputs."""
    generator = torch.Generator().manual_seed(0)
    made = [nn.Linear(32, 16, bias=bias), nn.Linear(32, 32, bias=bias)]
    for layer in made:
        for parameter in layer.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / 6)
    return [layer.to(dtype) for layer in made]


def expected(made: list[nn.Linear], inputs: torch.Tensor) -> torch.Tensor:
    return torch.cat([linear(inputs, layer.weight, layer.bias) for layer in made], -1)


@pytest.mark.parametrize("packs", [True, False])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_merged_linears_equal_their_layers(dtype, bias, packs) -> None:
    made = layers(dtype, bias)
    product = MergedLinear(made, packs=packs)
    for count in NUM_TOKENS:
        inputs, others = torch.randn(count, 32).to(dtype), torch.randn(count, 48).to(dtype)
        plain = expected(made, inputs)
        close = {"atol": TOLERANCE[dtype], "rtol": TOLERANCE[dtype]}
        torch.testing.assert_close(product(inputs), plain, **close)
        torch.testing.assert_close(product.silu(inputs), silu(plain), **close)
        torch.testing.assert_close(product.mul(inputs, others), plain * others, **close)
        torch.testing.assert_close(product.add(inputs, others), plain + others, **close)


def test_adapters_are_added_before_fused_operations() -> None:
    made = layers()
    product = MergedLinear(made, SITE, packs=True)
    change = LowRank(torch.randn(4, 32), torch.randn(48, 4))
    adapter = Adapter("a", Path("step_1"), 1, {SITE: change})
    adapters = StepAdapters([adapter, None], [2, 3], torch.device("cpu"))
    inputs, others = torch.randn(5, 32), torch.randn(5, 48)
    plain = expected(made, inputs)
    plain[:2] += inputs[:2] @ change.down_RI.t() @ change.up_OR.t()
    close = {"atol": 1e-4, "rtol": 1e-4}
    torch.testing.assert_close(product(inputs, adapters), plain, **close)
    torch.testing.assert_close(product.silu(inputs, adapters), silu(plain), **close)
    torch.testing.assert_close(product.mul(inputs, others, adapters), plain * others, **close)
    torch.testing.assert_close(product.add(inputs, others, adapters), plain + others, **close)


def test_refresh_updates_the_packed_weights() -> None:
    made = layers()
    product = MergedLinear(made, packs=True)
    for layer in made:
        layer.weight.mul_(-2)
    product.refresh()
    inputs = torch.randn(7, 32)
    torch.testing.assert_close(product(inputs), expected(made, inputs), atol=1e-5, rtol=1e-5)


def test_other_dtypes_use_pytorch() -> None:
    assert not uses_onednn(torch.zeros(2, 2, dtype=torch.float16))
    product = MergedLinear(layers(torch.float16), packs=True)
    assert product(torch.ones(2, 32, dtype=torch.float16)).shape == (2, 48)


@pytest.mark.parametrize("name", ["qwen3_with_tied_head", "llama"])
def test_new_weights_reach_every_layer_and_the_head(name, small_model) -> None:
    start, newer = (small_model(name, seed=seed) for seed in (0, 1))
    model, _ = load_model(str(start), "float32", torch.device("cpu"))
    runner = ModelRunner(model, 1 << 24)
    runner.load_weights(read_weights(newer), newer)
    reference = AutoModelForCausalLM.from_pretrained(newer, dtype=torch.float32)
    prompt = [3, 1, 4, 1, 5, 9, 2, 6]
    logits, _ = runner.forward([], [prompt], [0])
    torch.testing.assert_close(logits, reference(torch.tensor([prompt])).logits[0, -1:], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["qwen3_with_tied_head", "mistral_with_window", "qwen3_moe"])
def test_a_step_of_any_size_gives_the_logits_of_transformers(name, small_model) -> None:
    directory = small_model(name)
    model, _ = load_model(str(directory), "float32", torch.device("cpu"))
    reference = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    tokens = torch.randint(1, 16, (24, 12), generator=torch.Generator().manual_seed(0))
    expected_logits = reference(tokens).logits
    sequences = tokens.tolist()
    for num_running in (0, 1, 7, 8, 9, 15, 16, 17):
        for num_prompts in (0 if num_running else 3, 1, 2, 7):
            rows = list(range(num_running, num_running + num_prompts))
            runner = ModelRunner(model, 1 << 24)
            runner.slots.reserve(num_running + num_prompts, 12)
            running = sequences[:num_running]
            prompts = [sequences[row][: 3 + row % 5] for row in rows]
            if running:
                runner.forward([], [sequence[:-1] for sequence in running], range(num_running))
            logits, _ = runner.forward(running, prompts, rows)
            ends = [11] * num_running + [len(prompt) - 1 for prompt in prompts]
            torch.testing.assert_close(logits, expected_logits[range(len(ends)), ends], atol=1e-4, rtol=1e-4)


def test_a_step_that_fills_the_cache_gives_the_logits_of_transformers(small_model) -> None:
    directory = small_model("qwen2")
    model, _ = load_model(str(directory), "float32", torch.device("cpu"))
    reference = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    tokens = torch.randint(1, 16, (257, 6), generator=torch.Generator().manual_seed(0))
    runner = ModelRunner(model, 1 << 24)
    runner.slots.reserve(len(tokens), tokens.shape[1])
    runner.forward([], tokens[:, :-1].tolist(), range(len(tokens)))
    logits, _ = runner.forward(tokens.tolist(), [], [])
    torch.testing.assert_close(logits, reference(tokens).logits[:, -1], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["qwen3_with_tied_head", "qwen2", "llama"])
def test_in_bfloat16_the_engine_is_as_close_to_float32_as_transformers(name, small_model) -> None:
    directory = small_model(name)
    tokens = torch.randint(1, 16, (8, 24), generator=torch.Generator().manual_seed(0))
    exact = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)(tokens).logits[:, -1]
    rounded = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16)(tokens).logits[:, -1].float()
    model, _ = load_model(str(directory), "bfloat16", torch.device("cpu"))
    runner = ModelRunner(model, 1 << 24)
    runner.slots.reserve(len(tokens), tokens.shape[1])
    logits, _ = runner.forward([], tokens.tolist(), list(range(len(tokens))))
    assert (logits.float() - exact).norm() <= 1.25 * (rounded - exact).norm()
