"""Saves and restores the orchestrator's checkpoints: progress and buffer state.

Every checkpoint of the trainer needs a counterpart here. The trainer saves at configured steps, but also when it is
stopped or the walltime is near, which can be any step. The counterpart takes a few kilobytes, so it is written at the
start of every step. It is deleted once the trainer has passed the step without saving it, unless `ckpt.interval`,
`ckpt.keep_last` and `ckpt.keep_interval` keep it.
"""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from prime_rl.configs.orchestrator import CheckpointConfig
from prime_rl.orchestrator.errors import OrchestratorError
from prime_rl.run.checkpoints import SavedSteps, kept_steps
from prime_rl.run.early_stop import History
from prime_rl.run.paths import OrchestratorPaths, RunPaths, stable_steps, step_of
from prime_rl.utils.contents import find_damage
from prime_rl.utils.errors import RunDirError
from prime_rl.utils.files import STABLE, remove_directory, replacing_directory, scratch_of
from prime_rl.utils.logger import get_logger
from prime_rl.utils.waiting import Wait

WEIGHTS_POLL_S = 0.2
QUIET_S = 10.0


@dataclass(slots=True)
class Progress:
    """Progress of the run."""

    step: int = 0
    """Next step to run, 0-based."""
    total_tokens: int = 0
    total_samples: int = 0
    total_problems: int = 0
    ledger_bytes: int | None = None
    """Size of the ledger at the checkpoint. None in checkpoints of older versions, which have no ledger."""
    history: History = field(default_factory=History)
    """What the rules of `[early_stop]` and of `ckpt.keep_best` look at."""
    metrics_bytes: int = 0
    """Size of the part of `metrics.jsonl` whose entropies are in `history`."""

    def advance(self, tokens: int, samples: int, problems: int) -> None:
        self.step += 1
        self.total_tokens += tokens
        self.total_samples += samples
        self.total_problems += problems


@dataclass(frozen=True, slots=True)
class Checkpoints:
    """The orchestrator's checkpoints, in `RUN/checkpoints/step_<s>/orchestrator/{progress,buffer}.json`."""

    run: RunPaths
    paths: OrchestratorPaths
    config: CheckpointConfig = field(default_factory=CheckpointConfig)
    only_published: bool = False
    """Whether only published weights can be loaded, not exports. True for LoRA and for NCCL broadcasts."""

    def save(self, progress: Progress, buffer_state: dict[str, Any]) -> None:
        target = self.paths.checkpoint(progress.step)
        with replacing_directory(target.parent) as scratch:
            part = scratch / target.name
            part.mkdir()
            (part / self.paths.saved_progress(progress.step).name).write_text(json.dumps(asdict(progress)))
            (part / self.paths.saved_buffer(progress.step).name).write_text(json.dumps(buffer_state))

    def load(self, step: int) -> tuple[Progress, dict[str, Any]]:
        """Load the progress and buffer state at the start of `step`.

        Raises:
            OrchestratorError: a file is missing, malformed, or differs from the one that was written.
        """
        part = self.paths.checkpoint(step)
        if fault := find_damage(part.parent):
            raise OrchestratorError(fault)
        try:
            saved = json.loads(self.paths.saved_progress(step).read_text())
            progress = Progress(**{**saved, "history": History.of(saved.get("history", {}))})
            return progress, json.loads(self.paths.saved_buffer(step).read_text())
        except (OSError, ValueError, TypeError) as error:
            raise OrchestratorError(f"cannot read the orchestrator's checkpoint {part}: {error}") from error

    def resolve(self, resume_step: int | None) -> int | None:
        """Return the step to resume from; None for a fresh start.

        Raises:
            OrchestratorError: the orchestrator has no checkpoint of that step, or there is nothing to resume.
        """
        saved = SavedSteps(self.run, self.paths)
        try:
            is_word = resume_step is not None and resume_step < 0
            step = saved.choose(resume_step).step if is_word else resume_step
        except RunDirError as error:
            raise OrchestratorError(str(error)) from error
        if step is not None and (fault := saved.missing_counterpart(step)):
            raise OrchestratorError(fault)
        return step

    def prune(self, version: int, newest: int) -> None:
        """Delete checkpoints before `version` that neither a trainer's checkpoint nor the config keeps.

        A checkpoint that the trainer still writes counts. `version` is the policy version, which the trainer has
        reached; `newest` is the step saved last.
        """
        steps = stable_steps(self.paths.checkpoints)
        # Partial directories first: one that is completed meanwhile is then found below, under its final name.
        kept = {step for step in steps if scratch_of(self.run.checkpoint(step)).is_dir()}
        kept |= {*_steps_in(self.run.checkpoints), *self._kept_by_config(steps, newest)}
        for step in steps:
            # One step of slack, because the trainer publishes a version before it saves it.
            if step < version - 1 and step not in kept:
                remove_directory(self.paths.checkpoint(step).parent)

    def _kept_by_config(self, steps: Iterable[int], newest: int) -> set[int]:
        interval = self.config.interval
        regular = [step for step in steps if interval and 0 < step <= newest and step % interval == 0]
        return kept_steps(regular, self.config.keep_last, self.config.keep_interval)

    def weights(self, version: int) -> Path | None:
        """Directory of a version's weights; None if they are not complete."""
        return next((path for path in self._weight_dirs(version) if (path / STABLE).is_file()), None)

    async def await_weights(
        self, version: int, timeout_s: float | None, key: str = "orchestrator.ckpt.wait_for_weights_timeout"
    ) -> Path:
        """Wait up to `timeout_s`, the value of `key`, for the trainer to publish a version. None does not wait.

        A resumed trainer publishes its version again after it has loaded its checkpoint. One that starts from an
        adapter publishes version 0.

        Returns:
            Directory of the weights.

        Raises:
            OrchestratorError: the weights are missing after `timeout_s`.
        """
        candidates = " or in ".join(str(path) for path in self._weight_dirs(version))
        wait = Wait(
            f"the weights of version {version} in {candidates}",
            "the trainer publishes them once it has loaded them; see its log",
            timeout_s or 0,
            key,
            QUIET_S,
        )
        while (path := self.weights(version)) is None:
            if timeout_s is None:
                raise OrchestratorError(
                    f"the weights of version {version} are not in {candidates}: to wait until the trainer publishes "
                    "them, set orchestrator.ckpt.wait_for_weights_timeout"
                )
            if wait.is_over():
                raise OrchestratorError(wait.fault)
            await asyncio.sleep(WEIGHTS_POLL_S)
        return path

    def _weight_dirs(self, version: int) -> list[Path]:
        published = self.paths.broadcast(version)
        return [published] if self.only_published else [published, self.run.weight(version)]


def remove_stale(run: OrchestratorPaths, start_step: int) -> None:
    """Delete batches of `start_step` and later, and the broadcasts and checkpoints that follow them.

    Call it before anything else: the trainer must not read an old batch, nor the orchestrator an old broadcast. A
    checkpoint stays if the trainer has saved its step, too. Without this, the next resume could combine a checkpoint
    of the earlier attempt with one that the trainer saves in this attempt, after other batches.
    """
    saved = set(stable_steps(RunPaths.from_orchestrator_dir(run.root).checkpoints))
    for parent, first, kept in (
        (run.rollouts, start_step, set()),
        (run.broadcasts, start_step + 1, set()),
        (run.checkpoints, start_step + 1, saved),
    ):
        for step in _steps_in(parent):
            if step >= first and step not in kept:
                get_logger().debug(f"Deleting {parent.name}/step_{step} of an earlier attempt")
                shutil.rmtree(parent / f"step_{step}", ignore_errors=True)


def remove_empty_broadcasts(run: OrchestratorPaths) -> None:
    """Delete broadcasts without weight files, which an attempt with `weight_broadcast.type = "nccl"` left."""
    for version in stable_steps(run.broadcasts):
        markers = {STABLE, run.broadcast_ready(version).name}
        if {file.name for file in run.broadcast(version).iterdir()} <= markers:
            shutil.rmtree(run.broadcast(version), ignore_errors=True)


def restore(config: CheckpointConfig, checkpoints: Checkpoints, step: int) -> tuple[Progress, dict[str, Any] | None]:
    """Load the progress, and the buffer state unless `skip_buffer` is set. `skip_progress` starts the counters
    again; evaluations stay, which decide what the best step is."""
    progress, buffer_state = checkpoints.load(step)
    if config.skip_progress:
        progress = replace(progress, total_tokens=0, total_samples=0, total_problems=0)
    return progress, None if config.skip_buffer else buffer_state


def _steps_in(parent: Path) -> Iterable[int]:
    if not parent.is_dir():
        return []
    return [step for child in parent.iterdir() if (step := step_of(child)) is not None]
