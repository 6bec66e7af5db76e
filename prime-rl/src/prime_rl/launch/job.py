"""A job as a value: everything that one command starts. It can be printed, run here, or handed to a scheduler."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from prime_rl.launch.spec import ProcessSpec
from prime_rl.run.paths import RunPaths

if TYPE_CHECKING:
    from prime_rl.utils.pydantic_config import BaseSettings


@dataclass(frozen=True, slots=True)
class Resources:
    """Nodes and GPUs of a job."""

    nodes: int = 1
    gpus_per_node: int = 0
    """0 runs on CPUs."""


@dataclass(frozen=True, slots=True)
class Job:
    """The processes of one command, and what they need."""

    command: str
    """`sft`, `rl` or `eval`."""
    paths: RunPaths
    processes: tuple[ProcessSpec, ...]
    """In the order in which they start. They stop in the reverse order."""
    resources: Resources = field(default_factory=Resources)
    configs: Mapping[str, BaseSettings] = field(default_factory=dict)
    """Written to `OUT/configs` before the first process starts, by component."""
    headline: str = ""
    """Where the processes compute, in one line."""

    def process(self, name: str) -> ProcessSpec:
        """Raises KeyError for a name that the job does not have."""
        return {process.name: process for process in self.processes}[name]

    def describe(self) -> Iterator[str]:
        """One line for each process: the command that starts it."""
        return (process.describe() for process in self.processes)
