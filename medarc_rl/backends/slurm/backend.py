"""The Slurm back-end: checks a batch job, writes its config and script, and submits it."""

from __future__ import annotations

import json
import os
import re
import stat
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from medarc_rl.backends.options import SlurmOptions
from medarc_rl.backends.protocol import CONFIGS, Prepared, Request, Submitted
from medarc_rl.backends.slurm.job import BatchJob, log_file, plan, render, sbatch_argv, sbatch_env, sh_quote
from medarc_rl.backends.slurm.queue import CLUSTER, LOG, SlurmQueue
from medarc_rl.cli import say, warn
from medarc_rl.errors import MedarcError
from medarc_rl.utils import (
    Run,
    check_startable,
    maybe_autoset_auth_env,
    prepare_directory,
    reporting_directory_errors,
    write_components,
)
from prime_rl.run.directory import files_readable_by
from prime_rl.utils.files import replacing_file

_SUBMITTED = re.compile(r"^(?:Submitted batch job )?(\d+)(?:;(\S*)| on cluster (\S+))?$", re.MULTILINE)
"""sbatch's answer, also with `--parsable`. A cluster may print lines before it, for example about a budget."""


@dataclass(frozen=True, kw_only=True)
class PreparedBatchJob(Prepared):
    """A job whose config and script are written."""

    job: BatchJob
    run: Run[Any]
    env: Mapping[str, str]
    """The environment to submit with, perhaps with the user's token of the hub."""


class Slurm(SlurmQueue):
    """Implements `Backend`."""

    def prepare(self, request: Request) -> PreparedBatchJob:
        """Check the run and the cluster, then write config and script. A dry run asks no cluster and writes them, too.

        Raises:
            MedarcError: something that the job needs is not there.
        """
        options: SlurmOptions = request.options
        job, run = plan(request)
        dry_run = request.options.dry_run or run.config.dry_run
        with files_readable_by(run.config.file_access):
            check_startable(run, dry_run, job.project_dir, waits=job.queued is not None)
            env = dict(os.environ)
            for line in maybe_autoset_auth_env(env, options.auto_auth and not dry_run):
                say(line)
            if options.check and not dry_run and not passes_checks(job, run, env):
                raise MedarcError("nothing was submitted: see FAILED above, or submit all the same with --no-check")
            write_job(job, run, dry_run)
        return PreparedBatchJob(
            name=job.name,
            output=str(job.paths.root),
            text=" ".join(map(sh_quote, sbatch_argv(job))),
            is_dry_run=dry_run,
            job=job,
            run=run,
            env=env,
        )

    def submit(self, prepared: PreparedBatchJob) -> Submitted:
        """Call sbatch.

        Raises:
            MedarcError: there is no `sbatch`, or it refuses the script.
        """
        job = prepared.job
        stays = f"nothing was submitted; the script is {job.script}"
        argv, env = sbatch_argv(job), sbatch_env(prepared.env, job)
        try:
            # Slurm gives the job this process's umask.
            with files_readable_by(prepared.run.config.file_access):
                answer = subprocess.run(argv, env=env, capture_output=True, text=True, errors="replace", check=False)
        except OSError as error:
            absent = isinstance(error, FileNotFoundError)
            complaint = "not found: submit where Slurm is, or run here with medarc_train" if absent else error.strerror
            raise MedarcError(f"sbatch: {complaint}", stays) from error
        said, complained = (answer.stdout or "").strip(), (answer.stderr or "").strip()
        found = _SUBMITTED.search(said)
        if answer.returncode != 0 and found is None:
            raise MedarcError(*(complained.splitlines() or [f"sbatch ended with exit code {answer.returncode}"]), stays)
        for line in complained.splitlines():
            warn(line)
        if found is None:
            warn("sbatch printed no job number, so the job is not in the job log")
            return Submitted("", lines=[said])
        log, fault = log_file(job.paths, found[1]), ""
        if answer.returncode != 0:  # with `--sbatch-arg=--wait`: the job was queued, and has ended
            fault = f"sbatch --wait: the job ended with exit code {answer.returncode}"
        details = {LOG: str(log)}
        if cluster := found[2] or found[3]:
            details[CLUSTER] = cluster
        return Submitted(found[1], details, [said, f"log: {log}"], fault)


def passes_checks(job: BatchJob, run: Run[Any], env: Mapping[str, str], as_json: bool = False) -> bool:
    """Print the table of what the job needs. Returns whether all of it is there."""
    # Imported here: a dry run asks nobody.
    from medarc_rl.checks import as_table, table
    from medarc_rl.checks.job import can_start, job_rows

    rows = list(job_rows(run.config, job, env))
    for line in [json.dumps(as_table(rows), indent=1)] if as_json else table(rows):
        say(line)
    return can_start(rows)


def write_job(job: BatchJob, run: Run[Any], dry_run: bool) -> None:
    """Write config and script."""
    script = render(job)
    if run.config.clean_output_dir and not dry_run:
        prepare_directory(run)
    component, paths = CONFIGS[job.command], job.queued or run.paths
    if job.queued is not None:
        with reporting_directory_errors():
            # Another submission may have taken the number meanwhile.
            job.queued.root.mkdir(parents=True)
    write_components(replace(run, paths=paths), {component: run.config}, dry_run)
    with reporting_directory_errors():
        run.paths.slurm.mkdir(parents=True, exist_ok=True)
        with replacing_file(job.script) as scratch:
            scratch.write_text(script, encoding="utf-8")
            scratch.chmod(scratch.stat().st_mode | stat.S_IXUSR)
    say(f"config: {paths.config(component)}")
    say(f"script: {job.script}")
