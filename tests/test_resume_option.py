"""`--resume latest|N|auto` on every command: what it chooses, and what it refuses before anything starts."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from medarc_rl import medarc_slurm, medarc_train
from prime_rl.run.paths import RunPaths
from prime_rl.utils.files import STABLE

COMMANDS = [
    (medarc_train, "sft"),
    pytest.param(medarc_train, "rl", marks=pytest.mark.slow),  # loads the environments, which takes seconds
    (medarc_slurm, "sft"),
    (medarc_slurm, "rl"),
]
"""With each, `--dry-run` starts and submits nothing."""


@pytest.fixture
def paths(tmp_path: Path) -> RunPaths:
    return RunPaths(tmp_path / "out")


def save(paths: RunPaths, *steps: int) -> None:
    """Checkpoints of both parts, as older versions marked them: their contents are not compared."""
    for step in steps:
        for directory in (paths.checkpoint(step), paths.orchestrator.checkpoint(step).parent):
            directory.mkdir(parents=True)
            (directory / STABLE).touch()


def finish(paths: RunPaths) -> None:
    for part in ("trainer", "orchestrator"):
        paths.completion(part).parent.mkdir(exist_ok=True)
        paths.completion(part).touch()


def dry_run(app, kind: str, request, paths: RunPaths, *words: object) -> Result:
    toml = request.getfixturevalue(f"{kind}_toml")
    device = ("--device", "cpu") if app is medarc_train else ()
    options = ("--output-dir", paths.root, "--max-steps", 8, "--ckpt", *device, "--dry-run", *words)
    return CliRunner().invoke(app.app, [*map(str, (kind, toml, *options))])


def errors(result: Result) -> list[str]:
    return [line for line in result.stderr.splitlines() if not line.startswith("warning: ")]


@pytest.mark.parametrize(("app", "kind"), COMMANDS)
def test_every_command_refuses_what_cannot_be_resumed(app, kind: str, request, paths: RunPaths) -> None:
    nothing = dry_run(app, kind, request, paths, "--resume", "latest")
    assert nothing.exit_code == 2
    (line,) = errors(nothing)
    assert line.startswith(f"error: nothing to resume: {paths.checkpoints} has no complete checkpoint; ")

    save(paths, 2, 4, 8)
    absent = dry_run(app, kind, request, paths, "--resume", 5)
    assert absent.exit_code == 2
    assert errors(absent)[0].endswith("(complete steps: 2, 4, 8); the nearest that can be resumed is --resume 4")

    finish(paths)
    finished = dry_run(app, kind, request, paths, "--resume", "latest")
    assert finished.exit_code == 2
    assert errors(finished)[0].endswith(
        "its last checkpoint is step 8, and max_steps = 8; raise max_steps to continue it"
    )

    misspelled = dry_run(app, kind, request, paths, "--resume", "lastest")
    assert misspelled.exit_code == 2
    assert "is neither a step nor one of latest, auto (got 'lastest')" in errors(misspelled)[0]


@pytest.mark.parametrize(("app", "kind"), COMMANDS)
def test_auto_starts_continues_and_leaves_a_finished_run_alone(app, kind: str, request, paths: RunPaths) -> None:
    assert dry_run(app, kind, request, paths, "--resume", "auto").exit_code == 0
    save(paths, 8)
    finish(paths)
    finished = dry_run(app, kind, request, paths, "--resume", "auto")
    assert (finished.exit_code, errors(finished)) == (0, [])
    assert finished.stdout == (
        f"the run in {paths.root} is finished: its last checkpoint is step 8, and max_steps = 8; "
        "there is nothing left to do\n"
    )
    assert dry_run(app, kind, request, paths, "--resume", "auto", "--max-steps", 9).exit_code == 0


@pytest.mark.parametrize("kind", ["sft", pytest.param("rl", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("resume", "flag"),
    [("latest", "--ckpt.resume-step 4"), ("auto", "--ckpt.resume-step 4"), ("2", None)],
)
def test_every_process_is_told_the_same_step(
    kind: str, resume: str, flag: str | None, request, paths: RunPaths
) -> None:
    save(paths, 2, 4)
    (paths.root / "checkpoints" / "step_6").mkdir()
    result = dry_run(medarc_train, kind, request, paths, "--resume", resume)
    assert result.exit_code == 0, result.output
    started = [line for line in result.stdout.splitlines() if ".train " in line or "/orchestrator " in line]
    assert len(started) == (2 if kind == "rl" else 1)
    assert all((flag in line) if flag else ("resume-step" not in line) for line in started), "2 is in the config"
    why = f"resuming from step 4: {paths.checkpoint(6)} is not complete: it has no file STABLE"
    replaced = paths.root / "checkpoints" / "replaced"
    newer = f"resuming from step 2 moves the newer steps 4 to {replaced}; delete them if you do not need them"
    assert f"warning: {newer if resume == '2' else why}" in result.stdout.splitlines()


def test_a_job_is_submitted_with_the_word_and_decides_where_it_runs(request, paths: RunPaths) -> None:
    assert dry_run(medarc_slurm, "rl", request, paths, "--resume", "auto").exit_code == 0
    assert "resume_step = -2" in paths.config("rl").read_text()


@pytest.mark.parametrize("command", ["sft", "rl", "trainer", "orchestrator"])
def test_the_engines_commands_know_the_option(command: str) -> None:
    program = Path(sys.executable).with_name(command)
    shown = subprocess.run([program, "--help"], capture_output=True, text=True, check=True).stdout
    assert "  --ckpt.resume-step, --resume  (int?, >= -2, <= 1_000_000_000, default None)" in shown
