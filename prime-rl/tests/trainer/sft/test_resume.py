"""Resuming SFT is refused if it could not be exact."""

from __future__ import annotations

import json
import math
import random
import shutil
from pathlib import Path
from typing import Any

import pytest

from prime_rl.checks import start_faults
from prime_rl.configs.sft import SFTConfig
from prime_rl.trainer.sft.run import run
from prime_rl.utils.contents import write_marker


@pytest.fixture
def base(tiny_model_dir: Path, tmp_path: Path) -> dict[str, Any]:
    file = tmp_path / "texts.jsonl"
    words = random.Random(0)
    rows = [{"prompt": str(words.random()), "completion": str(words.random())} for _ in range(40)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {
        "device": "cpu",
        "model": {"name": str(tiny_model_dir), "attn": "sdpa"},
        "data": {"name": str(file), "batch_size": 2, "seq_len": 128, "pack_function": "cat"},
        "optim": {"lr": 1e-3},
        "ckpt": {"weights": None},
        "max_steps": 1,
        "output_dir": tmp_path / "out",
    }


def run_sft(base: dict[str, Any], **changes: Any) -> int:
    return run(SFTConfig(**{**base, **changes}))


def test_a_resumed_run_leaves_a_receipt(base: dict[str, Any], capsys) -> None:
    run_sft(base)
    moved = Path(base["data"]["name"]).rename(base["output_dir"] / "moved.jsonl")
    data = {**base["data"], "name": str(moved)}
    assert run_sft(base, data=data, max_steps=2, ckpt={"resume_step": -1}) == 0
    receipt = next(line for line in capsys.readouterr().out.splitlines() if "Resumed from" in line)
    for part in ("step 1", "256 tokens", "entry ", "(epoch 0)", "verified: data, tokenizer, chat"):
        assert part in receipt


def test_changed_rows_are_refused_with_each_reason_and_forced_by_a_key(base: dict[str, Any], capsys) -> None:
    run_sft(base)
    with Path(base["data"]["name"]).open("a") as file:
        file.write('{"prompt": "a", "completion": "b"}\n')
    changes = {
        "data": {**base["data"], "pack_function": "best_fit"},
        "tokenizer": {"chat_template": "{% for message in messages %}{{ message.content }}{% endfor %}"},
        "max_steps": 2,
    }
    capsys.readouterr()
    with pytest.raises(SystemExit) as refused:
        run_sft(base, **changes, ckpt={"resume_step": -1})
    assert refused.value.code == 2
    out = capsys.readouterr().out
    (line,) = [line for line in out.splitlines() if "was trained on different rows" in line]
    assert "the contents of the data changed" in line
    assert "; the chat template changed" in line
    assert "; data.pack_function was 'cat' and is 'best_fit'. Undo the change, or" in line
    assert "--ckpt.skip-dataloader" in out
    assert "Traceback" not in out

    assert run_sft(base, **changes, ckpt={"resume_step": -1, "skip_dataloader": True}) == 0
    out = capsys.readouterr().out
    assert "continuing from the beginning of the data" in out
    assert "verified: not the data: 3 differences" in out


def test_changed_settings_are_applied_from_the_resumed_step_on_and_listed(base: dict[str, Any], capsys) -> None:
    cosine = {"type": "cosine", "warmup_steps": 1, "min_lr": 1e-4}
    run_sft(base, max_steps=2)
    capsys.readouterr()
    changes = {"optim": {"lr": 5e-4, "max_norm": 0.5}, "scheduler": cosine, "log": {"level": "debug"}}
    assert run_sft(base, **changes, max_steps=5, ckpt={"resume_step": -1}) == 0
    out = capsys.readouterr().out
    (applied,) = (line for line in out.splitlines() if "applied from step 2: " in line)
    for change in ("optim.lr 0.001 -> 0.0005", "optim.max_norm 1.0 -> 0.5", "scheduler.type constant -> cosine"):
        assert change in applied
    (without,) = (line for line in out.splitlines() if "changed without effect on the training: " in line)
    assert "log.level info -> debug" in without

    metrics = [json.loads(line) for line in (base["output_dir"] / "metrics.jsonl").read_text().splitlines()]
    rates = [record["optim/lr"] for record in metrics if "optim/lr" in record]
    # A cosine over 5 updates, 1 of them warm-up: updates 2 to 4 are at 1/4, 2/4 and 3/4 of it.
    cosines = [1e-4 + 4e-4 / 2 * (1 + math.cos(math.pi * x)) for x in (0.25, 0.5, 0.75)]
    assert rates == pytest.approx([1e-3, 1e-3, *cosines], rel=1e-9)


def test_an_unchanged_resume_lists_no_change(base: dict[str, Any], capsys) -> None:
    run_sft(base)
    capsys.readouterr()
    assert run_sft(base, ckpt={"weights": None, "resume_step": -1}) == 0
    out = capsys.readouterr().out
    assert "applied from" not in out
    assert "without effect" not in out


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        (
            {"optim": {"type": "sgd", "lr": 1e-3}},
            "cannot resume step 1 with optim.type adamw -> sgd: the saved optimizer",
        ),
        (
            {"model": {"lora": {"rank": 4}}},
            "with model.lora unset -> set: the checkpoint does not fit another adapter",
        ),
    ],
)
def test_what_would_be_no_continuation_is_refused_in_one_line_for_each_key(
    base: dict[str, Any], capsys, changes: dict[str, Any], line: str
) -> None:
    run_sft(base)
    changed = {key: {**base.get(key, {}), **value} for key, value in changes.items()}
    with pytest.raises(SystemExit):
        run_sft(base, **changed, ckpt={"resume_step": -1})
    out = capsys.readouterr().out
    assert line in out
    assert "set it back, or start a new run" in out
    assert "Traceback" not in out


def test_the_launcher_refuses_a_changed_order_of_the_data_before_anything_starts(base: dict[str, Any]) -> None:
    run_sft(base)
    data = {**base["data"], "seed": 1}
    asked = {"ckpt": {"weights": None, "resume_step": -1}, "max_steps": 2}
    assert start_faults(SFTConfig(**{**base, **asked})) == []
    (fault,) = start_faults(SFTConfig(**{**base, **asked, "data": data}))
    assert fault == (
        "cannot resume step 1 with data.seed 0 -> 1: the data order would change; set it back, or start a new run, or "
        "add --ckpt.skip-dataloader"
    )
    skipping = {**asked, "ckpt": {**asked["ckpt"], "skip_dataloader": True}}
    assert start_faults(SFTConfig(**{**base, **skipping, "data": data})) == []


def test_a_checkpoint_without_configs_resumes_and_lists_nothing(base: dict[str, Any], capsys) -> None:
    run_sft(base)
    checkpoint = base["output_dir"] / "checkpoints" / "step_1"
    shutil.rmtree(checkpoint / "configs")
    write_marker(checkpoint, {})
    assert run_sft(base, optim={"lr": 1e-4}, max_steps=2, ckpt={"resume_step": -1}) == 0
    assert "applied from" not in capsys.readouterr().out
