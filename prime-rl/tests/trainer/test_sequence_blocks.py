from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from prime_rl.trainer.model.layouts import SequenceBlocks, attend_blocks, find_sequence_blocks

HEADS, GROUPS, QUERY_WIDTH, VALUE_WIDTH = 6, 2, 16, 8
SCALE = 0.2
PROMPT = list(range(40))
SEPARATE = [list(range(start, start + length)) for start, length in ((0, 20), (100, 1), (200, 300), (600, 7))]
SHARED = [[*PROMPT, 50, 51], [*PROMPT, 50], PROMPT, [*PROMPT, *range(60, 200)], [7], [7], [*PROMPT[:20], 99]]
ROWS = {"separate": SEPARATE, "with common prefixes": SHARED}


def arranged(sequences: list[list[int]], without_last: bool = False) -> SequenceBlocks:
    tokens = torch.tensor([token for sequence in sequences for token in sequence])[None]
    places = torch.cat([torch.arange(len(sequence)) for sequence in sequences])[None]
    return find_sequence_blocks(tokens, places, HEADS, without_last=without_last)


def attention_alone(states_THD: list[Tensor], lengths: list[int], window: int | None) -> Tensor:
    """PyTorch's attention of each sequence by itself, [T, H, E]."""
    outs = []
    for q, k, v in zip(*(states.split(lengths) for states in states_THD), strict=True):
        places = torch.arange(len(q))
        distance = places[:, None] - places
        visible = (distance >= 0) & (distance < (window or len(q)))
        by_head = (states.transpose(0, 1)[None] for states in (q, k, v))
        out = scaled_dot_product_attention(*by_head, attn_mask=visible, scale=SCALE, enable_gqa=True)
        outs.append(out[0].transpose(0, 1))
    return torch.cat(outs)


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 3e-2)])
@pytest.mark.parametrize("row", ROWS)
def test_attention_in_blocks_equals_attention_of_each_sequence_alone(
    row: str, dtype: torch.dtype, tolerance: float, window: int | None
) -> None:
    sequences, layout = ROWS[row], arranged(ROWS[row])
    generator = torch.Generator().manual_seed(0)
    count = len(layout.token_of_node_N)
    shapes = ((HEADS, QUERY_WIDTH), (GROUPS, QUERY_WIDTH), (GROUPS, VALUE_WIDTH))
    nodes = [torch.randn(count, *shape, generator=generator).requires_grad_() for shape in shapes]
    slope = torch.randn(len(layout.node_of_token_T), HEADS, VALUE_WIDTH, generator=generator)
    expected = attention_alone([states[layout.node_of_token_T] for states in nodes], [*map(len, sequences)], window)
    theirs = [expected, *torch.autograd.grad(expected, nodes, slope)]
    blocked = attend_blocks(*(states.to(dtype) for states in nodes), layout.blocks, SCALE, window)
    ours = blocked[layout.node_of_token_T]
    for one, other in zip([ours, *torch.autograd.grad(ours, nodes, slope.to(dtype))], theirs, strict=True):
        torch.testing.assert_close(
            one.float(), other, rtol=tolerance, atol=tolerance * float(other.detach().abs().max())
        )


@given(
    st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=150), min_size=1, max_size=40),
    st.booleans(),
)
def test_each_node_attends_exactly_once(sequences: list[list[int]], without_last: bool) -> None:
    layout = arranged(sequences, without_last)
    count = len(layout.token_of_node_N)
    targets = torch.cat([block.targets_CQ.flatten() for block in layout.blocks])
    used = sorted(set(layout.node_of_token_T.tolist()))
    assert sorted(targets[targets < count].tolist()) == used
    for block in layout.blocks:
        is_used = block.targets_CQ < count
        assert torch.equal(block.query_nodes_CQ[is_used], block.targets_CQ[is_used])


def test_a_long_sequence_is_divided_so_that_its_blocks_skip_what_the_mask_discards() -> None:
    layout = arranged([list(range(1024))])
    scores = sum(block.targets_CQ.shape[1] * block.nodes_CW.shape[1] for block in layout.blocks)
    assert scores < 0.6 * 1024 * 1024


def test_the_blocks_of_a_very_long_sequence_stay_small() -> None:
    blocks = arranged([list(range(40_000))]).blocks
    assert max(block.targets_CQ.shape[1] * block.nodes_CW.shape[1] for block in blocks) * HEADS <= 1 << 24


def test_short_sequences_share_a_block() -> None:
    assert len(arranged([[token] * 8 for token in range(64)]).blocks) == 1
