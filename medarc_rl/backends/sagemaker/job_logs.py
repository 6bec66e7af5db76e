"""State and output of a training job, from SageMaker and CloudWatch."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from medarc_rl.backends.sagemaker.aws_calls import AwsError, calling
from medarc_rl.backends.sagemaker.permissions import LOG_GROUP
from medarc_rl.jobs.record import State, Status

LOOK_EVERY_S = 10.0
"""Pause between two questions. Both services limit how often an account may ask."""
_LATE_LOOKS, _LATE_LOOK_EVERY_S = 3, 1.5
"""After a job's end, until so many looks brought nothing: CloudWatch shows lines seconds after they were written."""
_ENDS: Mapping[str, State] = {"Completed": "succeeded", "Failed": "failed", "Stopped": "cancelled"}
_BEFORE_THE_RUN = ("Starting", "Pending", "LaunchingMLInstances", "PreparingTrainingStack")


def described(sagemaker: Any, name: str) -> Mapping[str, Any] | None:
    """What SageMaker knows of a job; None if it knows none of this name. Raises AwsError."""
    try:
        with calling(f"sagemaker:DescribeTrainingJob {name}"):
            found: Mapping[str, Any] = sagemaker.describe_training_job(TrainingJobName=name)
            return found
    except AwsError as error:
        # There is no code of its own for this.
        if error.code == "ResourceNotFound" or (error.code == "ValidationException" and "not" in str(error).lower()):
            return None
        raise


def status_of(job: Mapping[str, Any] | None) -> Status:
    """Waiting for an instance is `queued`; a job that ran out of time has failed, though SageMaker calls it stopped."""
    if job is None:
        return Status("unknown", "SageMaker knows no job of this name in this region")
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
            prefix = f"{_instance(stream, self._name)}: " if len(streams) > 1 else ""
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
            # The same token again means that there is no more for now.
            if token == self._tokens.get(stream):
                return
            self._tokens[stream] = token


def _lines(message: str) -> list[str]:
    # A progress bar's carriage returns would hide what was written before them.
    return message.replace("\r", "\n").splitlines() or [""]


def _instance(stream: str, name: str) -> str:
    return stream.removeprefix(f"{name}/").rpartition("-")[0] or stream


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
