"""Options of `medarc_submit --to sagemaker`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, TypeVar

from typer import Option

from medarc_rl.backends.shared_options import ContainerOptions

LIMIT_S = 86400
"""Longest time of a job unless `--deadline` says otherwise, in seconds."""
REPOSITORY = "medarc-rl"
# Not read by Typer: with a variable set, the options would look given to other back-ends, which refuse them.
ROLE_VARIABLE = "MEDARC_SAGEMAKER_ROLE"
S3_VARIABLE = "MEDARC_SAGEMAKER_S3"


@dataclass(frozen=True, kw_only=True)
class AccountOptions:
    """Where and as whom jobs run. Imports nothing but Typer, because every help page needs it."""

    role: Annotated[
        str | None,
        Option(metavar="ARN", help=f"sagemaker: role that the job runs as; by default ${ROLE_VARIABLE}."),
    ] = None
    s3: Annotated[
        str | None,
        Option(
            metavar="s3://BUCKET/PREFIX",
            help="sagemaker: where sources, runs and outputs are kept, below it a prefix for each job; by default "
            f"${S3_VARIABLE}.",
        ),
    ] = None
    region: Annotated[str | None, Option(help="sagemaker: region; by default that of your AWS configuration.")] = None
    repository: Annotated[str, Option(help="sagemaker: ECR repository of --build.")] = REPOSITORY
    kms_key: Annotated[str | None, Option(help="sagemaker: key that encrypts outputs and the instance's volume.")] = (
        None
    )
    input: Annotated[
        list[str],
        Option(
            metavar="NAME=s3://…",
            help="sagemaker: S3 prefix that the job finds in /opt/ml/input/data/NAME; may be repeated.",
        ),
    ] = field(default_factory=list)
    subnet: Annotated[list[str], Option(help="sagemaker: subnet of the job; may be repeated.")] = field(
        default_factory=list
    )
    security_group: Annotated[list[str], Option(help="sagemaker: security group of the job; may be repeated.")] = field(
        default_factory=list
    )
    file_system: Annotated[
        str | None,
        Option(
            metavar="fsx:ID:/PATH|efs:ID:/PATH",
            help="sagemaker: directory that the instances of a run on several nodes share; needs --subnet.",
        ),
    ] = None


@dataclass(frozen=True, kw_only=True)
class SageMakerOptions(AccountOptions, ContainerOptions):
    profile: Annotated[str | None, Option(help="sagemaker: profile of your AWS configuration.")] = None
    instance_type: Annotated[str | None, Option(help="sagemaker: type of the instance, as ml.g5.2xlarge.")] = None
    volume_gb: Annotated[int, Option(help="sagemaker: disk of the instance, in GB.")] = 100
    spot: Annotated[
        bool, Option("--spot", help="sagemaker: take spare capacity; the run saves and continues when it is lost.")
    ] = False
    max_wait: Annotated[
        int | None,
        Option(metavar="SECONDS", help="sagemaker: with --spot, longest time in all; by default twice --deadline."),
    ] = None
    tag: Annotated[list[str], Option(metavar="NAME=VALUE", help="sagemaker: tag of the job; may be repeated.")] = field(
        default_factory=list
    )
    project_dir: Annotated[Path, Option(help="sagemaker: directory that is sent and that the job runs in.")] = Path()
    include: Annotated[
        list[str],
        Option(metavar="PATH", help="sagemaker: send this, though an ignore file names it; may be repeated."),
    ] = field(default_factory=list)
    max_upload_mb: Annotated[int, Option(min=1, max=100_000, help="sagemaker: refuse a larger project.")] = 256
    build: Annotated[
        bool, Option("--build", help="sagemaker: build the image with docker and push it to ECR, unless it is there.")
    ] = False
    build_extra: Annotated[
        list[str], Option(help="sagemaker: extra of this package in the image of --build, as vllm; may be repeated.")
    ] = field(default_factory=list)
    local: Annotated[
        bool, Option("--local", help="sagemaker: run the job's container here with docker, without AWS.")
    ] = False


@dataclass(frozen=True, kw_only=True)
class PolicyOptions(AccountOptions):
    """Of the command that prints the policies."""

    secret_env: Annotated[
        list[str], Option(metavar="NAME=ARN", help="Secret or parameter that jobs read; may be repeated.")
    ] = field(default_factory=list)
    config: Annotated[
        list[Path],
        Option(metavar="FILE", help="Config of such jobs: the places on S3 that it names count, too; may be repeated."),
    ] = field(default_factory=list)


AccountOptionsT = TypeVar("AccountOptionsT", bound=AccountOptions)


def with_variables(options: AccountOptionsT, env: Mapping[str, str]) -> AccountOptionsT:
    """The options, with what was not given from the environment."""
    return replace(
        options, role=options.role or env.get(ROLE_VARIABLE) or None, s3=options.s3 or env.get(S3_VARIABLE) or None
    )
