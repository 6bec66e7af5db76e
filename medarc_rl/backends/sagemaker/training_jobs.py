"""The SageMaker back-end: submits training jobs and looks after them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from medarc_rl.backends.backend import Request, Submitted
from medarc_rl.backends.sagemaker.aws_calls import Aws, AwsError, Patience, calling
from medarc_rl.backends.sagemaker.images import build_and_push
from medarc_rl.backends.sagemaker.job_logs import JobLogs, described, followed, status_of
from medarc_rl.backends.sagemaker.prepared_training import PreparedTraining, prepared_training
from medarc_rl.backends.sagemaker.request.training_request import TrainingJob
from medarc_rl.backends.sagemaker.source.bundle import packed
from medarc_rl.cli import say
from medarc_rl.errors import MedarcError, UsageError
from medarc_rl.jobs.record import JobRecord, Status

_UPLOAD_PART_BYTES = 16 << 20


class SageMaker:
    """Implements `Backend`."""

    def __init__(self, patience: Patience | None = None, pause: Callable[[float], object] = time.sleep) -> None:
        self._patience = patience
        self._pause = pause

    def prepare(self, request: Request) -> PreparedTraining:
        return prepared_training(request)

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
            raise UsageError(f"--name {job.name}: SageMaker has such a job, and never forgets a name: give another one")
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
                f"{error}; no job was made; its files stay at {job.places.archive.uri}", error.code
            ) from error

    def status(self, record: JobRecord) -> Status:
        return status_of(described(self._aws(record).client("sagemaker"), record.id))

    def logs(self, record: JobRecord, follow: bool) -> Iterator[str]:
        aws = self._aws(record)
        lines = JobLogs(aws.client("logs"), record.id)
        if not follow:
            return lines.new_lines()
        sagemaker = aws.client("sagemaker")

        def has_ended() -> bool:
            state = status_of(described(sagemaker, record.id))
            return state.has_ended or state.state == "unknown"

        return followed(lines, has_ended, self._pause)

    def cancel(self, record: JobRecord) -> None:
        with calling(f"sagemaker:StopTrainingJob {record.id}"):
            self._aws(record).client("sagemaker").stop_training_job(TrainingJobName=record.id)

    def _aws(self, record: JobRecord) -> Aws:
        return Aws(record.details.get("region"), record.details.get("profile"), self._patience)


def _upload(aws: Aws, job: TrainingJob, path: Path) -> None:
    from boto3.s3.transfer import TransferConfig

    place = job.places.archive
    encryption = {} if job.kms_key is None else {"ServerSideEncryption": "aws:kms", "SSEKMSKeyId": job.kms_key}
    with calling(f"upload to {place.uri}"):
        aws.client("s3").upload_file(
            str(path),
            place.bucket,
            place.key,
            ExtraArgs={"Metadata": {"sha256": job.source_sha256}, **encryption},
            Config=TransferConfig(multipart_chunksize=_UPLOAD_PART_BYTES),
        )


def _created(sagemaker: Any, job: TrainingJob) -> str:
    try:
        with calling(f"sagemaker:CreateTrainingJob {job.name}"):
            sagemaker.create_training_job(**job.request())
    except AwsError as error:
        # An answer that was lost is asked for again, and the second request then finds the first one's job.
        if error.code != "ResourceInUse" or not _is_ours(sagemaker, job):
            raise
    return job.name


def _is_ours(sagemaker: Any, job: TrainingJob) -> bool:
    found = described(sagemaker, job.name) or {}
    return bool(found.get("HyperParameters", {}).get("source_sha256") == job.source_sha256)
