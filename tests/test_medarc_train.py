"""`medarc_train`: what it writes, which program it starts with which environment, and what it hands to the launcher."""

from __future__ import annotations

import os
import sys
import tomllib
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from medarc_rl import medarc_train
from medarc_rl.errors import UsageError
from medarc_rl.place import find_place
from prime_rl.configs.rl import RLConfig


class Launches:
    """Stands in for `rl_local`: remembers what it was given."""

    def __init__(self, code: int = 0) -> None:
        self.code = code
        self.configs: list[RLConfig] = []
        self.masks: list[str] = []
        self.single: list[str] = []

    def __call__(self, config: RLConfig) -> int:
        self.configs.append(config)
        self.masks.append(os.environ["CUDA_VISIBLE_DEVICES"])
        self.single.append(os.environ["MEDARC_SINGLE_GPU"])
        return self.code


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Launches:
    stand_in = Launches()
    monkeypatch.setattr("medarc_rl.launchers.rl_local.rl_local", stand_in)
    # The command sets these two; monkeypatch puts them back.
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    monkeypatch.setenv("MEDARC_SINGLE_GPU", "")
    return stand_in


@pytest.fixture
def programs(stand_ins, monkeypatch: pytest.MonkeyPatch):
    """Stand-ins for `sft` and `torchrun` beside the interpreter, where the command looks first."""
    monkeypatch.setattr(sys, "executable", str(stand_ins.directory / "python"))
    return stand_ins


def run(*words: object) -> Result:
    return CliRunner().invoke(medarc_train.app, [*map(str, words)])


def test_one_process_is_the_sft_command(programs, sft_toml: Path, tmp_path: Path) -> None:
    programs.add("sft")
    result = run("sft", "@", sft_toml, "--output-dir", tmp_path / "out", "--optim.lr", "1e-3")
    assert result.exit_code == 0, result.output
    (call,) = programs.calls
    config = tmp_path / "out" / "configs" / "trainer.toml"
    assert call["argv"][1:] == ["@", str(config)]
    assert int(call["env"]["OMP_NUM_THREADS"]) >= 1
    assert tomllib.loads(config.read_text())["optim"]["lr"] == 1e-3


def test_a_preflight_reads_the_resolved_config_and_leaves_the_runs_directory_alone(
    programs, sft_toml: Path, tmp_path: Path
) -> None:
    programs.add("python")
    result = run("sft", sft_toml, "--output-dir", tmp_path / "out", "--preflight", "--data.seq-len", 64)
    assert result.exit_code == 0, result.output
    (call,) = programs.calls
    assert call["argv"][1:4] == ["-m", "prime_rl.trainer.sft.preflight", "@"]
    assert not (tmp_path / "out").exists()


def test_several_processes_are_torchrun(programs, sft_toml: Path, tmp_path: Path) -> None:
    programs.add("torchrun")
    result = run("sft", sft_toml, "--output-dir", tmp_path / "out", "--gpus", 2, "--device", "cpu")
    assert result.exit_code == 0, result.output
    (call,) = programs.calls
    assert "--nproc-per-node=2" in call["argv"]
    config = str(tmp_path / "out" / "configs" / "trainer.toml")
    assert call["argv"][-4:] == ["-m", "prime_rl.trainer.sft.train", "@", config]


@pytest.mark.parametrize("code", [1, 9, 143])
def test_the_exit_code_is_the_childs(code: int, programs, sft_toml: Path, tmp_path: Path) -> None:
    programs.add("sft", code=code)
    assert run("sft", sft_toml, "--output-dir", tmp_path / "out").exit_code == code


def test_a_signal_that_ends_the_child_is_128_and_its_number(programs, sft_toml: Path, tmp_path: Path) -> None:
    (programs.directory / "sft").write_text("#!/bin/bash\nkill -KILL $$\n")
    (programs.directory / "sft").chmod(0o755)
    assert run("sft", sft_toml, "--output-dir", tmp_path / "out").exit_code == 137


def test_a_missing_program_is_one_line(programs, sft_toml: Path, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    result = run("sft", sft_toml, "--output-dir", tmp_path / "out")
    assert (result.exit_code, result.stderr) == (1, "error: sft: not found: install prime-rl in this environment\n")


def test_a_dry_run_of_sft_shows_the_command(programs, sft_toml: Path, tmp_path: Path) -> None:
    programs.add("sft")
    result = run("sft", sft_toml, "--output-dir", tmp_path / "out", "--dry-run")
    assert result.stdout.splitlines()[-1] == f"sft @ {tmp_path}/out/configs/trainer.toml"
    assert programs.calls == []


def test_rl_is_handed_to_the_launcher(launches: Launches, rl_toml: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    result = run("rl", rl_toml, "--output-dir", out, "--train-gpus", 2, "--infer-gpus", 1, "--seq-len", 64)
    assert result.exit_code == 0, result.output
    (config,) = launches.configs
    assert (config.deployment.num_train_gpus, config.deployment.num_infer_gpus) == (2, 1)
    assert config.trainer.model.seq_len == 64
    assert (launches.masks, launches.single) == (["0,1,2"], ["0"])
    assert sorted(path.name for path in (out / "configs").iterdir()) == [
        "inference.toml",
        "orchestrator.toml",
        "rl.toml",
        "trainer.toml",
    ]


def test_one_gpu_for_both(launches: Launches, rl_toml: Path, tmp_path: Path) -> None:
    assert run("rl", rl_toml, "--output-dir", tmp_path / "out", "--single-gpu").exit_code == 0
    assert (launches.masks, launches.single) == (["0"], ["1"])


def test_the_first_of_the_visible_ids_are_taken(
    launches: Launches, rl_toml: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-ab,MIG-cd,7")
    assert run("rl", rl_toml, "--output-dir", tmp_path / "out").exit_code == 0
    assert launches.masks == ["GPU-ab,MIG-cd"]


def test_the_launchers_exit_code_is_the_commands(launches: Launches, rl_toml: Path, tmp_path: Path) -> None:
    launches.code = 3
    assert run("rl", rl_toml, "--output-dir", tmp_path / "out").exit_code == 3


def test_another_runs_checkpoints_are_left_alone(launches: Launches, rl_toml: Path, tmp_path: Path) -> None:
    (tmp_path / "out" / "checkpoints" / "step_4").mkdir(parents=True)
    result = run("rl", rl_toml, "--output-dir", tmp_path / "out")
    assert result.exit_code == 2
    assert launches.configs == []
    assert not (tmp_path / "out" / "configs").exists()


def test_what_is_not_built_is_refused_before_the_start(launches: Launches, rl_toml: Path, tmp_path: Path) -> None:
    result = run("rl", rl_toml, "--output-dir", tmp_path / "out", "--max-model-len", 5)
    assert result.exit_code == 2
    assert "max_model_len = 5 is not built yet" in result.stderr
    assert not (tmp_path / "out").exists()


@pytest.fixture
def node_with_two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("prime_rl.launch.devices.machine_gpus", lambda dev=None: ("0", "1"))
    monkeypatch.setattr("medarc_rl.place.machine_gpus", lambda: ("0", "1"))


@pytest.mark.parametrize(
    ("device", "mask", "place"),
    [
        ("auto", None, ("cuda", ("0", "1"))),
        ("auto", "1,0", ("cuda", ("1", "0"))),
        ("cpu", None, ("cpu", ("0", "1"))),
        ("auto", "", ("cpu", ())),
    ],
)
def test_where_a_run_of_two_goes_on_a_machine_with_two_gpus(node_with_two_gpus, device, mask, place) -> None:
    found = find_place(device, 2, {} if mask is None else {"CUDA_VISIBLE_DEVICES": mask})
    assert (found.device, found.ids) == place


def test_more_gpus_than_there_are_is_an_error(node_with_two_gpus) -> None:
    with pytest.raises(UsageError, match="takes 3 GPUs, and 2 can be used here"):
        find_place("auto", 3, {})


def test_cuda_without_a_gpu_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("prime_rl.launch.devices.machine_gpus", lambda dev=None: ())
    with pytest.raises(UsageError, match="cuda"):
        find_place("cuda", 1, {})
