"""All checks of a batch job before it is submitted, in the order in which it would fail."""

from __future__ import annotations

import json
import netrc
import os
import re
import shlex
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from medarc_rl.backends.slurm.job import BatchJob, Container, render, sbatch_argv, sbatch_env, walltime_s
from medarc_rl.backends.slurm.queue import SLURM_LIMIT_S, Properties, shown
from medarc_rl.checks import Row, State, failed, ok, unknown
from medarc_rl.commands.estimating import Answer, rl_answer, sft_answer
from medarc_rl.deployment import training_gpus
from medarc_rl.errors import MedarcError, UsageError
from medarc_rl.external import NoAnswer, ask
from prime_rl.checks.data_files import find_parts
from prime_rl.checks.disk import default_hub_cache, existing_parent, forecast_disk, size_of_folder, snapshot_in_cache
from prime_rl.checks.environments import Place, loss_faults, trial_faults
from prime_rl.checks.memory import Gpu, parse_gpu
from prime_rl.checks.memory.changes import verdict_line
from prime_rl.checks.model_files import model_fault
from prime_rl.checks.start_dir import StartDir
from prime_rl.configs.dpo import DPOConfig
from prime_rl.configs.eval import OfflineEvalConfig
from prime_rl.configs.orchestrator import OrchestratorConfig
from prime_rl.configs.rl import RLConfig
from prime_rl.configs.sft import SFTConfig, evaluation_of
from prime_rl.configs.trainer import TrainerConfig
from prime_rl.utils.errors import UserError

# Checks a batch job against the cluster: controller, partition, time limit, account, GPUs and their memory, sbatch.


_OUT_OF_SERVICE = re.compile(r"DOWN|DRAIN|FAIL|MAINT|FUTURE|POWERED_DOWN|NOT_RESPONDING|\*")
_GPUS = re.compile(r"gpu(?::[^:,()]+)?:(\d+)")
WHAT = "gpu memory"
_TYPE = re.compile(r"gpu:([^:,()]+):\d+")
_MODEL = re.compile(r"(?:nvidia[_-])?(\w+?)(?:[_-](?:sxm\d?|pcie|nvl))?(?:[_-](\d+)gb(?:[_-]hbm\w*)?)?", re.IGNORECASE)
"""A type of GPU as in `gpu:h100:8` or `gpu:nvidia_h100_80gb_hbm3:8`. Slices such as `a100_3g.20gb` do not match."""


def cluster_rows(job: BatchJob, limit_s: float = SLURM_LIMIT_S) -> Iterator[Row]:
    """Rows about the cluster. If its controller does not answer within `limit_s` seconds, that is the only row."""
    if shutil.which("sbatch") is None:
        yield failed("slurm", "sbatch: not found: submit where Slurm is, or run here with medarc_train")
        return
    try:
        ping = ask(["scontrol", "ping"], limit_s)
        if " is UP" not in ping.stdout:
            yield failed("slurm", f"the controller (slurmctld) does not answer: {ping.last_line}")
            return
        partitions, nodes = shown("partition", limit_s=limit_s), shown("node", limit_s=limit_s)
    except NoAnswer as error:
        yield failed("slurm", f"the controller (slurmctld) does not answer: {error}")
        return
    yield ok("slurm", ping.stdout.strip())
    yield from _partition_rows(job, partitions, nodes)
    yield sbatch_row(job, limit_s)


def sbatch_row(job: BatchJob, limit_s: float) -> Row:
    """Whether sbatch would accept the script. Nothing is submitted or written."""
    argv = [*sbatch_argv(job)[:-1], "--test-only"]
    try:
        answer = ask(argv, limit_s, env=sbatch_env(os.environ, job), stdin=render(job))
    except NoAnswer as error:
        return failed("sbatch --test-only", str(error))
    return (ok if answer.code == 0 else failed)(
        "sbatch --test-only", re.sub(r"^(?:sbatch: |error: )+", "", answer.last_line)
    )


def _partition_rows(job: BatchJob, partitions: list[Properties], nodes: list[Properties]) -> Iterator[Row]:
    if any(word.startswith(("-p", "--partition")) for word in job.request.sbatch_arg):
        yield unknown("partition", "--sbatch-arg names it: left to sbatch --test-only")
        return
    wanted, chosen = _wanted(job, os.environ), chosen_partitions(job, partitions, os.environ)
    if not chosen:
        there = ", ".join(each.get("PartitionName", "?") for each in partitions) or "none"
        said = f"no partition {wanted}" if wanted else "the cluster has no default partition: name one with --partition"
        yield failed("partition", f"{said}; there are: {there}")
        return
    up = [each for each in chosen if each.get("State") == "UP"]
    yield (ok if up else failed)("partition", "; ".join(f"{_name(each)} is {each.get('State')}" for each in chosen))
    yield _time_row(job.request.time, up or chosen)
    yield _account_row(job.request.account, up or chosen)
    yield _gpu_row(job, up or chosen, nodes)


def _time_row(time: str | None, partitions: list[Properties]) -> Row:
    listed = "; ".join(f"{_name(each)} allows {each.get('MaxTime', '?')}" for each in partitions)
    if time is None:
        defaults = "; ".join(f"{_name(each)}: {_default_time(each)}" for each in partitions)
        return ok("time limit", f"without --time, the partition's default ({defaults})")
    asked_s = walltime_s(time) or float("inf")
    if all(asked_s > _limit_s(each) for each in partitions):
        return failed("time limit", f"--time {time} is too long: {listed}. The job would never start")
    return ok("time limit", f"{time}; {listed}")


def _default_time(partition: Properties) -> str:
    default = partition.get("DefaultTime", "NONE")
    return partition.get("MaxTime", "?") if default == "NONE" else default


def _account_row(account: str | None, partitions: list[Properties]) -> Row:
    if account is None:
        return ok("account", "without --account, your default")
    refusing = [each for each in partitions if not _admits(each, account)]
    if len(refusing) == len(partitions):
        names = ", ".join(map(_name, refusing))
        return failed("account", f"{account} may not use {names}: choose another --account or --partition")
    return ok(
        "account", f"{account}; sbatch --test-only shows whether you may use it, if the cluster enforces accounts"
    )


def _admits(partition: Properties, account: str) -> bool:
    allowed, denied = partition.get("AllowAccounts", "ALL"), partition.get("DenyAccounts", "")
    return (allowed == "ALL" or account in allowed.split(",")) and account not in denied.split(",")


def _gpu_row(job: BatchJob, partitions: list[Properties], nodes: list[Properties]) -> Row:
    """Whether a node in service has as many GPUs as the job asks for, free or not."""
    members, fitting = _members(partitions, nodes), nodes_with_gpus(job, partitions, nodes)
    in_service = [node for node in fitting if not _OUT_OF_SERVICE.search(node.get("State", ""))]
    where = ", ".join(sorted(map(_name, partitions)))
    if not fitting:
        most = max(map(_gpus, members), default=0)
        return failed("gpus", f"{job.gpus} asked for; the largest of {len(members)} nodes in {where} has {most}")
    if not in_service:
        states = ", ".join(sorted({f"{node.get('NodeName')} {node.get('State')}" for node in fitting})[:4])
        return failed("gpus", f"no node in {where} with {job.gpus} GPUs is in service: {states}")
    if len(in_service) < job.nodes:
        few = f"{len(in_service)} of {len(members)} nodes in {where} have {job.gpus} GPUs and are in service"
        return failed("gpus", f"{job.nodes} nodes asked for; {few}")
    of = "one node" if job.nodes == 1 else f"each of {job.nodes} nodes"
    return ok("gpus", f"{job.gpus} of {of}; {len(in_service)} of {len(members)} nodes in {where} have enough")


# Partitions and nodes.


def chosen_partitions(job: BatchJob, partitions: list[Properties], environ: Mapping[str, str]) -> list[Properties]:
    """The partitions that the job may run in, of those that there are."""
    wanted = _wanted(job, environ)
    names = (
        wanted.split(",") if wanted else [each["PartitionName"] for each in partitions if each.get("Default") == "YES"]
    )
    return [each for each in partitions if each.get("PartitionName") in names]


def nodes_with_gpus(job: BatchJob, partitions: list[Properties], nodes: list[Properties]) -> list[Properties]:
    """The nodes of partitions that have as many GPUs as the job asks for, in service or not."""
    return [node for node in _members(partitions, nodes) if _gpus(node) >= job.gpus]


def _members(partitions: list[Properties], nodes: list[Properties]) -> list[Properties]:
    names = {_name(each) for each in partitions}
    return [node for node in nodes if names & set(node.get("Partitions", "").split(","))]


def _wanted(job: BatchJob, environ: Mapping[str, str]) -> str | None:
    return job.request.partition or environ.get("SBATCH_PARTITION")


def _name(partition: Properties) -> str:
    return partition.get("PartitionName", "?")


def _limit_s(partition: Properties) -> float:
    """The longest time limit that the partition allows, in seconds."""
    try:
        return walltime_s(partition.get("MaxTime", "UNLIMITED")) or float("inf")
    except UsageError:  # a notation that we do not know
        return float("inf")


def _gpus(node: Properties) -> int:
    return sum(map(int, _GPUS.findall(node.get("Gres", ""))))


# Memory of the GPUs that the job may get.


def memory_row(config: SFTConfig | RLConfig, job: BatchJob, gpu: Gpu | None, place: Callable[[str], str] = str) -> Row:
    """Compare the estimate with `gpu`; None is one that is not known. `place` is where a model's files are."""
    try:
        answer = _answer(config, job, gpu, place)
    except UsageError as error:
        # A download goes to the cache of the job, which is not the one of the user's shell.
        downloads = f"`HF_HOME={shlex.quote(str(job.hf_cache_dir))} hf download"
        return unknown(WHAT, str(error).removeprefix("--estimate: ").replace("`hf download", downloads))
    found = verdict_line(answer.estimate, answer.change)
    if config_device(config) == "cpu":
        return unknown(WHAT, f"{found.partition(': ')[2]}; on a CPU; not compared with the node's memory")
    if gpu is None:
        return unknown(WHAT, f"{found}; Slurm does not say which GPU: compare with --estimate --gpu NAME")
    state = failed if answer.estimate.verdict == "does not fit" else ok
    return state(WHAT, f"{found}; {gpu.name} has {gpu.total_bytes / 2**30:.1f} GiB")


def config_device(config: SFTConfig | RLConfig) -> str:
    return (config.trainer if isinstance(config, RLConfig) else config).device


def _answer(config: SFTConfig | RLConfig, job: BatchJob, gpu: Gpu | None, place: Callable[[str], str]) -> Answer:
    if isinstance(config, SFTConfig):
        return sft_answer(config, training_gpus(config), gpu, in_job=True, place=place)
    return rl_answer(config, job.shares_gpus, gpu, in_job=True, place=place)


def offered_gpu(job: BatchJob, limit_s: float = SLURM_LIMIT_S) -> Gpu | None:
    """The smallest GPU that the job may get; None if Slurm does not name the types of all."""
    if any(re.match(r"--(?:gres|gpus|constraint)|-[CG]", word) for word in job.request.sbatch_arg):
        return None
    try:
        partitions = chosen_partitions(job, shown("partition", limit_s=limit_s), os.environ)
        nodes = nodes_with_gpus(job, partitions, shown("node", limit_s=limit_s))
    except NoAnswer:
        return None
    gpus = [gpu_of_type(name) for node in nodes for name in _TYPE.findall(node.get("Gres", "")) or ["gpu"]]
    known = [gpu for gpu in gpus if gpu is not None]
    return min(known, key=lambda gpu: gpu.total_bytes) if known and len(known) == len(gpus) else None


def gpu_of_type(name: str) -> Gpu | None:
    """The GPU that a cluster calls so, if the name says."""
    model = _MODEL.fullmatch(name)
    for candidate in () if model is None else _candidates(*model.groups()):
        try:
            return parse_gpu(candidate)
        except UserError:
            continue
    return None


def _candidates(model: str, gib: str | None) -> Iterator[str]:
    if not model.isdecimal():  # a number would be an amount of memory
        if gib is not None:
            yield f"{model}-{gib}"
        yield model


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
    return names | dict.fromkeys(filter(None, (served, *_beside(config))), True)


def _beside(config: SFTConfig | RLConfig) -> Iterator[str | None]:
    """The models that the trainer loads beside the trained one."""
    if isinstance(config, RLConfig):
        yield None if config.trainer.critic is None else config.trainer.critic.name
        return
    yield None if config.distillation is None else config.distillation.teacher
    yield config.reference.name if isinstance(config, DPOConfig) else None


def _remote_datasets(config: SFTConfig | RLConfig, start: StartDir) -> list[str]:
    # Environments load theirs.
    trainer = config.trainer if isinstance(config, RLConfig) else config
    parts = [part for data in trainer.datasets for part in find_parts(data, start)]
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
    place = Place(str(python), env, job.project_dir)
    if tried is not None:
        yield from _environment_rows(tried, place)
    if isinstance(config, RLConfig) and config.trainer.loss.type == "custom":
        yield from _loss_rows(config.trainer, config.trainer.loss.import_path, place)


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


def _loss_rows(config: TrainerConfig, import_path: str, place: Place) -> Iterator[Row]:
    faults = loss_faults(config, place, ENVIRONMENTS_LIMIT_S)
    for fault in faults:
        yield failed("loss", fault)
    if not faults:
        yield ok("loss", f"{import_path}: called on made-up tensors")
