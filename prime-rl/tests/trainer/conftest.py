"""Fixtures: a trainer in the test process, and runs with two processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from prime_rl.configs.sft import SFTConfig
from prime_rl.run.paths import RunPaths
from prime_rl.trainer.process.mesh import Mesh, ParallelDims
from prime_rl.trainer.process.world import destroy_world, setup_world
from prime_rl.utils.pydantic_config import dump_toml

HERE = Path(__file__).parent


@pytest.fixture
def mesh() -> Iterator[Mesh]:
    """A mesh with only this process, on the CPU."""
    yield ParallelDims(dp_replicate=1, dp_shard=1).mesh(setup_world("cpu", timeout_s=3600, environ={}))
    destroy_world()


@pytest.fixture
def assert_two_processes_train_like_one() -> Callable[[SFTConfig], None]:
    """For a run of six steps: two processes resume it bit-identically, and make the same step as one process.

    `sft/two_processes.py` runs in each of them.
    """

    def check(config: SFTConfig) -> None:
        out = config.output_dir
        dump_toml(config, out / "sft.toml")
        script = [HERE / "sft" / "two_processes.py", "@", out / "sft.toml"]
        _run_python("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *script)
        straight, halves = (_losses_and_weights(RunPaths(out / name)) for name in ("straight", "halves"))
        assert halves[0] == straight[0] + straight[0][3:]
        assert halves[1].keys() == straight[1].keys()
        assert all(torch.equal(halves[1][name], straight[1][name]) for name in straight[1])
        _run_python(*script)
        alone, sharded, replicated = (
            json.loads((out / f"{processes}_processes_{replicas}_replicas.json").read_text())
            for processes, replicas in ((1, 1), (2, 1), (2, 2))
        )
        for together in (sharded, replicated):
            assert together["loss"] == pytest.approx(alone["loss"], rel=1e-6)
            assert together["grad_norm"] == pytest.approx(alone["grad_norm"], rel=1e-5)

    return check


def _run_python(*arguments: str | Path) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    completed = subprocess.run(
        [sys.executable, *arguments], env=environment, capture_output=True, text=True, check=False
    )
    assert completed.returncode == 0, completed.stdout + completed.stderr


def _losses_and_weights(paths: RunPaths) -> tuple[list[float], dict[str, torch.Tensor]]:
    losses = [json.loads(line)["loss/mean"] for line in paths.metrics.read_text().splitlines()]
    return losses, load_file(paths.weight(6) / "model.safetensors")
