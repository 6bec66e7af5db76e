"""Runs and inputs on S3, for commands that read files."""

from __future__ import annotations

from typing import TypeVar

from medarc_rl.cli import say
from medarc_rl.errors import UsageError
from prime_rl.storage.staging import StagingRefused, staged
from prime_rl.utils.pydantic_config import BaseSettings

ConfigT = TypeVar("ConfigT", bound=BaseSettings)


def with_local_inputs(config: ConfigT) -> ConfigT:
    """The config with local copies of the inputs on S3 that it names.

    Raises:
        UsageError: something cannot be downloaded.
    """
    try:
        return staged(config, say)
    except StagingRefused as error:
        raise UsageError(*error.faults) from error
