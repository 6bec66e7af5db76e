"""Copies runs, weights and inputs from S3, for commands that read files."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from medarc_rl.cli import say
from medarc_rl.errors import UsageError
from prime_rl.configs.storage import BadS3Name, S3Name
from prime_rl.run.paths import RunPaths
from prime_rl.storage import S3
from prime_rl.storage.copies import RemoteRun
from prime_rl.storage.staging import Listing, cache_root, local_copy, staged
from prime_rl.utils.errors import StagingRefused, StorageError
from prime_rl.utils.private import private_directory
from prime_rl.utils.pydantic_config import BaseSettings

ConfigT = TypeVar("ConfigT", bound=BaseSettings)


def local_run(run: Path) -> Path:
    """The directory of a run, for reading. Of one on S3, everything but checkpoints and weights is downloaded.

    Raises:
        UsageError: S3 holds no such run, or cannot be read.
    """
    try:
        name = S3Name.of(run)
        if name is None:
            return run
        root = _copy_of_run(name)
        remote = RemoteRun(S3.connect(), name, RunPaths(root))
        if remote.is_empty:
            raise UsageError(f"{name}: nothing is there")
        remote.mirror(lambda line: None)
    except (BadS3Name, StorageError, OSError) as error:
        raise UsageError(str(error)) from error
    return root


def local_weights(weights: str, steps: Sequence[int] | None, show: Callable[[str], None]) -> str:
    """The weights that a command line names. Of a run or a model on S3, the path of a local copy.

    Args:
        steps: of a run, those that are needed; None takes all.

    Raises:
        UsageError: S3 holds no such weights, or cannot be read.
    """
    try:
        name = S3Name.of(weights)
        if name is None:
            return weights
        s3, root = S3.connect(), _copy_of_run(name)
        remote = RemoteRun(s3, name, RunPaths(root))
        if not remote.is_run:
            return str(local_copy(s3, Listing.of(s3, name), cache_root(os.environ), show))
        remote.mirror(show)
        remote.fetch_weights(steps, show)
    except (BadS3Name, StorageError, OSError) as error:
        raise UsageError(str(error)) from error
    return str(root)


def _copy_of_run(name: S3Name) -> Path:
    """The directory in the cache for what is read of a run. Made if it is missing."""
    digest = hashlib.sha256(str(name).encode()).hexdigest()[:16]
    root = private_directory(cache_root(os.environ)) / "runs" / digest / (name.key.rpartition("/")[2] or name.bucket)
    root.mkdir(parents=True, exist_ok=True)
    return root


def with_local_inputs(config: ConfigT) -> ConfigT:
    """The config with local copies of the inputs on S3 that it names.

    Raises:
        UsageError: something cannot be downloaded.
    """
    try:
        return staged(config, say)
    except StagingRefused as error:
        raise UsageError(*error.faults) from error
