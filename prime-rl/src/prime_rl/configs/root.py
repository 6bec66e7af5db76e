"""The parent of every root class: it knows which keys earlier and later versions had."""

from __future__ import annotations

from typing import ClassVar

from prime_rl.utils.pydantic_config import BaseSettings


class RootConfig(BaseSettings):
    """What a command reads: files, environment variables and arguments."""

    component: ClassVar[str] = ""
