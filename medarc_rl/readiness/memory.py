"""Whether the run fits into the memory of the GPUs that its partition has."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Callable, Iterator

from medarc_rl.backends.scontrol import SLURM_LIMIT_S, shown
from medarc_rl.backends.slurm import BatchJob
from medarc_rl.commands.estimating import Answer, rl_answer, sft_answer
from medarc_rl.deployment import training_gpus
from medarc_rl.errors import UsageError
from medarc_rl.external import NoAnswer
from medarc_rl.readiness.cluster import chosen_partitions, nodes_with_gpus
from medarc_rl.readiness.rows import Row, failed, ok, unknown
from prime_rl.checks.memory import Gpu, parse_gpu
from prime_rl.checks.memory.changes import verdict_line
from prime_rl.configs.rl import RLConfig
from prime_rl.configs.sft import SFTConfig
from prime_rl.utils.errors import UserError

WHAT = "gpu memory"
_TYPE = re.compile(r"gpu:([^:,()]+):\d+")
_MODEL = re.compile(r"(?:nvidia[_-])?(\w+?)(?:[_-](?:sxm\d?|pcie|nvl))?(?:[_-](\d+)gb(?:[_-]hbm\w*)?)?", re.IGNORECASE)
"""A type of GPU as in `gpu:h100:8` or `gpu:nvidia_h100_80gb_hbm3:8`. Slices such as `a100_3g.20gb` are none."""


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
        return unknown(WHAT, f"{found.partition(': ')[2]}; on a CPU, and the memory of its node is not asked for")
    if gpu is None:
        return unknown(WHAT, f"{found}; Slurm does not say which GPU: compare with --estimate --gpu NAME")
    state = failed if answer.estimate.verdict == "does not fit" else ok
    return state(WHAT, f"{found}; {gpu.name} has {gpu.total_bytes / 2**30:.1f} GiB")


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


def config_device(config: SFTConfig | RLConfig) -> str:
    return (config.trainer if isinstance(config, RLConfig) else config).device


def _answer(config: SFTConfig | RLConfig, job: BatchJob, gpu: Gpu | None, place: Callable[[str], str]) -> Answer:
    if isinstance(config, SFTConfig):
        return sft_answer(config, training_gpus(config), gpu, in_job=True, place=place)
    return rl_answer(config, job.single_gpu, gpu, in_job=True, place=place)
