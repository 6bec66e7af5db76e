"""Parent of the root config classes."""

import warnings
from typing import Self

from pydantic import model_validator

from prime_rl.configs.surface.hints import hint_for_renamed
from prime_rl.configs.surface.not_built import ignored_keys
from prime_rl.utils.pydantic_config import BaseSettings, ConfigWarning


class RootConfig(BaseSettings):
    """What a command reads: files, environment variables and arguments."""

    @model_validator(mode="after")
    def _warn_of_ignored_keys(self) -> Self:
        for text in ignored_keys(self):
            warnings.warn(text, ConfigWarning, stacklevel=2)
        return self

    @classmethod
    def advice_for_key(cls, key: str, as_flag: bool = False) -> str | None:
        return hint_for_renamed(cls, cls.component, key, as_flag)
