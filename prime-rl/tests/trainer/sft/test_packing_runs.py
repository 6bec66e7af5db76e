"""Complete runs that stop and resume, with every packing and reading mode."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from prime_rl.configs.sft import SFTConfig
from prime_rl.run.paths import RunPaths
from prime_rl.trainer.sft.run import run


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Texts of different lengths; a run takes about two epochs."""
    path = tmp_path_factory.mktemp("data") / "texts.jsonl"
    lengths = np.random.default_rng(0).integers(5, 200, 60)
    path.write_text(
        "".join(json.dumps({"text": f"{n:03}" * (int(size) // 3)}) + "\n" for n, size in enumerate(lengths))
    )
    return path


def losses_of(output_dir: Path) -> list[float]:
    records = [json.loads(line) for line in RunPaths(output_dir).metrics.read_text().splitlines()]
    return [record["loss/mean"] for record in records if "loss/mean" in record]


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("packing", ["cat", "best_fit", "stack"])
def test_a_run_that_stops_and_resumes_has_bit_identical_losses(
    packing: str, streaming: bool, file: Path, tiny_model_dir: Path, tmp_path: Path
) -> None:
    data = {"name": str(file), "pack_function": packing, "streaming": streaming, "shuffle_buffer": 16}
    base: dict[str, Any] = {
        "device": "cpu",
        "model": {"name": str(tiny_model_dir), "attn": "sdpa"},
        "data": {**data, "batch_size": 4, "micro_batch_size": 2, "seq_len": 256},
        "optim": {"lr": 3e-3},
        "max_steps": 14,
    }
    assert run(SFTConfig(**base, output_dir=tmp_path / "straight")) == 0
    ckpt = {"interval": 5, "keep_last": 3, "weights": None}
    assert run(SFTConfig(**base, output_dir=tmp_path / "halves", ckpt=ckpt)) == 0
    RunPaths(tmp_path / "halves").metrics.unlink()
    assert run(SFTConfig(**base, output_dir=tmp_path / "halves", ckpt={"resume_step": 5, "weights": None})) == 0
    assert losses_of(tmp_path / "halves") == losses_of(tmp_path / "straight")[5:]
    assert len(set(losses_of(tmp_path / "straight"))) == 14
