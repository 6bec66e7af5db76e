"""`medarc_submit sagemaker-policy`: the least rights that a submission and its job need, as IAM policies."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from medarc_rl.backends.options import PolicyOptions, with_variables
from medarc_rl.backends.sagemaker.request import (
    Aws,
    FileSystem,
    S3Prefix,
    input_channels,
    is_parameter,
    references,
    resource_of,
)
from medarc_rl.cli import say
from medarc_rl.errors import UsageError
from prime_rl.configs.storage import BadS3Name
from prime_rl.storage.staging import WRITTEN_KEYS, s3_names
from prime_rl.utils.pydantic_config import ConfigError
from prime_rl.utils.pydantic_config.toml_files import read_files

VERSION = "2012-10-17"
"""The current version of the policy language, which is a date."""
LOG_GROUP = "/aws/sagemaker/TrainingJobs"
_ROLE = re.compile(r"arn:(?P<partition>aws[a-z-]*):iam::(?P<account>\d{12}):role/[A-Za-z0-9_+=,.@/-]+")
_PULL = ("ecr:BatchCheckLayerAvailability", "ecr:BatchGetImage", "ecr:GetDownloadUrlForLayer")
_PUSH = (
    *("ecr:CreateRepository", "ecr:CompleteLayerUpload", "ecr:InitiateLayerUpload", "ecr:PutImage"),
    "ecr:UploadLayerPart",
)
_NETWORK = (
    *("ec2:CreateNetworkInterface", "ec2:CreateNetworkInterfacePermission", "ec2:DeleteNetworkInterface"),
    *("ec2:DeleteNetworkInterfacePermission", "ec2:DescribeDhcpOptions", "ec2:DescribeNetworkInterfaces"),
    *("ec2:DescribeSecurityGroups", "ec2:DescribeSubnets", "ec2:DescribeVpcs"),
)


def print_policies(options: PolicyOptions) -> int:
    """Print the documents of `Rights` as JSON. Raises UsageError."""
    given = with_variables(options, os.environ)
    missing = [name for name, value in (("--role ARN", given.role), ("--s3 s3://BUCKET/PREFIX", given.s3)) if not value]
    if missing or given.role is None or given.s3 is None:
        raise UsageError(*(f"give {name}" for name in missing))
    faults: list[str] = []
    inputs = input_channels(given.input, faults)
    if faults:
        raise UsageError(*faults)
    named, outputs = prefixes_of(given.config)
    rights = Rights(
        role=given.role,
        region=Aws(given.region).region,
        root=S3Prefix.of(given.s3),
        repository=given.repository,
        inputs=[S3Prefix.of(uri, "--input") for uri in inputs.values()],
        named=named,
        outputs=outputs,
        secrets=list(references(given.secret_env).values()),
        kms_key=given.kms_key,
        in_vpc=bool(given.subnet or given.file_system),
        file_system=None if given.file_system is None else FileSystem.of(given.file_system),
    )
    say(json.dumps(rights.documents(), indent=2))
    return 0


def prefixes_of(files: Sequence[Path]) -> tuple[list[S3Prefix], list[S3Prefix]]:
    """The S3 prefixes that configs name: inputs, and destinations of copies of runs.

    Raises:
        UsageError: a file cannot be read, or S3 has no such names.
    """
    try:
        layers = read_files(files).layers
        names = [each for layer in layers for each in s3_names(layer.data)]
        found = {(key.rpartition(".")[2] in WRITTEN_KEYS, name) for key, name in names}
    except ConfigError as error:
        raise UsageError(*error.faults) from error
    except BadS3Name as error:
        raise UsageError(f"--config: {error}") from error
    written, read = (
        sorted(
            {S3Prefix(name.bucket, name.key) for is_written, name in found if is_written is chosen},
            key=lambda prefix: prefix.uri,
        )
        for chosen in (True, False)
    )
    return read, written


@dataclass(frozen=True, kw_only=True)
class Rights:
    """The resources that the policies allow access to."""

    role: str
    region: str
    root: S3Prefix
    repository: str
    inputs: Sequence[S3Prefix] = ()
    named: Sequence[S3Prefix] = ()
    """Inputs that configs name: prefixes or single objects."""
    outputs: Sequence[S3Prefix] = ()
    """Prefixes to which configs copy runs."""
    secrets: Sequence[str] = ()
    """ARNs of secrets and parameters."""
    kms_key: str | None = None
    in_vpc: bool = False
    file_system: FileSystem | None = None

    def __post_init__(self) -> None:
        if _ROLE.fullmatch(self.role) is None:
            raise UsageError(
                f"--role {self.role!r}: give the role's ARN, such as arn:aws:iam::123456789012:role/medarc-training"
            )

    def documents(self) -> dict[str, Any]:
        """The submitter's policy, the job role's policy, and who may assume the job's role."""
        return {
            "submitter": _document(self._submitter()),
            "job_role": _document(self._job_role()),
            "job_role_trust": _document([_trust()]),
        }

    def _arn(self, service: str, resource: str, region: str | None = None, account: str | None = None) -> str:
        _, partition, _, _, own_account, *_ = self.role.split(":")
        region = self.region if region is None else region
        account = own_account if account is None else account
        return f"arn:{partition}:{service}:{region}:{account}:{resource}"

    def _objects(self, prefix: S3Prefix) -> str:
        return self._arn("s3", "/".join(part for part in (prefix.bucket, prefix.key, "*") if part), "", "")

    def _submitter(self) -> list[dict[str, Any]]:
        jobs = self._arn("sagemaker", "training-job/*")
        repository = self._arn("ecr", f"repository/{self.repository}")
        actions = ("AddTags", "CreateTrainingJob", "DescribeTrainingJob", "StopTrainingJob")
        return [
            _allow("Jobs", [f"sagemaker:{name}" for name in actions], [jobs]),
            {
                **_allow("PassTheJobsRole", ["iam:PassRole"], [self.role]),
                "Condition": {"StringEquals": {"iam:PassedToService": "sagemaker.amazonaws.com"}},
            },
            _allow("UploadSources", ["s3:AbortMultipartUpload", "s3:PutObject"], [self._objects(self.root)]),
            _allow("ReadLogs", ["logs:DescribeLogStreams", "logs:GetLogEvents"], self._logs()),
            _allow("LogInToTheRegistry", ["ecr:GetAuthorizationToken"], ["*"]),
            _allow("PushTheImage", sorted((*_PULL, *_PUSH)), [repository]),
            *self._key_use(["kms:Decrypt", "kms:GenerateDataKey", "kms:CreateGrant", "kms:DescribeKey"]),
        ]

    def _job_role(self) -> list[dict[str, Any]]:
        readable = [self.root, *self.outputs, *self.inputs, *self.named]
        buckets = sorted({self._arn("s3", each.bucket, "", "") for each in readable})
        below = {"/".join(part for part in (each.key, "*") if part) for each in readable}
        prefixes = sorted(below | {each.key for each in self.named if each.key})
        written = (self.root, *self.outputs)
        written_buckets = sorted({self._arn("s3", each.bucket, "", "") for each in written})
        # A step that is replaced loses its marker first.
        writing = ["s3:AbortMultipartUpload", "s3:DeleteObject", "s3:GetObject", "s3:PutObject"]
        statements = [
            {
                **_allow("ListItsPrefixes", ["s3:ListBucket"], buckets),
                "Condition": {"StringLike": {"s3:prefix": prefixes}},
            },
            # It knows no condition on prefixes.
            _allow("FindPartsOfUploads", ["s3:ListBucketMultipartUploads"], written_buckets),
            _allow("ReadAndWriteRuns", writing, [self._objects(each) for each in written]),
        ]
        if self.inputs or self.named:
            objects = [self._arn("s3", f"{each.bucket}/{each.key}", "", "") for each in self.named if each.key]
            read = [*(self._objects(each) for each in (*self.inputs, *self.named)), *objects]
            statements.append(_allow("ReadInputs", ["s3:GetObject"], list(dict.fromkeys(read))))
        statements += [
            _allow("WriteLogs", ["logs:CreateLogGroup", "logs:CreateLogStream", "logs:PutLogEvents"], self._logs()),
            _allow("LogInToTheRegistry", ["ecr:GetAuthorizationToken"], ["*"]),
            _allow("PullTheImage", list(_PULL), [self._arn("ecr", f"repository/{self.repository}")]),
            {
                **_allow("ReportMetrics", ["cloudwatch:PutMetricData"], ["*"]),
                "Condition": {"StringLike": {"cloudwatch:namespace": "/aws/sagemaker/*"}},
            },
        ]
        parameters = sorted({resource_of(each) for each in self.secrets if is_parameter(each)})
        kept = sorted({resource_of(each) for each in self.secrets if not is_parameter(each)})
        if kept:
            statements.append(_allow("ReadSecrets", ["secretsmanager:GetSecretValue"], kept))
        if parameters:
            statements.append(_allow("ReadParameters", ["ssm:GetParameter"], parameters))
        if self.in_vpc:
            statements.append(_allow("JoinTheNetwork", list(_NETWORK), ["*"]))
        if self.file_system is not None:
            statements.append(self._mount(self.file_system))
        return [*statements, *self._key_use(["kms:Decrypt", "kms:GenerateDataKey", "kms:CreateGrant"])]

    def _mount(self, system: FileSystem) -> dict[str, Any]:
        if system.kind == "fsx":
            described = self._arn("fsx", f"file-system/{system.id}")
            return _allow("FindTheFileSystem", ["fsx:DescribeFileSystems"], [described])
        actions = ("ClientMount", "ClientRootAccess", "ClientWrite", "DescribeFileSystems", "DescribeMountTargets")
        mounted = self._arn("elasticfilesystem", f"file-system/{system.id}")
        return _allow("MountTheFileSystem", [f"elasticfilesystem:{name}" for name in actions], [mounted])

    def _logs(self) -> list[str]:
        group = self._arn("logs", f"log-group:{LOG_GROUP}")
        return [group, f"{group}:*"]

    def _key_use(self, actions: list[str]) -> list[dict[str, Any]]:
        if self.kms_key is None:
            return []
        key = self.kms_key if self.kms_key.startswith("arn:") else self._arn("kms", f"key/{self.kms_key}")
        return [_allow("UseTheKey", actions, [key])]


def _document(statements: list[dict[str, Any]]) -> dict[str, Any]:
    return {"Version": VERSION, "Statement": statements}


def _allow(name: str, actions: list[str], resources: list[str]) -> dict[str, Any]:
    return {"Sid": name, "Effect": "Allow", "Action": actions, "Resource": resources}


def _trust() -> dict[str, Any]:
    return {
        "Effect": "Allow",
        "Principal": {"Service": "sagemaker.amazonaws.com"},
        "Action": "sts:AssumeRole",
    }
