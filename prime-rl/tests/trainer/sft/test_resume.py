"""Resuming SFT is refused if it could not be exact."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from prime_rl.configs.sft import SFTConfig
from prime_rl.trainer.sft.run import run


@pytest.fixture
def base(tiny_model_dir: Path, tmp_path: Path) -> dict[str, Any]:
    file = tmp_path / "texts.jsonl"
    words = random.Random(0)
    rows = [{"prompt": str(words.random()), "completion": str(words.random())} for _ in range(40)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {
        "device": "cpu",
        "model": {"name": str(tiny_model_dir), "attn": "sdpa"},
        "data": {"name": str(file), "batch_size": 2, "seq_len": 128},
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
    with pytest.raises(SystemExit):
        run_sft(base, **changes, ckpt={"resume_step": -1})
    out = capsys.readouterr().out
    assert "was trained on different rows" in out
    assert "  - the contents of data.name changed" in out
    assert "  - the chat template changed" in out
    assert "  - data.pack_function was 'cat' and is 'best_fit'" in out
    assert "--ckpt.skip-dataloader" in out
    assert "Traceback" not in out

    assert run_sft(base, **changes, ckpt={"resume_step": -1, "skip_dataloader": True}) == 0
    out = capsys.readouterr().out
    assert "continuing from the beginning of the data" in out
    assert "verified: not the data: 3 differences" in out
