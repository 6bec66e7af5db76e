"""W&B offline: runs are written to the run's directory, without secrets."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from prime_rl.configs.sft import SFTConfig
from prime_rl.configs.trainer import TrainerConfig
from prime_rl.utils.pydantic_config import dump_toml

SECRETS = {
    "WANDB_API_KEY": "a-secret-of-wandb-0123456789abcdef0123456789",
    "HF_TOKEN": "hf_aSecretOfTheHub0123456789",
    "VLLM_API_KEY": "a-secret-of-the-server-0123456789",
}


def run_offline(module: str, config: SFTConfig | TrainerConfig, out: Path) -> str:
    """Run a trainer with secrets in its environment. Returns its output."""
    file = out.with_name("config.toml")
    dump_toml(config, file)
    # A proxy that does not exist, so that any network access fails.
    environment = {**os.environ, **SECRETS, "WANDB_MODE": "offline", "OMP_NUM_THREADS": "1"}
    environment |= {"HTTPS_PROXY": "http://127.0.0.1:9", "HTTP_PROXY": "http://127.0.0.1:9"}
    command = [sys.executable, "-m", module, "@", str(file)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.mark.parametrize("trainer", ["sft", "rl"])
def test_an_offline_run_is_written_next_to_the_metrics_without_secrets(
    trainer: str, tiny_model_dir: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    model = {"name": str(tiny_model_dir), "attn": "sdpa"}
    common = {"device": "cpu", "output_dir": out, "wandb": {"project": "tests", "name": "offline"}}
    if trainer == "sft":
        data = {"type": "fake", "batch_size": 2, "seq_len": 64}
        config = SFTConfig(model=model, data=data, max_steps=2, **common)
    else:
        config = TrainerConfig(model={**model, "seq_len": 64}, bench={}, **common)
    printed = run_offline(f"prime_rl.trainer.{trainer}.train", config, out)
    (record,) = (out / "wandb").glob("offline-run-*/run-*.wandb")
    content = record.read_bytes()
    assert b"loss/mean" in content
    assert b"perf/throughput" in content
    for secret in SECRETS.values():
        assert secret not in printed
        found = [file for file in tmp_path.rglob("*") if file.is_file() and secret.encode() in file.read_bytes()]
        assert found == []
