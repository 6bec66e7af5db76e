"""The CreateTrainingJob request of a run, the rules that SageMaker checks only after an upload, and the clients of AWS.

Every call of AWS has time limits and a bounded number of attempts, and every failure is one line.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

from medarc_rl.backends.options import VARIABLE, pairs
from medarc_rl.errors import MedarcError, UsageError
from prime_rl.storage.s3 import named_region

if TYPE_CHECKING:
    from botocore.model import Shape

# Calls of AWS.


EXTRA = "sagemaker"
_ADVICE: Mapping[str, str] = {
    "AccessDenied": "`medarc_submit sagemaker-policy` prints what is needed",
    "AccessDeniedException": "`medarc_submit sagemaker-policy` prints what is needed",
    "ExpiredToken": "log in again, for example with `aws sso login`",
    "ExpiredTokenException": "log in again, for example with `aws sso login`",
    "InvalidClientTokenId": "check AWS_PROFILE and the AWS_ACCESS_KEY_ID in use",
    "UnrecognizedClientException": "check AWS_PROFILE and the AWS_ACCESS_KEY_ID in use",
    "SignatureDoesNotMatch": "check AWS_SECRET_ACCESS_KEY",
    "ResourceLimitExceeded": "request a higher quota for this instance type in Service Quotas, or choose another type",
    "NoSuchBucket": "create the bucket, or give another one with --s3",
}


class AwsError(MedarcError):
    """A call failed. `code` is AWS's own, or empty if there was no answer."""

    def __init__(self, line: str, code: str = "") -> None:
        super().__init__(line)
        self.code = code


@dataclass(frozen=True, slots=True)
class Patience:
    """Limits of one call."""

    connect_s: float = 10.0
    read_s: float = 60.0
    attempts: int = 4
    """With a growing pause between them. Errors that another attempt cannot mend are not repeated."""


class Aws:
    """Makes clients, of one region and one profile."""

    def __init__(self, region: str | None, profile: str | None = None, patience: Patience | None = None) -> None:
        """Reads the user's AWS configuration. Contacts nobody.

        Raises:
            UsageError: boto3 is not installed, the profile is not there, or no region is known.
        """
        require_boto3()
        import boto3
        from botocore.exceptions import BotoCoreError

        try:
            self._session = boto3.session.Session(profile_name=profile, region_name=region or named_region(os.environ))
        except BotoCoreError as error:
            raise UsageError(_line(str(error))) from error
        found = self._session.region_name
        if not found:
            raise UsageError("no AWS region: give --region, as in --region eu-central-1, or export AWS_REGION")
        self.region: str = found
        self._patience = patience or Patience()

    def client(self, service: str) -> Any:
        """Raises UsageError for a region or an endpoint that cannot be one."""
        from botocore.config import Config
        from botocore.exceptions import BotoCoreError

        limits = self._patience
        config = Config(
            connect_timeout=limits.connect_s,
            read_timeout=limits.read_s,
            retries={"mode": "standard", "total_max_attempts": limits.attempts},
        )
        try:
            return self._session.client(service, config=config)
        except (BotoCoreError, ValueError) as error:
            raise UsageError(f"{service} in {self.region}: {_line(str(error))}") from error


def require_boto3() -> None:
    """Raises UsageError if the extra is not installed."""
    missing = [name for name in ("boto3", "pathspec") if importlib.util.find_spec(name) is None]
    if missing:
        raise UsageError(f"{missing[0]} is not installed: run `uv sync --inexact --extra {EXTRA}`")


@contextmanager
def calling(what: str) -> Iterator[None]:
    """Turn a failed call into one line that begins with `what`. Raises AwsError."""
    from boto3.exceptions import Boto3Error
    from botocore.exceptions import BotoCoreError, ClientError

    try:
        yield
    except ClientError as error:
        raise _refused(what, error.response.get("Error", {})) from error
    except Boto3Error as error:
        # A failed upload holds the refusal, in words that name a temporary file.
        if isinstance(error.__context__, ClientError):
            raise _refused(what, error.__context__.response.get("Error", {})) from error
        raise AwsError(f"{what}: {_line(str(error))}") from error
    except BotoCoreError as error:
        raise AwsError(f"{what}: {_line(str(error))}{_no_answer_advice(error)}") from error


def _refused(what: str, answer: Mapping[str, Any]) -> AwsError:
    code, message = str(answer.get("Code", "")), _line(str(answer.get("Message", "")))
    advice = f"; {_ADVICE[code]}" if code in _ADVICE else ""
    return AwsError(f"{what}: {code or 'refused'}{f': {message}' if message else ''}{advice}", code)


def _no_answer_advice(error: Exception) -> str:
    name = type(error).__name__
    if name in ("NoCredentialsError", "PartialCredentialsError", "CredentialRetrievalError"):
        return "; log in, for example with `aws sso login`, or set AWS_PROFILE"
    if name in ("EndpointConnectionError", "ConnectTimeoutError", "ConnectionClosedError", "ReadTimeoutError"):
        return "; check the network and --region"
    return ""


def _line(text: str) -> str:
    """One line without control characters."""
    return " ".join("".join(char if char.isprintable() else " " for char in text).split())


JOB_MODULE = "medarc_rl.backends.sagemaker.in_job"
SOURCE_CHANNEL = "source"
SHARES_GPUS = "single_gpu"
"""Hyperparameter, `1`: each GPU serves and trains, one or several. Named so in images of earlier versions, too."""
SHARED_CHANNEL = "shared"
"""SageMaker mounts the directory as the channel of this name."""
RUN_DIR = "/opt/ml/checkpoints"
"""The run's directory in the job. SageMaker copies what changes there to S3, and back when the job restarts."""
LONGEST_S = 28 * 86400
"""SageMaker's limit of a job's time. An account's own quota may be shorter."""
MOST_CHARS = 63
PATTERN = re.compile(r"[a-zA-Z0-9](-*[a-zA-Z0-9]){0,62}")
_RULE = f"letters, digits and inner hyphens, at most {MOST_CHARS} characters"
_TYPES = {"fsx": "FSxLustre", "efs": "EFS"}
_ID = re.compile(r"fs-[0-9a-f]{8,18}")
_FILE_SYSTEM_EXAMPLE = "as in --file-system fsx:fs-0123456789abcdef0:/mountname/runs"
_BUCKET = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")
_KEY = re.compile(r"[A-Za-z0-9!_.*'()/=+@,-]*")
_MOST_KEY_CHARS = 700
"""S3 allows 1024 bytes, and SageMaker appends names."""
_SECRETS_MANAGER = re.compile(r"arn:aws[a-z-]*:secretsmanager:[a-z0-9-]+:\d{12}:secret:[A-Za-z0-9/_+=.@-]+(#[\w.-]+)?")
_PARAMETER = re.compile(r"arn:aws[a-z-]*:ssm:[a-z0-9-]+:\d{12}:parameter/[A-Za-z0-9/_.-]+")
_SECRET_EXAMPLE = (
    "NAME=arn:aws:secretsmanager:REGION:ACCOUNT:secret:ID, with #KEY for one key of a JSON secret, or "
    "NAME=arn:aws:ssm:REGION:ACCOUNT:parameter/PATH"
)
_BY_SIZE: dict[str, dict[str, int]] = {
    # Sizes of a family that have more than one GPU; every other size has one.
    "p2": {"8xlarge": 8, "16xlarge": 16},
    "p3": {"8xlarge": 4, "16xlarge": 8},
    "p3dn": {"24xlarge": 8},
    "p4d": {"24xlarge": 8},
    "p4de": {"24xlarge": 8},
    "p5": {"48xlarge": 8},
    "p5e": {"48xlarge": 8},
    "p5en": {"48xlarge": 8},
    "p6-b200": {"48xlarge": 8},
    "p6-b300": {"48xlarge": 8},
    "p6e-gb200": {"36xlarge": 4},
    "g4dn": {"12xlarge": 4},
    "g5": {"12xlarge": 4, "24xlarge": 4, "48xlarge": 8},
    "g6": {"12xlarge": 4, "24xlarge": 4, "48xlarge": 8},
    "g6e": {"12xlarge": 4, "24xlarge": 4, "48xlarge": 8},
}
_TYPE = re.compile(r"ml\.(?P<family>[a-z0-9-]+)\.(?P<size>[a-z0-9]+)")
_WITHOUT_GPUS = re.compile(r"[cmrt]\d[a-z]*(-flex)?")
_SHOWN_CHARS = 80
OPTIONS: Mapping[str, str] = {
    "TrainingJobName": "--name",
    "RoleArn": "--role",
    "AlgorithmSpecification.TrainingImage": "--image",
    "ResourceConfig.InstanceType": "--instance-type",
    "ResourceConfig.InstanceCount": "--nodes",
    "ResourceConfig.VolumeSizeInGB": "--volume-gb",
    "ResourceConfig.VolumeKmsKeyId": "--kms-key",
    "OutputDataConfig.KmsKeyId": "--kms-key",
    "OutputDataConfig.S3OutputPath": "--s3",
    "CheckpointConfig.S3Uri": "--s3",
    "InputDataConfig[].ChannelName": "--input",
    "InputDataConfig[].DataSource.S3DataSource.S3Uri": "--input",
    "InputDataConfig": "--input",
    "InputDataConfig[].DataSource.FileSystemDataSource.FileSystemId": "--file-system",
    "InputDataConfig[].DataSource.FileSystemDataSource.DirectoryPath": "--file-system",
    "VpcConfig.SecurityGroupIds": "--security-group",
    "VpcConfig.SecurityGroupIds[]": "--security-group",
    "VpcConfig.Subnets": "--subnet",
    "VpcConfig.Subnets[]": "--subnet",
    "StoppingCondition.MaxRuntimeInSeconds": "--deadline",
    "StoppingCondition.MaxWaitTimeInSeconds": "--max-wait",
    "Tags": "--tag",
    "Tags[].Key": "--tag",
    "Tags[].Value": "--tag",
    "Environment": "--env",
    "Environment.key": "--env",
    "Environment.value": "--env",
    "HyperParameters.value": "--secret-env",
}
"""The option that sets a member of the request. `[]` is any item of a list."""
EXAMPLES: Mapping[str, str] = {
    "RoleArn": "arn:aws:iam::123456789012:role/medarc-training",
    "ResourceConfig.InstanceType": "ml.g5.2xlarge",
    "OutputDataConfig.S3OutputPath": "s3://BUCKET/PREFIX",
    "CheckpointConfig.S3Uri": "s3://BUCKET/PREFIX",
    "InputDataConfig[].DataSource.S3DataSource.S3Uri": "--input data=s3://BUCKET/PREFIX",
    "InputDataConfig[].ChannelName": "--input data=s3://BUCKET/PREFIX",
    "VpcConfig.Subnets[]": "subnet-0123456789abcdef0",
    "VpcConfig.SecurityGroupIds[]": "sg-0123456789abcdef0",
    "Environment.key": "--env OMP_NUM_THREADS=8",
    "Tags[].Key": "--tag team=radiology",
}


@dataclass(frozen=True, kw_only=True)
class TrainingJob:
    """Everything that decides the request."""

    name: str
    command: str
    """`sft`, `rl` or `eval`."""
    source_sha256: str
    image: str
    role: str
    prefixes: JobPrefixes
    instance_type: str
    nodes: int = 1
    volume_gb: int = 100
    limit_s: int = 86400
    """Longest time that the job may run, in seconds."""
    wait_s: int | None = None
    """Spot: longest time that the job may run and wait for capacity, in seconds. None does not use spot capacity."""
    shares_gpus: bool = False
    """Each GPU serves and trains (`rl` only)."""
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
        """The values that the job reads about itself. The console shows them; they reveal nothing of the experiment."""
        values = {"command": self.command, "source_sha256": self.source_sha256}
        if self.shares_gpus:
            values[SHARES_GPUS] = "1"
        if self.file_system is not None:
            values |= {"run": self.name, "upload_to": self.prefixes.run.uri}
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
            "OutputDataConfig": {"S3OutputPath": self.prefixes.output.uri, **key},
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
            request["CheckpointConfig"] = {"S3Uri": self.prefixes.run.uri, "LocalPath": RUN_DIR}
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
        uris = {SOURCE_CHANNEL: f"{self.prefixes.source.uri}/", **self.inputs}
        shared = [] if self.file_system is None else [self.file_system.channel()]
        return [*(_channel(name, uri) for name, uri in uris.items()), *shared]


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
    faults += [f"--env {name}: SageMaker sets this variable itself: choose another name" for name in reserved]
    faults += [
        f"--tag {name}: AWS reserves tag names that begin with aws: choose another name"
        for name in job.tags
        if name.lower().startswith("aws:")
    ]
    faults += [f"--env {name}: also given with --secret-env" for name in job.env if name in job.secrets]
    return faults


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


# Its parts: the name, prefixes on S3, a shared file system, secrets by reference, instance types.


def opaque_name(now_s: float, token: str | None = None) -> str:
    """`medarc-20260131-120000-1a2b3c4d`: the time in UTC, and random digits, so that no two submissions collide."""
    return f"medarc-{time.strftime('%Y%m%d-%H%M%S', time.gmtime(now_s))}-{token or secrets.token_hex(4)}"


def name_fault(name: str) -> str | None:
    """Why SageMaker would refuse a job's name, with the nearest name that it accepts."""
    # The pattern alone lets longer names through: it counts groups, in each of which hyphens are free.
    if len(name) <= MOST_CHARS and PATTERN.fullmatch(name):
        return None
    near = nearest_name(name)
    return f"--name {name!r}: SageMaker takes {_RULE}" + (f"; for example {near}" if near else "")


def nearest_name(name: str) -> str:
    """The name with everything else as hyphens, cut to the longest length. Empty if nothing is left."""
    return re.sub(r"[^a-zA-Z0-9]+", "-", name)[: MOST_CHARS + 1].strip("-")[:MOST_CHARS].strip("-")


@dataclass(frozen=True, slots=True)
class S3Prefix:
    bucket: str
    key: str
    """Without slashes at its ends; may be empty."""

    @classmethod
    def of(cls, uri: str, option: str = "--s3") -> S3Prefix:
        """Raises UsageError for anything but `s3://BUCKET` or `s3://BUCKET/PREFIX`."""
        scheme, _, rest = uri.partition("://")
        bucket, _, key = rest.partition("/")
        if scheme != "s3" or not bucket:
            raise UsageError(f"{option} {uri!r}: write s3://BUCKET/PREFIX")
        if not _BUCKET.fullmatch(bucket) or ".." in bucket:
            raise UsageError(
                f"{option}: {bucket!r} is not a bucket's name: 3 to 63 lower-case letters, digits, dots and hyphens"
            )
        if not _KEY.fullmatch(key) or len(key) > _MOST_KEY_CHARS:
            raise UsageError(
                f"{option}: the prefix {key[:80]!r} is longer than {_MOST_KEY_CHARS} characters, or has others than "
                "letters, digits and !_.*'()/=+@,-"
            )
        return cls(bucket, key.strip("/"))

    def below(self, *names: str) -> S3Prefix:
        return S3Prefix(self.bucket, "/".join(part for part in (self.key, *names) if part))

    @property
    def uri(self) -> str:
        return f"s3://{self.bucket}/{self.key}"


@dataclass(frozen=True, slots=True)
class JobPrefixes:
    """The prefixes of one job."""

    root: S3Prefix
    earlier_run: S3Prefix | None = None
    """The directory of an earlier job's run, which this job continues."""

    @property
    def source(self) -> S3Prefix:
        """A channel: SageMaker copies all of it into the job."""
        return self.root.below("source")

    @property
    def archive(self) -> S3Prefix:
        return self.source.below("source.tar.gz")

    @property
    def run(self) -> S3Prefix:
        """The run's directory, which SageMaker copies here while the job runs, and back when it restarts."""
        return self.earlier_run or self.root.below("run")

    @property
    def output(self) -> S3Prefix:
        return self.root.below("output")


def input_channels(words: Sequence[str], faults: list[str]) -> dict[str, str]:
    """`--input NAME=s3://BUCKET/PREFIX`, parsed: the prefix of each channel, as typed."""
    return pairs("--input", words, faults, "write NAME=s3://BUCKET/PREFIX", str)


@dataclass(frozen=True, slots=True)
class FileSystem:
    kind: str
    """`fsx` or `efs`."""
    id: str
    path: str
    """Path of the directory. On FSx it begins with the mount name of the file system."""

    @classmethod
    def of(cls, text: str) -> FileSystem:
        """Parse `KIND:ID:/PATH`. Raises UsageError."""
        kind, _, rest = text.partition(":")
        name, _, path = rest.partition(":")
        if kind not in _TYPES:
            raise UsageError(f"--file-system {text!r}: write fsx:ID:/PATH or efs:ID:/PATH, {_FILE_SYSTEM_EXAMPLE}")
        if _ID.fullmatch(name) is None:
            raise UsageError(
                f"--file-system {text!r}: {name!r} is not the id of a file system; write it {_FILE_SYSTEM_EXAMPLE}"
            )
        parts = path.split("/")
        if parts[0] or len(path) > 4096 or not path.isprintable() or not {".", ".."}.isdisjoint(parts):
            raise UsageError(
                f"--file-system {text!r}: the path begins with / and has no '..'; write it {_FILE_SYSTEM_EXAMPLE}"
            )
        if kind == "fsx" and not path.strip("/"):
            raise UsageError(
                f"--file-system {text!r}: a path on FSx begins with its mount name, {_FILE_SYSTEM_EXAMPLE}"
            )
        return cls(kind, name, path.rstrip("/") or "/")

    def channel(self) -> dict[str, Any]:
        """The channel of a CreateTrainingJob request."""
        source = {
            "FileSystemId": self.id,
            "FileSystemAccessMode": "rw",
            "FileSystemType": _TYPES[self.kind],
            "DirectoryPath": self.path,
        }
        return {"ChannelName": SHARED_CHANNEL, "DataSource": {"FileSystemDataSource": source}, "InputMode": "File"}


def references(words: Sequence[str]) -> dict[str, str]:
    """Variables and the ARNs of their values, from `--secret-env NAME=ARN`.

    Raises:
        UsageError: one line for each that is not a reference, without its value, which may be the secret itself.
    """
    faults: list[str] = []
    found = pairs("--secret-env", words, faults, f"write {_SECRET_EXAMPLE}", _reference, VARIABLE)
    if faults:
        raise UsageError(*faults)
    return found


def _reference(text: str) -> str | None:
    return text if _SECRETS_MANAGER.fullmatch(text) or _PARAMETER.fullmatch(text) else None


def resource_of(reference: str) -> str:
    """The ARN that a policy names: without the key of a JSON secret."""
    return reference.partition("#")[0]


def is_parameter(reference: str) -> bool:
    return _PARAMETER.fullmatch(reference) is not None


def resolved(names: Mapping[str, str]) -> dict[str, str]:
    """The values of references, as variables of an environment. Runs inside the job.

    Raises:
        MedarcError: one cannot be read, or has another form. The line holds the reference, never a value.
    """
    return {name: _value(name, reference) for name, reference in names.items()}


def _value(name: str, reference: str) -> str:
    aws = Aws(region=reference.split(":")[3])
    arn, _, key = reference.partition("#")
    if is_parameter(reference):
        with calling(f"secret {name}: ssm:GetParameter"):
            path = arn.partition(":parameter")[2]
            answer = aws.client("ssm").get_parameter(Name=path, WithDecryption=True)
            return str(answer["Parameter"]["Value"])
    with calling(f"secret {name}: secretsmanager:GetSecretValue"):
        text = aws.client("secretsmanager").get_secret_value(SecretId=arn).get("SecretString")
    if text is None:
        raise MedarcError(f"secret {name}: {arn} is binary; store text")
    return str(text) if not key else _of_key(name, arn, key, text)


def _of_key(name: str, arn: str, key: str, text: str) -> str:
    try:
        value = json.loads(text)[key]
    except (ValueError, KeyError, TypeError):
        # Without the cause, which quotes the secret.
        raise MedarcError(f"secret {name}: {arn} has no key {key!r}: store it as a JSON object with this key") from None
    return str(value)


def gpus_of(instance_type: str) -> int | None:
    """Number of GPUs of one instance; None if this table does not know the type."""
    match = _TYPE.fullmatch(instance_type)
    if match is None:
        return None
    if match["family"] in _BY_SIZE:
        return _BY_SIZE[match["family"]].get(match["size"], 1)
    return 0 if _WITHOUT_GPUS.fullmatch(match["family"]) else None


def smallest_with(gpus: int, family: str) -> str | None:
    """The smallest instance type of a family with at least so many GPUs."""
    sizes = sorted(_BY_SIZE.get(family, {}).items(), key=lambda item: (item[1], item[0]))
    return next((f"ml.{family}.{size}" for size, count in sizes if count >= gpus), None)


def family_of(instance_type: str) -> str:
    match = _TYPE.fullmatch(instance_type)
    return match["family"] if match else ""


# Rules that botocore's model of the API states. botocore itself checks only types and required members; names, lengths,


# ranges and lists of values come back from the service as an error, after the upload.


def request_faults(request: Mapping[str, Any]) -> list[str]:
    """One line for each value of a CreateTrainingJob request that the API does not take."""
    import botocore.session

    model = botocore.session.get_session().get_service_model("sagemaker")
    shape = model.operation_model("CreateTrainingJob").input_shape
    assert shape is not None
    return list(dict.fromkeys(_faults(shape, request, "")))


def _faults(shape: Shape, value: Any, path: str) -> Iterator[str]:
    where = f"{path}." if path else ""
    if shape.type_name == "structure":
        for name, member in value.items():
            yield from _faults(shape.members[name], member, f"{where}{name}")
    elif shape.type_name == "list":
        yield from _size_faults(shape, value, path, "items")
        for item in value:
            yield from _faults(shape.member, item, f"{path}[]")
    elif shape.type_name == "map":
        yield from _size_faults(shape, value, path, "entries")
        for key, item in value.items():
            yield from _faults(shape.key, key, f"{where}key")
            yield from _faults(shape.value, item, f"{where}value")
    elif shape.type_name == "string":
        yield from _text_faults(shape, value, path)
    elif shape.type_name in ("integer", "long"):
        yield from _number_faults(shape, value, path)


def _size_faults(shape: Shape, value: Sequence[Any], path: str, unit: str) -> Iterator[str]:
    most = shape.metadata.get("max")
    if most is not None and len(value) > most:
        yield f"{named(path)}: {len(value)} {unit}; SageMaker takes at most {most}"


def _text_faults(shape: Shape, value: str, path: str) -> Iterator[str]:
    rules = shape.metadata
    allowed, most = rules.get("enum"), rules.get("max")
    if allowed and value not in allowed:
        near = get_close_matches(value, allowed, 3)
        yield f"{named(path)} {_shown(value)}: SageMaker has no such value; nearest: {', '.join(near or allowed[:3])}"
    elif most is not None and len(value) > most:
        yield f"{named(path)} {_shown(value)}: {len(value)} characters; SageMaker takes at most {most}"
    elif len(value) < rules.get("min", 0) or not _fits(rules.get("pattern"), value):
        example = f"; write it as in {EXAMPLES[path]}" if path in EXAMPLES else ""
        yield f"{named(path)} {_shown(value)}: SageMaker does not take this{example}"


def _number_faults(shape: Shape, value: int, path: str) -> Iterator[str]:
    least, most = shape.metadata.get("min"), shape.metadata.get("max")
    if (least is not None and value < least) or (most is not None and value > most):
        nearest = least if least is not None and value < least else most
        yield f"{named(path)} {value}: SageMaker takes {least} to {most or 'any'}; nearest: {nearest}"


def _fits(pattern: str | None, value: str) -> bool:
    if pattern is None:
        return True
    # Java's character classes, which Python's `re` does not know.
    translated = pattern.replace(r"\p{L}\p{Z}\p{N}_", r"\w\s").replace(r"\p{Alnum}", "a-zA-Z0-9")
    return re.fullmatch(translated, value) is not None


def _shown(value: str) -> str:
    return repr(value if len(value) <= _SHOWN_CHARS else f"{value[:_SHOWN_CHARS]}...")


def named(path: str) -> str:
    """The option that sets a member, or else the member."""
    return OPTIONS.get(path, path)
