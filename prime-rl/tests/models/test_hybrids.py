"""Hybrid models, packed: no state crosses the border between the sequences of a row."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from model_cases import Case, save_tiny_model
from torch import Tensor, nn
from transformers import PreTrainedModel

from prime_rl.configs.trainer import ActivationCheckpointConfig, ModelConfig
from prime_rl.trainer.model.build import setup_model
from prime_rl.trainer.model.layouts import SequenceBlocks
from prime_rl.trainer.model.scoring import LogitsOf, cross_entropy_sum, score_tokens, scoring_of
from prime_rl.trainer.process.mesh import Mesh, ParallelDims
from prime_rl.trainer.process.world import destroy_world, setup_world
from prime_rl.utils.logger import setup_logger

ATTENDING = {"layer_types": ["linear_attention", "full_attention"]}
HYBRIDS = {
    "gated delta rule of Qwen3-Next": Case("qwen3_next", ATTENDING),
    "gated delta rule of Qwen3.5": Case("qwen3_5_text", ATTENDING),
    "Mamba 2 of Nemotron-H": Case("nemotron_h"),
    "Mamba 2 of Granite 4": Case("granitemoehybrid"),
    "Mamba 2 beside attention, of Falcon-H1": Case("falcon_h1"),
    "Mamba 2 of Bamba": Case("bamba"),
    "short convolutions of LFM2": Case("lfm2"),
}
ROWS = ((7, 1, 30, 12, 2), (25, 3), (40,))


@pytest.fixture(scope="module")
def mesh() -> Iterator[Mesh]:
    yield ParallelDims(dp_replicate=1, dp_shard=1).mesh(setup_world("cpu", timeout_s=3600, environ={}))
    destroy_world()


def rows() -> list[list[Tensor]]:
    """Rows of several sequences. In the first, two sequences start with the same tokens, as in a group of RL."""
    drawn = [[torch.randint(3, 64, (length,)) for length in lengths] for lengths in ROWS]
    drawn[0][3][:7] = drawn[0][0]
    return drawn


def loss_of(model: PreTrainedModel, sequences: list[Tensor], *, uses_last: bool = True) -> Tensor:
    """Cross-entropy of a packed row by the trainer."""
    ids, positions = torch.cat(sequences), torch.cat([torch.arange(len(each)) for each in sequences])
    is_predicted = torch.cat([torch.arange(len(each)) < len(each) - 1 for each in sequences])

    def score(hidden: Tensor, logits_of: LogitsOf) -> Tensor:
        return cross_entropy_sum(hidden[is_predicted], ids.roll(-1)[is_predicted], logits_of, 64)

    return score_tokens(model, ids[None], positions[None], score, uses_last=uses_last)


def gradients(model: nn.Module) -> Tensor:
    found = [each.grad for each in model.parameters() if each.grad is not None]
    return torch.cat([(each.full_tensor() if hasattr(each, "full_tensor") else each).flatten() for each in found])


@pytest.mark.parametrize("case", HYBRIDS.values(), ids=HYBRIDS)
def test_a_packed_row_has_the_loss_and_gradients_of_its_sequences_alone(
    case: Case, mesh: Mesh, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    reference, drawn = save_tiny_model(case, tmp_path), rows()
    expected = []
    for sequences in drawn:
        alone = [reference(input_ids=each[None], labels=each[None], use_cache=False).logits[0] for each in sequences]
        losses = [
            nn.functional.cross_entropy(a[:-1], each[1:], reduction="sum")
            for a, each in zip(alone, sequences, strict=True)
        ]
        expected.append(torch.stack(losses).sum())
    torch.autograd.backward(expected)
    setup_logger("info")
    for ac in (None, ActivationCheckpointConfig()):
        model = setup_model(ModelConfig(name=str(tmp_path), seq_len=56, ac=ac), mesh)
        assert scoring_of(model).shares_rows or SequenceBlocks in scoring_of(model).layouts
        # All rows go forward before the first goes backward, where checkpointed blocks are computed again.
        losses = [loss_of(model, sequences, uses_last=bool(place)) for place, sequences in enumerate(drawn)]
        torch.testing.assert_close(torch.stack(losses), torch.stack(expected), rtol=1e-5, atol=0)
        torch.autograd.backward(losses)
        ours, wanted = gradients(model), gradients(reference)
        assert (ours - wanted).norm() <= 1e-5 * wanted.norm()
    assert capsys.readouterr().out.count("Layers with a state: ") == 2
