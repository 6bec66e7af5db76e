"""Everything that is checked of a batch job before it queues."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from medarc_rl.backends.slurm import BatchJob
from medarc_rl.readiness.cluster import cluster_rows
from medarc_rl.readiness.hub import HubAccess, hub_rows, trained_model
from medarc_rl.readiness.memory import memory_row, offered_gpu
from medarc_rl.readiness.rows import Row, State, failed
from medarc_rl.readiness.software import Unreadable, job_environment, script_row, software_rows
from medarc_rl.readiness.storage import storage_rows
from medarc_rl.readiness.tokens import token_rows
from prime_rl.checks.disk import default_hub_cache
from prime_rl.checks.start_dir import StartDir
from prime_rl.configs.rl import RLConfig
from prime_rl.configs.sft import SFTConfig


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
    except Unreadable as error:
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
