"""Tests that need a GPU: kernels without a CPU version, and memory freed by offloading."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.distributed.checkpoint.state_dict import get_state_dict

from prime_rl.configs.trainer import (
    ActivationCheckpointConfig,
    ActivationOffloadingConfig,
    AdamWConfig,
    CompileConfig,
    DebugModelConfig,
    DecoupledLossConfig,
    DefaultLossConfig,
    GSPOLossConfig,
    LoRAConfig,
    ModelConfig,
    MuonConfig,
    OptimizerConfig,
)
from prime_rl.trainer.kernels.attention import FLEX, SDPA, VARLEN, choose_attention
from prime_rl.trainer.model.build import load_model_config, setup_model
from prime_rl.trainer.model.scoring import score_tokens
from prime_rl.trainer.optim.optimizer import clip_gradients, setup_optimizer
from prime_rl.trainer.process.mesh import Mesh, ParallelDims
from prime_rl.trainer.process.world import destroy_world, setup_world
from prime_rl.trainer.rl.loss import setup_loss
from prime_rl.trainer.rl.metrics import MetricValues
from prime_rl.trainer.rl.rows import Row
from prime_rl.trainer.rl.step import ForwardBackward, StepSize
from prime_rl.trainer.sft.data.packer import PackedRow
from prime_rl.trainer.sft.step import row_loss_sum
from prime_rl.transport.loading import local
from prime_rl.transport.messages import MicroBatch
from prime_rl.transport.residence import Residence

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
LENGTHS = (70, 130, 1, 300)


@pytest.fixture
def gpu() -> Iterator[Mesh]:
    yield ParallelDims(dp_replicate=1, dp_shard=1).mesh(setup_world("cuda", timeout_s=3600, environ={}))
    destroy_world()


@pytest.fixture(scope="module")
def wide_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A config whose activations are large compared with the allocator's rounding: 8 layers, hidden size 512."""
    from transformers import Qwen3Config

    directory = tmp_path_factory.mktemp("wide")
    Qwen3Config(
        vocab_size=1024,
        hidden_size=512,
        intermediate_size=1024,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=64,
    ).save_pretrained(directory)
    return directory


def config_of(directory: Path, **fields) -> ModelConfig:
    return ModelConfig(name=str(directory), debug=DebugModelConfig(random_init=True), **fields)


def backward(model, lengths: tuple[int, ...] = LENGTHS) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, 128, (1, sum(lengths)), generator=generator).cuda()
    places = torch.cat([torch.arange(length) for length in lengths])[None].cuda()
    loss = score_tokens(model, tokens, places, lambda hidden, logits_of: logits_of(hidden).float().logsumexp(-1).mean())
    loss.backward()
    return loss.detach()


def gradient_of(model) -> Tensor:
    backward(model)
    return torch.cat([parameter.grad.full_tensor().flatten().cpu() for parameter in model.parameters()])


def relative(one: Tensor, other: Tensor) -> float:
    return float((one - other).norm() / other.norm())


@pytest.mark.parametrize("kernel", [VARLEN, FLEX])
def test_packed_rows_have_the_same_gradient_with_every_kernel(wide_model_dir: Path, gpu: Mesh, kernel: str) -> None:
    expected = gradient_of(setup_model(config_of(wide_model_dir, attn=SDPA, compute_dtype="float32"), gpu))
    rounded = gradient_of(setup_model(config_of(wide_model_dir, attn=SDPA), gpu))
    model = setup_model(config_of(wide_model_dir), gpu)
    model.set_attn_implementation(kernel)
    found = gradient_of(model)
    assert relative(found, expected) < 1.5 * relative(rounded, expected)


@pytest.fixture
def no_waiting(gpu: Mesh) -> Iterator[Callable[[], None]]:
    """Call it where the host must not wait for the GPU any more."""

    def forbid() -> None:
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")

    yield forbid
    torch.cuda.set_sync_debug_mode("default")


def test_no_row_of_sft_waits_for_the_gpu(wide_model_dir: Path, gpu: Mesh, no_waiting: Callable[[], None]) -> None:
    model = setup_model(config_of(wide_model_dir), gpu)
    tokens, places = np.arange(sum(LENGTHS)), np.concatenate([np.arange(length) for length in LENGTHS])
    row = PackedRow(tokens, np.roll(tokens, -1), tokens % 3 > 0, places, samples=len(LENGTHS))
    losses = [row_loss_sum(model, row, gpu.process.device)]
    losses[0].backward()
    no_waiting()
    losses.append(row_loss_sum(model, row, gpu.process.device))
    losses[1].backward()
    torch.cuda.set_sync_debug_mode("default")
    assert losses[0].item() == losses[1].item() > 0


@pytest.mark.parametrize("loss", [DefaultLossConfig(), GSPOLossConfig(), DecoupledLossConfig()])
def test_no_row_of_rl_waits_for_the_gpu(loss, wide_model_dir: Path, gpu: Mesh, no_waiting: Callable[[], None]) -> None:
    model = setup_model(config_of(wide_model_dir), gpu)
    num_tokens = sum(LENGTHS)
    message = MicroBatch(
        input_ids=list(range(num_tokens)),
        position_ids=[place for length in LENGTHS for place in range(length)],
        loss_mask=[place > 1 for length in LENGTHS for place in range(length)],
        advantages=[0.5] * num_tokens,
        inference_logprobs=[-6.9] * num_tokens,
        temperatures=[1.0] * num_tokens,
    )
    step = ForwardBackward(model, setup_loss(loss), 256, gpu)

    def train() -> MetricValues:
        rows = [Row.from_message(message, gpu.process.device)]
        return step.run(step.with_proximal(rows), StepSize.from_rows(rows, gpu.data_axis))

    train()
    no_waiting()
    values = train()
    torch.cuda.set_sync_debug_mode("default")
    assert values.gather(gpu.data_axis)["loss"].isfinite().all()


def test_without_flash_attention_the_varlen_kernel_is_chosen(wide_model_dir: Path) -> None:
    (model_config, _), device = load_model_config(config_of(wide_model_dir)), torch.device("cuda", 0)
    kernel, _ = choose_attention("flash_attention_2", model_config, device, torch.bfloat16, lambda name: False)
    assert kernel == (VARLEN if torch.cuda.get_device_capability()[0] >= 8 else FLEX)


def peak_bytes_of_backward(config: ModelConfig, mesh: Mesh) -> tuple[int, Tensor]:
    model = setup_model(config, mesh)
    backward(model, (4096,))
    model.zero_grad()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    loss = backward(model, (4096,) * 4)
    return torch.cuda.max_memory_allocated(), loss


def test_offloaded_activations_free_memory_and_are_bit_identical(wide_model_dir: Path, gpu: Mesh) -> None:
    recomputed = {"ac": ActivationCheckpointConfig(freq=2)}
    offloading = ActivationOffloadingConfig(max_inflight_activations=1)
    kept, loss = peak_bytes_of_backward(config_of(wide_model_dir, **recomputed), gpu)
    moved, same_loss = peak_bytes_of_backward(config_of(wide_model_dir, **recomputed, ac_offloading=offloading), gpu)
    assert torch.equal(same_loss, loss)
    assert moved < 0.8 * kept


@pytest.mark.parametrize("optim", [AdamWConfig(lr=1e-3), MuonConfig(lr=1e-3)], ids=["adamw", "muon"])
def test_states_are_on_the_gpu_only_during_the_update(wide_model_dir: Path, gpu: Mesh, optim: OptimizerConfig) -> None:
    models = [setup_model(config_of(wide_model_dir), gpu) for _ in range(2)]
    plain, offloaded = (
        setup_optimizer(optim, model, states_on_host=is_on_host)
        for model, is_on_host in zip(models, (False, True), strict=True)
    )
    for _ in range(3):
        backward(models[0])
        # The kernels of a backward pass add in no fixed order: a second pass has other gradients in the last bits.
        for own, other in zip(models[1].parameters(), models[0].parameters(), strict=True):
            own.grad = other.grad.clone()
        for model, optimizer in zip(models, (plain, offloaded), strict=True):
            clip_gradients(model, 1.0)
            optimizer.step()
            optimizer.zero_grad()
        states = [value.to_local() for state in offloaded.state.values() for value in state.values() if value.ndim > 0]
        assert states
        assert all(state.is_pinned() for state in states)
    assert all(torch.equal(one, other) for one, other in zip(*map(list, map(weights, models)), strict=True))


@pytest.mark.parametrize(
    ("optim", "fields"),
    [
        (AdamWConfig(lr=1e-3), {}),
        (MuonConfig(lr=1e-3), {"optim_cpu_offload": True}),
        (AdamWConfig(lr=1e-3), {"lora": LoRAConfig(rank=4)}),
    ],
    ids=["adamw", "muon-states-on-host", "adapter"],
)
def test_a_trainer_that_leaves_the_gpu_and_comes_back_learns_the_same_bits(
    wide_model_dir: Path, gpu: Mesh, optim: OptimizerConfig, fields: dict[str, Any]
) -> None:
    staying, leaving = (setup_model(config_of(wide_model_dir, **fields), gpu) for _ in range(2))
    on_host = fields.get("optim_cpu_offload", False)
    optimizers = [setup_optimizer(optim, model, on_host) for model in (staying, leaving)]
    residence = Residence([leaving], optimizers[1:], gpu.process.device)
    for _ in range(3):
        for model, optimizer in zip((staying, leaving), optimizers, strict=True):
            backward(model)
            optimizer.step()
            optimizer.zero_grad()
        held_bytes = torch.cuda.memory_allocated()
        residence.leave()
        own = [local(each) for each in parts_of(staying, optimizers[0])]
        others_bytes = sum(each.nbytes for each in own if each.is_cuda)
        # What left is as much as what the other one keeps; the rest is that of both, such as rotary tables.
        assert held_bytes - torch.cuda.memory_allocated() >= 0.99 * others_bytes > 0
        saved = get_state_dict(leaving, optimizers[1])  # as a checkpoint reads them
        assert {part.device.type for part in saved[0].values()} == {"cpu"}
        away = [local(each) for each in parts_of(leaving, optimizers[1])]
        assert all(not each.is_cuda and each.is_pinned() for each in away)
        assert all(torch.equal(one.cpu(), other) for one, other in zip(own, away, strict=True))
        residence.come_back()
        assert torch.cuda.memory_allocated() == held_bytes
    assert all(torch.equal(one, other) for one, other in zip(*map(list, map(weights, (staying, leaving))), strict=True))


def parts_of(model, optimizer) -> Iterator[Tensor]:
    """Weights and states."""
    yield from model.parameters()
    for states in optimizer.state.values():
        yield from (state for state in states.values() if state.ndim)


def weights(model) -> Iterator[Tensor]:
    return (parameter.full_tensor() for parameter in model.parameters())


def test_offloaded_parameters_live_on_the_host_and_give_the_same_gradient(wide_model_dir: Path, gpu: Mesh) -> None:
    exact = {"attn": SDPA, "compute_dtype": "float32"}
    resident = setup_model(config_of(wide_model_dir, **exact), gpu)
    model = setup_model(config_of(wide_model_dir, **exact, fsdp_cpu_offload=True), gpu)
    assert {parameter.device.type for parameter in model.parameters()} == {"cpu"}
    with torch.no_grad():  # a CPU draws other weights than a GPU
        for own, other in zip(model.parameters(), resident.parameters(), strict=True):
            own.to_local().copy_(other.to_local())
    assert relative(gradient_of(model), gradient_of(resident)) < 1e-3
    clip_gradients(model, 1.0)
    setup_optimizer(AdamWConfig(), model).step()


def test_compiled_blocks_run_on_packed_rows(wide_model_dir: Path, gpu: Mesh) -> None:
    expected = gradient_of(setup_model(config_of(wide_model_dir, attn=SDPA, compute_dtype="float32"), gpu))
    found = gradient_of(setup_model(config_of(wide_model_dir, compile=CompileConfig()), gpu))
    assert relative(found, expected) < 0.05
