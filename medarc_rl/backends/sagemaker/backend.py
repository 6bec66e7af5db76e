"""The SageMaker back-end: prepares and creates training jobs, and shows, follows and stops them later."""

from __future__ import annotations

import json
import os
import time
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from medarc_rl.backends.options import (
    LIMIT_S,
    ROLE_VARIABLE,
    S3_VARIABLE,
    SageMakerOptions,
    pairs,
    plain_variables,
    with_variables,
)
from medarc_rl.backends.protocol import Prepared, Request, Submitted
from medarc_rl.backends.sagemaker.docker import ImageBuild, LocalContainer, build_and_push, require_docker
from medarc_rl.backends.sagemaker.permissions import LOG_GROUP
from medarc_rl.backends.sagemaker.request import (
    RUN_DIR,
    Aws,
    AwsError,
    FileSystem,
    JobPrefixes,
    Patience,
    S3Prefix,
    TrainingJob,
    calling,
    family_of,
    gpus_of,
    input_channels,
    name_fault,
    opaque_name,
    references,
    request_faults,
    require_boto3,
    rule_faults,
    smallest_with,
)
from medarc_rl.backends.sagemaker.source_files import Staged, packed, relocated, stage
from medarc_rl.cli import say
from medarc_rl.deployment import GpuSplit
from medarc_rl.errors import MedarcError, UsageError
from medarc_rl.jobs import JobRecord, State, Status
from medarc_rl.utils import Run
from prime_rl.configs.areal import Launcher
from prime_rl.configs.ranges import AUTO, LATEST
from prime_rl.utils.gpus import MASK_VARIABLE

LOOK_EVERY_S = 10.0
"""Pause between two questions. Both services limit how often an account may ask."""
_LATE_LOOKS, _LATE_LOOK_EVERY_S = 3, 1.5
"""After a job's end, until so many looks brought nothing: CloudWatch shows lines seconds after they were written."""
_ENDS: Mapping[str, State] = {"Completed": "succeeded", "Failed": "failed", "Stopped": "cancelled"}
# Phases of a job in which no container runs yet.
_BEFORE_THE_RUN = ("Starting", "Pending", "LaunchingMLInstances", "PreparingTrainingStack")
_UPLOAD_PART_BYTES = 16 << 20
"""Size of the parts of an upload, which are repeated one by one if a connection breaks."""
_NO_PREFIX = "s3://local/runs"
"""Stands for the prefix of a job that is not sent."""
_NOT_BUILT = "ACCOUNT.dkr.ecr.{region}.amazonaws.com/{repository}:{tag}"
"""Stands for the image until ECR has given the account's number."""


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


class SageMaker:
    """Implements `Backend`."""

    def __init__(self, patience: Patience | None = None, pause: Callable[[float], object] = time.sleep) -> None:
        self._patience = patience
        self._pause = pause

    def prepare(self, request: Request) -> PreparedTraining:
        """Check the run and decide what would be sent. Contacts nobody, and writes only temporary files."""
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
        job = replace(job, env={**_gpus_of_run(request, run.config, options.instance_type), **job.env})
        faults += rule_faults(job)
        named = {fault.split()[0].rstrip(":") for fault in faults}
        # One line for each option is enough.
        by_model = [] if options.local else request_faults(job.request())
        if faults := [*faults, *(fault for fault in by_model if fault.split()[0].rstrip(":") not in named)]:
            raise UsageError(*dict.fromkeys(faults))
        prepared = PreparedTraining(
            name=job.name,
            output=job.prefixes.run.uri if not options.local else str(local_root(job.name) / "checkpoints"),
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

    def submit(self, prepared: PreparedTraining) -> Submitted:
        """Build and push the image, upload the project's files, create the job.

        Raises:
            UsageError: the name is taken.
            MedarcError: a step failed. Nothing runs then; the line says what was left in S3.
        """
        aws = Aws(prepared.region, prepared.profile, self._patience)
        for line in prepared.staged.left_out:
            say(f"left out: {line}")
        job = prepared.job
        if described(aws.client("sagemaker"), job.name) is not None:
            # Its files would be replaced, which it reads again when it restarts.
            raise UsageError(
                f"--name {job.name}: SageMaker already has a job with this name, and a name cannot be used again: give "
                "another one"
            )
        if prepared.build is not None:
            job = replace(job, image=build_and_push(prepared.build, aws, say))
        with packed(prepared.staged, prepared.config) as bundle:
            if bundle.sha256 != job.source_sha256:
                raise MedarcError("the project's files changed while they were checked; submit again")
            _upload(aws, job, bundle.path)
        try:
            return Submitted(_created(aws.client("sagemaker"), job))
        except AwsError as error:
            raise AwsError(
                f"{error}; no job was created; its uploaded files are still at {job.prefixes.archive.uri}", error.code
            ) from error

    def status(self, record: JobRecord) -> Status:
        return status_of(described(self._aws(record).client("sagemaker"), record.id))

    def logs(self, record: JobRecord, follow: bool) -> Iterator[str]:
        aws = self._aws(record)
        lines = JobLogs(aws.client("logs"), record.id)
        if not follow:
            return lines.new_lines()
        sagemaker = aws.client("sagemaker")
        return followed(lines, lambda: not status_of(described(sagemaker, record.id)).goes_on, self._pause)

    def cancel(self, record: JobRecord) -> None:
        with calling(f"sagemaker:StopTrainingJob {record.id}"):
            self._aws(record).client("sagemaker").stop_training_job(TrainingJobName=record.id)

    def _aws(self, record: JobRecord) -> Aws:
        return Aws(record.details.get("region"), record.details.get("profile"), self._patience)


def _upload(aws: Aws, job: TrainingJob, path: Path) -> None:
    from boto3.s3.transfer import TransferConfig

    archive = job.prefixes.archive
    encryption = {} if job.kms_key is None else {"ServerSideEncryption": "aws:kms", "SSEKMSKeyId": job.kms_key}
    with calling(f"upload to {archive.uri}"):
        aws.client("s3").upload_file(
            str(path),
            archive.bucket,
            archive.key,
            ExtraArgs={"Metadata": {"sha256": job.source_sha256}, **encryption},
            Config=TransferConfig(multipart_chunksize=_UPLOAD_PART_BYTES),
        )


def _created(sagemaker: Any, job: TrainingJob) -> str:
    try:
        with calling(f"sagemaker:CreateTrainingJob {job.name}"):
            sagemaker.create_training_job(**job.request())
    except AwsError as error:
        # An answer that was lost is asked for again, and the second request then finds the first one's job.
        found = described(sagemaker, job.name) if error.code == "ResourceInUse" else None
        if (found or {}).get("HyperParameters", {}).get("source_sha256") != job.source_sha256:
            raise
    return job.name


# Preparing.


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
    launcher: Launcher = "ray" if is_large else "local"
    owned = {"launcher": "ray"} if is_large else {}
    run = request.load(launcher, Path(RUN_DIR), owned)
    if options.spot and not run.checkpoints and request.kind != "eval":
        raise UsageError("--spot: the run would start again each time: add a [ckpt] table, or --ckpt.interval N")
    if run.resume_step not in (None, AUTO) and not request.output_dir:
        asked = "the newest step" if run.resume_step == LATEST else f"step {run.resume_step}"
        raise UsageError(
            f"resume from {asked}: a new job begins with an empty directory; name the earlier run's, as in "
            "--output-dir s3://BUCKET/PREFIX/JOB/run, which `medarc_jobs list` shows"
        )
    if run.resume_step is None and run.checkpoints:
        return request.load(launcher, Path(RUN_DIR), {**owned, "ckpt.resume_step": "auto"})
    return run


def _check_start(run: Run[Any], project: Path) -> None:
    """Refuse keys that are not supported and files that are missing. Packages are those of the image."""
    from prime_rl.checks import NotInstalled, start_faults
    from prime_rl.configs.surface.not_built import unbuilt_faults

    missing = [fault for fault in start_faults(run.config, project) if not isinstance(fault, NotInstalled)]
    if faults := [*unbuilt_faults(run.config), *missing]:
        raise UsageError(*faults)


def _config_of(run: Run[Any], project: Path, staged: Staged) -> tuple[str, list[str]]:
    import tomli_w

    from prime_rl.utils.pydantic_config import to_toml

    # Keys about this launch, which the job's config does not have.
    left_out = [key for key in ("slurm", "dry_run", "clean_output_dir") if key in type(run.config).model_fields]
    table, faults = relocated(tomllib.loads(to_toml(run.config, exclude=left_out)), project, staged)
    return tomli_w.dumps(table), faults


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
    root = _collected(faults, S3Prefix.of, options.s3 or _NO_PREFIX) or S3Prefix.of(_NO_PREFIX)
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
        prefixes=JobPrefixes(root.below(name), run),
        instance_type=options.instance_type or "",
        volume_gb=options.volume_gb,
        limit_s=limit_s,
        wait_s=_wait_s(options, limit_s),
        shares_gpus=request.shares_gpus,
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


def _gpus_of_run(request: Request, config: Any, instance_type: str | None) -> dict[str, str]:
    """The variable that names the GPUs of a run that takes fewer than the instance has. A launcher of RL uses exactly
    those that it sees."""
    available = None if not instance_type or request.nodes > 1 else gpus_of(instance_type)
    wanted = 0 if config.device == "cpu" else request.gpus_of_node(config)
    return {MASK_VARIABLE: ",".join(map(str, range(wanted)))} if available and 0 < wanted < available else {}


def gpu_faults(request: Request, config: Any, instance_type: str | None) -> list[str]:
    """A run that takes more GPUs than the instance has."""
    available = None if not instance_type else gpus_of(instance_type)
    if available is None or config.device == "cpu":
        return []
    wanted = request.gpus_of_node(config)
    if available == 0:
        cuda = [f'device = "cuda": {instance_type} has no GPU; take one such as ml.g5.2xlarge']
        return cuda if config.device == "cuda" else []
    if wanted <= available:
        return []
    larger = smallest_with(wanted, family_of(instance_type or ""))
    advice = f"; take {larger}" if larger else ""
    shared, split = "", request.split
    if split is not None and not split.shares_gpus and wanted - split.infer <= available:
        shared = f", or {GpuSplit(split.train, 1, shares_gpus=True).option}"
    plural = "" if available == 1 else "s"
    return [f"--instance-type {instance_type} has {available} GPU{plural}, and the run takes {wanted}{advice}{shared}"]


def _shown(prepared: PreparedTraining, size_bytes: int) -> str:
    """The text that `--dry-run` prints."""
    job, table = prepared.job, dict[str, Any]()
    if prepared.build is not None:
        table["build"] = prepared.build.plan(job.image.partition("/")[0])
    if not prepared.is_local:
        table["upload"] = {"to": job.prefixes.archive.uri, "sha256": job.source_sha256, "bytes": size_bytes}
    table["files"] = {name: file.size_bytes for name, file in prepared.staged.files.items()}
    table["left_out"] = list(prepared.staged.left_out)
    table["config"] = tomllib.loads(prepared.config)
    if prepared.is_local:
        table["run"] = LocalContainer(job, local_root(job.name), os.environ).argv()
    else:
        table["create_training_job"] = {"region": prepared.region, **job.request()}
    return json.dumps(table, indent=2, ensure_ascii=True)


def local_root(name: str) -> Path:
    """The directory that is /opt/ml in a `--local` container."""
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


# State and output, from SageMaker and CloudWatch.


def described(sagemaker: Any, name: str) -> Mapping[str, Any] | None:
    """SageMaker's description of a job; None if it has no job of this name. Raises AwsError."""
    try:
        with calling(f"sagemaker:DescribeTrainingJob {name}"):
            found: Mapping[str, Any] = sagemaker.describe_training_job(TrainingJobName=name)
            return found
    except AwsError as error:
        # AWS has no separate code for an unknown name.
        if error.code == "ResourceNotFound" or (error.code == "ValidationException" and "not" in str(error).lower()):
            return None
        raise


def status_of(job: Mapping[str, Any] | None) -> Status:
    """Waiting for an instance is `queued`; a job that ran out of time has failed, though SageMaker calls it stopped."""
    if job is None:
        return Status("unknown", "SageMaker has no job with this name in this region")
    status, phase = str(job.get("TrainingJobStatus", "")), str(job.get("SecondaryStatus", ""))
    detail = _detail(job, phase)
    if phase in ("MaxRuntimeExceeded", "MaxWaitTimeExceeded"):
        option = "--deadline" if phase == "MaxRuntimeExceeded" else "--max-wait"
        return Status("failed", f"{phase}: raise {option}; what was saved is in S3")
    if status in _ENDS:
        return Status(_ENDS[status], detail)
    if status in ("InProgress", "Stopping"):
        return Status("queued" if phase in _BEFORE_THE_RUN else "running", detail)
    return Status("unknown", f"SageMaker says {status!r}")


def _detail(job: Mapping[str, Any], phase: str) -> str:
    reason = " ".join(str(job.get("FailureReason", "")).split())
    if reason or job.get("TrainingJobStatus") in _ENDS:
        return reason or phase
    transitions = job.get("SecondaryStatusTransitions") or [{}]
    message = " ".join(str(transitions[-1].get("StatusMessage", "")).split())
    return ": ".join(part for part in (phase, message) if part)


class JobLogs:
    """The lines that a job's instances have written so far."""

    def __init__(self, logs: Any, name: str) -> None:
        self._logs = logs
        self._name = name
        self._tokens: dict[str, str] = {}

    def new_lines(self) -> Iterator[str]:
        """Lines since the last call. With several instances each line begins with its instance. Raises AwsError."""
        streams = self._streams()
        for stream in streams:
            # A stream is named JOB/INSTANCE-NUMBER.
            instance = stream.removeprefix(f"{self._name}/").rpartition("-")[0] or stream
            prefix = f"{instance}: " if len(streams) > 1 else ""
            yield from (f"{prefix}{line}" for line in self._of_stream(stream))

    def _streams(self) -> list[str]:
        with calling("logs:DescribeLogStreams"):
            try:
                pages = self._logs.get_paginator("describe_log_streams").paginate(
                    logGroupName=LOG_GROUP, logStreamNamePrefix=f"{self._name}/"
                )
                return sorted(str(each["logStreamName"]) for page in pages for each in page["logStreams"])
            except self._logs.exceptions.ResourceNotFoundException:
                return []  # the account has run no job yet

    def _of_stream(self, stream: str) -> Iterator[str]:
        while True:
            given = {"nextToken": self._tokens[stream]} if stream in self._tokens else {}
            with calling("logs:GetLogEvents"):
                page = self._logs.get_log_events(
                    logGroupName=LOG_GROUP, logStreamName=stream, startFromHead=True, **given
                )
            yield from (line for event in page["events"] for line in _lines(str(event["message"])))
            token = str(page["nextForwardToken"])
            # The same token again means that nothing more was written yet.
            if token == self._tokens.get(stream):
                return
            self._tokens[stream] = token


def followed(
    logs: JobLogs, has_ended: Callable[[], bool], pause: Callable[[float], object] = time.sleep
) -> Iterator[str]:
    """The lines of a job until it has ended, however long it runs."""
    quiet_looks = 0
    while True:
        ended = has_ended()
        number = 0
        for number, line in enumerate(logs.new_lines(), start=1):  # noqa: B007 - the count is used below
            yield line
        quiet_looks = 0 if number or not ended else quiet_looks + 1
        if quiet_looks >= _LATE_LOOKS:
            return
        pause(_LATE_LOOK_EVERY_S if ended else LOOK_EVERY_S)


def _lines(message: str) -> list[str]:
    # A progress bar's carriage returns would hide what was written before them.
    return message.replace("\r", "\n").splitlines() or [""]
