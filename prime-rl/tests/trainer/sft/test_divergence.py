"""A run that diverges says which rows it had read."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from prime_rl.configs.sft import SFTConfig
from prime_rl.utils.pydantic_config import dump_toml


def test_the_main_process_names_the_rows_of_all_ranks(tiny_model_dir: Path, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"prompt": "p", "completion": "c" * 60}) + "\n" for _ in range(4)))
    fields = {
        "output_dir": tmp_path / "out",
        "device": "cpu",
        "model": {"name": str(tiny_model_dir), "attn": "sdpa"},
        "data": {"name": str(rows), "batch_size": 2, "seq_len": 32, "shuffle": False, "pack_function": "cat"},
        "optim": {"lr": 100, "weight_decay": 100},
        "max_steps": 40,
    }
    dump_toml(SFTConfig(**fields), tmp_path / "sft.toml")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*torchrun, "-m", "prime_rl.trainer.sft.train", "@", str(tmp_path / "sft.toml")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stdout
    fault = (tmp_path / "out" / "logs" / "trainer" / "rank_0.log").read_text().splitlines()[-1]
    assert "training has diverged" in fault
    names = fault.partition("Rows of this step: ")[2].split(", ")
    assert names in ([f"{rows}:1", f"{rows}:2"], [f"{rows}:3", f"{rows}:4"])
