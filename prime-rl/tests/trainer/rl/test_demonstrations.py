"""SFT beside RL: demonstrations (loss, gradient, weight by step, position after a resume), and what tools answered."""

from __future__ import annotations

import json
import math
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from prime_rl.configs.algorithms import ClipLossConfig
from prime_rl.configs.demonstrations import DemonstrationsConfig
from prime_rl.configs.trainer import ModelConfig, TrainerConfig
from prime_rl.orchestrator.rollouts.trace import sampled_logprob
from prime_rl.run.paths import RunPaths
from prime_rl.trainer.model.build import setup_model
from prime_rl.trainer.model.tokenizer import setup_tokenizer
from prime_rl.trainer.process.errors import ResumeRefused
from prime_rl.trainer.rl.batches import pack_batch
from prime_rl.trainer.rl.demonstrations import setup_demonstrations
from prime_rl.trainer.rl.loss import setup_loss
from prime_rl.trainer.rl.rows import Row
from prime_rl.trainer.rl.run import train
from prime_rl.trainer.rl.step import ForwardBackward, StepSize
from prime_rl.trainer.sft.data.packer import PackedRow
from prime_rl.transport.messages import TrainingBatch, TrainingSample

QUESTIONS = ("Is it measles?", "Which dose?", "Who reads the scan?", "Stop at once?", "Since when?")


@pytest.fixture(scope="module")
def rows_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("demonstrations") / "rows.jsonl"
    pairs = [{"prompt": question, "response": question[::-1] * (1 + at)} for at, question in enumerate(QUESTIONS)]
    file.write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    return file


def loss_of_papers(model: PreTrainedModel, rows: list[PackedRow], kind: str) -> Tensor:
    """The mean over trained tokens of -w log p, in float64, each sequence alone. w is 1, p (Wu et al. 2025, DFT) or
    p (1 - p) (Zhang et al. 2025, CHORD), a constant."""
    terms = []
    for row in rows:
        starts = [*(row.position_ids == 0).nonzero()[0].tolist(), len(row.input_ids)]
        for first, end in pairwise(starts):
            inputs, targets = (torch.from_numpy(ids[first:end]) for ids in (row.input_ids, row.target_ids))
            logprobs = model(input_ids=inputs[None]).logits[0].log_softmax(-1).gather(1, targets[:, None])[:, 0]
            p = logprobs.detach().exp()
            weights = {"cross_entropy": torch.ones_like(p), "dft": p, "phi": p * (1 - p)}[kind]
            terms.append((-weights * logprobs)[torch.from_numpy(row.is_trained[first:end])])
    return torch.cat(terms).mean()


def test_value_and_gradient_of_demonstrations_are_those_of_the_papers(tiny_model_dir, mesh, rows_file) -> None:
    of_model = ModelConfig(name=str(tiny_model_dir), attn="sdpa", seq_len=128)
    trainer = TrainerConfig(model=of_model)
    tokenizer = setup_tokenizer(trainer.tokenizer, trainer.model)
    model = setup_model(of_model, mesh)
    exact = AutoModelForCausalLM.from_pretrained(tiny_model_dir, dtype=torch.float64)
    for kind in ("cross_entropy", "dft", "phi"):
        config = DemonstrationsConfig.model_validate(
            {
                "data": {"name": str(rows_file), "seq_len": 128, "batch_size": 3},
                "weight": 0.8,
                "final_weight": 0.2,
                "anneal_steps": 4,
                "loss": kind,
            }
        )
        ours, same = (setup_demonstrations(config, tokenizer, mesh, None, None, len(tokenizer)) for _ in range(2))
        ours.accumulate(model, step=2)
        (found,) = [ours.metrics(2)]
        expected = loss_of_papers(exact, [next(same.rows) for _ in range(3)], kind)
        assert found["demonstrations/loss"] == pytest.approx(expected.item(), rel=1e-5)
        assert found["demonstrations/weight"] == pytest.approx(0.5), "half of the way from 0.8 to 0.2"
        assert ours.metrics(None) == {"demonstrations/weight": 0}, "a step that trains the critic alone"
        gradients = torch.autograd.grad(0.5 * expected, list(exact.parameters()))
        for (name, parameter), gradient in zip(model.named_parameters(), gradients, strict=True):
            grad = parameter.grad.full_tensor() if isinstance(parameter.grad, DTensor) else parameter.grad
            torch.testing.assert_close(grad.double(), gradient, atol=1e-6, rtol=1e-4, msg=name)
            parameter.grad = None


def test_the_gradient_of_observations_is_that_of_their_mean_cross_entropy(tiny_model_dir, mesh) -> None:
    """ECHO: GRPO's gradient, and that of -log p at temperature 1 for what the environment wrote between the turns."""
    sampled = [[3, 1, 2, 4], [3, 2], [3, 1, 5, 1, 2]]  # lengths of prompt, turn, observation, turn, ...
    generator = torch.Generator().manual_seed(1)
    samples, texts = [], []
    for number, (prompt, *parts) in enumerate(sampled):
        mask = [at % 2 == 0 for at, part in enumerate(parts) for _ in range(part)]
        tokens = torch.randint(4, 100, (prompt + len(mask),), generator=generator).tolist()
        # The last token was sampled without an alternative, and the environment masks it.
        is_sampled = [*mask[:-1], True]
        texts.append((tokens, [at for at, is_own in enumerate(is_sampled, start=prompt) if not is_own]))
        samples.append(
            TrainingSample(
                prompt_ids=tokens[:prompt],
                prompt_mask=[False] * prompt,
                completion_ids=tokens[prompt:],
                completion_mask=mask,
                inference_logprobs=[-4.5 if is_own else 0.0 for is_own in mask[:-1]] + [sampled_logprob(0.0)],
                completion_temperatures=[0.7] * len(mask),
                advantage=1.0 - number,
            )
        )
    model = setup_model(ModelConfig(name=str(tiny_model_dir), attn="sdpa"), mesh)
    (packed,) = pack_batch(TrainingBatch(samples, 0), 24, 24, 1)
    rows = [Row.from_message(row, torch.device("cpu")) for row in packed]

    def gradients(coef: float) -> dict[str, Tensor]:
        loss = setup_loss(ClipLossConfig(observation_coef=coef))
        values = ForwardBackward(model, loss, 8192, mesh).run(rows, StepSize.from_rows(rows, mesh.data_axis))
        found = {name: each.grad.full_tensor().double() for name, each in model.named_parameters()}
        model.zero_grad()
        assert ("observation_loss" in values.gather(mesh.data_axis)) == (coef > 0)
        return found

    exact = AutoModelForCausalLM.from_pretrained(tiny_model_dir, dtype=torch.float64)
    terms = []
    for tokens, observed in texts:
        logprobs = exact(input_ids=torch.tensor([tokens])).logits[0].log_softmax(-1)
        terms += [-logprobs[at - 1, tokens[at]] for at in observed]
    assert len(terms) == 2 + 6
    expected = torch.autograd.grad(0.1 * torch.stack(terms).mean(), list(exact.parameters()))
    alone, both = gradients(0.0), gradients(0.1)
    for (name, own), slope in zip(alone.items(), expected, strict=True):
        torch.testing.assert_close(both[name] - own, slope, atol=2e-6, rtol=1e-4, msg=name)


def test_the_weight_rises_and_then_falls_as_half_a_cosine() -> None:
    chord = DemonstrationsConfig.model_validate(
        {
            "data": {"name": "rows.jsonl"},
            "weight": 0.9,
            "final_weight": 0.05,
            "warmup_steps": 10,
            "anneal_steps": 200,
            "combine": "share",
        }
    )
    expected = {
        0: 0,
        5: 0.45,
        10: 0.9,
        60: 0.05 + 0.85 * (1 + math.cos(math.pi / 4)) / 2,
        110: 0.475,
        210: 0.05,
        999: 0.05,
    }
    assert {step: chord.weight_at(step) for step in expected} == pytest.approx(expected)
    assert chord.rl_weight_at(110) == pytest.approx(0.525)
    fixed = DemonstrationsConfig.model_validate({"data": {"name": "rows.jsonl"}, "weight": 3.0})
    assert [fixed.weight_at(step) for step in (0, 7, 999)] == [3.0] * 3
    assert fixed.rl_weight_at(7) == 1


def test_a_resumed_run_continues_in_the_demonstrations_and_refuses_other_rows(
    tmp_path, tiny_model_dir, rows_file
) -> None:
    def run(name: str, end: int, data: Path | None = rows_file, resume_step: int | None = None, **ckpt) -> list[dict]:
        out = tmp_path / name
        of_model = ModelConfig(name=str(tiny_model_dir), attn="sdpa", seq_len=96)
        table = {
            "device": "cpu",
            "max_steps": end,
            "output_dir": out,
            "optim": {"lr": 1e-3},
            "data": {"fake": {"batch_size": 4}},
            "ckpt": {"interval": 2, "resume_step": resume_step, **ckpt},
        }
        if data is not None:
            of_data = {"name": str(data), "batch_size": 2}
            table["demonstrations"] = {"data": of_data, "weight": 0.5, "anneal_steps": 6, "combine": "share"}
        train(TrainerConfig(model=of_model, **table), RunPaths(out))
        return [json.loads(line) for line in RunPaths(out).metrics.read_text().splitlines()]

    whole = run("whole", 4)
    run("halves", 2)
    halves = run("halves", 4, resume_step=2)
    keys = [f"demonstrations/{key}" for key in ("loss", "weight", "tokens", "epoch")] + ["loss/mean", "optim/grad_norm"]
    assert [[each[key] for key in keys] for each in halves] == [[each[key] for key in keys] for each in whole]
    first, second = (
        load_file(RunPaths(tmp_path / name).weight(4) / "model.safetensors") for name in ("whole", "halves")
    )
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert whole[-1]["demonstrations/epoch"] > 0, "it reads the rows again"

    changed = tmp_path / "changed.jsonl"
    changed.write_text(rows_file.read_text() * 2)
    with pytest.raises(ResumeRefused, match=r"contents of the data changed.*--trainer\.ckpt\.skip-dataloader"):
        run("halves", 6, data=changed, resume_step=4)
    run("halves", 5, data=changed, resume_step=4, skip_dataloader=True)
    # A run without demonstrations may get some, from the beginning of the data.
    run("added", 2, data=None)
    run("added", 3, resume_step=2)
