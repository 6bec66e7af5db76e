"""`medarc_train eval`: the front of the engine's `eval`, and the example's own file for real."""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from medarc_rl import medarc_train

ROOT = Path(__file__).resolve().parents[1]
MED_CALC = ROOT / "examples" / "med_calc"
EVAL_TOML = MED_CALC / "eval_cpu.toml"


def invoke(*words: object):
    return CliRunner().invoke(medarc_train.app, ["eval", *map(str, words)])


def test_a_dry_run_shows_the_command_and_writes_the_config(tmp_path: Path) -> None:
    result = invoke(EVAL_TOML, "--output-dir", tmp_path, "--dry-run")
    assert result.exit_code == 0, result.output
    every, server, evaluator = result.stdout.strip().split("\n\n")
    assert every.startswith("# Every process\nexport ")
    assert f"/inference @ {tmp_path}/configs/inference.toml" in server
    assert f" -m prime_rl.eval.evaluate @ {tmp_path}/configs/eval.toml" in evaluator
    assert (tmp_path / "configs" / "eval.toml").is_file()


def test_the_command_in_the_files_header_is_dry_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    (line,) = [line for line in EVAL_TOML.read_text().splitlines() if line.startswith("#   uv run medarc_train eval ")]
    words = shlex.split(line)[5:]
    words[words.index("--output-dir") + 1] = str(tmp_path / "out")
    # Those of the run that the file's README trains first.
    words[words.index("--weights-dir") + 1] = str(tmp_path / "weights")
    step = tmp_path / "weights" / "step_5"
    step.mkdir(parents=True)
    (step / "STABLE").touch()
    assert invoke(*words, "--dry-run").exit_code == 0


def test_options_alone_are_enough(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = invoke("--model.name", MED_CALC / "checkpoint", "--environment-ids", "med-calc", "--dry-run")
    assert result.exit_code == 0, result.output
    _, server, evaluator = result.stdout.strip().split("\n\n")
    assert f"inference @ {tmp_path}/outputs/eval/configs/inference.toml" in server
    assert f"prime_rl.eval.evaluate @ {tmp_path}/outputs/eval/configs/eval.toml" in evaluator


def test_without_anything_the_environment_is_asked_for() -> None:
    result = invoke()
    assert result.exit_code == 2
    assert result.stderr == "error: this command: there is no environment: give one with `environment_ids` or [[env]]\n"


@pytest.mark.parametrize(
    ("options", "fault"),
    [
        (["--steps", "3"], "steps are those of weights_dir"),
        (["--num-exmples", "3"], "did you mean --num-examples?"),
        (["--client.elastic.hostname", "http://x"], "is not a host name: write it without scheme and port"),
        (["--slurm.partition", "x"], "--slurm.partition: unknown option"),
        (["--weights-dir", "nowhere"], "nowhere lacks any step; complete steps: none; there is no such folder"),
        (["--weights-dir", "nowhere", "--dry-run"], "nowhere lacks any step"),
    ],
)
def test_a_fault_is_one_line_and_nothing_is_written(options: list[str], fault: str, tmp_path: Path) -> None:
    result = invoke(EVAL_TOML, "--output-dir", tmp_path / "out", *options)
    assert result.exit_code == 2
    (line,) = result.stderr.splitlines()
    assert fault in line
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_the_example_is_evaluated_with_a_server_of_its_own(tmp_path: Path) -> None:
    weights = tmp_path / "weights" / "step_5"
    shutil.copytree(MED_CALC / "checkpoint", weights)
    (weights / "STABLE").touch()
    executable = Path(sys.executable).with_name("medarc_train")
    options = ["--weights-dir", weights.parent, "--output-dir", tmp_path / "out", "--num-examples", "8"]
    done = subprocess.run(
        [executable, "eval", EVAL_TOML, *options], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads((tmp_path / "out" / "eval" / "summary.json").read_text())
    assert [(row["candidate"], row["env"]) for row in rows] == [
        ("base", "anion-gap"),
        ("base", "map"),
        ("step 5", "anion-gap"),
        ("step 5", "map"),
    ]
    # The same weights, the same questions and the same seeds.
    base, step = ([row["metrics"]["avg@4"] for row in rows if row["candidate"] == name] for name in ("base", "step 5"))
    assert base == step
    assert all({"pass@1", "pass@2", "pass@4"} <= set(row["metrics"]) for row in rows)
    assert len((tmp_path / "out" / "eval" / "results.jsonl").read_text().splitlines()) == 2 * 2 * 8 * 4
