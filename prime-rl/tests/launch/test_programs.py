"""The command lines of the engine's programs."""

import signal
import sys
from pathlib import Path

import pytest

from prime_rl.launch.job import Job
from prime_rl.launch.programs import (
    RL_TRAINER,
    Programs,
    TrainerRanks,
    inference_process,
    orchestrator_process,
)
from prime_rl.run.paths import RunPaths
from prime_rl.utils.errors import CannotStart

PATHS = RunPaths(Path("out dir"))


def program(path: Path) -> str:
    path.touch(mode=0o755)
    return str(path)


def test_inference_serves_until_the_run_is_complete() -> None:
    spec = inference_process(PATHS, "/venv/inference", {"CUDA_VISIBLE_DEVICES": "3"}, ("3",), "--server.port", "8123")
    assert spec.argv == ("/venv/inference", "@", "out dir/configs/inference.toml", "--server.port", "8123")
    assert spec.env == {"CUDA_VISIBLE_DEVICES": "3", "PYTHONUNBUFFERED": "1"}
    assert spec.log == Path("out dir/logs/inference.log")
    assert not spec.completes_run


def test_the_orchestrator_sees_no_gpu() -> None:
    spec = orchestrator_process(PATHS, "/venv/orchestrator", {"CUDA_VISIBLE_DEVICES": "0,1"})
    assert spec.env["CUDA_VISIBLE_DEVICES"] == ""
    assert spec.completes_run


def test_a_rank_is_told_what_torchrun_would_tell_it() -> None:
    ranks = TrainerRanks(RL_TRAINER, PATHS.config("trainer"), 1, "/run/store")
    (spec,) = ranks.processes(PATHS, "/venv/python", {}, (), "--ckpt.resume-step", "4")
    assert spec.argv[:3] == ("/venv/python", "-m", "prime_rl.trainer.rl.train")
    assert spec.argv[-2:] == ("--ckpt.resume-step", "4")
    assert (spec.env["RANK"], spec.env["WORLD_SIZE"], spec.env["PRIME_RL_STORE"]) == ("0", "1", "/run/store")
    assert spec.relays == {signal.SIGUSR1}


def test_a_job_can_be_read_as_commands_for_a_shell() -> None:
    env = {"NAME": "two words", "WANDB_PROGRAM": "rl"}
    server = inference_process(PATHS, "/venv/inference", env, ())
    ranks = TrainerRanks(RL_TRAINER, PATHS.config("trainer"), 2, "/run/store").processes(PATHS, "/venv/python", env, ())
    job = Job("rl", PATHS, (server, *ranks))
    assert list(job.describe()) == [
        "",
        "# Every process",
        "export NAME='two words'",
        "export PYTHONUNBUFFERED=1",
        "",
        "# inference",
        "/venv/inference @ 'out dir/configs/inference.toml'",
        "",
        "# trainer",
        "LOCAL_RANK=0 \\",
        "LOCAL_WORLD_SIZE=2 \\",
        "PRIME_RL_STORE=/run/store \\",
        "RANK=0 \\",
        "WORLD_SIZE=2 \\",
        "/venv/python -m prime_rl.trainer.rl.train @ 'out dir/configs/trainer.toml'",
        "# trainer_rank_1: the same with LOCAL_RANK=1 RANK=1",
    ]


def test_programs_are_taken_from_the_interpreters_directory_before_the_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sibling, on_path = tmp_path / "sibling", tmp_path / "on_path"
    sibling.mkdir()
    on_path.mkdir()
    own = program(sibling / "inference")
    others = [program(on_path / name) for name in ("inference", "orchestrator")]
    monkeypatch.setenv("PATH", str(on_path))
    assert Programs.find(sibling) == Programs(sys.executable, own, others[1])


def test_a_program_that_is_nowhere_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(CannotStart, match=f"inference is neither in {tmp_path} nor on PATH"):
        Programs.find(tmp_path)
