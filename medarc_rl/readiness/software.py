"""Whether the job's Python works: the project's `.venv`, its `.env`, and the environments that a run trains on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from medarc_rl.backends.containers import Container
from medarc_rl.backends.slurm import BatchJob, render
from medarc_rl.external import NoAnswer, ask
from medarc_rl.readiness.rows import Row, failed, ok, unknown
from prime_rl.checks.environments import Place, trial_faults
from prime_rl.configs.eval import OfflineEvalConfig
from prime_rl.configs.orchestrator import OrchestratorConfig
from prime_rl.configs.rl import RLConfig
from prime_rl.configs.sft import SFTConfig, evaluation_of

START_LIMIT_S = 120.0
"""Seconds for the import of the launcher, which may come from a cold network file system."""
ENVIRONMENTS_LIMIT_S = 600.0
"""Seconds to load the environments, which may download their data."""
SHELL_LIMIT_S = 30.0

_SOURCED = r"""if grep -q $'\r$' "$1"; then
  echo 'its lines end as on Windows: run sed -i "s/\r$//" on it' >&2; exit 1
fi
bash -n "$1" 2>/dev/null || {
  echo "bash cannot read it: put quotes around values that contain more than letters and digits" >&2; exit 1
}
set -a; source "$1" >/dev/null; env -0"""
"""Prints the environment after the project's `.env`, as the batch script reads it. The file's name is an argument."""


class Unreadable(Exception):
    """The project's `.env` cannot be sourced."""


def job_environment(job: BatchJob, env: Mapping[str, str]) -> dict[str, str]:
    """The environment that the job gets from `env` and its project's `.env`.

    Raises:
        Unreadable: bash stops in `.env`.
    """
    found = dict(env)
    dot_env = job.project_dir / ".env"
    if dot_env.is_file():
        try:
            answer = ask(["bash", "-c", _SOURCED, "bash", str(dot_env)], SHELL_LIMIT_S, env, job.project_dir)
        except NoAnswer as error:
            raise Unreadable(str(error)) from error
        if answer.code != 0:
            raise Unreadable(answer.last_line)
        found = dict(line.split("=", 1) for line in answer.stdout.split("\0") if "=" in line)
    return found | {"HF_HOME": str(job.hf_cache_dir), "HF_HUB_OFFLINE": str(int(job.hf_hub_offline))}


def script_row(job: BatchJob) -> Row:
    """Whether bash can read the script."""
    try:
        answer = ask(["bash", "-n"], SHELL_LIMIT_S, stdin=render(job))
    except NoAnswer as error:
        return failed("batch script", str(error))
    return (
        ok("batch script", "renders, and bash reads it")
        if answer.code == 0
        else failed("batch script", answer.last_line)
    )


def software_rows(config: SFTConfig | RLConfig, job: BatchJob, env: Mapping[str, str]) -> Iterator[Row]:
    """`env` is the job's environment."""
    if job.container is not None:
        yield _container_row(job.container)
        return
    if not (job.project_dir / ".venv" / "bin" / "activate").is_file():
        advice = "run 'uv sync' there, or name another place with --project-dir"
        yield failed("project", f"{job.project_dir}/.venv is missing: {advice}")
        return
    python = job.project_dir / ".venv" / "bin" / "python"
    launcher = job.argv[job.argv.index("-m") + 1]
    try:
        answer = ask([str(python), "-c", f"import {launcher}"], START_LIMIT_S, env, job.project_dir)
    except NoAnswer as error:
        yield failed("project", str(error))
        return
    if answer.code != 0:
        yield failed("project", f"{python} cannot import {launcher}: {answer.last_line}")
        return
    yield ok("project", f"{python} imports {launcher}")
    tried = config.orchestrator if isinstance(config, RLConfig) else evaluation_of(config)
    if tried is not None:
        yield from _environment_rows(tried, Place(str(python), env, job.project_dir))


def _container_row(container: Container) -> Row:
    image = Path(container.image)
    if image.suffix in (".sif", ".sqsh") and not image.is_file():
        return failed("container", f"{image}: no such file")
    return unknown("container", f"{container.image}: what it holds shows in the job")


def _environment_rows(config: OrchestratorConfig | OfflineEvalConfig, place: Place) -> Iterator[Row]:
    faults = trial_faults(config, place, ENVIRONMENTS_LIMIT_S)
    for fault in faults:
        yield failed("environments", fault)
    if not faults:
        names = ", ".join(dict.fromkeys(env.id for env in config.env))
        yield ok("environments", f"{names}: imported, loaded and examined")
