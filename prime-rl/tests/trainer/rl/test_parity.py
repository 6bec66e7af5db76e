"""Parity check: a run is stopped if engine and trainer disagree on the first tokens, with the likely causes."""

from __future__ import annotations

import dataclasses
import logging
import shutil
from contextlib import nullcontext

import pytest
import torch
from transformers import AutoConfig

from prime_rl.configs.trainer import DefaultLossConfig, LoRAConfig, ModelConfig, ParityConfig
from prime_rl.trainer.model.build import setup_model
from prime_rl.trainer.rl.batches import pack_batch
from prime_rl.trainer.rl.loss import setup_loss
from prime_rl.trainer.rl.rows import Row
from prime_rl.trainer.rl.step import ForwardBackward, ParityGate, StepSize, TrainerError
from prime_rl.transport.messages import TrainingBatch, TrainingSample

CPU = torch.device("cpu")


@pytest.fixture
def scorer(tiny_model_dir, mesh) -> ForwardBackward:
    model = setup_model(ModelConfig(name=str(tiny_model_dir), attn="sdpa"), mesh)
    return ForwardBackward(model, setup_loss(DefaultLossConfig()), 8192, mesh)


@pytest.fixture
def engine_log(caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("prime_rl"), "propagate", True)
    caplog.set_level(logging.INFO)
    return caplog


def row_of(scorer: ForwardBackward, *versions: int | None, temperature: float = 1.0) -> Row:
    """A packed row with one sequence per version and the log-probabilities of an engine with this policy."""
    generator = torch.Generator().manual_seed(3)

    def sample(version: int | None) -> TrainingSample:
        tokens = torch.randint(4, 100, (24,), generator=generator).tolist()
        fields = ([0.0] * 20, [temperature] * 20)
        return TrainingSample(tokens[:4], [False] * 4, tokens[4:], [True] * 20, *fields, advantage=1.0, version=version)

    batch = TrainingBatch([sample(version) for version in versions], step=0)
    ((message,),) = pack_batch(batch, seq_len=64, row_tokens=512, data_ranks=1)
    (row,) = scorer.with_proximal([Row.from_message(message, CPU)])
    return dataclasses.replace(row, inference_logprobs=row.proximal_logprobs)


def test_an_engine_of_the_same_policy_passes(scorer, mesh, engine_log) -> None:
    ParityGate(ParityConfig(), mesh).check([row_of(scorer, 0, 0)], scorer, version=0)
    assert "differ by 0 on average over 40 tokens of version 0" in engine_log.text


@pytest.mark.parametrize("kind", ["model", "adapters"])
def test_training_scores_what_the_gate_scores_also_with_dropouts(kind, tiny_model_dir, tmp_path, mesh) -> None:
    directory = shutil.copytree(tiny_model_dir, tmp_path / "model")
    if kind == "model":
        AutoConfig.from_pretrained(directory, attention_dropout=0.3).save_pretrained(directory)
    config = ModelConfig(name=str(directory), lora=LoRAConfig(dropout=0.3) if kind == "adapters" else None)
    model = setup_model(config, mesh)
    with torch.no_grad():
        for parameter in model.parameters():  # new adapters change nothing
            parameter += 0.01
    scorer = ForwardBackward(model, setup_loss(DefaultLossConfig()), 8192, mesh)
    row = row_of(scorer, 0, 0)
    values = scorer.run([row], StepSize.from_rows([row], mesh.data_axis)).gather(mesh.data_axis)
    assert torch.equal(values["trainer_probs"], values["inference_probs"])


def test_another_temperature_stops_the_run_and_names_the_causes(scorer, mesh) -> None:
    row = row_of(scorer, 0, temperature=0.3)
    row = dataclasses.replace(row, temperatures=torch.ones_like(row.temperatures))
    with pytest.raises(TrainerError, match=r"version 0: .* over 20 tokens, more than parity.*temperature.*tied head"):
        ParityGate(ParityConfig(), mesh).check([row], scorer, version=0)


def test_a_penalty_of_the_config_is_named_as_the_cause(scorer, mesh, tmp_path) -> None:
    file = tmp_path / "orchestrator.toml"
    row = row_of(scorer, 0)
    row = dataclasses.replace(row, inference_logprobs=row.inference_logprobs - 1)
    for sampling in ("repetition_penalty = 1.3", "extra_body = { presence_penalty = 1.0 }", "min_tokens = 8"):
        file.write_text(f"[sampling]\n{sampling}\n[[env]]\nid = 'x'\n")
        with pytest.raises(TrainerError) as caught:
            ParityGate(ParityConfig(), mesh, orchestrator_config=file).check([row], scorer, version=0)
        (name,) = (word for word in ("repetition_penalty", "presence_penalty", "min_tokens") if word in sampling)
        assert f"{name} = " in str(caught.value)
        assert "makes training off-policy" in str(caught.value)
        assert "tied head" not in str(caught.value)


def test_engine_arguments_of_the_run_are_named_beside_what_they_cost(scorer, mesh, tmp_path, caplog) -> None:
    file = tmp_path / "inference.toml"
    file.write_text("[vllm]\nkv_cache_dtype = 'fp8'\n")
    row = row_of(scorer, 0)
    options = r"with inference.vllm = {'kv_cache_dtype': 'fp8'}"
    with caplog.at_level("INFO"):
        ParityGate(ParityConfig(), mesh, inference_config=file).check([row], scorer, version=0)
    assert caplog.messages[-1].endswith(options)
    row = dataclasses.replace(row, inference_logprobs=row.inference_logprobs - 1)
    with pytest.raises(TrainerError, match=f"differ by 1 .* {options}, more than parity"):
        ParityGate(ParityConfig(), mesh, inference_config=file).check([row], scorer, version=0)


def test_nan_stops_the_run(scorer, mesh) -> None:
    row = row_of(scorer, 0)
    row = dataclasses.replace(row, inference_logprobs=torch.full_like(row.inference_logprobs, torch.nan))
    with pytest.raises(TrainerError, match="differ by nan"):
        ParityGate(ParityConfig(), mesh).check([row], scorer, version=0)


@pytest.mark.parametrize(
    ("dtype", "config", "difference", "is_stopped"),
    [
        (torch.bfloat16, ParityConfig(), 0.055, False),  # as measured between a correct bfloat16 engine and trainer
        (torch.bfloat16, ParityConfig(), 0.15, True),
        (torch.float32, ParityConfig(), 0.055, True),
        (torch.float32, ParityConfig(max_mean_abs_diff=0.06), 0.055, False),
    ],
)
def test_bfloat16_has_a_larger_bound_than_float32(scorer, mesh, dtype, config, difference, is_stopped) -> None:
    row = row_of(scorer, 0)
    row = dataclasses.replace(row, inference_logprobs=row.inference_logprobs + difference)
    with pytest.raises(TrainerError) if is_stopped else nullcontext():
        ParityGate(config, mesh, dtype).check([row], scorer, version=0)


@pytest.mark.parametrize(("on_mismatch", "warnings"), [("warn", 1), ("off", 0)])
def test_the_run_continues_with_on_mismatch_warn(scorer, mesh, engine_log, on_mismatch, warnings) -> None:
    row = row_of(scorer, 0)
    row = dataclasses.replace(row, inference_logprobs=row.inference_logprobs - 1)
    gate = ParityGate(ParityConfig(on_mismatch=on_mismatch), mesh)
    gate.check([row], scorer, version=0)
    gate.check([row], scorer, version=1)
    assert [record.levelname for record in engine_log.records] == ["WARNING"] * warnings


def test_after_a_resume_only_tokens_of_the_resumed_version_are_compared(scorer, mesh, engine_log) -> None:
    row = row_of(scorer, 7, 6, None)
    stale = row.versions != 7
    row = dataclasses.replace(row, inference_logprobs=row.inference_logprobs - 2.0 * stale)
    ParityGate(ParityConfig(), mesh).check([row], scorer, version=7)
    assert "over 20 tokens of version 7" in engine_log.text


def test_a_batch_without_on_policy_tokens_is_not_checked(scorer, mesh, engine_log) -> None:
    ParityGate(ParityConfig(), mesh).check([row_of(scorer, 4, None)], scorer, version=5)
    assert "not checked, because no token" in engine_log.text
