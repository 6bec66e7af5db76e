"""What one program may use."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


class Limits(BaseModel):
    """Limits of one program. Its tests run in a process of their own, with the same limits."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    time_s: float = Field(10.0, gt=0, le=600)
    """Time on the clock. Then the process is killed."""
    memory_mb: int = Field(512, ge=64, le=65536)
    """Address space, Python's own included (about 30 MB)."""
    output_bytes: int = Field(1_000_000, ge=0, le=100_000_000)
    """What it may print. A program that prints more is killed."""
    threads: int = Field(32, ge=1, le=1024)
    """Threads, where they can be counted: in namespaces, and as a user of its own."""


def inside(limits: Limits) -> dict[str, int]:
    """The limits that the kernel keeps, as the process that forks programs takes them."""
    return {"cpu_s": int(limits.time_s) + 2, "memory_mb": limits.memory_mb, "threads": limits.threads}
