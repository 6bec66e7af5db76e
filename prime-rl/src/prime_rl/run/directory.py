"""Prepares the output directory of a launch, so that it does not read files of an earlier run."""

from __future__ import annotations

import itertools
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from prime_rl.run.paths import OrchestratorPaths, RunPaths, stable_steps, step_of
from prime_rl.utils.contents import STABLE, find_damage

if TYPE_CHECKING:
    from prime_rl.utils.pydantic_config import BaseSettings

KEEP_VARIABLE = "NEVER_CLEAN_OUTPUT_DIR"
"""If this environment variable is set, output directories are never cleaned."""

LATEST = -1
"""As a step to resume from: the latest."""

_NOT_CLEANED = frozenset({"configs", "slurm", "rl.sh", "sft.sh", "run.lock"})
"""Files that the batch job itself uses, and the lock. A launch overwrites its own."""

_SIGNS_OF_A_RUN = ("configs", "logs", "checkpoints", "weights", "metrics.jsonl")

_LAUNCH_KEYS = ("slurm", "dry_run", "clean_output_dir")


class OutputDirInUse(Exception):
    """The output directory holds the checkpoints of another run."""


class RunDirError(Exception):
    """The output directory cannot be used as asked."""


def check_run_dir(paths: RunPaths, resume_step: int | None, clean: bool = False) -> int | None:
    """Check the directory, without changing it, and return the step to resume from, if any.

    -1 becomes the newest step that trainer and orchestrator have both completed, or else the trainer's newest. Without
    any it stays -1, and the components start a new run.

    Raises:
        OutputDirInUse: a new run would find another run's checkpoints.
        RunDirError: the directory must not be cleaned, or the step to resume from does not exist or lacks a file.
    """
    if resume_step is not None:
        step = _resolve(paths, resume_step)
        if step != LATEST and (fault := find_damage(paths.checkpoint(step), hashes=False)):
            raise RunDirError(f"{fault}; {advice_for_damage(paths, step)}")
        return step
    if _is_to_be_cleaned(clean):
        _check_cleanable(paths.root)
    else:
        check_output_dir(paths, resuming=False)
    return None


def prepare_run_dir(paths: RunPaths, resume_step: int | None, clean: bool = False) -> None:
    """Remove files of an earlier run that a launch starting at `resume_step` would mistake for its own.

    A new run renames an existing `metrics.jsonl` to `metrics.<n>.jsonl`. A resumed run appends to it, and never cleans
    the directory.
    """
    if resume_step is None and _is_to_be_cleaned(clean):
        _clean(paths.root)
    _discard_stale(paths, resume_step)
    if resume_step is None:
        _set_aside(paths.metrics)


def write_configs(paths: RunPaths, configs: Mapping[str, BaseSettings]) -> None:
    """Write each component's resolved config to `OUT/configs`, without keys that only concern this launch."""
    from prime_rl.utils.pydantic_config import dump_toml

    for component, config in configs.items():
        exclude = [key for key in _LAUNCH_KEYS if key in type(config).model_fields]
        dump_toml(config, paths.config(component), exclude=exclude)


def _is_to_be_cleaned(clean: bool) -> bool:
    return clean and not os.environ.get(KEEP_VARIABLE)


def _check_cleanable(root: Path) -> None:
    precious = any(place.is_relative_to(root.resolve()) for place in (Path.cwd(), Path.home()))
    is_run = any((root / sign).exists() for sign in _SIGNS_OF_A_RUN)
    is_empty = not root.is_dir() or not {path.name for path in root.iterdir()} - {"run.lock"}
    if not is_empty and (precious or not is_run):
        raise RunDirError(f"{root} does not look like the directory of a run: delete it yourself if you mean it")


def _clean(root: Path) -> None:
    for entry in root.iterdir() if root.is_dir() else ():
        if entry.name in _NOT_CLEANED:
            continue
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            entry.unlink()


def latest_step(paths: RunPaths) -> int:
    """The newest step that trainer and orchestrator have both completed, or else the trainer's newest; or -1."""
    complete = stable_steps(paths.checkpoints)
    common = set(complete) & set(stable_steps(paths.orchestrator.checkpoints))
    return max(common or complete, default=LATEST)


def _resolve(paths: RunPaths, resume_step: int) -> int:
    complete = stable_steps(paths.checkpoints)
    if resume_step == LATEST:
        return latest_step(paths)
    if resume_step not in complete:
        there = ", ".join(map(str, complete)) or "none"
        raise RunDirError(
            f"no complete checkpoint {paths.checkpoint(resume_step)} to resume from; complete steps: {there}"
        )
    return resume_step


def advice_for_damage(paths: RunPaths, step: int) -> str:
    """What to do about a damaged checkpoint of `step`."""
    earlier = [other for other in stable_steps(paths.checkpoints) if other < step]
    if not earlier:
        return "there is no earlier checkpoint: start a new run in another directory"
    return f"continue from an earlier checkpoint with --ckpt.resume-step {earlier[-1]}"


def _discard_stale(paths: RunPaths, resume_step: int | None) -> None:
    """Remove batches from the first step on, policies newer than the one to start from, and control files."""
    run, first_step = paths.orchestrator, max(resume_step or 0, 0)
    oldest_stale_broadcast = 0 if resume_step is None else first_step + 1
    if resume_step is not None and _is_of_another_attempt(paths, first_step):
        oldest_stale_broadcast = first_step
    for directory in (paths.rollouts, run.control):
        if directory.exists():
            shutil.rmtree(directory)
    for parent, first_stale in ((run.rollouts, first_step), (run.broadcasts, oldest_stale_broadcast)):
        for directory in parent.glob("step_*"):
            # A name without a step is a write that a crash interrupted.
            step = step_of(directory)
            if step is None or step >= first_stale:
                shutil.rmtree(directory)


def _is_of_another_attempt(paths: RunPaths, step: int) -> bool:
    """Whether the policy of a step was published after the step was saved: a trainer publishes, then saves."""
    markers = (paths.orchestrator.broadcast(step) / STABLE, paths.checkpoint(step) / STABLE)
    if not all(marker.is_file() for marker in markers):
        return False
    published_ns, saved_ns = (marker.stat().st_mtime_ns for marker in markers)
    return published_ns > saved_ns


def _set_aside(metrics: Path) -> None:
    if metrics.exists():
        names = (metrics.with_name(f"{metrics.stem}.{number}{metrics.suffix}") for number in itertools.count(1))
        metrics.rename(next(name for name in names if not name.exists()))


def missing_counterpart(paths: RunPaths, run: OrchestratorPaths, step: int) -> str | None:
    """Why the orchestrator has nothing to continue from at a step that the trainer saved; None if it has."""
    saved = stable_steps(run.checkpoints)
    if step in saved:
        return None
    common = set(saved) & set(stable_steps(paths.checkpoints))
    advice = (
        f"resume from {max(common)}, the newest step that both have" if common else "start again in another directory"
    )
    return f"the trainer's checkpoint of step {step} has no counterpart {run.checkpoint(step)}: {advice}"


def check_output_dir(paths: RunPaths, resuming: bool) -> None:
    """Refuse to start a new run in a directory with another run's checkpoints.

    Raises:
        OutputDirInUse: `OUT/checkpoints` has entries and the run does not resume.
    """
    if resuming or not paths.checkpoints.is_dir() or not any(paths.checkpoints.iterdir()):
        return
    raise OutputDirInUse(
        f"{paths.root} holds the checkpoints of another run: choose another --output-dir, "
        "continue it with --ckpt.resume-step -1, or replace it with --clean-output-dir"
    )
