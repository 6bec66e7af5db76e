"""What a user writes about a reward, and what is wrong with it."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, field_validator

DEFAULT_TIME_LIMIT_S = 15.0


OnTimeout = Literal["zero", "fail"]


class RewardFault(Exception):
    """A reward cannot be used: no such name, no such function, or one that cannot be called. The text is for users."""


class RewardSpec(BaseModel):
    """One part of the reward. A string alone is its `fn`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    fn: str
    """A registered name (`math`), or `package.module:function` (`package.module.function` works, too)."""
    weight: float = Field(1.0, allow_inf_nan=False)
    """Factor of this part in the reward. 0 only measures it."""
    args: dict[str, Any] = {}
    """Keyword arguments for the function, in addition to the row's columns. They win over columns of the same name."""
    timeout_s: float | None = Field(None, gt=0, le=3600)
    """Time limit of one call. Unset: the registered function's own, or 15 s."""
    on_timeout: OnTimeout | None = None
    """What a call at its time limit is: `zero`, a reward of 0, or `fail`, a failed reward. Unset: `zero` for a
    registered function, which is slow on strange answers only, and for AReaL's signature, as in AReaL; `fail` for
    others."""
    name: str | None = None
    """Name of the metric. Unset: the function's name."""

    @field_validator("fn")
    @classmethod
    def _names_something(cls, fn: str) -> str:
        if not re.fullmatch(r"[\w-]+|\w+(\.\w+)*[.:]\w+", fn):
            raise ValueError(f"{fn!r} is neither a registered name nor `package.module:function`")
        return fn

    @property
    def metric(self) -> str:
        return self.name or re.split(r"[.:]", self.fn)[-1].replace("-", "_")


def _from_text(value: object) -> object:
    return {"fn": value} if isinstance(value, str) else value


Reward = Annotated[RewardSpec, BeforeValidator(_from_text)]
"""A `RewardSpec`, or the name of its function."""
