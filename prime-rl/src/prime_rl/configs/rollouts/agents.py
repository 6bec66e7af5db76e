"""The keys of an environment that runs an agent."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

EXTERNAL = "external"
"""As an agent: processes that somebody else starts."""

ROW_FILES = (".json", ".jsonl", ".parquet")
"""Ends of datasets that are files. Others are functions."""

Samples = Literal["interleaved", "separate"]


@dataclass(frozen=True, slots=True)
class AgentKeys:
    """What an environment with `agent` or `workflow` is made of."""

    target: str
    """`module:object`, or `external`."""
    dataset: str
    eval_dataset: str | None
    turn_discount: float
    samples: Samples
    timeout_s: float
    port: int | None
