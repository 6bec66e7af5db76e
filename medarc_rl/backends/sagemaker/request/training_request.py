"""The CreateTrainingJob request of a run, as a value."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from medarc_rl.backends.sagemaker.request.file_systems import SHARED_CHANNEL, FileSystem
from medarc_rl.backends.sagemaker.request.s3_places import JobPlaces

JOB_MODULE = "medarc_rl.backends.sagemaker.job.in_job"
SOURCE_CHANNEL = "source"
RUN_DIR = "/opt/ml/checkpoints"
"""The run's directory in the job. SageMaker copies what changes there to S3, and back when the job restarts."""
LONGEST_S = 28 * 86400
"""SageMaker's limit of a job's time. An account's own quota may be shorter."""


@dataclass(frozen=True, kw_only=True)
class TrainingJob:
    """Everything that decides the request."""

    name: str
    command: str
    """`sft`, `rl` or `eval`."""
    source_sha256: str
    image: str
    role: str
    places: JobPlaces
    instance_type: str
    nodes: int = 1
    volume_gb: int = 100
    limit_s: int = 86400
    """Longest time that the job may run, in seconds."""
    wait_s: int | None = None
    """Spot: longest time that the job may run and wait for capacity, in seconds. None does not use spot capacity."""
    single_gpu: bool = False
    env: Mapping[str, str] = field(default_factory=dict)
    secrets: Mapping[str, str] = field(default_factory=dict)
    """Variables, and the ARNs of their values."""
    inputs: Mapping[str, str] = field(default_factory=dict)
    """Channels, and the S3 prefix of each."""
    tags: Mapping[str, str] = field(default_factory=dict)
    subnets: Sequence[str] = ()
    security_groups: Sequence[str] = ()
    kms_key: str | None = None
    file_system: FileSystem | None = None
    """With several nodes: holds the run's directory, which the run itself copies to S3."""

    def hyperparameters(self) -> dict[str, str]:
        """What the job reads about itself. The console shows it, so it tells nothing about the experiment."""
        values = {"command": self.command, "source_sha256": self.source_sha256}
        if self.single_gpu:
            values["single_gpu"] = "1"
        if self.file_system is not None:
            values |= {"run": self.name, "upload_to": self.places.run.uri}
        if self.secrets:
            values["secrets"] = json.dumps(dict(sorted(self.secrets.items())), separators=(",", ":"))
        return values

    def request(self) -> dict[str, Any]:
        """Ready for `create_training_job`."""
        key = {} if self.kms_key is None else {"KmsKeyId": self.kms_key}
        volume_key = {} if self.kms_key is None else {"VolumeKmsKeyId": self.kms_key}
        request: dict[str, Any] = {
            "TrainingJobName": self.name,
            "RoleArn": self.role,
            "AlgorithmSpecification": {
                "TrainingImage": self.image,
                "TrainingInputMode": "File",
                "ContainerEntrypoint": ["python", "-m", JOB_MODULE],
            },
            "HyperParameters": self.hyperparameters(),
            "InputDataConfig": self._channels(),
            "OutputDataConfig": {"S3OutputPath": self.places.output.uri, **key},
            "ResourceConfig": {
                "InstanceType": self.instance_type,
                "InstanceCount": self.nodes,
                "VolumeSizeInGB": self.volume_gb,
                **volume_key,
            },
            "StoppingCondition": {"MaxRuntimeInSeconds": self.limit_s},
            "EnableManagedSpotTraining": self.wait_s is not None,
        }
        if self.file_system is None:
            request["CheckpointConfig"] = {"S3Uri": self.places.run.uri, "LocalPath": RUN_DIR}
        if self.wait_s is not None:
            request["StoppingCondition"]["MaxWaitTimeInSeconds"] = self.wait_s
        if self.nodes > 1:
            request["EnableInterContainerTrafficEncryption"] = True
        if self.env:
            request["Environment"] = dict(self.env)
        if self.subnets or self.security_groups:
            request["VpcConfig"] = {"SecurityGroupIds": list(self.security_groups), "Subnets": list(self.subnets)}
        if self.tags:
            request["Tags"] = [{"Key": name, "Value": value} for name, value in self.tags.items()]
        return request

    def _channels(self) -> list[dict[str, Any]]:
        prefixes = {SOURCE_CHANNEL: f"{self.places.source.uri}/", **self.inputs}
        shared = [] if self.file_system is None else [self.file_system.channel()]
        return [*(_channel(name, uri) for name, uri in prefixes.items()), *shared]


def _channel(name: str, uri: str) -> dict[str, Any]:
    source = {"S3DataType": "S3Prefix", "S3Uri": uri, "S3DataDistributionType": "FullyReplicated"}
    return {"ChannelName": name, "DataSource": {"S3DataSource": source}, "InputMode": "File"}


def rule_faults(job: TrainingJob) -> list[str]:
    """Rules between values, and limits that the API's model does not state."""
    faults = []
    if bool(job.subnets) != bool(job.security_groups):
        faults.append("--subnet and --security-group belong together: give both, or neither")
    if not 60 <= job.limit_s <= LONGEST_S:
        nearest = min(max(job.limit_s, 60), LONGEST_S)
        faults.append(f"--deadline {job.limit_s}: SageMaker takes 60 to {LONGEST_S} s; nearest: {nearest}")
    if job.wait_s is not None and job.wait_s < job.limit_s:
        faults.append(f"--max-wait {job.wait_s} is shorter than the time that the job may run; nearest: {job.limit_s}")
    if job.volume_gb < 1 or job.volume_gb > 16384:
        faults.append(f"--volume-gb {job.volume_gb}: 1 to 16384; nearest: {min(max(job.volume_gb, 1), 16384)}")
    faults += _file_system_faults(job)
    if SOURCE_CHANNEL in job.inputs:
        faults.append(f"--input {SOURCE_CHANNEL}: this name is taken by the project's files; choose another one")
    for name, uri in job.inputs.items():
        if not uri.startswith("s3://") or len(uri) < len("s3://abc"):
            faults.append(f"--input {name}={uri}: write s3://BUCKET/PREFIX")
    reserved = [name for name in job.env if name.startswith(("SM_", "SAGEMAKER_", "TRAINING_JOB_"))]
    faults += [f"--env {name}: SageMaker sets variables of this name itself" for name in reserved]
    faults += [
        f"--tag {name}: AWS keeps names of tags that begin with aws: for itself" for name in job.tags if _is_aws(name)
    ]
    faults += [f"--env {name}: also given with --secret-env" for name in job.env if name in job.secrets]
    return faults


def _is_aws(tag: str) -> bool:
    return tag.lower().startswith("aws:")


def _file_system_faults(job: TrainingJob) -> list[str]:
    if job.file_system is None:
        return []
    faults = []
    if job.nodes == 1:
        faults.append(
            "--file-system belongs to several nodes: leave it out; a run on one keeps its directory on its disk"
        )
    if not job.subnets and not job.security_groups:
        faults.append("--file-system needs --subnet and --security-group: SageMaker mounts it through your network")
    if SHARED_CHANNEL in job.inputs:
        faults.append(f"--input {SHARED_CHANNEL}: this name is taken by --file-system; choose another one")
    return faults
