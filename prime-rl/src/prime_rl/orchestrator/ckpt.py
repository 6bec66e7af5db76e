"""Checkpoints of the orchestrator: progress and buffer, so that an interrupted run can resume.

Every checkpoint of the trainer needs a counterpart here. The trainer saves at its configured steps, and also when it is
told to stop or the walltime is near, which can be any step. The counterpart is a few kilobytes, so it is written at the
start of every step, and removed once the trainer has passed the step without saving it, unless `ckpt.interval`,
`ckpt.keep_last` and `ckpt.keep_interval` keep it.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from prime_rl.configs.orchestrator import CheckpointConfig
from prime_rl.orchestrator.errors import ResumeFault
from prime_rl.run.directory import missing_counterpart
from prime_rl.run.paths import OrchestratorPaths, RunPaths, stable_steps, step_of
from prime_rl.run.retention import kept_steps
from prime_rl.utils.files import STABLE, replacing_directory
from prime_rl.utils.logger import get_logger

LATEST = -1
WEIGHTS_POLL_S = 0.2


@dataclass(slots=True)
class Progress:
    """How far the run is. `step` is the next batch to make."""

    step: int = 0
    total_tokens: int = 0
    total_samples: int = 0
    total_problems: int = 0

    def advance(self, tokens: int, samples: int, problems: int) -> None:
        self.step += 1
        self.total_tokens += tokens
        self.total_samples += samples
        self.total_problems += problems


@dataclass(frozen=True, slots=True)
class Checkpoints:
    """The orchestrator's checkpoints: `RUN/checkpoints/step_<s>/orchestrator/{progress,buffer}.json`."""

    run: RunPaths
    paths: OrchestratorPaths
    config: CheckpointConfig = field(default_factory=CheckpointConfig)
    only_published: bool = False
    """Whether exports cannot stand for what the trainer publishes: an adapter, or weights that it sends itself."""

    def save(self, progress: Progress, buffer_state: dict[str, Any]) -> None:
        target = self.paths.checkpoint(progress.step)
        with replacing_directory(target.parent) as scratch:
            part = scratch / target.name
            part.mkdir()
            (part / "progress.json").write_text(json.dumps(asdict(progress)))
            (part / "buffer.json").write_text(json.dumps(buffer_state))

    def load(self, step: int) -> tuple[Progress, dict[str, Any]]:
        """Progress and buffer state as saved at the start of `step`.

        Raises:
            ResumeFault: they cannot be read.
        """
        part = self.paths.checkpoint(step)
        try:
            progress = Progress(**json.loads((part / "progress.json").read_text()))
            return progress, json.loads((part / "buffer.json").read_text())
        except (OSError, ValueError, TypeError) as error:
            raise ResumeFault(f"the orchestrator's checkpoint {part} cannot be read: {error}") from error

    def resolve(self, resume_step: int | None) -> int | None:
        """The step to resume from; None for a fresh start.

        The latest step is the trainer's latest: it is the trainer that holds the weights.

        Raises:
            ResumeFault: the orchestrator's part of that step is missing.
        """
        if resume_step is None:
            return None
        if resume_step == LATEST:
            saved = stable_steps(self.run.checkpoints)
            if not saved:
                get_logger().warning(f"No complete checkpoint in {self.run.checkpoints}: starting afresh")
                return None
            resume_step = saved[-1]
        if fault := missing_counterpart(self.run, self.paths, resume_step):
            raise ResumeFault(fault)
        return resume_step

    def prune(self, version: int, newest: int) -> None:
        """Remove the steps that nothing keeps: the trainer, now at `version` or later, has no checkpoint of them, and
        neither does the config keep them. `newest` is the step saved last."""
        steps = stable_steps(self.paths.checkpoints)
        kept = {*_steps_in(self.run.checkpoints), *self._kept_by_config(steps, newest)}
        for step in steps:
            # One step of slack: the trainer publishes a version before it saves it.
            if step < version - 1 and step not in kept:
                shutil.rmtree(self.paths.checkpoint(step).parent)

    def _kept_by_config(self, steps: Iterable[int], newest: int) -> set[int]:
        interval = self.config.interval
        regular = [step for step in steps if interval and 0 < step <= newest and step % interval == 0]
        return kept_steps(regular, self.config.keep_last, self.config.keep_interval)

    def weights(self, version: int) -> Path | None:
        """Where the weights of a version lie, or None."""
        return next((path for path in self._weight_places(version) if (path / STABLE).is_file()), None)

    async def await_weights(self, version: int, timeout_s: float | None) -> Path:
        """Wait up to `timeout_s` for the trainer to publish the weights of a version; None does not wait.

        A resumed trainer publishes its version again once it has loaded its checkpoint.

        Raises:
            ResumeFault: they are not there.
        """
        places = " or in ".join(str(place) for place in self._weight_places(version))
        deadline = time.monotonic() + (timeout_s or 0)
        while (path := self.weights(version)) is None:
            if timeout_s is None:
                raise ResumeFault(
                    f"the weights of version {version} are not in {places}: to wait for the trainer to publish them, "
                    "set orchestrator.ckpt.wait_for_weights_timeout"
                )
            if time.monotonic() > deadline:
                raise ResumeFault(f"the weights of version {version} do not appear in {places} within {timeout_s:g} s")
            await asyncio.sleep(WEIGHTS_POLL_S)
        return path

    def _weight_places(self, version: int) -> list[Path]:
        published = self.paths.broadcast(version)
        return [published] if self.only_published else [published, self.run.weight(version)]


def remove_stale(run: OrchestratorPaths, start_step: int) -> None:
    """Remove what an earlier life of this directory left for the steps that are about to run again.

    Call it first thing: the trainer must not find an old batch, nor this process an old broadcast.
    """
    for parent, first in ((run.rollouts, start_step), (run.broadcasts, start_step + 1)):
        for step in _steps_in(parent):
            if step >= first:
                get_logger().debug(f"Removing {parent.name}/step_{step} of an earlier start")
                shutil.rmtree(parent / f"step_{step}", ignore_errors=True)


def remove_offers(run: OrchestratorPaths) -> None:
    """Remove versions without files, which a start with `weight_broadcast.type = "nccl"` left: nobody can load them."""
    for version in stable_steps(run.broadcasts):
        markers = {STABLE, run.broadcast_ready(version).name}
        if {file.name for file in run.broadcast(version).iterdir()} <= markers:
            shutil.rmtree(run.broadcast(version), ignore_errors=True)


def restore(config: CheckpointConfig, checkpoints: Checkpoints, step: int) -> tuple[Progress, dict[str, Any] | None]:
    """Progress, and the buffer state unless the config skips it."""
    progress, buffer_state = checkpoints.load(step)
    if config.skip_progress:
        progress = Progress(step=step)
    return progress, None if config.skip_buffer else buffer_state


def _steps_in(parent: Path) -> Iterable[int]:
    if not parent.is_dir():
        return []
    return [step for child in parent.iterdir() if (step := step_of(child)) is not None]
