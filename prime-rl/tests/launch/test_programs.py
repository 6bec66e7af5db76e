"""The command lines of the engine's programs."""

import signal
import sys
from pathlib import Path

import pytest

from prime_rl.launch import CannotStart
from prime_rl.launch.programs import (
    RL_TRAINER,
    Programs,
    TorchJob,
    inference_spec,
    orchestrator_spec,
    trainer_spec,
)
from prime_rl.run.paths import RunPaths

PATHS = RunPaths(Path("out dir"))
PROGRAMS = Programs("/venv/python", "/venv/torchrun", "/venv/inference", "/venv/orchestrator")


def job(processes: int) -> TorchJob:
    return TorchJob(RL_TRAINER, PATHS.config("trainer"), processes, 29123, "id", PATHS.torchrun_logs)


def program(path: Path) -> str:
    path.touch(mode=0o755)
    return str(path)


def test_inference_serves_until_the_run_is_complete() -> None:
    spec = inference_spec(PATHS, PROGRAMS, {"CUDA_VISIBLE_DEVICES": "3"}, "--server.port", "8123")
    assert spec.argv == ("/venv/inference", "@", "out dir/configs/inference.toml", "--server.port", "8123")
    assert spec.env == {"CUDA_VISIBLE_DEVICES": "3", "PYTHONUNBUFFERED": "1"}
    assert spec.log == Path("out dir/logs/inference.log")
    assert not spec.completes_run


def test_the_orchestrator_sees_no_gpu() -> None:
    spec = orchestrator_spec(PATHS, PROGRAMS, {"CUDA_VISIBLE_DEVICES": "0,1"})
    assert spec.env["CUDA_VISIBLE_DEVICES"] == ""
    assert spec.completes_run


def test_several_training_processes_meet_on_this_machine_at_a_port_of_their_own() -> None:
    argv = trainer_spec(PATHS, PROGRAMS, job(3), {}, torchrun=True).argv
    assert argv[0] == "/venv/torchrun"
    assert {"--rdzv-endpoint=localhost:29123", "--rdzv-id=id", "--nproc-per-node=3", "--rdzv-backend=c10d"} <= set(argv)
    assert {"--redirects=1:1,2:1", "--tee=1:2,2:2"} <= set(argv)
    assert argv[-4:] == ("-m", "prime_rl.trainer.rl.train", "@", "out dir/configs/trainer.toml")


def test_a_lone_training_process_needs_no_torchrun_but_is_told_the_same() -> None:
    spec = trainer_spec(PATHS, PROGRAMS, job(1), {}, "--ckpt.resume-step", "4", torchrun=False)
    assert spec.argv[:3] == ("/venv/python", "-m", "prime_rl.trainer.rl.train")
    assert spec.argv[-2:] == ("--ckpt.resume-step", "4")
    assert (spec.env["RANK"], spec.env["WORLD_SIZE"], spec.env["MASTER_PORT"]) == ("0", "1", "29123")
    assert spec.relays == {signal.SIGUSR1}


def test_a_spec_can_be_read_as_a_command() -> None:
    spec = inference_spec(PATHS, PROGRAMS, {"NAME": "two words"})
    assert spec.describe() == ("NAME='two words' PYTHONUNBUFFERED=1 /venv/inference @ 'out dir/configs/inference.toml'")


def test_programs_are_taken_from_the_interpreters_directory_before_the_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    beside, on_path = tmp_path / "beside", tmp_path / "on_path"
    beside.mkdir()
    on_path.mkdir()
    own = program(beside / "inference")
    others = [program(on_path / name) for name in ("torchrun", "inference", "orchestrator")]
    monkeypatch.setenv("PATH", str(on_path))
    assert Programs.find(beside) == Programs(sys.executable, others[0], own, others[2])


def test_a_program_that_is_nowhere_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(CannotStart, match=f"torchrun is neither in {tmp_path} nor on PATH"):
        Programs.find(tmp_path)
