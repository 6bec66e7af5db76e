"""Reward models: losses equal TRL's, and runs whose exports Transformers and PEFT load with equal rewards."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from prime_rl.configs.data import SFTDataConfig
from prime_rl.configs.rm import RewardLossConfig, RewardModelConfig
from prime_rl.configs.trainer import ModelConfig
from prime_rl.run.paths import RunPaths
from prime_rl.trainer.model.build import setup_model
from prime_rl.trainer.preferences.reward_model import Ranking
from prime_rl.trainer.process.errors import BadRow, DataError
from prime_rl.trainer.process.mesh import Mesh
from prime_rl.trainer.sft.data.packer import lay_out
from prime_rl.trainer.sft.data.pairs import margin_of
from prime_rl.trainer.sft.data.samples import DatasetStream, as_bytes, from_bytes
from prime_rl.trainer.sft.run import run
from prime_rl.trainer.sft.step import forward_backward, sizes_of
from prime_rl.trainer.sft.validation import packed
from prime_rl.transport.loading import put_own
from prime_rl.utils.conversations import RowFault
from prime_rl.utils.pydantic_config import ConfigError, load_config

TRL = json.loads(Path(__file__).with_name("trl_rewards.json").read_text(encoding="utf-8"))
CHECKPOINT = Path(__file__).parents[4] / "examples" / "reverse_text" / "checkpoint"
Rows = list[dict[str, Any]]


def written(file: Path, rows: Rows) -> Path:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return file


def scored(file: Path, **keys: Any) -> SFTDataConfig:
    data = SFTDataConfig(**{"name": str(file), "seq_len": 128, "shuffle": False, **keys})
    data.hold_pairs(are_scored=True)
    return data


# Losses, gradients and metrics. benchmarks/preferences/trl_rewards.py wrote those of TRL.


@pytest.mark.skipif(not CHECKPOINT.is_dir(), reason="the examples are not part of an installed prime-rl")
def test_every_variant_has_the_tokens_losses_gradients_and_metrics_of_trl(tmp_path: Path, mesh: Mesh) -> None:
    tokenizer = AutoTokenizer.from_pretrained(CHECKPOINT)
    model = setup_model(ModelConfig(name=str(CHECKPOINT), attn="sdpa"), mesh, is_scored=True)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            at = torch.arange(parameter.numel(), dtype=torch.float64).view(parameter.shape)
            is_score = name == "score.weight"
            change = 0.5 * torch.cos(at) if is_score else 0.02 * torch.sin(at)
            put_own(parameter, (0 if is_score else parameter.full_tensor()) + change.to(parameter.dtype))
    for name, case in TRL["cases"].items():
        has_margin = case["variant"].get("has_margin", False)
        rows = [{key: row[key] for key in row if key != "margin" or has_margin} for row in TRL["rows"]]
        data = scored(written(tmp_path / f"{name}.jsonl", rows))
        stream = DatasetStream(data, tokenizer, mesh.data_axis)
        samples = [sample for made in stream.own_share() for sample in made.samples]
        # TRL's batch has all chosen answers first.
        ours = [sample.chosen for sample in samples] + [sample.rejected for sample in samples]
        assert [each.token_ids.tolist() for each in ours] == case["trl"]["tokens"]
        objective = Ranking(
            RewardLossConfig(center_rewards_coefficient=case["variant"].get("center_rewards_coefficient"))
        )
        packed_rows = packed(samples, data)
        found = forward_backward(model, packed_rows, objective, sizes_of(packed_rows, objective), mesh)
        gradients = {key: parameter.grad.full_tensor() for key, parameter in model.named_parameters()}
        norms = {key: float(gradients[key].double().norm()) for key in case["trl"]["gradient_norms"]}
        model.zero_grad()
        expected = {"loss": case["trl"]["loss"], **case["trl"]["metrics"]}
        assert {key: found[key] for key in expected} == pytest.approx(expected, rel=1e-5, abs=1e-5), name
        assert norms == pytest.approx(case["trl"]["gradient_norms"], rel=1e-4), name


# Rows.


def test_a_row_scores_the_last_token_that_is_not_padding(tiny_model_dir: Path, tmp_path: Path, mesh: Mesh) -> None:
    rows = [
        {"prompt": "ab", "chosen": "cd", "rejected": "e", "margin": 2},
        {"prompt": "abcdefgh", "chosen": "x" * 9, "rejected": "y"},
    ]
    data = scored(written(tmp_path / "rows.jsonl", rows), seq_len=12)
    tokenizer = AutoTokenizer.from_pretrained(tiny_model_dir)

    def samples() -> list[Any]:
        stream = DatasetStream(data, tokenizer, mesh.data_axis)
        return [sample for made in stream.own_share() for sample in made.samples]

    pairs = samples()
    assert [pair.margin for pair in pairs] == [2.0, 0.0]
    # The second chosen answer is cut: a row holds all tokens of a sequence, also the last one.
    assert [len(each) for pair in pairs for each in pair.sequences] == [5, 4, 12, 10]
    assert [pair.inputs for pair in pairs] == [9, 22]
    row = lay_out(pairs, 40, 12)
    assert np.flatnonzero(row.is_trained).tolist() == [4, 8, 20, 30]
    assert (row.input_ids[[4, 8, 30]] == tokenizer.eos_token_id).all()
    assert np.flatnonzero(row.position_ids == 0).tolist()[:5] == [0, 5, 9, 21, 31]
    stream = DatasetStream(data.model_copy(update={"overlong": "error"}), tokenizer, mesh.data_axis)
    with pytest.raises(DataError, match=r"rows.jsonl:2: 18 tokens, more than data.seq_len = 12"):
        list(stream.own_share())
    # Transformers takes end tokens for padding if they pad.
    tokenizer.pad_token = tokenizer.eos_token
    assert np.flatnonzero(lay_out(samples(), 40, 12).is_trained).tolist() == [3, 7, 20, 29]
    restored = from_bytes(as_bytes(pairs))
    assert [(each.margin, each.padding_id, each.key) for each in restored] == [
        (2.0, pairs[0].padding_id, 0),
        (0.0, pairs[0].padding_id, 1),
    ]


@pytest.mark.parametrize(("cell", "margin"), [("1.5", 1.5), (" ", 0.0), (None, 0.0), (2, 2.0), ("-1e-1", -0.1)])
def test_a_margin_may_be_the_cell_of_a_table(cell: Any, margin: float) -> None:
    assert margin_of({"margin": cell}) == margin


def test_scores_are_the_margin_of_rows_without_one() -> None:
    scores = {"score_chosen": "8.5", "score_rejected": 6}
    assert margin_of(scores, 0.2) == pytest.approx(0.5)
    assert margin_of({**scores, "margin": 3}, 0.2) == 3
    assert margin_of(scores) == 0
    with pytest.raises(RowFault, match="score_margin needs two finite numbers, got `score_chosen` "):
        margin_of({"score_chosen": "8.5"}, 0.2)
    for factor, least in ((10.0, -1e308), (1e39, 6)):  # beyond float64, and beyond float32
        with pytest.raises(RowFault, match="too large a margin"):
            margin_of({**scores, "score_rejected": least}, factor)


@pytest.mark.parametrize("cell", ["nan", "inf", 1e39, True, [1], "much" * 1000], ids=str)
def test_a_margin_that_is_no_number_is_refused_in_one_line(cell: Any) -> None:
    with pytest.raises(RowFault, match="`margin` must be a finite number, got ") as caught:
        margin_of({"margin": cell})
    assert len(str(caught.value)) < 150


def test_a_margin_that_is_no_number_is_named_by_file_and_line(tiny_model_dir: Path, tmp_path: Path, mesh: Mesh) -> None:
    rows: Rows = [{"prompt": "a", "chosen": "b", "rejected": "c", "margin": "much"}]
    data = scored(written(tmp_path / "rows.jsonl", rows))
    stream = DatasetStream(data, AutoTokenizer.from_pretrained(tiny_model_dir), mesh.data_axis)
    with pytest.raises(BadRow, match=r"rows.jsonl:1: `margin` must be a finite number, got 'much'"):
        list(stream.own_share())


@pytest.mark.parametrize(
    ("options", "fault"),
    [
        (["--loss.center-rewards-coefficient=-1"], "should be at least 0"),
        (["--loss.type=sigmoid"], "loss.type"),
        (["--data.pack-function=cat"], "an answer is compared as a whole"),
        (["--eval.env.0.id=rows"], "a reward model writes no text"),
    ],
    ids=lambda each: str(each)[:30],
)
def test_a_config_that_cannot_work_is_refused_in_one_line(options: list[str], fault: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(RewardModelConfig, [], ["--data.seq-len=64", *options])
    assert len(caught.value.faults) == 1
    assert fault in caught.value.faults[0]


# Runs.


def made_up(count: int) -> Rows:
    letters = "abcdefgh"
    words = ["".join(letters[(at * 7 + place * (at % 5 + 1)) % 8] for place in range(5)) for at in range(count)]
    return [{"prompt": f"{word}:", "chosen": word[::-1], "rejected": word + "?"} for word in words]


@pytest.mark.slow
@pytest.mark.parametrize("is_lora", [False, True], ids=["full", "lora"])
def test_a_run_learns_continues_exactly_and_exports(tiny_model_dir: Path, tmp_path: Path, is_lora: bool) -> None:
    rows = made_up(48)
    base: dict[str, Any] = {
        "device": "cpu",
        "model": {"name": str(tiny_model_dir), "attn": "sdpa", **({"lora": {"rank": 4}} if is_lora else {})},
        "data": {"name": str(written(tmp_path / "rows.jsonl", rows)), "batch_size": 2, "seq_len": 64},
        "val": {"size": 8, "interval": 6, "on_start": True},
        "optim": {"lr": 2e-2 if is_lora else 2e-3},
        "loss": {"center_rewards_coefficient": 0.01},
    }
    saving = {"weights": {"save_adapter_separately": True}} if is_lora else {}

    def metrics_of(name: str, **keys: Any) -> Rows:
        assert run(RewardModelConfig(**{**base, "output_dir": tmp_path / name, **keys})) == 0
        return [json.loads(line) for line in RunPaths(tmp_path / name).metrics.read_text().splitlines()]

    straight = metrics_of("straight", max_steps=6, ckpt={"interval": 6, **saving})
    metrics_of("halves", max_steps=3, ckpt={"interval": 3, **saving})
    halves = metrics_of("halves", max_steps=6, ckpt={"interval": 3, "resume_step": 3, **saving})
    losses = [[line["loss/mean"] for line in lines if "loss/mean" in line] for lines in (straight, halves)]
    assert losses[0] == losses[1]
    one, other = (
        load_file(RunPaths(tmp_path / name).weight(6) / "model.safetensors") for name in ("straight", "halves")
    )
    assert one.keys() == other.keys()
    assert all(torch.equal(one[key], other[key]) for key in one)
    validations = [line for line in straight if "val/loss" in line]
    assert validations[-1]["val/accuracy"] > 0.8
    assert validations[-1]["val/loss"] < validations[0]["val/loss"]

    export = RunPaths(tmp_path / "straight").weight(6)
    tokenizer = AutoTokenizer.from_pretrained(export)
    texts = [row["prompt"] + row[side] for row in rows[:4] for side in ("chosen", "rejected")]
    batch = tokenizer([text + tokenizer.eos_token for text in texts], padding=True, return_tensors="pt")

    def rewards(model: Any) -> Tensor:
        with torch.no_grad():
            return model.eval()(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits[:, 0]

    found = rewards(AutoModelForSequenceClassification.from_pretrained(export))
    assert float((found[::2] > found[1::2]).float().mean()) > 0.7
    # A run that starts from the reward model keeps its head, and so begins with its validation loss.
    again = metrics_of("again", max_steps=1, model={"name": str(export), "attn": "sdpa"})
    first = next(line for line in again if "val/loss" in line)
    assert first["val/loss"] == pytest.approx(validations[-1]["val/loss"], abs=1e-4 if is_lora else 1e-6)
    if is_lora:
        from peft import PeftModel

        with torch.random.fork_rng():
            start = AutoModelForSequenceClassification.from_pretrained(
                tiny_model_dir, num_labels=1, pad_token_id=tokenizer.pad_token_id
            )
        adapted = PeftModel.from_pretrained(start, export / "lora_adapters")
        assert adapted.peft_config["default"].task_type == "SEQ_CLS"
        torch.testing.assert_close(rewards(adapted), found, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_a_model_without_a_class_for_it_is_refused_in_one_line(tiny_model_dir: Path, tmp_path: Path) -> None:
    from transformers import GraniteConfig

    GraniteConfig(hidden_size=8, num_hidden_layers=1).save_pretrained(tmp_path / "granite")
    for file in tiny_model_dir.glob("tokenizer*"):
        (tmp_path / "granite" / file.name).write_bytes(file.read_bytes())
    data = {"name": str(written(tmp_path / "rows.jsonl", made_up(8))), "seq_len": 64, "batch_size": 2}
    model = {"name": str(tmp_path / "granite"), "attn": "sdpa"}
    with pytest.raises(SystemExit):
        run(RewardModelConfig(device="cpu", model=model, data=data, max_steps=1, output_dir=tmp_path / "out"))
    log = RunPaths(tmp_path / "out").rank_log(0).read_text()
    assert "Transformers has no class for a reward model of the type 'granite'" in log
