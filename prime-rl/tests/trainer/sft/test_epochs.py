"""`num_epochs` and `warmup_ratio` become numbers of steps once the data is known."""

from __future__ import annotations

import io
import json
import math
import random
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from prime_rl.configs.sft import SFTConfig
from prime_rl.run.paths import RunPaths, stable_steps
from prime_rl.trainer.sft.preflight import preflight
from prime_rl.trainer.sft.run import run
from prime_rl.utils.pydantic_config import ConfigError, load_config

ROWS = 20


@pytest.fixture
def base(tiny_model_dir: Path, tmp_path: Path) -> dict[str, Any]:
    """20 rows of equal length, each of which fills more than half of a packed row."""
    file = tmp_path / "texts.jsonl"
    words = random.Random(0)
    rows = [{"prompt": "ask", "completion": f"{words.randrange(10**80):080}"} for _ in range(ROWS)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {
        "device": "cpu",
        "model": {"name": str(tiny_model_dir), "attn": "sdpa"},
        "data": {"name": str(file), "batch_size": 2, "seq_len": 128, "pack_function": "best_fit"},
        "optim": {"lr": 1e-3},
        "scheduler": {"type": "cosine", "warmup_ratio": 0.2},
        "output_dir": tmp_path / "out",
    }


def rates_of(out: Path) -> list[float]:
    records = [json.loads(line) for line in RunPaths(out).metrics.read_text().splitlines()]
    return [record["optim/lr"] for record in records if "optim/lr" in record]


def test_a_run_ends_after_its_epochs_and_the_schedule_spans_them(base: dict[str, Any], capsys) -> None:
    assert run(SFTConfig(**base, num_epochs=1.5)) == 0
    out = capsys.readouterr().out
    # 20 rows make 20 packed rows, 2 of them a step: 10 steps an epoch, 15 in all, 3 of warm-up.
    assert "num_epochs = 1.5: 15 steps, 10.0 per epoch" in out
    assert stable_steps(RunPaths(base["output_dir"]).weights) == [15]
    rates = rates_of(base["output_dir"])
    assert len(rates) == 15
    assert rates[3:] == pytest.approx([1e-3 / 2 * (1 + math.cos(math.pi * x / 12)) for x in range(12)])
    assert max(rates[:3]) < 1e-3


def test_every_row_is_trained_on_once_per_epoch(base: dict[str, Any]) -> None:
    run(SFTConfig(**base, num_epochs=2))
    records = [json.loads(line) for line in RunPaths(base["output_dir"]).metrics.read_text().splitlines()]
    assert records[-1]["progress/num_samples"] == 2 * ROWS


def test_the_preflight_shows_the_steps(base: dict[str, Any]) -> None:
    printed = io.StringIO()
    preflight(SFTConfig(**base, num_epochs=1.5), Console(file=printed, width=100))
    assert "steps of num_epochs = 1.5" in printed.getvalue()
    assert " 15" in printed.getvalue()


def test_more_epochs_continue_a_finished_run(base: dict[str, Any], capsys) -> None:
    run(SFTConfig(**base, num_epochs=1, ckpt={"weights": None}))
    capsys.readouterr()
    assert run(SFTConfig(**base, num_epochs=2, ckpt={"weights": None, "resume_step": -1})) == 0
    assert "applied from step 10: num_epochs 1.0 -> 2.0" in capsys.readouterr().out
    assert len(rates_of(base["output_dir"])) == 20


@pytest.mark.parametrize(
    ("options", "fault"),
    [
        (["--max-steps", "3", "--num-epochs", "2"], "max_steps (3) and num_epochs (2) are both set: give one"),
        (["--num-epochs", "2", "--data.streaming"], "num_epochs needs the number of rows, which data.streaming = true"),
        (["--num-epochs", "2", "--data.type", "fake"], "num_epochs needs a dataset (data.type = 'sft')"),
        (["--num-epochs", "0"], "should be above 0"),
        (
            ["--max-steps", "9", "--scheduler", '{"type": "linear", "warmup_ratio": 0.1, "warmup_steps": 3}'],
            "warmup_steps (3) and warmup_ratio (0.1) are both set: give one",
        ),
        (
            ["--scheduler.type", "linear", "--scheduler.decay-steps", "0", "--scheduler.warmup-ratio", "0.1"],
            "scheduler.warmup_ratio = 0.1 is a share of max_steps, which is not set",
        ),
        (
            ["--max-steps", "10", "--scheduler.type", "cosine", "--scheduler.warmup-ratio", "1"],
            "the cosine schedule needs max_steps above scheduler.warmup_steps = 10 (got max_steps = 10)",
        ),
        (
            ["--max-steps", "99", "--scheduler.type", "cosine", "--scheduler.min-lr", "1e-4", "--optim.lr", "5e-5"],
            "scheduler.min_lr = 0.0001 is above optim.lr = 5e-05: the rate would rise instead of decay",
        ),
    ],
)
def test_what_does_not_fit_together_is_refused(options: list[str], fault: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(SFTConfig, [], options)
    assert fault in str(caught.value)


def test_a_cosine_may_wait_for_the_number_of_steps() -> None:
    config = load_config(SFTConfig, [], ["--num-epochs", "2", "--scheduler.type", "cosine"])
    assert (config.num_epochs, config.max_steps, config.scheduler.type) == (2, None, "cosine")
