"""What runs only on a GPU runs on a simulated one (`run`): every operator on CUDA's side of PyTorch, with real values.

Speed, rounding and what streams do at the same time remain for a real GPU.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
PROGRAMS = Path(sys.executable).parent
KIT = ROOT / "benchmarks" / "gpu"
EXAMPLE = ROOT / "examples" / "reverse_text"
GPU_TESTS = [f"prime-rl/tests/{name}.py" for name in ("inference/test_embedded_on_a_gpu", "trainer/test_on_a_gpu")]

OnGpus = Callable[..., str]


@pytest.fixture(scope="session")
def on_gpus() -> OnGpus:
    """Runs a command with simulated GPUs, and returns its output."""
    if shutil.which("g++") is None:
        pytest.skip("needs g++")
    if torch.version.cuda is not None:
        pytest.skip("needs a CPU build of torch: a CUDA build has its own device")
    can_mount = ["unshare", *([] if os.geteuid() == 0 else ["--map-root-user"]), "--mount", "true"]
    if shutil.which("unshare") is None or subprocess.run(can_mount, capture_output=True, check=False).returncode:
        pytest.skip("needs unshare and the right to mount")

    def run(command: Sequence[str | Path], gpus: int = 1) -> str:
        env = {**os.environ, "PYTHON": sys.executable, "SIMULATED_GPUS": str(gpus)}
        done = subprocess.run(
            ["bash", str(HERE / "run"), *map(str, command)],
            cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout[-6000:]
        return done.stdout

    return run


@pytest.mark.parametrize("part", ["trainer_numbers", "engine_numbers", "trainer_speed", "engine_speed", "runs"])
def test_the_kit_finds_nothing_wrong(part: str, on_gpus: OnGpus, tmp_path: Path) -> None:
    result = tmp_path / "result.json"
    output = on_gpus([sys.executable, KIT / f"{part}.py", "--device", "cuda", "--tiny", "--result", result])
    checks = json.loads(result.read_text())["checks"]
    assert checks
    assert [check for check in checks if not check["ok"]] == [], output[-6000:]


def test_the_tests_for_gpus_pass(on_gpus: OnGpus) -> None:
    # They measure memory with sequences too long for a CPU, and read what only CUDA's allocator writes.
    left_out = "not offloaded_activations_free_memory and not memory_snapshots"
    output = on_gpus(
        [sys.executable, "-m", "pytest", "-m", "gpu", "-k", left_out, "-p", "no:cacheprovider", *GPU_TESTS]
    )
    assert "skipped" not in output


def test_two_gpus_train_as_two_processes_on_the_cpu(on_gpus: OnGpus, tmp_path: Path) -> None:
    config = tmp_path / "sft.toml"
    config.write_text(
        f'max_steps = 3\n[model]\nname = "{EXAMPLE}/checkpoint"\ncompute_dtype = "float32"\nattn = "sdpa"\n'
        f'[data]\nname = "{EXAMPLE}/demonstrations.jsonl"\nseq_len = 128\nbatch_size = 4\n'
    )
    losses = []
    for device, gpus in (("cpu", 0), ("cuda", 2)):
        out = tmp_path / device
        command = [PROGRAMS / "medarc_train", "sft", config, "--device", device, "--gpus", "2", "--output-dir", out]
        on_gpus(command, gpus)
        records = map(json.loads, (out / "metrics.jsonl").read_text().splitlines())
        losses.append([record["loss/mean"] for record in records if "loss/mean" in record])
    assert len(losses[0]) == 3
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)


def test_rl_sends_weights_from_two_gpus_to_a_third(on_gpus: OnGpus, tmp_path: Path) -> None:
    command = [PROGRAMS / "medarc_train", "rl", EXAMPLE / "rl_cpu.toml", "--device", "cuda", "--max-steps", "3"]
    options = ["--train-gpus", "2", "--infer-gpus", "1", "--weight-broadcast.type", "nccl"]
    output = on_gpus([*command, *options, "--inference.backend", "embedded", "--output-dir", tmp_path / "out"], gpus=3)
    assert "inference on GPU 0, trainer on GPU 1,2" in output
    records = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    assert len([record for record in records if "reward/mean" in record]) == 3


def test_on_each_of_two_gpus_a_server_and_a_process_of_the_trainer_take_turns(on_gpus: OnGpus, tmp_path: Path) -> None:
    command = [PROGRAMS / "medarc_train", "rl", EXAMPLE / "rl_cpu.toml", "--device", "cuda", "--max-steps", "2"]
    turns = ["--colocate", "2", "--max-async-level", "0", "--trainer.offload-while-sampling"]
    turns += ["--inference.enable-sleep-mode", "--inference.backend", "embedded"]
    output = on_gpus([*command, *turns, "--output-dir", tmp_path / "out"], gpus=2)
    assert "inference on GPU 0,1, trainer on GPU 0,1" in output
    for server in ("inference", "inference_1"):
        log = (tmp_path / "out" / "logs" / f"{server}.log").read_text()
        assert re.findall(r"Asleep|Weights: version \d", log) == ["Asleep", "Weights: version 1", "Asleep"]
    records = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    steps = [record for record in records if "perf/memory_while_sampling" in record]
    assert len(steps) == 2
    assert all(step["perf/memory_while_sampling"] < 0.1 * step["perf/peak_memory"] for step in steps)


@pytest.mark.parametrize(
    ("command", "setting", "fault"),
    [
        (["true"], {"SIMULATED_GPUS": "x[$(touch made)]"}, "is no number of GPUs"),
        (["true"], {"SIMULATED_GPUS": ""}, None),
        (["true"], {"PYTHON": "/no/such/python"}, "no torch in /no/such/python"),
        ([], {}, "name the command"),
    ],
)
def test_what_cannot_run_is_one_line(
    command: list[str], setting: dict[str, str], fault: str | None, on_gpus: OnGpus, tmp_path: Path
) -> None:
    env = {**os.environ, "PYTHON": sys.executable, **setting}
    done = subprocess.run(
        ["bash", str(HERE / "run"), *command], cwd=tmp_path, env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == (0 if fault is None else 2)
    assert len(done.stderr.splitlines()) == (fault is not None)
    assert (fault or "") in done.stderr
    assert list(tmp_path.iterdir()) == []
