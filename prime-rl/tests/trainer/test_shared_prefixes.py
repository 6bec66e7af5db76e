from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, MistralConfig

from prime_rl.configs.trainer import ModelConfig
from prime_rl.trainer.model.build import setup_model
from prime_rl.trainer.model.layouts import SHARED, find_shared_prefixes
from prime_rl.trainer.model.scoring import score_tokens
from prime_rl.trainer.process.mesh import Mesh

PROMPT = list(range(20, 32))
GROUP = [[*PROMPT, 5, 6, 7], [*PROMPT, 5, 9], [*PROMPT], [3, 4, 5, 6], [*PROMPT, 5, 6, 8, 8, 8]]


def row_of(sequences: list[list[int]]) -> tuple[Tensor, Tensor]:
    tokens = torch.tensor([token for sequence in sequences for token in sequence])[None]
    return tokens, torch.cat([torch.arange(len(sequence)) for sequence in sequences])[None]


def losses_and_gradient(model, rows: list[list[list[int]]], uses_last: bool = True) -> tuple[Tensor, Tensor]:
    """Log-probabilities of every token except each sequence's first, and the gradient of their sum."""
    scored = []
    for sequences in rows:
        tokens, places = row_of(sequences)
        logits = score_tokens(model, tokens, places, lambda hidden, logits_of: logits_of(hidden), uses_last=uses_last)
        logprobs = logits[:-1].log_softmax(-1).gather(1, tokens[0, 1:, None])[:, 0]
        scored.append(logprobs[places[0, 1:] != 0])
    torch.cat(scored).sum().backward()
    gradient = torch.cat([parameter.grad.full_tensor().flatten() for parameter in model.parameters()])
    model.zero_grad()
    return torch.cat(scored).detach(), gradient


def test_tokens_with_the_same_prefix_are_one_node() -> None:
    tree = find_shared_prefixes(*row_of(GROUP))
    assert tree is not None
    sequences = list(tree.node_of_token_T.split([len(sequence) for sequence in GROUP]))
    assert torch.equal(sequences[0][:13], sequences[1][:13])
    assert torch.equal(sequences[0][:14], sequences[4][:14])
    assert torch.equal(sequences[2], sequences[0][:12])
    assert int(tree.node_of_token_T.max()) + 1 == len({tuple(s[:end]) for s in GROUP for end in range(1, len(s) + 1)})


def test_the_same_token_after_another_prefix_is_another_node() -> None:
    assert find_shared_prefixes(*row_of([[1, 2, 3], [2, 2, 3]])) is None


def test_last_tokens_have_no_node_if_nothing_is_predicted_after_them() -> None:
    rows = [*GROUP, [7], [7], [20, 21]]
    tree = find_shared_prefixes(*row_of(rows), without_last=True)
    assert tree is not None
    sequences = list(tree.node_of_token_T.split([len(sequence) for sequence in rows]))
    assert all(sequence[-1] == sequence[max(len(sequence) - 2, 0)] for sequence in sequences)
    shorter = [sequence[:-1] or sequence for sequence in rows]
    prefixes = {tuple(sequence[:end]) for sequence in shorter for end in range(1, len(sequence) + 1)}
    assert int(tree.node_of_token_T.max()) + 1 == len(prefixes)
    assert tree.node_of_cell_SW.shape == (len(rows), max(map(len, shorter)))


@pytest.mark.parametrize("uses_last", [True, False])
def test_a_group_has_the_losses_and_gradients_of_separate_sequences(
    tiny_model_dir: Path, mesh: Mesh, uses_last: bool
) -> None:
    model = setup_model(ModelConfig(name=str(tiny_model_dir), attn="sdpa"), mesh)
    assert model.config._attn_implementation == SHARED
    alone = losses_and_gradient(model, [[sequence] for sequence in GROUP])
    together = losses_and_gradient(model, [GROUP], uses_last)
    for ours, expected in zip(together, alone, strict=True):
        torch.testing.assert_close(ours, expected, atol=2e-5, rtol=1e-4)


def test_sliding_windows_are_respected(tmp_path: Path, mesh: Mesh) -> None:
    config = MistralConfig(
        vocab_size=128,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        sliding_window=4,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    model = setup_model(ModelConfig(name=str(tmp_path), attn="sdpa"), mesh)
    assert model.config._attn_implementation == SHARED
    with torch.no_grad():
        tokens, places = row_of(GROUP)
        ours = score_tokens(model, tokens, places, lambda hidden, logits_of: logits_of(hidden))
        own = [model(input_ids=row_of([sequence])[0], use_cache=False).logits[0] for sequence in GROUP]
    torch.testing.assert_close(ours, torch.cat(own), atol=1e-5, rtol=0)


@pytest.mark.parametrize("copies", [2, 5])
def test_equal_sequences_cost_as_much_as_one(copies: int) -> None:
    tree = find_shared_prefixes(*row_of([PROMPT] * copies))
    assert tree is not None
    assert int(tree.node_of_token_T.max()) + 1 == len(PROMPT)
    assert len(tree.token_of_node_N) == len(PROMPT)
