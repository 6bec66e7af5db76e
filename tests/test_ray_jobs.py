"""What `medarc_submit --to ray` asks for, and what it knows of its driver. Needs no Ray."""

from __future__ import annotations

import os
import signal
import socket
import sys
from pathlib import Path

import pytest

from medarc_rl.backends.ray.connecting import _end_if_asked
from medarc_rl.backends.ray.demands import gpus_of
from medarc_rl.backends.ray.driver import _options
from medarc_rl.backends.ray.ray_jobs import RayJobs, RayPrepared
from medarc_rl.jobs.record import JobRecord, Status, circumstances
from medarc_rl.utils import load_run
from prime_rl.configs.sft import SFTConfig
from prime_rl.launch import LocalHost

SFT = """
max_steps = 4
[model]
name = "examples/reverse_text/model"
[data]
type = "fake"
batch_size = 4
"""
EVAL = """
[eval]
[[eval.env]]
id = "reverse-text"
[ckpt]
interval = 2
[ckpt.weights]
"""


def test_the_server_of_an_evaluation_beside_training_gets_a_gpu(tmp_path: Path) -> None:
    (tmp_path / "sft.toml").write_text(SFT + EVAL)
    config = load_run(SFTConfig, [str(tmp_path / "sft.toml")], "sft", tmp_path, {"deployment.num_gpus": 2}).config
    assert gpus_of(config, single_gpu=False) == [3]


def submitted(directory: Path, config: str, program: str) -> JobRecord:
    """A job whose driver is a Python program."""
    file, out = directory / "sft.toml", directory / "run"
    file.write_text(config)
    details = {"host": socket.gethostname(), "log": str(out / "ray" / "log"), "end": str(out / "ray" / "end")}
    prepared = RayPrepared(
        name="job",
        output=str(out),
        text="",
        details=details,
        run=load_run(SFTConfig, [str(file)], "sft", out, {}),
        kind="sft",
        argv=(sys.executable, "-c", program),
    )
    texts = {"id": RayJobs().submit(prepared), "kind": "sft", "config": str(file), "output": str(out)}
    return JobRecord(**{"name": "job", "backend": "ray", **texts, **circumstances("medarc_submit"), "details": details})


def test_a_directory_that_is_to_be_cleaned_is_cleaned_before_the_driver_starts(tmp_path: Path) -> None:
    for name in ("configs", "checkpoints/step_2", "ray"):
        (tmp_path / "run" / name).mkdir(parents=True)
    submitted(tmp_path, f"clean_output_dir = true\n{SFT}", "")
    assert not (tmp_path / "run" / "checkpoints").exists()
    assert (tmp_path / "run" / "ray" / "log").is_file()


def test_a_driver_that_was_killed_has_failed_also_for_the_process_that_started_it(tmp_path: Path) -> None:
    record = submitted(tmp_path, SFT, "import os; os.kill(os.getpid(), 9)")
    while (status := RayJobs().status(record)).state == "running":
        os.sched_yield()
    assert status == Status("failed", "its driver was killed")


def test_local_means_this_machine_whatever_the_environment_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    assert _options(["sft"])[0].address == "10.0.0.1:6379"
    assert _options(["--address", "local", "sft"])[0].address is None


def test_a_signal_while_ray_starts_is_not_lost() -> None:
    with LocalHost() as guarded:
        _end_if_asked(guarded)
        os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(SystemExit) as ended:
            _end_if_asked(guarded)
    assert ended.value.code == 143
