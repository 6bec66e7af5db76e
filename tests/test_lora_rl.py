"""RL that trains an adapter: trainer, engine and orchestrator together, stopped and continued."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
CONFIG = ROOT / "examples" / "reverse_text" / "rl_lora_cpu.toml"
SMALL = "--orchestrator.batch-size 16 --orchestrator.rollouts-per-example 4 --max-async-level 0 --ckpt.interval 2"


def train(out: Path, *options: str) -> str:
    command = [Path(sys.executable).with_name("medarc_train"), "rl", CONFIG, "--output-dir", out, *SMALL.split()]
    result = subprocess.run([*command, *options], cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout + result.stderr


def metrics(out: Path, source: str) -> list[dict[str, Any]]:
    records = map(json.loads, (out / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
    return [record for record in records if record["source"] == source]


def test_an_adapter_is_trained_and_served_and_a_resumed_run_goes_on_with_it(tmp_path: Path) -> None:
    train(tmp_path, "--max-steps", "2")
    published = tmp_path / "run_default" / "broadcasts" / "step_2"
    assert {path.name for path in published.iterdir()} == {"adapter_config.json", "adapter_model.safetensors", "STABLE"}
    trained = (published / "adapter_model.safetensors").read_bytes()
    assert "Adapter r16-a32.0: version 1 live" in (tmp_path / "logs" / "inference.log").read_text(encoding="utf-8")

    train(tmp_path, "--max-steps", "4", "--ckpt.resume-step", "-1")
    assert "Resumed at step 2" in (tmp_path / "logs" / "orchestrator.log").read_text(encoding="utf-8")
    assert "Adapter r16-a32.0: version 2 live" in (tmp_path / "logs" / "inference.log").read_text(encoding="utf-8")
    assert (published / "adapter_model.safetensors").read_bytes() == trained

    steps = metrics(tmp_path, "trainer")
    assert [record["step"] for record in steps] == [0, 1, 2, 3]
    # No lag between sampling and training: what differs is only what the engine's adapter differs from the trainer's.
    assert max(record["mismatch_kl/mean"] for record in steps) < 1e-6
    assert {path.name for path in (tmp_path / "weights").iterdir()} >= {"step_4"}
