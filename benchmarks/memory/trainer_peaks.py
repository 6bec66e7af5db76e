"""Measures the memory of a trainer's step by what PyTorch's allocator gives out, to the byte."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from unittest.mock import patch

import torch
from cases import Case
from pydantic import TypeAdapter
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from trainer_step import rl_pass, sft_pass
from transformers import AttentionInterface

from prime_rl.configs.trainer import ModelConfig, OptimizerConfig
from prime_rl.trainer.kernels.attention import VARLEN, varlen_attention
from prime_rl.trainer.model.build import setup_model
from prime_rl.trainer.optim.optimizer import clip_gradients, local, setup_optimizer
from prime_rl.trainer.process.mesh import Mesh

OPTIMIZER: TypeAdapter[OptimizerConfig] = TypeAdapter(OptimizerConfig)
BUILD = "prime_rl.trainer.model.build"


@dataclass(frozen=True)
class Measured:
    """Bytes."""

    weights: int
    gradients: int
    optimizer: int
    peak: int

    @property
    def rest(self) -> int:
        return self.peak - self.weights - self.gradients - self.optimizer


def measure(case: Case, mesh: Mesh, folder: Path) -> tuple[ModelConfig, Measured]:
    """Make two steps of the model whose config is written to `folder`, and measure the second."""
    (folder / "config.json").write_text(json.dumps(case.model))
    config = ModelConfig(name=str(folder), seq_len=case.seq_len, debug={"random_init": True}, **case.settings)
    on_cpu = mesh.process.device.type == "cpu"
    left_over = 0 if on_cpu else _left_over()
    with ExitStack() as stack:
        if case.as_on_gpu and on_cpu:
            stack.enter_context(running_as_on_a_gpu())
        model = setup_model(config, mesh, has_dropout=case.kind == "sft")
        optim = {"type": case.optimizer} | ({"stochastic_rounding": True} if case.is_rounded else {})
        optimizer = setup_optimizer(OPTIMIZER.validate_python(optim), model, config.optim_cpu_offload)
        run = _pass(case, config, model, mesh)

        def forward_and_backward() -> int:
            run()
            return _bytes(parameter.grad for parameter in model.parameters() if parameter.grad is not None)

        def update() -> None:
            clip_gradients(model, 1.0)
            optimizer.step()
            optimizer.zero_grad()

        gradients = forward_and_backward()
        update()
        states = _bytes(state for states in optimizer.state.values() for state in states.values() if state.ndim)
        weights = _bytes([*model.parameters(), *model.buffers()])
        with recording(mesh.process.device) as peak_of:
            forward_and_backward()
            update()
        if not on_cpu:
            return config, Measured(weights, gradients, states, peak_of(0) - left_over)
        kept = 0 if case.as_on_gpu else gradients
        return config, Measured(weights, gradients, states, peak_of(weights + kept + states))


def _left_over() -> int:
    """Bytes on the GPU before a case: what cases before it left, and the workspaces of cuBLAS.

    The reserve of the estimate for CUDA covers these: 32 MiB on a Hopper for each of two threads, forward and backward.
    """
    gc.collect()
    ones = torch.ones(16, 16, device="cuda", requires_grad=True)
    (ones @ ones).sum().backward()
    del ones
    return torch.cuda.memory_allocated()


@contextmanager
def running_as_on_a_gpu() -> Iterator[None]:
    """Let a trainer on a CPU use the operations of one on a GPU: PyTorch's modules and varlen attention."""
    # The check of the model's logits takes longer than the measurement, and has freed its memory before it.
    skipped = ("keep_gradients", "check_scoring")
    names = ("use_lean_norms", "use_lean_mlps", "use_lean_linears", *skipped)
    with ExitStack() as stack:
        for name in names:
            stack.enter_context(patch(f"{BUILD}.{name}", lambda *args: None))
        stack.enter_context(patch(f"{BUILD}.choose_attention", lambda *args: (VARLEN, "")))
        for step in ("sft", "rl"):
            stack.enter_context(patch(f"prime_rl.trainer.{step}.step.accumulated", lambda model, rows, process: rows))
        stack.enter_context(
            patch(
                "prime_rl.trainer.kernels.heads.ChunkSizes.float_rows",
                lambda limits, width, on_cpu: max(1, limits.float_logits // width),
            )
        )
        AttentionInterface.register(VARLEN, partial(varlen_attention, varlen=_flash_of_sequences))
        yield
        AttentionInterface.register(VARLEN, varlen_attention)


def _flash_of_sequences(
    q: Tensor, k: Tensor, v: Tensor, bounds: Tensor, *_: object, scale: float, enable_gqa: bool, **__: object
) -> Tensor:
    """PyTorch's flash attention for CPUs, which saves what the one for GPUs saves."""
    outputs = []
    for start, end in pairwise(bounds.tolist()):
        one = (states[start:end].transpose(0, 1)[None] for states in (q, k, v))
        out = scaled_dot_product_attention(*one, is_causal=True, scale=scale, enable_gqa=enable_gqa)
        outputs.append(out[0].transpose(0, 1))
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


def _pass(case: Case, config: ModelConfig, model: nn.Module, mesh: Mesh) -> Callable[[], object]:
    vocabulary = case.model["vocab_size"]
    if case.kind == "sft":
        return sft_pass(model, vocabulary, [case.seq_len] * case.micro_batch, case.rows, mesh)
    return rl_pass(model, vocabulary, [case.seq_len] * case.rows, config, mesh, case.top_k)


def _bytes(tensors: Iterable[Tensor]) -> int:
    """Size of the distinct storages of tensors, or of this process's shards."""
    storages = (local(tensor).untyped_storage() for tensor in tensors)
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


@contextmanager
def recording(device: torch.device) -> Iterator[Callable[[int], int]]:
    """Yields a function that returns the peak of the block, from what was allocated before it (on a CPU)."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        yield lambda before: torch.cuda.max_memory_allocated()
        return
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        yield lambda before: _peak(profiler, before)


def _peak(profiler: torch.profiler.profile, before: int) -> int:
    assert profiler.profiler is not None
    events = (event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]")
    current = peak = before
    for _, change in sorted((event.start_ns(), event.nbytes()) for event in events):
        current += change
        peak = max(peak, current)
    return peak
