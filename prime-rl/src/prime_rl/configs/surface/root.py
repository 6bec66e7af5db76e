"""The parent of every root class: it knows which keys earlier and later versions had."""

from typing import ClassVar

from prime_rl.configs.surface.renamed import new_name
from prime_rl.utils.pydantic_config import BaseSettings


class RootConfig(BaseSettings):
    """What a command reads: files, environment variables and arguments."""

    component: ClassVar[str] = ""
    """How other components call this one: the first word of its keys in `not_built` and `renamed`."""

    @classmethod
    def advice_for_key(cls, key: str) -> str | None:
        return new_name(cls.component, key)
