"""Preference training: losses equal TRL's, rows of all formats, and runs that resume exactly."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoTokenizer

from prime_rl.configs.data import SFTDataConfig
from prime_rl.configs.dpo import DPOConfig, FrozenReferenceConfig, PreferenceLossConfig
from prime_rl.configs.trainer import ModelConfig
from prime_rl.run.paths import RunPaths
from prime_rl.trainer.model.build import setup_model
from prime_rl.trainer.preferences.losses import LOSSES, PairLogprobs
from prime_rl.trainer.preferences.objective import Preferences, Unpaired
from prime_rl.trainer.preferences.reference import Parts, Reference, reference_logprobs
from prime_rl.trainer.process.errors import DataError, ModelError
from prime_rl.trainer.process.mesh import Mesh
from prime_rl.trainer.sft.data.examination import Examination, examine, label_worries, worries
from prime_rl.trainer.sft.data.packer import PackedRow, setup_rows
from prime_rl.trainer.sft.data.pairs import Labelled, labelled_of, sides_of
from prime_rl.trainer.sft.data.samples import DatasetStream, SampleCounts, SampleMaker, as_bytes, from_bytes
from prime_rl.trainer.sft.data.sources import setup_entries
from prime_rl.trainer.sft.run import run
from prime_rl.trainer.sft.step import Objective, forward_backward, sizes_of
from prime_rl.trainer.sft.validation import packed
from prime_rl.utils.conversations import RowFault
from prime_rl.utils.pydantic_config import ConfigError, dump_toml, load_config

TRL = json.loads(Path(__file__).with_name("trl_losses.json").read_text(encoding="utf-8"))
SCRIPT = Path(__file__).with_name("pairs_of_two_ranks.py")
CHECKPOINT = Path(__file__).parents[4] / "examples" / "reverse_text" / "checkpoint"

Rows = list[dict[str, Any]]


def written(file: Path, rows: Rows) -> Path:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return file


def pairs_of(file: Path, **keys: Any) -> SFTDataConfig:
    data = SFTDataConfig(**{"name": str(file), "seq_len": 128, "shuffle": False, **keys})
    data.hold_pairs()
    return data


def labels_of(file: Path, loss: PreferenceLossConfig, **keys: Any) -> SFTDataConfig:
    data = pairs_of(file, **keys)
    data.hold_labels(mismatched=loss.type == "kto")
    return data


# Losses, gradients and metrics. benchmarks/preferences/trl_losses.py wrote those of TRL.


@pytest.mark.skipif(not CHECKPOINT.is_dir(), reason="the examples are not part of an installed prime-rl")
def test_every_variant_has_the_tokens_losses_gradients_and_metrics_of_trl(tmp_path: Path, mesh: Mesh) -> None:
    data = pairs_of(written(tmp_path / "rows.jsonl", TRL["rows"]))
    tokenizer = AutoTokenizer.from_pretrained(CHECKPOINT)
    stream = DatasetStream(data, tokenizer, mesh.data_axis)
    samples = [sample for made in stream.own_share() for sample in made.samples]
    theirs = TRL["cases"]["sigmoid"]["trl"]["tokens"]
    # TRL's batch has all chosen answers first.
    ours = [sample.chosen for sample in samples] + [sample.rejected for sample in samples]
    assert [each.token_ids.tolist() for each in ours] == [each["ids"] for each in theirs]
    assert [each.is_trained.tolist() for each in ours] == [each["is_trained"] for each in theirs]

    model, policy = (setup_model(ModelConfig(name=str(CHECKPOINT), attn="sdpa"), mesh) for _ in range(2))
    with torch.no_grad():
        for parameter in policy.parameters():
            local = parameter.to_local()
            at = torch.arange(local.numel(), dtype=torch.float64)
            local += (0.02 * torch.sin(at)).to(local.dtype).view_as(local)

    def check(name: str, case: Any, trained: Any, objective: Objective, rows: list[PackedRow]) -> None:
        objective.prepare(trained, rows, mesh)
        found = forward_backward(trained, rows, objective, sizes_of(rows, objective), mesh)
        gradients = {key: parameter.grad.full_tensor() for key, parameter in trained.named_parameters()}
        norms = {key: float(gradients[key].double().norm()) for key in case["trl"]["gradient_norms"]}
        trained.zero_grad()
        expected = {"loss": case["trl"]["loss"], **case["trl"]["metrics"]}
        assert {key: found[key] for key in expected} == pytest.approx(expected, rel=1e-5, abs=1e-5), name
        assert norms == pytest.approx(case["trl"]["gradient_norms"], rel=1e-4), name

    reference = reference_logprobs(model, stream, mesh)
    for name, case in TRL["cases"].items():
        check(name, case, policy, Preferences(PreferenceLossConfig(**case["loss"]), reference), packed(samples, data))
    # Answers with labels: TRL's policy is the checkpoint there, and the KL is above 0.
    for name, case in TRL["unpaired"].items():
        loss = PreferenceLossConfig(**case["loss"])
        of_labels = labels_of(written(tmp_path / "labels.jsonl", case["rows"]), loss)
        stream = DatasetStream(of_labels, tokenizer, mesh.data_axis)
        answers = [sample for made in stream.own_share() for sample in made.samples]
        objective = Unpaired(loss, of_labels, reference_logprobs(policy, stream, mesh))
        check(name, case, model, objective, packed(answers, of_labels))
        assert loss.type != "kto" or case["trl"]["metrics"]["kl"] > 0.1


def pair(chosen: float, rejected: float, lengths: tuple[int, int] = (2, 4), ref: tuple[float, float] = (0, 0)) -> Any:
    values = (chosen, rejected, *lengths, *ref)
    return PairLogprobs(*(torch.tensor([float(each)], dtype=torch.float64) for each in values))


SIGMOID: Callable[[float], float] = lambda x: float(1 / (1 + np.exp(-x)))  # noqa: E731
FORMULAS = [
    ({"type": "sigmoid", "beta": 0.5}, pair(-1, -3, ref=(-2, -2.5)), -np.log(SIGMOID(0.5 * (1 - -0.5)))),
    (
        {"type": "sigmoid", "beta": 0.5, "label_smoothing": 0.1},
        pair(-1, -3),
        -0.9 * np.log(SIGMOID(1)) - 0.1 * np.log(SIGMOID(-1)),
    ),
    ({"type": "sigmoid", "beta": 0.5}, replace(pair(-1, -3), margins=0.7), -np.log(SIGMOID(0.5 * 2 - 0.7))),
    ({"type": "hinge", "beta": 0.1}, pair(-1, -3), 0.8),
    ({"type": "ipo", "beta": 0.25}, pair(-1, -3), (-0.5 + 0.75 - 2) ** 2),
    ({"type": "simpo", "beta": 2, "simpo_gamma": 0.25}, pair(-1, -3), -np.log(SIGMOID(2 * 0.25 - 0.25))),
    ({"type": "cpo", "beta": 0.5}, pair(-1, -3), -np.log(SIGMOID(1))),
    (
        {"type": "orpo", "beta": 1},
        pair(-1, -3),
        -np.log(SIGMOID(np.log(np.exp(-0.5) / (1 - np.exp(-0.5))) - np.log(np.exp(-0.75) / (1 - np.exp(-0.75))))),
    ),
    ({"type": "discopop", "beta": 1}, pair(-900, 0), 900.0),
]


@pytest.mark.parametrize(("keys", "pairs", "expected"), FORMULAS, ids=lambda each: str(each)[:40])
def test_a_loss_is_its_papers_formula(keys: dict[str, Any], pairs: PairLogprobs, expected: float) -> None:
    config = PreferenceLossConfig(**keys)
    assert float(LOSSES[config.type](pairs, config)) == pytest.approx(expected, abs=1e-12)


def test_orpo_is_finite_for_answers_that_are_certain_or_impossible() -> None:
    config = PreferenceLossConfig(type="orpo", beta=1)
    values = [0.0, -1e-8, -900.0], [-900.0, 0.0, 0.0]
    chosen, rejected = (torch.tensor(each, requires_grad=True) for each in values)
    counts, zeros = torch.ones(3), torch.zeros(3)
    LOSSES["orpo"](PairLogprobs(chosen, rejected, counts, counts, zeros, zeros), config).sum().backward()
    assert chosen.grad is not None
    assert torch.isfinite(chosen.grad).all()


# Rows.

ASKED = [{"role": "user", "content": "dose?"}]
GOOD, BAD = [{"role": "assistant", "content": "ask"}], [{"role": "assistant", "content": "more"}]
FORMATS = {
    "messages with a prompt": {"prompt": ASKED, "chosen": GOOD, "rejected": BAD},
    "messages that begin alike": {"chosen": ASKED + GOOD, "rejected": ASKED + BAD},
    "UltraFeedback": {"prompt": "dose?", "chosen": ASKED + GOOD, "rejected": ASKED + BAD, "score_chosen": 8.0},
    "a text and messages": {"prompt": "dose?", "chosen": GOOD, "rejected": BAD},
    "messages as JSON": {"prompt": json.dumps(ASKED), "chosen": json.dumps(GOOD), "rejected": json.dumps(BAD)},
    "HH-RLHF": {
        "chosen": "\n\nHuman: dose?\n\nAssistant: ask",
        "rejected": "\n\nHuman: dose?\n\nAssistant: more",
    },
}


@pytest.mark.parametrize("row", FORMATS.values(), ids=FORMATS)
def test_formats_of_messages_give_the_same_prompt_and_answers(row: dict[str, Any]) -> None:
    assert [dict(side) for side in sides_of(row)] == [
        {"prompt": ASKED, "completion": GOOD},
        {"prompt": ASKED, "completion": BAD},
    ]


def test_texts_share_a_prompt_that_ends_before_a_blank() -> None:
    explicit = sides_of({"prompt": "a b", "chosen": " c", "rejected": " d"})
    implicit = sides_of({"chosen": "a b c", "rejected": "a b d"})
    expected = [{"prompt": "a b", "completion": " c"}, {"prompt": "a b", "completion": " d"}]
    assert [dict(side) for side in explicit] == [dict(side) for side in implicit] == expected
    (messages, _) = sides_of({"prompt": ASKED, "chosen": "ask", "rejected": "more"})
    assert dict(messages) == {"prompt": ASKED, "response": "ask"}


LABELLED: dict[str, tuple[dict[str, Any], list[tuple[dict[str, Any], bool]]]] = {
    "text": (
        {"prompt": "a", "completion": " b", "label": True},
        [({"prompt": "a", "completion": " b"}, True)],
    ),
    "messages": (
        {"prompt": ASKED, "completion": BAD, "label": 0},
        [({"prompt": ASKED, "completion": BAD}, False)],
    ),
    "messages in one column, from a CSV": (
        {"messages": json.dumps(ASKED + GOOD), "label": "True", "tools": None},
        [({"prompt": ASKED, "completion": GOOD, "tools": None}, True)],
    ),
    "a question and messages": (
        {"prompt": "dose?", "completion": GOOD, "label": 1.0},
        [({"prompt": ASKED, "completion": GOOD}, True)],
    ),
    "messages and a text": (
        {"prompt": ASKED, "completion": "ask", "label": "false"},
        [({"prompt": ASKED, "response": "ask"}, False)],
    ),
    "a pair": (
        {"prompt": ASKED, "chosen": GOOD, "rejected": BAD},
        [({"prompt": ASKED, "completion": GOOD}, True), ({"prompt": ASKED, "completion": BAD}, False)],
    ),
}


@pytest.mark.parametrize(("row", "expected"), LABELLED.values(), ids=LABELLED)
def test_an_answer_with_a_label_is_a_row_of_sft(
    row: dict[str, Any], expected: list[tuple[dict[str, Any], bool]]
) -> None:
    assert [(dict(side), label) for side, label in labelled_of(row)] == expected


def test_a_mismatched_answer_comes_from_another_prompt(tiny_model_dir: Path, tmp_path: Path, mesh: Mesh) -> None:
    # Three answers to one question are neighbours; the file ends with another question.
    rows = [{"prompt": "a:", "completion": each, "label": True} for each in ("b", "cc", "ddd")]
    file = written(tmp_path / "rows.jsonl", [*rows, {"prompt": "xy:", "completion": "zzzz", "label": False}])
    data = labels_of(file, PreferenceLossConfig(type="kto"))
    tokenizer = AutoTokenizer.from_pretrained(tiny_model_dir)
    stream = DatasetStream(data, tokenizer, mesh.data_axis)
    answers = [sample for made in stream.own_share() for sample in made.samples]
    texts = []
    for answer in answers:
        assert isinstance(answer, Labelled)
        assert answer.mismatched is not None
        texts.append(tokenizer.decode(answer.mismatched.token_ids, skip_special_tokens=True))
    assert texts == ["a:zzzz", "a:zzzz", "a:zzzz", "xy:ddd"]
    assert [answer.key for answer in answers if isinstance(answer, Labelled)] == [0, 2, 4, 6]
    assert as_bytes(from_bytes(as_bytes(answers))) == as_bytes(answers)
    one = written(tmp_path / "one.jsonl", rows[:1])
    alone = DatasetStream(labels_of(one, PreferenceLossConfig(type="kto")), tokenizer, mesh.data_axis)
    with pytest.raises(DataError, match=r"one.jsonl:1: found no other row"):
        next(alone)


@pytest.mark.parametrize(
    ("good", "bad", "weights", "advice"),
    [
        (50, 50, {}, None),
        (57, 43, {}, None),  # within 4:3
        (100, 50, {"desirable_weight": 0.5}, None),
        (50, 100, {"desirable_weight": 2.5}, None),
        (100, 50, {}, "set desirable_weight to 0.50 up to 0.67, or undesirable_weight to 1.50 up to 2.00"),
        (20, 80, {}, "set desirable_weight to 4.00 up to 5.33, or undesirable_weight to 0.19 up to 0.25"),
        (0, 80, {}, "all 80 answers are bad"),
        (100, 50, {"undesirable_weight": 0.0}, None),
    ],
)
def test_weights_that_do_not_balance_the_labels_are_told(
    good: int, bad: int, weights: dict[str, float], advice: str | None
) -> None:
    found = Examination(good + bad, SampleCounts(seen=good + bad), desirable=good)
    lines = list(label_worries(found, PreferenceLossConfig(type="kto", **weights)))
    assert lines == [] if advice is None else advice in lines[0]


FAULTS = {
    "`rejected` is missing": {"prompt": "a", "chosen": "b"},
    "`chosen` is empty": {"prompt": "a", "chosen": " ", "rejected": "c"},
    "`chosen` and `rejected` are equal": {"prompt": "a", "chosen": "b", "rejected": "b"},
    "`chosen` and `rejected` must both be message lists or both strings": {"chosen": "b", "rejected": BAD},
}


@pytest.mark.parametrize(("fault", "row"), FAULTS.items(), ids=FAULTS)
def test_a_faulty_pair_says_what_is_wrong(fault: str, row: dict[str, Any]) -> None:
    with pytest.raises(RowFault) as caught:
        sides_of(row)
    assert str(caught.value) == fault


def test_a_pair_that_is_cut_to_the_same_text_is_named_by_file_and_line(tiny_model_dir: Path, tmp_path: Path) -> None:
    rows = [{"prompt": "a", "chosen": "b", "rejected": "c"}, {"prompt": "abcdefgh", "chosen": "xy", "rejected": "xz"}]
    data = pairs_of(written(tmp_path / "rows.jsonl", rows), seq_len=8)
    make, entries = SampleMaker(data, AutoTokenizer.from_pretrained(tiny_model_dir)), setup_entries(data)
    make(entries.at(0))
    with pytest.raises(DataError, match=r"rows.jsonl:2: data.seq_len = 8 cuts chosen and rejected to the same"):
        make(entries.at(1))


def test_turned_scores_and_answers_without_words_are_told(tiny_model_dir: Path, tmp_path: Path, mesh: Mesh) -> None:
    rows = [
        {"prompt": "a", "chosen": "bb", "rejected": "c", "score_chosen": 3.0, "score_rejected": score}
        for score in (1.0, 3.0, 4)
    ]
    tokenizer = AutoTokenizer.from_pretrained(tiny_model_dir)
    nothing = {"prompt": "a", "chosen": "bb", "rejected": tokenizer.eos_token}
    data = pairs_of(written(tmp_path / "rows.jsonl", [*rows, nothing]))
    made = DatasetStream(data, tokenizer, mesh.data_axis).own_share()
    lines = list(worries(examine(made, 4, data), data))
    assert any("2 of 4 rows have a score_chosen that is not above score_rejected" in line for line in lines), lines
    assert any("1 of 4 rows have an answer of which only special tokens" in line for line in lines), lines


def test_a_waiting_pair_survives_a_checkpoint(tiny_model_dir: Path, tmp_path: Path, mesh: Mesh) -> None:
    scores = [{"score_chosen": at, "score_rejected": 1.0} for at in range(1, 40)]
    rows = [{"prompt": "a" * at, "chosen": "b", "rejected": "cc", **each} for at, each in enumerate(scores, start=1)]
    data = pairs_of(written(tmp_path / "rows.jsonl", rows), seq_len=32)
    data.hold_pairs(score_margin=0.5)
    tokenizer = AutoTokenizer.from_pretrained(tiny_model_dir)
    one, other = (setup_rows(data, tokenizer, len(tokenizer), mesh.data_axis) for _ in range(2))
    next(one)
    other.load_state([one.state()])
    for _ in range(5):
        mine, theirs = next(one), next(other)
        assert (mine.input_ids == theirs.input_ids).all()
        assert [(pair.key, pair.margin) for pair in mine.pairs] == [(pair.key, pair.margin) for pair in theirs.pairs]
        assert [pair.margin for pair in mine.pairs] == [pair.key / 2 for pair in mine.pairs]


# The reference.


def test_a_stopped_reference_goes_on_and_another_model_may_be_it(
    tiny_model_dir: Path, tmp_path: Path, mesh: Mesh
) -> None:
    moved = tmp_path / "moved"
    shutil.copytree(tiny_model_dir, moved)
    weights = {key: value * 1.5 for key, value in load_file(moved / "model.safetensors").items()}
    save_file(weights, moved / "model.safetensors", {"format": "pt"})
    file = written(tmp_path / "rows.jsonl", made_up(1100))

    def reference(name: str | None, **model: Any) -> Reference:
        of_model = {"name": str(tiny_model_dir), "attn": "sdpa", **model}
        config = DPOConfig(model=of_model, data={"name": str(file), "seq_len": 32}, device="cpu")
        config = config.model_copy(update={"reference": FrozenReferenceConfig(name=name)})
        assert isinstance(config.data, SFTDataConfig)
        stream = DatasetStream(config.data, tokenizer, mesh.data_axis)
        return Reference(config, [(Preferences(config.loss), stream)], tokenizer, mesh, RunPaths(tmp_path / "run"))

    def logprobs(of: Reference) -> Tensor:
        ((objective, _),) = of.compared
        assert objective.reference is not None
        return objective.reference

    tokenizer = AutoTokenizer.from_pretrained(tiny_model_dir)
    kept = RunPaths(tmp_path / "run").reference("data")
    model = setup_model(ModelConfig(name=str(tiny_model_dir), attn="sdpa"), mesh)
    # Stopped in the second window: the first is kept, and the next start goes on behind it.
    stopped = reference(None)
    ((_, stream),) = stopped.compared
    parts = Parts(kept, {"of": "these"}, mesh, save_every_s=0)
    kept.parent.mkdir(parents=True)
    whole = reference_logprobs(model, stream, mesh, parts)
    done, before = Parts(kept, {"of": "these"}, mesh).read(torch.zeros_like(whole))
    assert done == 1
    assert 0 < int((before == 0).all(1).sum()) < 100
    assert torch.equal(reference_logprobs(model, stream, mesh, parts), whole)
    assert Parts(kept, {"of": "others"}, mesh).read(torch.zeros_like(whole))[0] == 0
    parts.file.rename(parts.file.with_stem("data.part_1_of_2"))  # as of a start with other processes
    # A start after a failure reads what is complete, if data and weights are the same.
    first = reference(None)
    first.find(is_resumed=False)
    first.compute_rest(model)
    assert torch.equal(logprobs(first), whole)
    assert [each.name for each in kept.parent.iterdir()] == [kept.name]
    again = reference(None)
    again.find(is_resumed=False)
    assert torch.equal(logprobs(again), whole)
    # An adapter that training continues is part of the starting model.
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text("{}", encoding="utf-8")
    continued = reference(None, lora={"path": str(adapter)})
    continued.find(is_resumed=False)
    assert continued.compared[0][0].reference is None
    # Another reference is loaded and freed before the trained model. It gets none of the trained model's adapters.
    other = reference(str(moved), adapter=str(adapter))
    other.find(is_resumed=True)
    assert not torch.allclose(logprobs(other), whole, atol=0.1)
    without = reference(None)
    without.find(is_resumed=True)
    assert without.compared[0][0].reference is None
    # So is the start that an adapter takes from what quantization lost: that of another rank is another one.
    started, wider = (
        reference(None, quantization={"type": "nf4"}, lora={"init": "loftq", "rank": rank}) for rank in (4, 8)
    )
    started.find(is_resumed=False)
    started.compute_rest(model)
    wider.find(is_resumed=False)
    assert wider.compared[0][0].reference is None
    other_tokens = tmp_path / "other"
    shutil.copytree(moved, other_tokens)
    text = (other_tokens / "tokenizer.json").read_text(encoding="utf-8")
    (other_tokens / "tokenizer.json").write_text(text.replace('"a"', '"é"', 1), encoding="utf-8")
    with pytest.raises(ModelError, match="its tokenizer has another id for"):
        reference(str(other_tokens)).find(is_resumed=False)


# Configs and runs.


@pytest.mark.parametrize(
    ("options", "fault"),
    [
        (["--loss.beta=0"], "loss.beta"),
        (["--loss.type=sigmod"], "did you mean 'sigmoid'?"),
        (["--loss.type=hinge", "--loss.label-smoothing=0.1"], "label_smoothing (0.1) needs type"),
        (["--loss.type=kto", "--loss.rpo-alpha=1"], "needs pairs"),
        (["--loss.type=ipo", "--loss.score-margin=1"], "score_margin (1) needs type = 'sigmoid'"),
        (["--loss.desirable-weight=2"], "desirable_weight (2) needs type kto"),
        (["--data.pack-function=cat"], "an answer is compared as a whole"),
        (["--data.overlong=split"], "data.overlong = 'split' divides an answer"),
        (["--data.streaming"], "needs the reference's log-probabilities"),
        (["--loss.type=simpo", "--reference.name=x"], "'simpo' has no reference"),
        (["--distillation.teacher=x"], "[distillation] is for `sft`, and `dpo` has a loss of its own"),
    ],
    ids=lambda each: str(each)[:30],
)
def test_a_config_that_cannot_work_is_refused_in_one_line(options: list[str], fault: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(DPOConfig, [], ["--data.seq-len=64", *options])
    assert len(caught.value.faults) == 1
    assert fault in caught.value.faults[0]


def made_up(count: int) -> Rows:
    letters = "abcdefgh"
    words = ["".join(letters[(at * 7 + place * (at % 5 + 1)) % 8] for place in range(5)) for at in range(count)]
    return [{"prompt": f"{word}:", "chosen": word[::-1], "rejected": word + "?"} for word in words]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("is_lora", "loss"),
    [(False, {"rpo_alpha": 0.1}), (True, {"rpo_alpha": 0.1}), (True, {"type": "kto"})],
    ids=["full", "lora", "kto"],
)
def test_a_run_learns_and_continues_exactly(
    tiny_model_dir: Path, tmp_path: Path, is_lora: bool, loss: dict[str, Any]
) -> None:
    base: dict[str, Any] = {
        "device": "cpu",
        "model": {"name": str(tiny_model_dir), "attn": "sdpa", **({"lora": {"rank": 4}} if is_lora else {})},
        "data": {"name": str(written(tmp_path / "rows.jsonl", made_up(48))), "batch_size": 2, "seq_len": 64},
        "val": {"size": 8, "interval": 6, "on_start": True},
        "optim": {"lr": 2e-2 if is_lora else 2e-3},
        "loss": loss,
    }

    def metrics_of(name: str, **keys: Any) -> Rows:
        assert run(DPOConfig(**{**base, "output_dir": tmp_path / name, **keys})) == 0
        return [json.loads(line) for line in RunPaths(tmp_path / name).metrics.read_text().splitlines()]

    straight = metrics_of("straight", max_steps=6, ckpt={"interval": 6})
    metrics_of("halves", max_steps=3, ckpt={"interval": 3})
    halves = metrics_of("halves", max_steps=6, ckpt={"interval": 3, "resume_step": 3})

    def weights(name: str) -> dict[str, Tensor]:
        return {
            f"{file.name} {key}": value
            for file in RunPaths(tmp_path / name).weight(6).glob("*.safetensors")
            for key, value in load_file(file).items()
        }

    one, other = weights("straight"), weights("halves")
    assert one.keys() == other.keys()
    assert all(torch.equal(one[key], other[key]) for key in one)
    losses = [[line["loss/mean"] for line in lines if "loss/mean" in line] for lines in (straight, halves)]
    assert losses[0] == losses[1]
    validations = [line for line in straight if "val/loss" in line]
    first, last = validations[0], validations[-1]
    assert first["val/rewards/margins"] == 0.0
    assert last["val/loss"] < first["val/loss"]
    assert last["val/rewards/margins"] > 0
    assert "val/perplexity" not in last
    # A damaged file of the reference's log-probabilities is not read, nor computed again in silence.
    RunPaths(tmp_path / "halves").reference("data").write_bytes(b"")
    with pytest.raises(SystemExit):
        metrics_of("halves", max_steps=7, ckpt={"interval": 3, "resume_step": 6})
    log = RunPaths(tmp_path / "halves").rank_log(0).read_text()
    assert "reference/data.safetensors is damaged" in log
    assert "Traceback" not in log


@pytest.mark.slow
def test_two_processes_train_like_one_with_all_weights_and_with_an_adapter(
    tiny_model_dir: Path, tmp_path: Path
) -> None:
    config = DPOConfig(
        device="cpu",
        model={"name": str(tiny_model_dir), "attn": "sdpa", "lora": {"rank": 4}},
        data={"name": str(written(tmp_path / "rows.jsonl", made_up(40))), "seq_len": 32, "shuffle": False},
        optim={"lr": 1e-3},
        loss={"rpo_alpha": 0.1},
        output_dir=tmp_path,
    )
    dump_toml(config, tmp_path / "dpo.toml")
    for launcher in ((), ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")):
        command = [sys.executable, *launcher, SCRIPT, "@", tmp_path / "dpo.toml"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
    found = {file.stem: json.loads(file.read_text()) for file in tmp_path.glob("[12] *.json")}
    assert found.keys() == {"1 processes", "2 processes", "2 rows", "2 layers"}
    expected = found.pop("1 processes")
    assert len(expected) == 12
    for division, steps in found.items():
        for alone, together in zip(expected, steps, strict=True):
            assert together == pytest.approx(alone, rel=1e-4, abs=1e-5), division
