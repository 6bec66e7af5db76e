"""Log-probabilities of packed rows equal Transformers' for each separate sequence."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from transformers import AutoModelForCausalLM

from prime_rl.configs.trainer import DecoupledLossConfig, DefaultLossConfig, FakeDataLoaderConfig, ModelConfig
from prime_rl.orchestrator.rollouts.replies import Reported
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


@pytest.mark.parametrize("vocab_size", [128, 2**24])
def test_tokens_sampled_from_some_are_scored_over_the_same(
    tiny_model_dir, model, mesh, samples, vocab_size, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights under top-k: against Transformers in float64, whole and in chunks; their mean under the sampler is 1."""
    monkeypatch.setattr(model.config, "vocab_size", vocab_size)
    generator, plain = torch.Generator().manual_seed(3), AutoModelForCausalLM.from_pretrained(tiny_model_dir).double()
    expected, entropies, reported = [], [], Reported(6, is_support=True)
    for sample in samples:
        tokens, start, temperature = sample.prompt_ids + sample.completion_ids, 3, sample.completion_temperatures[0]
        logits = plain(torch.tensor([tokens])).logits[0, start - 1 : -1] / temperature
        behave = logits.detach() + torch.randn(logits.shape, generator=generator, dtype=torch.float64)
        tops = []
        for place, token in enumerate(sample.completion_ids):
            kept = sorted({token, *behave[place].topk(3).indices.tolist()})
            of_behave, of_theta = behave[place, kept].log_softmax(-1), logits[place, kept].log_softmax(-1)
            assert (of_behave.exp() * (of_theta - of_behave).exp()).sum().item() == pytest.approx(1)
            sample.inference_logprobs[place] = of_behave[kept.index(token)].item()
            tops.append({f"token_id:{at}": value for at, value in zip(kept, of_behave.tolist(), strict=True)})
            tops[-1]["token_id:0"] = -9999.0
            expected.append(of_theta[kept.index(token)])
            entropies.append(-(of_theta.exp() * of_theta).sum())
        sample.sampler_top = reported.read(sample.completion_ids, sample.inference_logprobs, tops)
    rows = [Row.from_message(row_from_sample(sample, 64), CPU) for sample in samples]
    found = [score_row(model, row, row.layout.trained_M, 8192, trains_entropy=True) for row in rows]
    logprobs, entropy = (
        torch.cat([each[row.loss_mask] for each, row in zip(parts, rows, strict=True)])
        for parts in zip(*found, strict=True)
    )
    own, own_entropy = torch.stack(expected), torch.stack(entropies)
    assert torch.allclose(logprobs.double(), own, atol=1e-5)
    assert torch.allclose(entropy.double(), own_entropy, atol=1e-5)
    factors = torch.linspace(-1, 1, len(own))
    ((logprobs + 0.3 * entropy) * factors).sum().backward()
    ((own + 0.3 * own_entropy) * factors).sum().backward()
    for (name, parameter), other in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert torch.allclose(parameter.grad.full_tensor().double(), other.grad, atol=1e-5), name
    # Packed in one row, they are the same; where nothing was reported, all tokens count.
    packed = packed_row(samples)
    together, _ = score_row(model, packed, packed.layout.trained_M, 8192)
    assert torch.allclose(together[packed.loss_mask].sort().values, logprobs.sort().values, atol=1e-5)
    others = dataclasses.replace(packed.sampler_top, is_support_M=torch.zeros_like(packed.sampler_top.is_support_M))
    over_all, _ = score_row(model, dataclasses.replace(packed, sampler_top=others), packed.layout.trained_M, 8192)
    alone, _ = score_row(model, dataclasses.replace(packed, sampler_top=None), packed.layout.trained_M, 8192)
    assert torch.allclose(over_all, alone, atol=1e-5)


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
