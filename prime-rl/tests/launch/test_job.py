"""How a job that has been stopped is continued: the command that its user would type."""

from __future__ import annotations

from pathlib import Path

import pytest

from prime_rl.launch.job import UV_VARIABLE, Job
from prime_rl.run.paths import RunPaths
from prime_rl.utils.files import replacing_directory

RESUME = ("--resume", "latest")


def job(root: Path, resume: tuple[str, ...] | None, saved: bool = True) -> Job:
    paths = RunPaths(root)
    if saved:
        with replacing_directory(paths.checkpoint(3)):
            pass
    return Job("sft", paths, (), resume=resume)


@pytest.mark.parametrize(
    ("typed", "again"),
    [
        ("/bin/sft @ sft.toml", "sft @ sft.toml --resume latest"),
        ("/bin/medarc_train rl rl.toml --max-steps 9", "medarc_train rl rl.toml --max-steps 9 --resume latest"),
        ("rl @ rl.toml --ckpt.resume-step 5 --seed 1", "rl @ rl.toml --seed 1 --resume latest"),
        ("rl @ rl.toml --ckpt.resume_step=5", "rl @ rl.toml --resume latest"),
        ("rl @ rl.toml --resume auto --seed 1", "rl @ rl.toml --seed 1 --resume latest"),
    ],
)
def test_the_same_command_continues_from_the_last_step(tmp_path: Path, typed: str, again: str) -> None:
    assert job(tmp_path, RESUME).how_to_continue(typed.split(), {}) == f"continue with\n  {again}"
    under_uv = job(tmp_path / "uv", RESUME).how_to_continue(typed.split(), {UV_VARIABLE: "1"})
    assert under_uv == f"continue with\n  uv run {again}"


def test_words_that_the_shell_would_split_are_quoted(tmp_path: Path) -> None:
    words = ["sft", "@", "my config.toml", "--wandb.name", "it's"]
    assert job(tmp_path, ()).how_to_continue(words, {}) == (
        "continue with\n  sft @ 'my config.toml' --wandb.name 'it'\"'\"'s'"
    )


def test_what_started_the_job_of_a_batch_script_is_not_repeated(tmp_path: Path) -> None:
    argv = ["/repo/medarc_rl/launchers/sft_local.py", "@", "/out/configs/trainer.toml"]
    assert job(tmp_path, RESUME).how_to_continue(argv, {}) == "continue with --resume latest"


def test_without_anything_saved_nothing_is_promised(tmp_path: Path) -> None:
    assert (
        job(tmp_path, RESUME, saved=False).how_to_continue(["sft"], {})
        == "no checkpoint was saved yet: start the run again"
    )
    assert (
        job(tmp_path, None).how_to_continue(["sft"], {})
        == "no checkpoint was saved, because [ckpt] is not set: the run cannot be continued"
    )
