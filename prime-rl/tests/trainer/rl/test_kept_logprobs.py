"""The trainer's log-probabilities of kept rollouts equal those of a plain forward pass, and change nothing."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from prime_rl.configs.model import LoRAConfig
from prime_rl.configs.trainer import DefaultLossConfig, ModelConfig
from prime_rl.run.paths import OrchestratorPaths
from prime_rl.trainer.model.build import setup_model
from prime_rl.trainer.process.mesh import DataAxis
from prime_rl.trainer.rl.batches import pack_batch
from prime_rl.trainer.rl.kept_logprobs import KeptLogprobs
from prime_rl.trainer.rl.loss import setup_loss
from prime_rl.trainer.rl.rows import Row
from prime_rl.trainer.rl.step import ForwardBackward, StepSize
from prime_rl.transport.messages import TrainingBatch, TrainingSample

SEQ_LEN = 24
TEMPERATURES = (0.7, 1.0, 1.3)


def sample(number: int, length: int, is_kept: bool) -> TrainingSample:
    generator = torch.Generator().manual_seed(number)
    tokens = torch.randint(4, 100, (length,), generator=generator).tolist()
    mask = [index % 5 != 2 for index in range(length - 3)]  # as if the environment had written every fifth token
    return TrainingSample(
        prompt_ids=tokens[:3],
        prompt_mask=[False] * 3,
        completion_ids=tokens[3:],
        completion_mask=mask,
        inference_logprobs=[-4.5] * (length - 3),
        completion_temperatures=[TEMPERATURES[number % 3]] * (length - 3),
        advantage=1.0,
        kept_as=[number // 2, number % 2, 0] if is_kept else None,
    )


def batch(is_marked: bool = True) -> TrainingBatch:
    lengths = (9, 14, 30, 7, 21, 11, 8)  # one is longer than SEQ_LEN
    return TrainingBatch(
        [sample(number, length, is_marked and number % 3 != 1) for number, length in enumerate(lengths)], 0
    )


def rows_of(message: TrainingBatch, data_ranks: int = 1) -> list[list[Row]]:
    packed = pack_batch(message, SEQ_LEN, 2 * SEQ_LEN, data_ranks)
    return [[Row.from_message(row, torch.device("cpu")) for row in rows] for rows in packed]


def written(paths: OrchestratorPaths) -> list[dict[str, Any]]:
    files = sorted(paths.samples.glob("step_3.rank_*.jsonl.gz"))
    return [json.loads(line) for file in files for line in gzip.decompress(file.read_bytes()).splitlines()]


def logprobs_alone(model: PreTrainedModel, tokens: list[int], temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    with torch.no_grad():
        logits = model(torch.tensor([tokens])).logits[0, :-1] / temperature
    log_softmax = torch.log_softmax(logits, -1)
    return log_softmax.gather(1, torch.tensor(tokens[1:])[:, None])[:, 0], -(log_softmax.exp() * log_softmax).sum(-1)


@pytest.mark.parametrize("data_ranks", [1, 2, 3])
def test_values_are_those_of_a_plain_forward_pass(tmp_path: Path, tiny_model_dir, mesh, data_ranks: int) -> None:
    """Over packed rows, on any number of data ranks, with a truncated sample and tokens of the environment."""
    paths = OrchestratorPaths(tmp_path)
    model = setup_model(ModelConfig(name=str(tiny_model_dir), attn="sdpa"), mesh)
    for data_rank, rows in enumerate(rows_of(batch(), data_ranks)):
        kept = KeptLogprobs(paths, DataAxis(data_rank, data_ranks))
        ForwardBackward(model, setup_loss(DefaultLossConfig()), 8192, mesh, kept).run(rows, StepSize(1, 1, 1))
        kept.write(3)
        kept.close()
    records = written(paths)
    marked = {tuple(each.kept_as): each for each in batch().examples if each.kept_as is not None}
    assert sorted(tuple(record["kept_as"]) for record in records) == sorted(marked), "each once"
    plain = AutoModelForCausalLM.from_pretrained(tiny_model_dir, dtype=torch.float32)
    for record in records:
        own = marked[tuple(record["kept_as"])]
        tokens = (own.prompt_ids + own.completion_ids)[:SEQ_LEN]
        logprobs, entropies = logprobs_alone(plain, tokens, own.completion_temperatures[0])
        scored = [place for start, end in record["scored"] for place in range(start, end)]
        mask = (own.prompt_mask + own.completion_mask)[:SEQ_LEN]
        assert scored == [place for place, is_trained in enumerate(mask) if is_trained]
        before = [place - 1 for place in scored]
        assert record["logprobs"] == pytest.approx(logprobs[before].tolist(), abs=3e-5)
        assert record["entropy"] == pytest.approx(entropies[before].tolist(), abs=3e-5)


@pytest.mark.parametrize("lora", [None, LoRAConfig(rank=4, alpha=8.0)], ids=["full", "lora"])
def test_gradients_are_bit_equal_whether_rollouts_are_kept_or_not(tmp_path: Path, tiny_model_dir, mesh, lora) -> None:
    model = setup_model(ModelConfig(name=str(tiny_model_dir), attn="sdpa", lora=lora), mesh)

    def gradient(is_marked: bool) -> torch.Tensor:
        kept = KeptLogprobs(OrchestratorPaths(tmp_path), mesh.data_axis)
        (rows,) = rows_of(batch(is_marked))
        step = ForwardBackward(model, setup_loss(DefaultLossConfig()), 8192, mesh, kept)
        step.run(rows, StepSize.from_rows(rows, mesh.data_axis))
        kept.write(3)
        kept.close()
        found = torch.cat([each.grad.full_tensor().flatten() for each in model.parameters() if each.requires_grad])
        model.zero_grad()
        return found

    without = gradient(is_marked=False)
    assert not (tmp_path / "samples").exists()
    assert torch.equal(gradient(is_marked=True), without)
    assert without.norm() > 0
    assert len(written(OrchestratorPaths(tmp_path))) == 5


def test_a_disk_that_fails_is_a_warning(tmp_path: Path, mesh, caplog) -> None:
    (tmp_path / "samples").write_text("a file, where a directory should be")
    kept = KeptLogprobs(OrchestratorPaths(tmp_path), mesh.data_axis)
    for step in range(2):
        kept.add([[0, 0, 0], None], 0, [2, 1], torch.zeros(3, 3))
        kept.write(step)
    with caplog.at_level("WARNING"):
        kept.close()
    assert "The trainer's log-probabilities of kept rollouts were not written" in caplog.text


def test_a_rank_that_fills_up_the_others_writes_nothing_for_its_copy(tmp_path: Path) -> None:
    first, second = rows_of(TrainingBatch([sample(0, 9, is_kept=True)], 0), data_ranks=2)
    assert [row.kept_as for row in (*first, *second)] == [[[0, 0, 0]], None]
