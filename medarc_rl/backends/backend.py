"""What a back-end does with a job: check it, submit it, and tell later what became of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar

from medarc_rl.deployment import GpuSplit
from medarc_rl.jobs.record import JobRecord, Status
from medarc_rl.utils import GivenConfig, OwnedKeys, Run, load_run

Kind = Literal["sft", "rl", "eval"]


@dataclass(frozen=True, kw_only=True)
class Request:
    """What the user asked for. The config was read, not validated; nothing was written or sent yet."""

    kind: Kind
    given: GivenConfig[Any]
    """The config as the command line names it, with `--resume`."""
    config: str
    """The TOML files, as typed."""
    name: str | None
    """`--name`. None lets the back-end choose."""
    output_dir: str | None
    """`--output-dir`, as typed."""
    resume: str | None = None
    """`--resume`, as typed. `given` holds it, too."""
    nodes: int
    split: GpuSplit | None = None
    """RL on one node: GPUs of the trainer and of inference. None for all others."""
    gpus: int | None = None
    """SFT: GPUs of a node. None leaves it to the config."""
    owned: OwnedKeys = field(default_factory=dict)
    """Keys of the config that the command's options set."""
    options: Any = None
    """The command's options: an instance of the back-end's own class of options."""

    def load(self, output_dir: Path | None = None, owned: OwnedKeys | None = None) -> Run[Any]:
        """Load the config, with this directory of the run. Raises UsageError, one line for each fault."""
        return load_run(self.given, self.kind, output_dir, {**self.owned, **(owned or {})})


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """A job that a back-end will take as it is. Back-ends add what they send."""

    name: str
    output: str
    text: str
    """What `--dry-run` prints: exactly what would be sent."""
    details: Mapping[str, str] = field(default_factory=dict)
    """For the job log: what the back-end needs to find the job again. No secret."""
    run_here: Callable[[], int] | None = None
    """Runs the job on this machine instead, and returns its exit code. None: it is submitted and recorded."""
    wait_shows_output: bool = False
    """Whether `--wait` prints the job's output as it comes."""


@dataclass(frozen=True, slots=True)
class Submitted:
    """A job that a back-end has taken."""

    id: str
    """How the back-end calls it."""
    details: Mapping[str, str] = field(default_factory=dict)
    """For the job log, besides those of `Prepared`: what was not known before. No secret."""


PreparedT = TypeVar("PreparedT", bound=Prepared)


class Tracker(Protocol):
    """Looks after jobs that were submitted. Each call has a time limit of its own."""

    def status(self, record: JobRecord) -> Status:
        """What became of a job. `unknown` if the back-end does not know it any more.

        Raises:
            MedarcError: the back-end did not answer.
        """
        ...

    def logs(self, record: JobRecord, follow: bool) -> Iterator[str]:
        """The lines of a job's output, without line ends. Following ends when the job does. Raises MedarcError."""
        ...

    def cancel(self, record: JobRecord) -> None:
        """Ask the back-end to end a job. Raises MedarcError if it refuses."""
        ...


class Backend(Tracker, Protocol[PreparedT]):
    """Also submits jobs."""

    def prepare(self, request: Request) -> PreparedT:
        """Check everything that can be known before anything is uploaded or queued.

        Raises:
            UsageError: one line for each fault.
        """
        ...

    def submit(self, prepared: PreparedT) -> Submitted:
        """Send a job. Raises MedarcError if the back-end refuses it."""
        ...
