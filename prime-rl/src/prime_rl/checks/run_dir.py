"""Finds faults of a run's directory: it cannot be written, or has no complete step to continue from."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from prime_rl.checks.start_dir import StartDir
from prime_rl.configs.ranges import LATEST
from prime_rl.configs.trainer import CheckpointConfig, beyond_end
from prime_rl.run.paths import RunPaths
from prime_rl.run.resume_point import SavedSteps
from prime_rl.run.resuming import changes_since
from prime_rl.utils.errors import RunDirError
from prime_rl.utils.files import unexpanded_advice
from prime_rl.utils.pydantic_config import BaseSettings


def output_fault(output_dir: Path, start: StartDir) -> str | None:
    """Why nothing can be written to `output_dir`; None if it can, or if that does not show from here."""
    if advice := unexpanded_advice(str(output_dir)):
        return f"output_dir = {output_dir}{advice}"
    root = start.find(output_dir).absolute()
    # A symbolic link that leads nowhere, or to itself, exists without a target.
    existing = next((path for path in (root, *root.parents) if path.exists() or path.is_symlink()), root)
    if not existing.is_dir():
        return f"output_dir = {output_dir}: {existing} is not a directory"
    is_known = start.is_here or existing in (root, root.parent)
    if is_known and not os.access(existing, os.W_OK | os.X_OK):
        return f"output_dir = {output_dir}: {existing} is not writable"
    return None


def latest_step_faults(ckpt: CheckpointConfig | None, max_steps: int | None, paths: RunPaths) -> Iterator[str]:
    """Why the latest checkpoint is beyond the end of the run. A step that the config names is checked with it."""
    if ckpt is not None and ckpt.resume_step == LATEST and not ckpt.skip_progress:
        yield from beyond_end(_step_of(ckpt, paths), max_steps)


def counterpart_faults(ckpt: CheckpointConfig | None, paths: RunPaths) -> Iterator[str]:
    """Why the orchestrator cannot continue from the trainer's checkpoint. Only a step that the trainer has counts."""
    saved = SavedSteps.of(paths)
    step = _step_of(ckpt, paths)
    if step is not None and step in saved.complete and (fault := saved.missing_counterpart(step)):
        yield fault


def changed_key_faults(
    ckpt: CheckpointConfig | None, paths: RunPaths, configs: Mapping[str, BaseSettings]
) -> Iterator[str]:
    """Keys of `configs`, by component, with a value that the checkpoint to resume from rules out."""
    step = _step_of(ckpt, paths)
    if step is not None:
        yield from changes_since(paths, step, configs).faults()


def _step_of(ckpt: CheckpointConfig | None, paths: RunPaths) -> int | None:
    """The step to resume from. None without one; why there is none is told when the directory is checked."""
    if ckpt is None or ckpt.resume_step is None or ckpt.resume_step >= 0:
        return None if ckpt is None else ckpt.resume_step
    try:
        return SavedSteps.of(paths).choose(ckpt.resume_step).step
    except RunDirError:
        return None
