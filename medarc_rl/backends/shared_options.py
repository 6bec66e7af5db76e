"""Options that several back-ends of `medarc_submit` have."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

from typer import Option


@dataclass(frozen=True, kw_only=True)
class ImageOptions:
    image: Annotated[
        str | None,
        Option(help="kubernetes, sagemaker: image with this package installed; with a tag or a digest."),
    ] = None


@dataclass(frozen=True, kw_only=True)
class ContainerOptions(ImageOptions):
    """Of back-ends that start a container for each job."""

    env: Annotated[
        list[str],
        Option(metavar="NAME=VALUE", help="kubernetes, sagemaker: variable of the job, no secret; may be repeated."),
    ] = field(default_factory=list)
    secret_env: Annotated[
        list[str],
        Option(
            metavar="NAME=REFERENCE",
            help="kubernetes: variable from a key of a Secret, as NAME=SECRET/KEY; sagemaker: from Secrets Manager or "
            "Parameter Store, as NAME=ARN. May be repeated.",
        ),
    ] = field(default_factory=list)
    deadline: Annotated[
        int | None,
        Option(
            min=60,
            max=31_536_000,
            metavar="SECONDS",
            help="kubernetes, sagemaker: end the job after this time; on SageMaker by default after a day.",
        ),
    ] = None
