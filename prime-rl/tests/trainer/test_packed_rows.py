from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from prime_rl.configs.data import TokenLoss
from prime_rl.configs.trainer import ModelConfig
from prime_rl.trainer.kernels.heads import ChunkSizes, linear_cross_entropy_sum
from prime_rl.trainer.kernels.products import plain_product
from prime_rl.trainer.model.build import setup_model
from prime_rl.trainer.model.layouts import fold
from prime_rl.trainer.model.scoring import cross_entropy_sum, score_tokens
from prime_rl.trainer.process.mesh import Mesh

VOCAB = 128


def positions(*lengths: int) -> Tensor:
    return torch.cat([torch.arange(length) for length in lengths])[None]


def token_losses(model, input_ids_1T: Tensor, position_ids_1T: Tensor) -> Tensor:
    """Cross-entropy of each token given those before it, except the row's first: [T - 1]."""
    logits = score_tokens(model, input_ids_1T, position_ids_1T, lambda hidden, logits_of: logits_of(hidden))
    return torch.nn.functional.cross_entropy(logits[:-1].float(), input_ids_1T[0, 1:], reduction="none")


def test_a_row_of_short_sequences_is_folded_to_the_width_of_the_longest() -> None:
    grid = fold(positions(3, 5, 2, 4), hidden_size=1)
    row = torch.arange(100, 114)[None]
    placed = grid.scatter(row)
    assert placed.shape == (3, 5)
    assert placed.tolist() == [[103, 104, 105, 106, 107], [110, 111, 112, 113, 1], [100, 101, 102, 108, 109]]
    assert torch.equal(grid.gather(placed[..., None])[:, 0], row[0])


def test_padding_continues_the_last_sequence_of_its_row() -> None:
    grid = fold(positions(3, 5, 2, 3), hidden_size=1)
    assert grid.position_ids_RW.tolist() == [[0, 1, 2, 3, 4], [0, 1, 2, 0, 1], [0, 1, 2, 3, 4]]


def test_a_row_is_not_folded_if_that_would_mostly_add_padding() -> None:
    row = positions(60, 1, 1)
    assert torch.equal(fold(row, hidden_size=1024).position_ids_RW, row)


@pytest.mark.parametrize("lengths", [(7, 12, 1, 30, 9), (40,), (1, 1, 1), (20, 20, 20)])
def test_a_packed_row_has_the_losses_of_its_sequences_alone(
    tiny_model_dir: Path, mesh: Mesh, lengths: tuple[int, ...]
) -> None:
    model = setup_model(ModelConfig(name=str(tiny_model_dir), attn="sdpa"), mesh)
    generator = torch.Generator().manual_seed(1)
    sequences = [torch.randint(0, VOCAB, (1, length), generator=generator) for length in lengths]
    with torch.no_grad():
        alone = [token_losses(model, sequence, positions(sequence.shape[1])) for sequence in sequences]
        packed = token_losses(model, torch.cat(sequences, dim=1), positions(*lengths))
    is_within = positions(*lengths)[0, 1:] != 0
    torch.testing.assert_close(packed[is_within], torch.cat(alone), atol=1e-5, rtol=0)


def test_a_folded_row_has_the_logits_that_transformers_gives_the_packed_row(tiny_model_dir: Path, mesh: Mesh) -> None:
    model = setup_model(ModelConfig(name=str(tiny_model_dir), attn="sdpa"), mesh)
    tokens, places = torch.arange(60)[None], positions(25, 10, 25)
    with torch.no_grad():
        expected = model(input_ids=tokens, position_ids=places, use_cache=False).logits[0]
        logits = score_tokens(model, tokens, places, lambda hidden, logits_of: logits_of(hidden))
    torch.testing.assert_close(logits, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("loss", ["cross_entropy", "dft", "phi"])
@pytest.mark.parametrize("kind", ["linear", "capped"])
def test_cross_entropy_in_chunks_equals_cross_entropy_at_once(kind: str, loss: TokenLoss) -> None:
    """Also with weights by the probability p of each token, as constants: p (DFT), p (1 - p) (CHORD)."""
    linear = torch.nn.Linear(8, VOCAB, bias=False)
    head = linear if kind == "linear" else lambda hidden: torch.tanh(linear(hidden) / 5) * 5
    hidden, targets = torch.randn(50, 8, requires_grad=True), torch.randint(0, VOCAB, (50,))
    of_tokens = torch.nn.functional.cross_entropy(head(hidden), targets, reduction="none")
    p = of_tokens.detach().neg().exp()
    weights = {"cross_entropy": torch.ones(50), "dft": p, "phi": p * (1 - p)}[loss]
    known = (weights * of_tokens).sum() / 3
    expected = [known.detach(), *torch.autograd.grad(known, (hidden, linear.weight))]
    for most in (2**20, 20 * VOCAB, 7 * VOCAB):
        limits = ChunkSizes(logits=most, float_logits=3 * VOCAB)
        total = cross_entropy_sum(hidden, targets, head, VOCAB, limits, loss) / 3
        found = [total.detach(), *torch.autograd.grad(total, (hidden, linear.weight))]
        for ours, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-5)


def test_the_gradient_of_a_head_is_summed_once_for_as_many_tokens_as_channels() -> None:
    tokens_of_products = []

    def product(a_NK: Tensor, b_MK: Tensor) -> Tensor:
        if len(a_NK) == VOCAB:
            tokens_of_products.append(a_NK.shape[1])
        return plain_product(a_NK, b_MK)

    weight, targets = torch.randn(VOCAB, 8, requires_grad=True), torch.randint(0, VOCAB, (50,))
    linear_cross_entropy_sum(torch.randn(50, 8), weight, targets, ChunkSizes(logits=VOCAB), product)
    assert tokens_of_products == [8] * 6 + [2]
