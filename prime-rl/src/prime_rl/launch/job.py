"""A job as a value: everything that one command starts. It can be printed, run here, or handed to a scheduler."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from prime_rl.launch.spec import ProcessSpec
from prime_rl.launch.stalling import StallLimits
from prime_rl.monitors.trace import trace_env
from prime_rl.run.attempts import PARTS, RESTORED_VARIABLE
from prime_rl.run.paths import RunPaths, stable_steps
from prime_rl.utils.logger import ATTEMPT_VARIABLE

if TYPE_CHECKING:
    from prime_rl.utils.pydantic_config import BaseSettings


COMMANDS = frozenset({"sft", "rl", "eval", "medarc_train"})
"""Programs that a person types. Others, such as a batch job's launcher, cannot be repeated with one more option."""

UV_VARIABLE = "UV_RUN_RECURSION_DEPTH"
"""`uv run` sets it."""


def command_prefix(env: Mapping[str, str]) -> str:
    """Words that a user types before the name of one of our programs, as this one was started."""
    return "uv run " if UV_VARIABLE in env else ""


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
    """`sft`, `dpo`, `rm`, `rl` or `eval`."""
    paths: RunPaths
    processes: tuple[ProcessSpec, ...]
    """In the order in which they start. They stop in the reverse order."""
    resources: Resources = field(default_factory=Resources)
    configs: Mapping[str, BaseSettings] = field(default_factory=dict)
    """Written to `OUT/configs` before the first process starts, by component."""
    headline: str = ""
    """Devices and nodes of the processes, in one line."""
    stopping: str = "stopping"
    """Effect of a signal on the processes, in one line."""
    stall_limits: StallLimits = field(default_factory=StallLimits)
    """When a process that makes no progress ends the job."""
    trace_mib: int | None = None
    """Size at which the trace of a process ends. None records no traces."""
    nodes: tuple[str, ...] = ()
    """Names of the nodes, in a job on several."""
    resume: tuple[str, ...] | None = None
    """Options that make the same command continue the job. None: it saves nothing to continue from."""

    @property
    def gpus(self) -> dict[str, tuple[str, ...]]:
        """The ids of each component's GPUs, on several nodes as `NODE:ID`. On a CPU they stand for processes."""
        found: dict[str, dict[str, None]] = {}
        for process in self.processes:
            where = f"{self.nodes[process.node]}:" if self.nodes else ""
            # Each rank of the trainer names the GPUs of all ranks on its node.
            component = "trainer" if process.rank else process.name
            found.setdefault(component, {}).update(dict.fromkeys(f"{where}{gpu}" for gpu in process.gpus))
        return {component: tuple(ids) for component, ids in found.items() if ids}

    def how_to_continue(self, argv: Sequence[str], env: Mapping[str, str]) -> str:
        """Tell how to continue the job that `argv` started, in one line or two."""
        if self.resume is None:
            return "no checkpoint was saved, because [ckpt] is not set: the run cannot be continued"
        if self.resume and not stable_steps(self.paths.checkpoints):
            return "no checkpoint was saved yet: start the run again"
        program = Path(argv[0]).name
        if program not in COMMANDS:
            return f"continue with {shlex.join(self.resume)}"
        words = (*_without(argv[1:], ("--resume", "--ckpt.resume-step") if self.resume else ()), *self.resume)
        return f"continue with\n  {command_prefix(env)}{shlex.join((program, *words))}"

    def in_attempt(self, number: int) -> Job:
        """The job with the number in its logs, and parts that report what they restored."""
        return replace(self, processes=tuple(self._in_attempt(process, number) for process in self.processes))

    def _in_attempt(self, process: ProcessSpec, number: int) -> ProcessSpec:
        restored = {RESTORED_VARIABLE: str(self.paths.restored(process.name))} if process.name in PARTS else {}
        traced = {} if self.trace_mib is None else trace_env(self.paths.trace(process.name), self.trace_mib)
        env = {**process.env, ATTEMPT_VARIABLE: str(number), **restored, **traced}
        return replace(process, attempt=number, env=env)

    def process(self, name: str) -> ProcessSpec:
        """Raises KeyError for a name that the job does not have."""
        return {process.name: process for process in self.processes}[name]

    def describe(self) -> Iterator[str]:
        """The shell commands that start the processes. Variables that all processes share come first."""
        common = self._common_env()
        if common:
            yield ""
            yield "# Every process"
            yield from (f"export {each}" for each in _assignments(common))
        first = None
        for process in self.processes:
            if first is not None and process.rank and process.argv == first.argv:
                differs = dict(process.typed_env.items() - first.typed_env.items())
                yield f"# {self._label(process)}: the same with {' '.join(_assignments(differs))}"
                continue
            first = process
            yield ""
            yield f"# {self._label(process)}"
            own = {name: value for name, value in process.typed_env.items() if name not in common}
            yield from (f"{each} \\" for each in _assignments(own))
            yield shlex.join(process.argv)

    def _common_env(self) -> dict[str, str]:
        """Variables that have the same value in all processes. Nothing for a single one."""
        first, *others = [process.typed_env for process in self.processes]
        same = {name: value for name, value in first.items() if all(env.get(name) == value for env in others)}
        return same if others else {}

    def _label(self, process: ProcessSpec) -> str:
        return f"{process.name} on {self.nodes[process.node]}" if self.nodes else process.name


def _assignments(env: Mapping[str, str]) -> list[str]:
    return [f"{name}={shlex.quote(env[name])}" for name in sorted(env)]


def _without(words: Sequence[str], options: Sequence[str]) -> Iterator[str]:
    """The words of a command line without these options and their values."""
    skip_value = False
    for word in words:
        name, equals, _ = word.replace("_", "-").partition("=")
        if name in options:
            skip_value = not equals
        elif skip_value:
            skip_value = False
        else:
            yield word
