"""All checks of a batch job before it is submitted, in the order in which it would fail."""

from __future__ import annotations

import json
import netrc
import shlex
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from medarc_rl.backends.slurm.job import BatchJob, Container, render
from medarc_rl.checks import Row, State, failed, ok, unknown
from medarc_rl.checks.cluster import cluster_rows, memory_row, offered_gpu
from medarc_rl.errors import MedarcError
from medarc_rl.external import NoAnswer, ask
from prime_rl.checks.data_files import find_parts
from prime_rl.checks.disk import default_hub_cache, existing_parent, forecast_disk, size_of_folder, snapshot_in_cache
from prime_rl.checks.environments import Place, trial_faults
from prime_rl.checks.model_files import model_fault
from prime_rl.checks.start_dir import StartDir
from prime_rl.configs.eval import OfflineEvalConfig
from prime_rl.configs.orchestrator import OrchestratorConfig
from prime_rl.configs.rl import RLConfig
from prime_rl.configs.sft import SFTConfig, SFTDataConfig, evaluation_of

# Repositories of the hub.


HUB_LIMIT_S = 30.0
"""Seconds for one question to the hub, the start of a Python process included."""
LOOKUP = "medarc_rl.checks.lookup"


@dataclass(frozen=True, slots=True)
class HubAccess:
    """The job's access to the hub."""

    start: StartDir
    cache: Path
    """The job's cache of repositories."""
    offline: bool
    env: Mapping[str, str]
    """The job's environment, with its token."""
    usual_cache: Path | None = None
    """The cache of this user's other commands."""

    def model_row(self, name: str, needs_weights: bool) -> Row:
        folder = self.folder(name)
        if folder is not None and model_fault(str(folder), StartDir(), needs_weights) is None:
            return ok("model", f"{name}: {'complete in the cache' if self.is_remote(name) else 'folder'}")
        if not self.is_remote(name):
            return failed("model", f"{name}: {model_fault(name, self.start, needs_weights)}")
        return self._remote_row("model", name, "not complete in" if folder is not None else "not in")

    def dataset_row(self, name: str) -> Row:
        if self._dataset_is_cached(name):
            return ok("dataset", f"{name}: in the cache {self.cache}")
        return self._remote_row("dataset", name, "not in")

    def folder(self, name: str) -> Path | None:
        """The folder of a model on this machine: its own, or one in the cache."""
        folder = self.start.find(name) if not self.is_remote(name) else snapshot_in_cache(name, self.cache)
        return folder if folder is not None and folder.is_dir() else None

    def is_remote(self, name: str) -> bool:
        return not self.start.find(name).is_dir()

    def _dataset_is_cached(self, name: str) -> bool:
        snapshot = snapshot_in_cache(name, self.cache, "datasets")
        prepared = self.cache.parent / "datasets" / name.replace("/", "___")
        return any(path is not None and path.is_dir() and any(path.iterdir()) for path in (snapshot, prepared))

    def _remote_row(self, kind: str, name: str, state: str) -> Row:
        missing = f"{name}: {state} the cache {self.cache}{self._elsewhere(kind, name)}"
        if self.offline:
            return failed(kind, f"{missing}, and --hf-hub-offline forbids downloading it")
        env = {**self.env, "HF_HUB_OFFLINE": "0", "PYTHONUNBUFFERED": "1"}
        try:
            answer = ask([sys.executable, "-m", LOOKUP, kind, name], HUB_LIMIT_S, env)
        except NoAnswer:
            return failed(kind, f"{missing}, and the hub did not answer within {HUB_LIMIT_S:g} s")
        if answer.code != 0:
            return failed(kind, f"{missing}, and {answer.last_line}")
        found = json.loads(answer.stdout)
        return ok(kind, f"{name}: on the hub, {found['files']} files to download; the node needs the network, too")

    def _elsewhere(self, kind: str, name: str) -> str:
        """Names the option that finds a repository which other commands have downloaded."""
        usual = self.usual_cache
        if usual is None or usual.name != "hub" or usual == self.cache:
            return ""
        found = snapshot_in_cache(name, usual, f"{kind}s")
        is_there = found is not None and found.is_dir()
        return f" (it is in another one: --hf-cache-dir {shlex.quote(str(usual.parent))})" if is_there else ""


def hub_rows(config: SFTConfig | RLConfig, access: HubAccess) -> Iterator[Row]:
    """One row for each model, tokenizer and dataset that the config names."""
    for name, needs_weights in _models(config).items():
        yield access.model_row(name, needs_weights)
    for name in _remote_datasets(config, access.start):
        yield access.dataset_row(name)


def trained_model(config: SFTConfig | RLConfig) -> str:
    """The model that is trained: a folder or a hub id."""
    return (config.trainer if isinstance(config, RLConfig) else config).model.name


def _models(config: SFTConfig | RLConfig) -> dict[str, bool]:
    """Each name, and whether its weights are needed."""
    trainer = config.trainer if isinstance(config, RLConfig) else config
    served = config.inference.model.name if isinstance(config, RLConfig) and config.inference is not None else None
    tokenizer = trainer.tokenizer.name
    names = {} if tokenizer is None else {tokenizer: False}
    names |= {trainer.model.name: not trainer.model.debug.random_init}
    return names if served is None else names | {served: True}


def _remote_datasets(config: SFTConfig | RLConfig, start: StartDir) -> list[str]:
    if isinstance(config, RLConfig):
        return []  # environments load theirs
    sections = [config.data] + ([] if config.val is None else [config.val.data])
    parts = [part for data in sections if isinstance(data, SFTDataConfig) for part in find_parts(data, start)]
    return list(dict.fromkeys(part.name for part in parts if not part.files))


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
WANDB_VARIABLE = "WANDB_API_KEY"
_WANDB_HOST = "api.wandb.ai"


def job_rows(config: SFTConfig | RLConfig, job: BatchJob, env: Mapping[str, str]) -> Iterator[Row]:
    """A row for each thing that the job needs, in the order in which it would fail without.

    `env` is the environment that the job is submitted with. Nothing is written. Takes seconds; each program that is
    asked has a time limit.
    """
    yield script_row(job)
    cluster = list(cluster_rows(job))
    yield from cluster
    # A controller that has not answered once is not asked again.
    answers = all(row.state is not State.FAILED for row in cluster if row.what == "slurm")
    try:
        job_env = job_environment(job, env)
    except MedarcError as error:
        yield failed(".env", f"{job.project_dir}/.env: {error}")
        return
    yield from token_rows(config, job_env)
    start, cache = StartDir.of_job(job.project_dir), job.hf_cache_dir / "hub"
    access = HubAccess(start, cache, job.hf_hub_offline, job_env, default_hub_cache())
    yield from hub_rows(config, access)
    gpu = offered_gpu(job) if answers else None
    yield memory_row(config, job, gpu, lambda name: str(access.folder(name) or name))
    yield from storage_rows(config, job.paths.root, access.folder(trained_model(config)))
    yield from software_rows(config, job, job_env)


def can_start(rows: list[Row]) -> bool:
    return all(row.state is not State.FAILED for row in rows)


# The script, and the environment that the job will have.


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


def job_environment(job: BatchJob, env: Mapping[str, str]) -> dict[str, str]:
    """The environment that the job gets from `env` and its project's `.env`.

    Raises:
        MedarcError: bash stops in `.env`.
    """
    found = dict(env)
    dot_env = job.project_dir / ".env"
    if dot_env.is_file():
        try:
            answer = ask(["bash", "-c", _SOURCED, "bash", str(dot_env)], SHELL_LIMIT_S, env, job.project_dir)
        except NoAnswer as error:
            raise MedarcError(str(error)) from error
        if answer.code != 0:
            raise MedarcError(answer.last_line)
        found = dict(line.split("=", 1) for line in answer.stdout.split("\0") if "=" in line)
    return found | {"HF_HOME": str(job.hf_cache_dir), "HF_HUB_OFFLINE": str(int(job.hf_hub_offline))}


# Secrets. Only names are shown.


def token_rows(config: SFTConfig | RLConfig, env: Mapping[str, str]) -> Iterator[Row]:
    """`env` is the job's environment."""
    yield ok("hub token", "HF_TOKEN is set" if env.get("HF_TOKEN") else "no HF_TOKEN: public repositories only")
    sections = (config.trainer, config.orchestrator) if isinstance(config, RLConfig) else (config,)
    if any(section.wandb is not None and not section.wandb.offline for section in sections):
        yield _wandb_row(env)
    # Variables that the config names for secret headers.
    headers = config.orchestrator.client.headers_from_env if isinstance(config, RLConfig) else {}
    for name in headers.values():
        advice = "export it, or write it to the project's .env"
        yield ok("secret", f"{name} is set") if env.get(name) else failed("secret", f"{name} is not set: {advice}")


def _wandb_row(env: Mapping[str, str]) -> Row:
    if env.get("WANDB_MODE") in ("offline", "disabled", "dryrun"):
        return ok("W&B key", f"not needed: WANDB_MODE is {env['WANDB_MODE']}")
    if env.get(WANDB_VARIABLE):
        return ok("W&B key", f"{WANDB_VARIABLE} is set")
    if _has_login():
        return ok("W&B key", "in ~/.netrc")
    advice = "export it, run `wandb login`, or set wandb.offline = true"
    return failed("W&B key", f"{WANDB_VARIABLE} is not set, and ~/.netrc has no login: {advice}")


def _has_login() -> bool:
    try:
        return netrc.netrc().authenticators(_WANDB_HOST) is not None
    except (OSError, netrc.NetrcParseError):
        return False


# The run's directory: whether it can be written, and holds what the run will save.


def storage_rows(config: SFTConfig | RLConfig, output_dir: Path, model: Path | None) -> Iterator[Row]:
    """`model` is the folder with the model's weights; None if they are not on this machine."""
    parent = existing_parent(output_dir)
    try:
        # A file without a name: it is gone when it is closed, whatever happens.
        with tempfile.TemporaryFile(dir=parent) as probe:
            probe.write(b"medarc")
            probe.flush()
    except OSError as error:
        yield failed("output folder", f"{output_dir}: {parent} cannot be written: {error.strerror}")
        return
    yield ok("output folder", f"{output_dir} can be written from here")
    trainer = config.trainer if isinstance(config, RLConfig) else config
    forecast = forecast_disk(trainer, output_dir, size_of_folder(model))
    if forecast is None:
        yield unknown("disk space", "the model's files are not here, so the size of its checkpoints is unknown")
    else:
        yield (ok if forecast.fits else failed)("disk space", str(forecast))


# Software: the project's `.venv`, and the environments that a run trains on.


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
    return unknown("container", f"{container.image}: its contents are not checked before the job starts")


def _environment_rows(config: OrchestratorConfig | OfflineEvalConfig, place: Place) -> Iterator[Row]:
    faults = trial_faults(config, place, ENVIRONMENTS_LIMIT_S)
    for fault in faults:
        yield failed("environments", fault)
    if not faults:
        names = ", ".join(dict.fromkeys(env.id for env in config.env))
        yield ok("environments", f"{names}: imported, loaded and examined")
