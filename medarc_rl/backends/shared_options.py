"""Options that several back-ends of `medarc_submit` have."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from typer import Option


@dataclass(frozen=True, kw_only=True)
class ImageOptions:
    image: Annotated[
        str | None,
        Option(help="kubernetes, sagemaker: image with this package installed; with a tag or a digest."),
    ] = None
