"""Log-probabilities of packed rows equal Transformers' for each separate sequence."""

from __future__ import annotations

import math

import pytest
import torch
from transformers import AutoModelForCausalLM

from prime_rl.configs.trainer import DecoupledLossConfig, DefaultLossConfig, FakeDataLoaderConfig, ModelConfig
from prime_rl.trainer.model.build import setup_model
from prime_rl.trainer.process.mesh import DataAxis
from prime_rl.trainer.rl.batches import FakeBatches, pack_rows, row_from_sample
from prime_rl.trainer.rl.loss import setup_loss
from prime_rl.trainer.rl.rows import Row, score_row, vocab_chunk_of
from prime_rl.trainer.rl.step import ForwardBackward, StepSize
from prime_rl.transport.messages import TrainingSample

CPU = torch.device("cpu")
LENGTHS = (9, 5, 12, 7)


@pytest.fixture
def samples() -> list[TrainingSample]:
    generator = torch.Generator().manual_seed(7)

    def sample(length: int, temperature: float) -> TrainingSample:
        tokens = torch.randint(4, 100, (length,), generator=generator).tolist()
        return TrainingSample(
            prompt_ids=tokens[:3],
            prompt_mask=[False] * 3,
            completion_ids=tokens[3:],
            completion_mask=[True] * (length - 3),
            inference_logprobs=[-4.5] * (length - 3),
            completion_temperatures=[temperature] * (length - 3),
            advantage=1.0 - length / 8,
        )

    return [sample(length, 0.6 + 0.2 * index) for index, length in enumerate(LENGTHS)]


@pytest.fixture
def model(tiny_model_dir, mesh):
    return setup_model(ModelConfig(name=str(tiny_model_dir), attn="sdpa"), mesh)


def packed_row(samples) -> Row:
    (row,) = pack_rows([row_from_sample(sample, 64) for sample in samples], 64)
    return Row.from_message(row, CPU)


def logprobs_alone(directory, tokens: list[int], temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities of tokens 1.. and entropies of their distributions, from the plain model."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    with torch.no_grad():
        logits = model(torch.tensor([tokens])).logits[0, :-1] / temperature
    log_softmax = torch.log_softmax(logits, -1)
    return log_softmax.gather(1, torch.tensor(tokens[1:])[:, None])[:, 0], -(log_softmax.exp() * log_softmax).sum(-1)


@pytest.mark.parametrize("vocab_chunk", [None, 40, 8192])
def test_each_sequence_scores_as_if_it_were_separate(tiny_model_dir, model, samples, vocab_chunk) -> None:
    row = packed_row(samples)
    logprobs, entropy = score_row(model, row, row.layout.trained_M, vocab_chunk)
    start = 0
    for sample in sorted(samples, key=lambda one: -len(one.completion_ids)):
        tokens = sample.prompt_ids + sample.completion_ids
        expected, expected_entropy = logprobs_alone(tiny_model_dir, tokens, sample.completion_temperatures[0])
        scored = slice(start + 3, start + len(tokens))
        assert torch.allclose(logprobs[scored], expected[2:], atol=2e-5)
        assert torch.allclose(entropy[scored], expected_entropy[2:], atol=2e-5)
        start += len(tokens)


def test_unselected_tokens_get_uniform_values(model, samples) -> None:
    row = packed_row(samples)
    logprobs, entropy = score_row(model, row, row.layout.trained_M, 8192)
    assert torch.all(logprobs[~row.loss_mask] == -math.log(128))
    assert torch.all(entropy[~row.loss_mask] == math.log(128))


def gradient_of(model, mesh, rows: list[Row], vocab_chunk: int | None) -> torch.Tensor:
    step = ForwardBackward(model, setup_loss(DefaultLossConfig()), vocab_chunk, mesh)
    step.run(rows, StepSize.from_rows(rows, mesh.data_axis))
    gradient = torch.cat([parameter.grad.full_tensor().flatten() for parameter in model.parameters()])
    model.zero_grad()
    return gradient


def test_the_gradient_does_not_depend_on_how_samples_are_packed(model, mesh, samples) -> None:
    together = gradient_of(model, mesh, [packed_row(samples)], 8192)
    apart = gradient_of(model, mesh, [Row.from_message(row_from_sample(sample, 64), CPU) for sample in samples], 8192)
    assert together.norm() > 0
    assert torch.allclose(together, apart, atol=1e-6)


def test_the_plain_and_the_fused_head_give_the_same_gradient(model, mesh, samples) -> None:
    rows = [packed_row(samples)]
    assert torch.allclose(gradient_of(model, mesh, rows, None), gradient_of(model, mesh, rows, 50), atol=1e-6)


def test_a_row_without_trained_tokens_adds_nothing(model, mesh, samples) -> None:
    row = packed_row(samples)
    filler = row_from_sample(samples[0], 64)
    filler.loss_mask = [False] * len(filler.loss_mask)
    alone = gradient_of(model, mesh, [row], 8192)
    assert torch.equal(alone, gradient_of(model, mesh, [row, Row.from_message(filler, CPU)], 8192))


def test_step_size_counts_trained_tokens_and_sequences(mesh, samples) -> None:
    size = StepSize.from_rows([packed_row(samples)], mesh.data_axis)
    assert (size.tokens, size.trained_tokens, size.sequences) == (sum(LENGTHS), sum(LENGTHS) - 12, 4)


def test_mean_of_the_reported_losses_is_the_loss_of_the_step(model, mesh, samples) -> None:
    rows = [packed_row(samples)]
    size = StepSize.from_rows(rows, mesh.data_axis)
    values = ForwardBackward(model, setup_loss(DefaultLossConfig()), 8192, mesh).run(rows, size).gather(mesh.data_axis)
    logprobs, _ = score_row(model, rows[0], rows[0].layout.trained_M, 8192)
    ratio = (logprobs - rows[0].inference_logprobs).exp()
    summed = -(ratio * rows[0].advantages * logprobs)[rows[0].loss_mask].sum()
    assert values["loss"].mean().item() == pytest.approx(summed.item() / size.trained_tokens, abs=1e-5)
    assert len(values["entropy"]) == size.trained_tokens
    assert len(values["mismatch_kl"]) == size.sequences


def test_proximal_log_probabilities_are_those_of_the_current_weights(model, mesh, samples) -> None:
    step = ForwardBackward(model, setup_loss(DecoupledLossConfig()), 8192, mesh)
    (row,) = step.with_proximal([packed_row(samples)])
    now, _ = score_row(model, row, row.layout.trained_M, 8192)
    assert torch.equal(row.proximal_logprobs, now.detach())
    assert not row.proximal_logprobs.requires_grad


@pytest.mark.parametrize(("setting", "chunk"), [("auto", 8192), ("disabled", None), (16384, 16384)])
def test_the_head_follows_its_setting(setting, chunk) -> None:
    assert vocab_chunk_of(ModelConfig(fused_lm_head_chunk_size=setting)) == chunk


@pytest.mark.parametrize("generate_samples", [False, True])
def test_fake_rows_fill_the_batch_without_an_orchestrator(mesh, generate_samples) -> None:
    batches = FakeBatches(FakeDataLoaderConfig(batch_size=3, generate_samples=generate_samples), 32, DataAxis(0, 1))
    rows = [Row.from_message(message, CPU) for message in batches.take(0)]
    assert batches.is_ready(0)
    assert len(rows) == 3
    assert all(len(row.input_ids) <= 32 for row in rows)
    assert (max(len(row.layout.lengths) for row in rows) > 1) == generate_samples
