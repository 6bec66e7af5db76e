"""Compiled blocks: same losses and gradients, without a compilation for every new length."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters

from prime_rl.configs.trainer import ActivationCheckpointConfig, CompileConfig, ModelConfig
from prime_rl.trainer.model.build import setup_model
from prime_rl.trainer.model.scoring import score_tokens
from prime_rl.trainer.process.mesh import Mesh

ROWS = ((50, 55, 52), (30, 90, 10), (128,), (33, 20, 7, 80, 90))
"""Sequences of equal and different lengths, in one and in several rows of the grid, to cover every kind of graph."""
LATER_ROWS = ((100,), (12, 9), (200, 10), (31, 32, 33), (70, 12, 58))


def loss_and_gradients(model, lengths: tuple[int, ...]) -> list[Tensor]:
    tokens = torch.randint(0, 128, (1, sum(lengths)), generator=torch.Generator().manual_seed(sum(lengths)))
    places = torch.cat([torch.arange(length) for length in lengths])[None]
    loss = score_tokens(model, tokens, places, lambda hidden, logits_of: logits_of(hidden).float().logsumexp(-1).mean())
    loss.backward()
    gradients = [parameter.grad.full_tensor().clone() for parameter in model.parameters()]
    model.zero_grad()
    return [loss.detach(), *gradients]


def test_compiled_blocks_give_the_same_gradients_and_stop_recompiling(
    tiny_model_dir: Path, mesh: Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The graphs are run as traced: generating code for each takes a minute. `test_lora.py` compiles to the end."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    torch._dynamo.reset()
    counters.clear()
    settings = {"name": str(tiny_model_dir), "attn": "sdpa", "ac": ActivationCheckpointConfig(freq=2)}
    plain = setup_model(ModelConfig(**settings), mesh)
    compiled = setup_model(ModelConfig(**settings, compile=CompileConfig(fullgraph=True)), mesh)
    graphs = []
    for rows in (ROWS, LATER_ROWS):
        for lengths in rows:
            pairs = zip(loss_and_gradients(compiled, lengths), loss_and_gradients(plain, lengths), strict=True)
            for one, other in pairs:
                torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-4)
        graphs.append(counters["stats"]["unique_graphs"])
    assert 0 < graphs[0] == graphs[1] <= 4
