"""The path of a GPU on a machine without one: tensors without values say where they are and what would wait for them.

In PyTorch's `FakeTensorMode` an operator that needs a value on the host raises, as does one that mixes devices.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from prime_rl.inference.embedded.engine import sampling
from prime_rl.inference.embedded.engine.attention import (
    ATTENTION_NAME,
    PromptBatch,
    SlotStep,
    register_slot_attention,
)
from prime_rl.inference.embedded.engine.cache import KVSlots
from prime_rl.inference.embedded.engine.decode_graphs import StaticStep
from prime_rl.inference.embedded.engine.fused import FusedDecoder
from prime_rl.inference.embedded.engine.generation import GenerationRequest, SamplingParams

GPU = torch.device("cuda", 0)
CPU = torch.device("cpu")
WAITS = {"aten._local_scalar_dense", "aten.item", "aten.nonzero", "aten.is_nonzero", "aten.equal", "aten.masked_select"}


class OnDevice(TorchDispatchMode):
    """Fails for every operator that takes or makes a tensor elsewhere than on the GPU, or waits for one."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()
        self.attention: list[tuple[Any, ...]] = []
        """Positional arguments of every call of PyTorch's attention."""

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.name().replace("::", ".").split(".", 2)
        self.names.add(".".join(name[:2]))
        if func.name() == "aten::scaled_dot_product_attention":
            self.attention.append(args)
        for leaf in tree_leaves((args, kwargs or {}, result)):
            if isinstance(leaf, Tensor):
                assert leaf.device == GPU, f"{func} has a tensor on {leaf.device}"
                if func.name().startswith("aten::index"):
                    assert leaf.dtype != torch.bool, f"{func} waits for the number of true elements"
        assert not self.names & WAITS, self.names
        return result


@pytest.fixture
def mode() -> Iterator[FakeTensorMode]:
    if not torch.backends.cuda.is_built():
        pytest.skip("needs a CUDA build of torch, but no GPU")
    with FakeTensorMode() as mode, torch.inference_mode():
        yield mode


def on_gpu(mode: FakeTensorMode, host: Tensor) -> Tensor:
    """A tensor without values on the GPU, in the shape and dtype of one on the host."""
    with mode:
        return torch.empty(host.shape, dtype=host.dtype, device=GPU)


@pytest.fixture(params=["qwen3_with_tied_head", "qwen2", "llama", "mistral_with_window"])
def decoder(request: pytest.FixtureRequest, small_model: Callable[..., Path], mode: FakeTensorMode) -> FusedDecoder:
    with unset_fake_temporarily():
        directory = small_model(request.param)
    return FusedDecoder(model_on_gpu(directory, mode))


def model_on_gpu(directory: Path, mode: FakeTensorMode) -> PreTrainedModel:
    register_slot_attention()
    with unset_fake_temporarily(), torch.device("meta"):
        config = AutoConfig.from_pretrained(directory)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation=ATTENTION_NAME)
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            setattr(module, name, nn.Parameter(on_gpu(mode, parameter), requires_grad=False))
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, on_gpu(mode, buffer))
    return model


@pytest.fixture
def slots(decoder: FusedDecoder) -> KVSlots:
    slots = KVSlots(1 << 30, GPU)
    slots.reserve(20, 300)
    token = torch.empty(1, 2, 8, dtype=torch.bfloat16, device=GPU)
    for layer in range(2):
        slots.layer(layer, token, token)
    return slots


def test_a_static_step_needs_nothing_of_the_host(decoder: FusedDecoder, slots: KVSlots) -> None:
    step = StaticStep(decoder, slots, (16, 256))
    with OnDevice() as seen:
        hidden = step.compute()
        logits = decoder.head(hidden)
    assert (hidden.shape, logits.shape) == ((16, 32), (16, 64))
    assert logits.dtype == torch.bfloat16
    assert "aten.index_copy_" in seen.names


@pytest.mark.parametrize("num_cached", [[0, 0, 0], [0, 4, 2]], ids=["prefill", "extend"])
def test_no_layer_of_a_step_with_prompts_waits(num_cached, decoder: FusedDecoder, slots: KVSlots, mode) -> None:
    with unset_fake_temporarily():
        prompts = PromptBatch([2, 3, 4], [5, 9, 1], num_cached, 2, CPU)
    for name, value in vars(prompts).items():
        if isinstance(value, Tensor):
            setattr(prompts, name, on_gpu(mode, value))
        elif isinstance(value, tuple):
            setattr(prompts, name, tuple(on_gpu(mode, each) for each in value))
    tokens, positions = torch.empty(2, 17, dtype=torch.long, device=GPU).unbind()
    wanted = torch.empty(5, dtype=torch.long, device=GPU)
    with OnDevice() as seen:
        step = SlotStep(slots, positions[:2], prompts, decode_length=40)
        logits = decoder.logits(step, tokens, positions, wanted)
    assert logits.shape == (5, 64)
    assert len(seen.attention) == 2
    for query, key, value, *mask in seen.attention:
        # With a mask, the kernel that takes fewer key-value heads than query heads cannot be used.
        heads = 4 if mask and mask[0] is not None else 2
        assert (query.shape[1], key.shape[1], value.shape[1]) == (4, heads, heads)


def test_the_length_of_slots_doubles_on_a_gpu_as_long_as_it_fits(slots: KVSlots) -> None:
    assert (slots.rows, slots.length) == (32, 512)
    before = slots.generation
    slots.reserve(32, 512)
    assert slots.generation == before
    slots.budget_bytes = 33 * 600 * slots.bytes_per_token
    slots.reserve(33, 300)
    assert (slots.rows, slots.length) == (48, 320)
    assert slots.generation == before + 1


def test_copies_between_rows_need_nothing_of_the_host(slots: KVSlots) -> None:
    with OnDevice() as seen:
        slots.copy(3, [1], 20)
        slots.erase(2)
        slots.write_row(slots.read_row(1, 30), 4, 30)
    assert {"aten.copy_", "aten.zero_", "aten.clone"} <= seen.names


PARAMS = {
    "plain": [SamplingParams(max_tokens=4)] * 3,
    "greedy": [SamplingParams(max_tokens=4, temperature=0), SamplingParams(max_tokens=4)] * 2,
    "truncated": [SamplingParams(max_tokens=4, top_k=3, top_p=0.9, min_p=0.1, temperature=0.7)] * 3,
    "top": [SamplingParams(max_tokens=4, top_logprobs=3)] * 3,
    "biased": [SamplingParams(max_tokens=4, logit_bias=((1, 2.0),), min_tokens=2, stop_token_ids=frozenset([3, 4]))],
    "penalised": [SamplingParams(max_tokens=4, repetition_penalty=1.5, presence_penalty=0.5)] * 2,
}


@pytest.mark.parametrize("vocab_size", [100, 5000])
@pytest.mark.parametrize("name", PARAMS)
def test_sampling_waits_only_for_its_result(name, vocab_size, mode, monkeypatch) -> None:
    """Values of the host arrive by `on_device` alone."""

    make = torch.tensor

    def on_host(values: Any, dtype: torch.dtype | None = None) -> Tensor:
        with _disable_current_modes():
            return make(values, dtype=dtype)

    def pinned(host: Tensor) -> Tensor:
        """What is pinned is only copied to the GPU, so that it may be there already."""
        with _disable_current_modes():
            return on_gpu(mode, host)

    monkeypatch.setattr(torch, "tensor", on_host)
    monkeypatch.setattr(Tensor, "pin_memory", pinned)
    params = PARAMS[name]
    rows = [GenerationRequest((1, 2), one, seed=0).sequences[0] for one in params]
    for row in rows:
        row.append(5, 0.0, None, version=0)
    part = sampling._PartSampler(params, GPU)
    logits = torch.empty(len(rows), vocab_size, dtype=torch.bfloat16, device=GPU)
    with OnDevice():
        drawn, normalized = part._choose(part._process(logits.float(), rows), part._column([0.5] * len(rows)))
    assert drawn.shape == (2, len(rows))
    assert (normalized is not None) == (name == "top")


def test_only_one_module_makes_tensors_of_the_hosts_values_on_a_device() -> None:
    """`torch.tensor(values, device="cuda")` waits for the GPU. The checks at the start, `check_*`, may wait."""
    package = Path(sampling.__file__).parents[1]
    found = [
        f"{file.name}:{call.lineno}"
        for file in package.rglob("*.py")
        for function in ast.parse(file.read_text(encoding="utf-8")).body
        if not (isinstance(function, ast.FunctionDef) and function.name.startswith("check_"))
        for call in ast.walk(function)
        if isinstance(call, ast.Call) and ast.unparse(call.func) in ("torch.tensor", "torch.as_tensor")
        if any(keyword.arg == "device" for keyword in call.keywords)
    ]
    assert found == []
