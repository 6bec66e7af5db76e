"""One row of random tokens through the trainer's own forward and backward pass: for benchmarks of speed and memory."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import nn

from prime_rl.configs.algorithms import DefaultLossConfig
from prime_rl.configs.trainer import ModelConfig
from prime_rl.trainer.process.mesh import Mesh
from prime_rl.trainer.rl.loss import setup_loss
from prime_rl.trainer.rl.rows import Row, RowLayout, SamplerTop, vocab_chunk_of
from prime_rl.trainer.rl.step import ForwardBackward, StepSize
from prime_rl.trainer.sft.data.packer import PackedRow
from prime_rl.trainer.sft.step import CrossEntropy, forward_backward

Pass = Callable[[], object]


def sft_pass(model: nn.Module, vocabulary: int, lengths: list[int], rows: int, mesh: Mesh) -> Pass:
    """SFT on `rows` equal rows, each with samples of these lengths, every token trained."""
    tokens = sum(lengths)
    ids = np.random.default_rng(0).integers(0, vocabulary, tokens)
    positions = np.concatenate([np.arange(length) for length in lengths])
    row = PackedRow(ids, np.roll(ids, -1), np.ones(tokens, bool), positions, samples=len(lengths))
    return lambda: forward_backward(model, [row] * rows, CrossEntropy(), [tokens * rows], mesh)


def rl_pass(
    model: nn.Module, vocabulary: int, lengths: list[int], config: ModelConfig, mesh: Mesh, top_k: int = 0
) -> Pass:
    """RL on rows of one trained sequence each, all of equal length, with the default loss. The engine has reported
    `top_k` tokens at each place."""
    device, tokens, rows = mesh.process.device, lengths[0], len(lengths)
    ones = torch.ones(tokens, device=device)
    places = (tokens - 1, top_k)
    top = SamplerTop(
        torch.randint(vocabulary, places, device=device),
        torch.full(places, -10.0, device=device),
        torch.ones(tokens - 1, dtype=torch.bool, device=device),
    )
    row = Row(
        layout=RowLayout.of_mask(torch.arange(tokens) > 0, [tokens], device),
        input_ids=torch.randint(vocabulary, (tokens,), device=device),
        position_ids=torch.arange(tokens),
        loss_mask=torch.arange(tokens, device=device) > 0,
        advantages=ones,
        inference_logprobs=-10 * ones,
        temperatures=ones,
        teacher_logprobs=None,
        versions=torch.zeros(tokens, device=device, dtype=torch.long),
        sampler_top=top if top_k else None,
    )
    runner = ForwardBackward(model, setup_loss(DefaultLossConfig()), vocab_chunk_of(config), mesh)
    return lambda: runner.run([row] * rows, StepSize.from_rows([row] * rows, mesh.data_axis))
