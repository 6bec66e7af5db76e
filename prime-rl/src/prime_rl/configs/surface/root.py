"""Parent of the root config classes."""

from typing import ClassVar

from prime_rl.configs.surface.hints import hint_for_renamed
from prime_rl.utils.pydantic_config import BaseSettings


class RootConfig(BaseSettings):
    """What a command reads: files, environment variables and arguments."""

    component: ClassVar[str] = ""
    """Name of this config in other configs, and first word of its keys in `not_built` and `renamed`."""

    @classmethod
    def advice_for_key(cls, key: str, as_flag: bool = False) -> str | None:
        return hint_for_renamed(cls, cls.component, key, as_flag)
