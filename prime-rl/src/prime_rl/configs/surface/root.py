"""Parent of the root config classes."""

import warnings
from collections.abc import Mapping
from typing import Any, ClassVar, Self

from pydantic import model_validator

from prime_rl.configs.surface.kinds import ROOTS, fault_of_file
from prime_rl.configs.surface.not_built import ignored_keys
from prime_rl.configs.surface.renamed import hint_for_renamed
from prime_rl.utils.pydantic_config import BaseSettings, ConfigWarning


class RootConfig(BaseSettings):
    """What a command reads: files, environment variables and arguments."""

    shortcuts: ClassVar[Mapping[str, str]] = {"resume": "ckpt.resume_step"}

    @model_validator(mode="after")
    def _warn_of_ignored_keys(self) -> Self:
        for text in ignored_keys(self):
            warnings.warn(text, ConfigWarning, stacklevel=2)
        return self

    @classmethod
    def fault_of_file(cls, name: str, data: Mapping[str, Any]) -> str | None:
        """What to do with a file that is a config of another command; None if it is not."""
        return fault_of_file(cls.component, name, data) if cls.component in ROOTS else None

    @classmethod
    def advice_for_key(cls, key: str, as_flag: bool = False) -> str | None:
        return hint_for_renamed(cls, cls.component, key, as_flag)
