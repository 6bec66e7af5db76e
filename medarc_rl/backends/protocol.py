"""The protocol of back-ends: what each does with a job, from the request to the end, and the back-ends by name.

A submission takes four values: a `Request` (what the user asked for), a `Prepared` (a job that passed all checks), a
`Submitted` (how the back-end calls it) and the job log's `JobRecord`, with which a `Tracker` finds it again later.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar

from medarc_rl.backends.options import KubernetesOptions, RayOptions, SageMakerOptions, SlurmOptions
from medarc_rl.errors import UsageError
from medarc_rl.jobs import JobRecord, Status

if TYPE_CHECKING:
    from medarc_rl.deployment import GpuSplit
    from medarc_rl.utils import GivenConfig, OwnedKeys, Run
    from prime_rl.configs.areal import Launcher

Kind = Literal["sft", "dpo", "rm", "rl", "eval"]

LAUNCHERS: Mapping[str, tuple[str, ...]] = {
    "sft": ("medarc_rl.launchers.sft_local",),
    "dpo": ("medarc_rl.launchers.sft_local", "dpo"),
    "rm": ("medarc_rl.launchers.sft_local", "rm"),
    "rl": ("medarc_rl.launchers.rl_local",),
    "eval": ("prime_rl.entrypoints.eval",),
}
"""The module that starts each kind of run on one node, and its words before the config. It chooses GPUs, ports and
scratch directories there."""
CONFIGS: Mapping[str, str] = {"sft": "trainer", "dpo": "dpo", "rm": "rm", "rl": "rl", "eval": "eval"}
"""Name of the resolved config in `OUT/configs` that the launcher reads."""
RAY_DRIVER = "medarc_rl.backends.ray.driver"
"""The module that runs a job on a Ray cluster: of `--to ray`, of KubeRay, and of SageMaker on several hosts."""
STOPS_ITSELF = "this Ray job stops itself, so that nothing starts it again"
"""A line that the Ray driver prints. It distinguishes a run that was refused from a job that somebody stopped."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """The user's request. The config has been read, not validated. Nothing has been written or sent yet."""

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
    program: str = "medarc_submit"
    """The command that the user typed, for the job log."""

    @property
    def shares_gpus(self) -> bool:
        return self.split is not None and self.split.shares_gpus

    def load(
        self, launcher: Launcher, output_dir: Path | None = None, owned: OwnedKeys | None = None, submits: bool = False
    ) -> Run[Any]:
        """Load the config, with this directory of the run.

        Args:
            launcher: what starts the run. A config that names another one is refused.
            output_dir: the run's directory. None leaves it to the config.
            owned: more keys that the back-end sets.
            submits: whether the config's `[slurm]` table counts.

        Raises:
            UsageError: one line for each fault.
        """
        # Imported here: the commands of the job log load no config, and would wait for these imports.
        from medarc_rl.deployment import sharing_faults
        from medarc_rl.utils import load_run, refuse_other_launcher

        run = load_run(self.given, self.kind, output_dir, {**self.owned, **(owned or {})}, submits)
        if self.split is not None and (faults := [*sharing_faults(run.config, self.split)]):
            raise UsageError(*faults)
        if self.kind != "eval":  # an evaluation runs on one node and names no launcher
            refuse_other_launcher(run.config, launcher, self.given.words)
        return run

    def gpus_of_node(self, config: Any) -> int:
        """GPUs that the run takes on each of its nodes. An evaluation takes those that were asked for.

        Raises:
            UsageError: a node does not have as many.
        """
        from medarc_rl.deployment import gpus_of_nodes

        if self.kind == "eval" or self.gpus == 0:
            return self.gpus or 0
        return max(gpus_of_nodes(config, self.shares_gpus))


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """A job that a back-end will take as it is. Back-ends add what they send."""

    name: str
    output: str
    text: str
    """Printed by `--dry-run`: exactly what would be sent."""
    details: Mapping[str, str] = field(default_factory=dict)
    """For the job log: values with which the back-end finds the job again. No secret."""
    is_dry_run: bool = False
    """Whether the config asks for a dry run."""
    run_here: Callable[[], int] | None = None
    """Runs the job on this machine instead, and returns its exit code. None: it is submitted and recorded."""
    wait_shows_output: bool = False
    """Whether `--wait` prints the job's output as it comes."""


@dataclass(frozen=True, slots=True)
class Submitted:
    """A job that a back-end has taken."""

    id: str
    """The back-end's id of the job. Empty if the back-end gave none; such a job is not recorded."""
    details: Mapping[str, str] = field(default_factory=dict)
    """For the job log, besides those of `Prepared`: values that were not known before. No secret."""
    lines: Sequence[str] = ()
    """For the user, in place of `submitted to BACKEND: ID`."""
    fault: str = ""
    """Why the submission failed all the same, which is reported once the job is recorded."""


PreparedT = TypeVar("PreparedT", bound=Prepared)


class Tracker(Protocol):
    """Looks after jobs that were submitted. Each call has a time limit."""

    def status(self, record: JobRecord) -> Status:
        """The state of a job. `unknown` if the back-end no longer knows it.

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

        Slurm's also writes config and script, which a dry run shows by their paths.

        Raises:
            UsageError: one line for each fault.
        """
        ...

    def submit(self, prepared: PreparedT) -> Submitted:
        """Send a job. Raises MedarcError if the back-end refuses it."""
        ...


OPTIONS: Mapping[str, type] = {
    "slurm": SlurmOptions,
    "kubernetes": KubernetesOptions,
    "ray": RayOptions,
    "sagemaker": SageMakerOptions,
}
"""The names that `medarc_submit --to` takes, and the options of each. Base classes hold options that several have."""

_CLASSES = {
    "slurm": "medarc_rl.backends.slurm.backend:Slurm",
    "ray": "medarc_rl.backends.ray.backend:Ray",
    "kubernetes": "medarc_rl.backends.kubernetes.backend:Kubernetes",
    "sagemaker": "medarc_rl.backends.sagemaker.backend:SageMaker",
}
"""Module and class of each back-end, imported only when it is used. The class is made without arguments."""


def backend(name: str) -> Backend[Any]:
    """A back-end by its name in `--to` or in the job log. Raises UsageError for one that this version does not have."""
    if name not in _CLASSES:
        raise UsageError(f"back-end {name!r}: known back-ends are {', '.join(_CLASSES)}")
    module, _, cls = _CLASSES[name].partition(":")
    found: Backend[Any] = getattr(importlib.import_module(module), cls)()
    return found
