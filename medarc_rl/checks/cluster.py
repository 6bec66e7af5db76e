"""Checks a batch job against the cluster: controller, partition, time limit, account, GPUs and their memory, sbatch."""

from __future__ import annotations

import os
import re
import shlex
import shutil
from collections.abc import Callable, Iterator, Mapping

from medarc_rl.backends.slurm.job import BatchJob, render, sbatch_argv, sbatch_env, walltime_s
from medarc_rl.backends.slurm.queue import SLURM_LIMIT_S, Properties, shown
from medarc_rl.checks import Row, failed, ok, unknown
from medarc_rl.commands.estimating import Answer, rl_answer, sft_answer
from medarc_rl.deployment import training_gpus
from medarc_rl.errors import UsageError
from medarc_rl.external import NoAnswer, ask
from prime_rl.checks.memory import Gpu, parse_gpu
from prime_rl.checks.memory.changes import verdict_line
from prime_rl.configs.rl import RLConfig
from prime_rl.configs.sft import SFTConfig
from prime_rl.utils.errors import UserError

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
    return rl_answer(config, job.single_gpu, gpu, in_job=True, place=place)


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
