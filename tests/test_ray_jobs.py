"""What `medarc_submit --to ray` asks for, and what it knows of its driver. Needs no Ray."""

from __future__ import annotations

import json
import os
import shlex
import signal
import socket
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from typer.testing import CliRunner

from medarc_rl import medarc_submit
from medarc_rl.backends.ray.backend import PreparedDriver, Ray
from medarc_rl.backends.ray.cluster import _end_if_asked
from medarc_rl.backends.ray.driver import _options
from medarc_rl.deployment import gpus_of_nodes
from medarc_rl.errors import UsageError
from medarc_rl.jobs import JobRecord, Status, circumstances
from medarc_rl.utils import GivenConfig, load_run
from prime_rl.configs.rl import RLConfig
from prime_rl.configs.sft import SFTConfig
from prime_rl.launch import LocalHost
from prime_rl.utils.pydantic_config import parse_argv_or_exit

ROOT = Path(__file__).resolve().parents[1]
SFT = """
max_steps = 4
[model]
name = "examples/reverse_text/model"
[data]
type = "fake"
seq_len = 64
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
    given = GivenConfig.read(SFTConfig, [str(tmp_path / "sft.toml")])
    config = load_run(given, "sft", tmp_path, {"deployment.num_gpus": 2}).config
    assert gpus_of_nodes(config, shares_gpus=False) == [3]


@pytest.mark.skipif(find_spec("ray") is None, reason="the extra ray is not installed: uv sync --inexact --extra ray")
@pytest.mark.parametrize(
    ("kind", "mode", "bundles"), [("sft", "d16", [8, 8]), ("rl", "vllm:d8+fsdp:d16", [8, 8, 8]), ("sft", "d2", [2])]
)
def test_an_allocation_mode_asks_for_whole_nodes(kind: str, mode: str, bundles: list[int], tmp_path: Path) -> None:
    example = ROOT / "examples" / "reverse_text" / f"{kind}_cpu.toml"
    words = [kind, str(example), "--device", "auto", "--allocation-mode", mode, "--output-dir", str(tmp_path / "run")]
    more = ["--data.batch-size", "64"] if kind == "sft" else []
    result = CliRunner().invoke(medarc_submit.app, [*words, *more, "--to", "ray", "--dry-run"])
    assert result.exit_code == 0, result.output
    asked = next(line for line in result.stdout.splitlines() if line.startswith("# placement group: "))
    assert json.loads(asked.partition("PACK ")[2]) == [{"CPU": 1, "GPU": count} for count in bundles]


@pytest.mark.skipif(find_spec("ray") is None, reason="the extra ray is not installed: uv sync --inexact --extra ray")
@pytest.mark.parametrize(("shape", "gpus"), [((), 2), (("--single-gpu",), 1), (("--colocate", "3"), 3)])
def test_trainer_and_server_have_gpus_each_or_share_them(shape: tuple[str, ...], gpus: int, tmp_path: Path) -> None:
    example = ROOT / "examples" / "reverse_text" / "rl_cpu.toml"
    words = ["rl", str(example), *shape, "--device", "auto", "--output-dir", str(tmp_path / "run")]
    result = CliRunner().invoke(medarc_submit.app, [*words, "--to", "ray", "--dry-run"])
    assert result.exit_code == 0, result.output
    asked, driver = (line for line in result.stdout.splitlines() if line.startswith(("# placement", "# driver")))
    assert json.loads(asked.partition("PACK ")[2]) == [{"CPU": 1, "GPU": gpus}]
    options, given = _options(shlex.split(driver.removeprefix("# driver: "))[3:])
    assert options.colocate == (gpus if shape else None)
    if shape:  # a config of the driver's own users may name other numbers
        table = parse_argv_or_exit(RLConfig, argv=["@", str(example), "--device", "auto", *given[2:]])
        assert gpus_of_nodes(table, shares_gpus=True) == [gpus]


def submitted(directory: Path, config: str, program: str) -> JobRecord:
    """A job whose driver is a Python program."""
    file, out = directory / "sft.toml", directory / "run"
    file.write_text(config)
    details = {"host": socket.gethostname(), "log": str(out / "ray" / "log"), "end": str(out / "ray" / "end")}
    prepared = PreparedDriver(
        name="job",
        output=str(out),
        text="",
        details=details,
        run=load_run(GivenConfig.read(SFTConfig, [str(file)]), "sft", out, {}),
        kind="sft",
        argv=(sys.executable, "-c", program),
        config=out / "ray" / "config.toml",
    )
    texts = {"id": Ray().submit(prepared).id, "kind": "sft", "config": str(file), "output": str(out)}
    return JobRecord(**{"name": "job", "backend": "ray", **texts, **circumstances("medarc_submit"), "details": details})


def test_a_directory_that_is_to_be_cleaned_is_cleaned_before_the_driver_starts(tmp_path: Path) -> None:
    for name in ("configs", "checkpoints/step_2", "ray"):
        (tmp_path / "run" / name).mkdir(parents=True)
    submitted(tmp_path, f"clean_output_dir = true\n{SFT}", "")
    assert not (tmp_path / "run" / "checkpoints").exists()
    assert (tmp_path / "run" / "ray" / "log").is_file()


def test_a_directory_has_one_driver_at_a_time(tmp_path: Path) -> None:
    first = submitted(tmp_path, SFT, "import sys, time\nwhile True: time.sleep(60)")
    written = (tmp_path / "run" / "configs" / "trainer.toml").read_bytes()
    with pytest.raises(UsageError, match=r"run is in use by Ray job .*choose another --output-dir"):
        submitted(tmp_path, SFT.replace("max_steps = 4", "max_steps = 8"), "")
    assert (tmp_path / "run" / "configs" / "trainer.toml").read_bytes() == written
    assert (tmp_path / "run" / "ray" / "config.toml").read_bytes() == written, "the driver reads a file of its own"
    os.kill(int(first.id.partition(".")[0]), signal.SIGKILL)
    while Ray().status(first).state == "running":
        os.sched_yield()
    (tmp_path / "run" / "ray" / "log").unlink()
    submitted(tmp_path, SFT.replace("max_steps = 4", "max_steps = 8"), "")
    assert "max_steps = 8" in (tmp_path / "run" / "ray" / "config.toml").read_text()


def test_a_driver_that_was_killed_has_failed_also_for_the_process_that_started_it(tmp_path: Path) -> None:
    record = submitted(tmp_path, SFT, "import os; os.kill(os.getpid(), 9)")
    while (status := Ray().status(record)).state == "running":
        os.sched_yield()
    assert status == Status("failed", "its driver was killed")


def test_local_means_this_machine_whatever_the_environment_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    assert _options(["sft"])[0].address == "10.0.0.1:6379"
    assert _options(["--address", "local", "sft"])[0].address is None


def test_a_mistake_in_the_drivers_own_options_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    for words, fault in (
        (["--colocate", "2", "sft"], "error: --single-gpu and --colocate are options of rl, not of sft"),
        (["--strategy", "fast", "rl"], "error: argument --strategy: invalid choice: 'fast' (choose from "),
        (["--colocate", "2", "--single-gpu", "rl"], "error: argument --single-gpu: not allowed with argument --col"),
    ):
        with pytest.raises(SystemExit) as end:
            _options(words)
        (line,) = capsys.readouterr().err.splitlines()
        assert (end.value.code, line[: len(fault)]) == (2, fault)


def test_a_signal_while_ray_starts_is_not_lost() -> None:
    with LocalHost() as guarded:
        _end_if_asked(guarded)
        os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(SystemExit) as ended:
            _end_if_asked(guarded)
    assert ended.value.code == 143
