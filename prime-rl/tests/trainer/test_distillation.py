"""Divergences from a teacher: equal to TRL's GKD, bounded with fewer tokens, and their way through batches."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from prime_rl.configs.distillation import SFTDistillationConfig
from prime_rl.configs.model import ModelConfig
from prime_rl.trainer.distillation import TopTokens, divergences, generalized_jsd, top_of_logits
from prime_rl.trainer.model.build import setup_frozen, setup_model
from prime_rl.trainer.process.mesh import Mesh
from prime_rl.trainer.rl.batches import pack_batch
from prime_rl.trainer.rl.rows import Row
from prime_rl.trainer.sft.data.conversation import TokenizedSample
from prime_rl.trainer.sft.data.packer import lay_out
from prime_rl.trainer.sft.step import Distilled, forward_backward, sizes_of
from prime_rl.transport.messages import LikeliestTokens, TrainingBatch, TrainingSample

# `GKDTrainer.generalized_jsd_loss` of TRL 1.16 with `reduction = "sum"` on these logits, and three of its gradients.
TRL = {
    0.0: (3.6929169, [-0.1400042, 0.2821128, 0.1788537]),
    0.1: (0.2956302, [-0.0175633, 0.0192395, 0.0130479]),
    0.5: (0.7187816, [-0.0624374, 0.0451196, 0.035806]),
    0.9: (0.2783864, [-0.0283667, 0.0162117, 0.0173502]),
    1.0: (3.3195202, [-0.3459253, 0.1772492, 0.2270386]),
}


def logits_of(seed: float) -> torch.Tensor:
    numbers = torch.arange(21, dtype=torch.float64).view(3, 7)
    return (torch.sin(numbers * 0.7 + seed) * 2).float()


@pytest.mark.parametrize(("beta", "expected"), TRL.items())
def test_values_and_gradients_are_those_of_trl(beta: float, expected: tuple[float, list[float]]) -> None:
    logits, teacher = logits_of(1.0).requires_grad_(), logits_of(2.5)
    loss = generalized_jsd(logits, *top_of_logits(teacher, 7), beta).sum()
    loss.backward()
    assert loss.item() == pytest.approx(expected[0], abs=1e-5)
    assert logits.grad.flatten()[:3].tolist() == pytest.approx(expected[1], abs=1e-5)
    parts = [generalized_jsd(logits, *top_of_logits(teacher, k), beta).detach() for k in range(1, 8)]
    assert all((more >= less - 1e-6).all() for less, more in pairwise(parts)), "a lower bound"
    same = generalized_jsd(teacher, *top_of_logits(teacher, 3), beta)
    assert same.abs().max() < 1e-5, "nothing to learn from oneself"
    # A teacher that is sure: the rest has no probability left, and nothing is infinite.
    sure = generalized_jsd(logits, *top_of_logits(teacher * 100, 2), beta)
    assert sure.isfinite().all()


def test_chunks_and_several_teachers(monkeypatch: pytest.MonkeyPatch) -> None:
    head, hidden = torch.nn.Linear(4, 7), torch.randn(9, 4, requires_grad=True)
    tops = [top_of_logits(torch.randn(9, 7), 3) for _ in range(2)]
    ids, logprobs = (torch.stack(each, 1) for each in zip(*tops, strict=True))
    weights = torch.tensor([0.25, 0.75]).expand(9, 2)
    whole = divergences(hidden, head, TopTokens(ids, logprobs, weights), 0.5, 7)
    alone = [generalized_jsd(head(hidden), *top, 0.5) for top in tops]
    assert torch.allclose(whole, 0.25 * alone[0] + 0.75 * alone[1], atol=1e-6)
    in_chunks = divergences(hidden, head, TopTokens(ids, logprobs, weights), 0.5, 2**24)
    assert torch.allclose(whole, in_chunks, atol=1e-6)
    (first,), (second,) = (torch.autograd.grad(each.sum(), hidden, retain_graph=True) for each in (whole, in_chunks))
    assert torch.allclose(first, second, atol=1e-6)


def sample_with(trained: int, **changes: object) -> TrainingSample:
    ids = np.arange(trained * 2, dtype="<i4") + 10 * trained
    top = LikeliestTokens(1, 2, ids.tobytes(), (-ids.astype("<f4")).tobytes(), np.ones(trained, "<f4").tobytes())
    sample = TrainingSample([1, 2], [False] * 2, [3] * trained, [True] * trained, [-1.0] * trained, [1.0] * trained)
    return msgspec.structs.replace(sample, advantage=0.0, teacher_top=top, **changes)


def test_likeliest_tokens_stay_with_their_place() -> None:
    batch = TrainingBatch([sample_with(3), sample_with(6), sample_with(1)], step=0)
    batch = msgspec.msgpack.decode(msgspec.msgpack.encode(batch), type=TrainingBatch)
    ranks = pack_batch(batch, seq_len=6, row_tokens=12, data_ranks=2)
    rows = [Row.from_message(message, torch.device("cpu")) for (message,) in ranks]
    found = [row.teacher_top.ids_MNK[:, 0].tolist() for row in rows]
    # The sample of 8 tokens is cut to 6.
    first = [[60, 61], [62, 63], [64, 65], [66, 67]]
    assert sorted(found) == sorted([[*first, [30, 31], [32, 33], [34, 35]], [[10, 11]]])
    assert all(len(row.teacher_top.weights_MN) == row.trained_tokens for row in rows)
    filler = pack_batch(TrainingBatch([sample_with(3)], step=0), seq_len=6, row_tokens=12, data_ranks=2)[1][0]
    assert len(Row.from_message(filler, torch.device("cpu")).teacher_top.ids_MNK) == 0


def test_sft_with_a_teacher_minimises_the_divergence_of_trained_tokens(tmp_path: Path, mesh: Mesh) -> None:
    """The teacher's vocabulary has more rows than the model's: padding."""
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "num_hidden_layers": 1}
    for name, vocab_size in (("model", 40), ("teacher", 48)):
        torch.manual_seed(vocab_size)
        LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=vocab_size)).save_pretrained(tmp_path / name)
    config = ModelConfig(name=str(tmp_path / "model"), attn="sdpa", seq_len=24)
    model = setup_model(config, mesh)
    ids = np.arange(26, dtype=np.int32) * 7 % 40
    samples = [TokenizedSample(part, part % 3 > 0) for part in (ids[:10], ids[10:])]
    row = lay_out(samples, 24, 24)
    loss_of = SFTDistillationConfig(teacher=str(tmp_path / "teacher"), beta=0.0, top_k=40, weight=2.0, sft_coef=0.5)
    objective = Distilled(loss_of)
    of_mixture = config.model_copy(update={"freeze_moe_router": True})
    objective.teacher = setup_frozen(of_mixture, mesh, name=loss_of.teacher)  # the teacher has no router
    objective.prepare(model, [row], mesh)
    found = forward_backward(model, [row], objective, sizes_of([row], objective), mesh)

    logprobs = {}
    for name in ("model", "teacher"):
        alone = LlamaForCausalLM.from_pretrained(tmp_path / name)
        parts = [alone(torch.from_numpy(each.token_ids[:-1]).long()[None]).logits[0, :, :40] for each in samples]
        logprobs[name] = torch.cat(parts).log_softmax(-1)
    trained = torch.from_numpy(np.concatenate([each.is_trained[1:] for each in samples]))
    targets = torch.from_numpy(np.concatenate([each.token_ids[1:] for each in samples])).long()
    own, theirs = logprobs["model"][trained], logprobs["teacher"][trained]
    divergence = (theirs.exp() * (theirs - own)).sum(-1).mean()
    cross_entropy = -own.gather(1, targets[trained][:, None]).mean()
    assert found["teacher_divergence/mean"] == pytest.approx(divergence.item(), rel=1e-5)
    assert found["sft_loss/mean"] == pytest.approx(cross_entropy.item(), rel=1e-5)
    assert found["loss"] == pytest.approx(2 * divergence.item() + 0.5 * cross_entropy.item(), rel=1e-5)
