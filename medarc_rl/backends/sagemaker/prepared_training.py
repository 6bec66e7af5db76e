"""Checks a run for SageMaker and decides what would be sent. Contacts nobody and writes nothing."""

from __future__ import annotations

import json
import os
import time
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from medarc_rl.backends.backend import Prepared, Request
from medarc_rl.backends.pairs import pairs, plain_variables
from medarc_rl.backends.ray import demands
from medarc_rl.backends.sagemaker.aws_calls import Aws, require_boto3
from medarc_rl.backends.sagemaker.images import ImageBuild
from medarc_rl.backends.sagemaker.local_container import LocalContainer, require_docker
from medarc_rl.backends.sagemaker.request.api_rules import request_faults
from medarc_rl.backends.sagemaker.request.file_systems import FileSystem
from medarc_rl.backends.sagemaker.request.instances import family_of, gpus_of, smallest_with
from medarc_rl.backends.sagemaker.request.job_names import name_fault, opaque_name
from medarc_rl.backends.sagemaker.request.s3_places import JobPlaces, S3Prefix, input_channels
from medarc_rl.backends.sagemaker.request.secret_references import references
from medarc_rl.backends.sagemaker.request.training_request import RUN_DIR, TrainingJob, rule_faults
from medarc_rl.backends.sagemaker.sagemaker_options import (
    LIMIT_S,
    ROLE_VARIABLE,
    S3_VARIABLE,
    SageMakerOptions,
    with_variables,
)
from medarc_rl.backends.sagemaker.source.bundle import packed
from medarc_rl.backends.sagemaker.source.local_paths import relocated
from medarc_rl.backends.sagemaker.source.staging import Staged, stage
from medarc_rl.cli import say
from medarc_rl.deployment import frozen_gpus, sft_gpus
from medarc_rl.errors import UsageError
from medarc_rl.utils import Run, refuse_other_launcher
from prime_rl.configs.ranges import AUTO, LATEST

_NO_PLACE = "s3://local/runs"
"""Stands for the prefix of a job that is not sent."""
_NOT_BUILT = "ACCOUNT.dkr.ecr.{region}.amazonaws.com/{repository}:{tag}"
"""Stands for the image until ECR has told the account's number."""


@dataclass(frozen=True, kw_only=True)
class PreparedTraining(Prepared):
    """A job that passed all checks."""

    job: TrainingJob
    staged: Staged
    config: str
    """The resolved config, as TOML."""
    region: str
    profile: str | None
    build: ImageBuild | None
    is_local: bool


def prepared_training(request: Request) -> PreparedTraining:
    """Raises UsageError, one line for each fault."""
    require_boto3()
    options: SageMakerOptions = with_variables(request.options, os.environ)
    if options.local:
        require_docker("--local")
    project = options.project_dir.absolute()
    if not project.is_dir():
        raise UsageError(f"--project-dir {project}: no such directory")
    run = _loaded(request, options)
    _check_start(run, project)
    staged = stage(project, options.include, options.max_upload_mb * 1_000_000)
    config, path_faults = _config_of(run, project, staged)
    region = "local" if options.local and options.region is None else Aws(options.region, options.profile).region
    extras = [*options.build_extra, *(("ray",) if request.nodes > 1 else ())]
    build = ImageBuild.of(options.repository, list(dict.fromkeys(extras))) if options.build else None
    with packed(staged, config) as bundle:
        sha256, size_bytes = bundle.sha256, bundle.size_bytes
    faults = [*path_faults, *gpu_faults(request, run.config, options.instance_type)]
    job = _job(request, options, sha256, _image(options, build, region), faults)
    faults += rule_faults(job)
    told = {fault.split()[0].rstrip(":") for fault in faults}
    # One line for each option is enough.
    by_model = [] if options.local else request_faults(job.request())
    if faults := [*faults, *(fault for fault in by_model if fault.split()[0].rstrip(":") not in told)]:
        raise UsageError(*dict.fromkeys(faults))
    prepared = PreparedTraining(
        name=job.name,
        output=job.places.run.uri if not options.local else str(local_root(job.name) / "checkpoints"),
        text="",
        details={"region": region, **({"profile": options.profile} if options.profile else {})},
        job=job,
        staged=staged,
        config=config,
        region=region,
        profile=options.profile,
        build=build,
        is_local=options.local,
        wait_shows_output=True,
    )
    shown = replace(prepared, text=_shown(prepared, size_bytes))
    return replace(shown, run_here=partial(run_local, shown)) if options.local else shown


def _loaded(request: Request, options: SageMakerOptions) -> Run[Any]:
    """The config, which resumes from what the run's prefix holds, if it saves anything."""
    is_large = request.nodes > 1
    if is_large and options.local:
        raise UsageError(f"{request.nodes} nodes: --local runs one container, which is one node")
    if is_large and options.file_system is None:
        raise UsageError(
            f"{request.nodes} nodes: they share a directory, and instances do not: give --file-system "
            "fsx:ID:/PATH (or efs:…), or take medarc_slurm, --to ray or --to kubernetes"
        )
    owned = {"launcher": "ray"} if is_large else {}
    run = request.load(Path(RUN_DIR), owned)
    if request.kind != "eval":
        refuse_other_launcher(run.config, "ray" if is_large else "local", request.given.words)
    if options.spot and not run.checkpoints and request.kind != "eval":
        raise UsageError("--spot: the run would start again each time: add a [ckpt] table, or --ckpt.interval N")
    if run.resume_step not in (None, AUTO) and not request.output_dir:
        asked = "the newest step" if run.resume_step == LATEST else f"step {run.resume_step}"
        raise UsageError(
            f"resume from {asked}: a new job begins with an empty directory; name the earlier run's, as in "
            "--output-dir s3://BUCKET/PREFIX/JOB/run, which `medarc_jobs list` shows"
        )
    if run.resume_step is None and run.checkpoints:
        return request.load(Path(RUN_DIR), {**owned, "ckpt.resume_step": "auto"})
    return run


def _check_start(run: Run[Any], project: Path) -> None:
    """Keys that are not built and files that are missing. The image has its own packages."""
    from prime_rl.checks import NotInstalled, start_faults
    from prime_rl.configs.surface.not_built import unbuilt_faults

    missing = [fault for fault in start_faults(run.config, project) if not isinstance(fault, NotInstalled)]
    if faults := [*unbuilt_faults(run.config), *missing]:
        raise UsageError(*faults)


def _config_of(run: Run[Any], project: Path, staged: Staged) -> tuple[str, list[str]]:
    import tomli_w

    from prime_rl.utils.pydantic_config import to_toml

    table, faults = relocated(tomllib.loads(to_toml(run.config, exclude=_launch_keys(run.config))), project, staged)
    return tomli_w.dumps(table), faults


def _launch_keys(config: Any) -> list[str]:
    """Keys about this launch, which the job's config does not have."""
    return [key for key in ("slurm", "dry_run", "clean_output_dir") if key in type(config).model_fields]


def _image(options: SageMakerOptions, build: ImageBuild | None, region: str) -> str:
    if build is not None and options.image is not None:
        raise UsageError("--image and --build: give one of them")
    if build is not None:
        return _NOT_BUILT.format(region=region, repository=build.repository, tag=build.tag)
    if not options.image:
        raise UsageError("no image: give --image URI, one with this package installed, or --build")
    return options.image


def _job(request: Request, options: SageMakerOptions, sha256: str, image: str, faults: list[str]) -> TrainingJob:
    """The job, and in `faults` one line for each option that cannot be read. Such a job must not be sent."""
    if request.name is not None and (fault := name_fault(request.name)):
        faults.append(fault)
    if not options.local:
        faults += _missing(options)
    env = plain_variables(options.env, faults, "give --secret-env {name}=ARN")
    tags = pairs("--tag", options.tag, faults, "write NAME=VALUE, as in --tag team=radiology", str)
    inputs = input_channels(options.input, faults)
    secrets = _collected(faults, references, options.secret_env) or {}
    root = _collected(faults, S3Prefix.of, options.s3 or _NO_PLACE) or S3Prefix.of(_NO_PLACE)
    run = None if not request.output_dir else _collected(faults, _run_prefix, request.output_dir)
    if options.max_wait is not None and not options.spot:
        faults.append("--max-wait belongs to --spot: add it, or leave --max-wait out")
    name = request.name or opaque_name(time.time())
    limit_s = options.deadline or LIMIT_S
    return TrainingJob(
        name=name,
        command=request.kind,
        source_sha256=sha256,
        image=image,
        role=options.role or "",
        places=JobPlaces(root.below(name), run),
        instance_type=options.instance_type or "",
        volume_gb=options.volume_gb,
        limit_s=limit_s,
        wait_s=_wait_s(options, limit_s),
        single_gpu=bool(request.split and request.split.single_gpu),
        env=env,
        secrets=secrets,
        inputs=inputs,
        tags=tags,
        subnets=options.subnet,
        security_groups=options.security_group,
        kms_key=options.kms_key,
        nodes=request.nodes,
        file_system=None if options.file_system is None else _collected(faults, FileSystem.of, options.file_system),
    )


def _missing(options: SageMakerOptions) -> Iterator[str]:
    if not options.role:
        yield f"--role: missing; give the ARN of the job's role, or export {ROLE_VARIABLE}"
    if not options.s3:
        yield f"--s3: missing; give s3://BUCKET/PREFIX, or export {S3_VARIABLE}"
    if not options.instance_type:
        yield "--instance-type: missing; give one, as in --instance-type ml.g5.2xlarge"


def _wait_s(options: SageMakerOptions, limit_s: int) -> int | None:
    if not options.spot:
        return None
    return 2 * limit_s if options.max_wait is None else options.max_wait


def _run_prefix(text: str) -> S3Prefix:
    if not text.startswith("s3://"):
        raise UsageError(f"--output-dir {text}: the job's disk is lost; name an s3:// prefix, or leave it out")
    return S3Prefix.of(text, "--output-dir")


def _collected(faults: list[str], read: Any, value: Any) -> Any:
    """The result, or None with its faults added."""
    try:
        return read(value)
    except UsageError as error:
        faults.extend(error.faults)
        return None


def gpu_faults(request: Request, config: Any, instance_type: str | None) -> list[str]:
    """A run that takes more GPUs than the instance has."""
    available = None if not instance_type else gpus_of(instance_type)
    if available is None or config.device == "cpu":
        return []
    wanted = _gpus_of(request, config)
    if available == 0:
        cuda = [f'device = "cuda": {instance_type} has no GPU; take one such as ml.g5.2xlarge']
        return cuda if config.device == "cuda" else []
    if wanted <= available:
        return []
    larger = smallest_with(wanted, family_of(instance_type or ""))
    advice = f"; take {larger}" if larger else ""
    shared = ", or --single-gpu" if request.kind == "rl" and available == 1 and wanted == 2 else ""
    plural = "" if available == 1 else "s"
    return [f"--instance-type {instance_type} has {available} GPU{plural}, and the run takes {wanted}{advice}{shared}"]


def _gpus_of(request: Request, config: Any) -> int:
    """Of one instance."""
    if request.nodes > 1:
        return max(demands.gpus_of(config, single_gpu=False))
    if request.split is not None:
        return request.split.total + frozen_gpus(config)
    return sft_gpus(config) if request.kind == "sft" and request.gpus != 0 else request.gpus or 0


def _shown(prepared: PreparedTraining, size_bytes: int) -> str:
    """What `--dry-run` prints."""
    job, table = prepared.job, dict[str, Any]()
    if prepared.build is not None:
        table["build"] = prepared.build.plan(job.image.partition("/")[0])
    if not prepared.is_local:
        table["upload"] = {"to": job.places.archive.uri, "sha256": job.source_sha256, "bytes": size_bytes}
    table["files"] = {name: file.size_bytes for name, file in prepared.staged.files.items()}
    table["left_out"] = list(prepared.staged.left_out)
    table["config"] = tomllib.loads(prepared.config)
    if prepared.is_local:
        table["run"] = LocalContainer(job, local_root(job.name), os.environ).argv()
    else:
        table["create_training_job"] = {"region": prepared.region, **job.request()}
    return json.dumps(table, indent=2, ensure_ascii=True)


def local_root(name: str) -> Path:
    """Where `--local` keeps what is /opt/ml in the container."""
    return Path("outputs").absolute() / "sagemaker" / name


def run_local(prepared: PreparedTraining) -> int:
    """Run the job's container here, and return its exit code. Raises MedarcError."""
    root = local_root(prepared.name)
    container = LocalContainer(prepared.job, root, os.environ)
    root.mkdir(parents=True, mode=0o700, exist_ok=True)
    with packed(prepared.staged, prepared.config) as bundle:
        container.lay_out(bundle)
    say(f"the run's directory: {prepared.output}")
    return container.run(say)
