"""Prepares the directory of a launch: refuses one in use, removes what an earlier run left, sets who may read it."""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from prime_rl.configs.ranges import AUTO
from prime_rl.configs.shared import FileAccess
from prime_rl.run.checkpoints import End, SavedSteps
from prime_rl.run.paths import EvalPaths, RunPaths, SamplesFile, step_of
from prime_rl.utils.contents import STABLE, find_damage
from prime_rl.utils.errors import RunDirError
from prime_rl.utils.files import DELETED, PARTIAL, TEMPORARY
from prime_rl.utils.private import home_directory

if TYPE_CHECKING:
    from prime_rl.utils.pydantic_config import BaseSettings

KEEP_VARIABLE = "NEVER_CLEAN_OUTPUT_DIR"
"""If this environment variable is set, output directories are never cleaned."""

_NOT_CLEANED = frozenset({"configs", "ray", "slurm", "rl.sh", "sft.sh", "run.lock"})
"""Files that the batch job itself uses, and the lock. A launch overwrites its own."""

_SIGNS_OF_A_RUN = ("configs", "logs", "checkpoints", "weights", "metrics.jsonl")

REPLACED = "replaced"
"""Name of the folder in `checkpoints` and `weights` for what a resume from an earlier step has replaced."""

_LAUNCH_KEYS = ("slurm", "dry_run", "clean_output_dir")
_NO_END = End()


class RunFinished(Exception):
    """The run has done all of its work, and `auto` leaves it at that. The message is for the user."""


def check_run_dir(paths: RunPaths, resume_step: int | None, clean: bool = False, end: End = _NO_END) -> int | None:
    """Check the directory, without changing it, and return the step to resume from. None starts a new run.

    `resume_step` is a step, -1 (`latest`) or -2 (`auto`).

    Raises:
        RunDirError: a new run would find another run's checkpoints.
        RunDirError: the directory must not be cleaned, or there is nothing to resume, or nothing left to do.
        RunFinished: there is nothing left to do, and `resume_step` is -2.
    """
    step = SavedSteps.of(paths).choose(resume_step).step
    if step is not None:
        _refuse_if_finished(paths, step, end, is_auto=resume_step == AUTO)
        return step
    if _is_to_be_cleaned(clean):
        _check_cleanable(paths.root)
    else:
        check_output_dir(paths, resuming=False)
    return None


def prepare_run_dir(paths: RunPaths, resume_step: int | None, clean: bool = False) -> None:
    """Remove files of an earlier run that a launch starting at `resume_step` would mistake for its own.

    A new run renames an existing `metrics.jsonl` to `metrics.<n>.jsonl`. A resumed run appends to it, never cleans the
    directory, and moves checkpoints and weights after `resume_step` to `checkpoints/replaced` and `weights/replaced`:
    they follow from other steps than the ones to come, and the next resume, a chat or an evaluation could otherwise
    take them for this run's. Kept rollouts of the steps that it repeats are removed; a new run renames those of another
    one to `samples.<n>`.
    """
    if resume_step is None and _is_to_be_cleaned(clean):
        _clean(paths.root)
    _discard_stale(paths, resume_step)
    if resume_step is None:
        set_aside(paths.metrics)
        set_aside(paths.orchestrator.samples)
    else:
        for saved in (paths.checkpoints, paths.orchestrator.checkpoints, paths.weights):
            _replace_after(resume_step, saved)
        _remove_repeated(paths.orchestrator.samples, resume_step)


def write_configs(paths: RunPaths, configs: Mapping[str, BaseSettings]) -> None:
    """Write each component's resolved config to `OUT/configs`, without keys that only concern this launch."""
    from prime_rl.utils.pydantic_config import dump_toml

    for component, config in configs.items():
        deployment = getattr(config, "deployment", None)
        # A deployment on several nodes is valid only with [slurm].
        kept = ("slurm",) if getattr(deployment, "type", None) == "multi_node" else ()
        exclude = [key for key in _LAUNCH_KEYS if key in type(config).model_fields and key not in kept]
        dump_toml(config, paths.config(component), exclude=exclude)


def _is_to_be_cleaned(clean: bool) -> bool:
    return clean and not os.environ.get(KEEP_VARIABLE)


def _check_cleanable(root: Path) -> None:
    precious = any(place.is_relative_to(root.resolve()) for place in (Path.cwd(), home_directory()))
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


def _refuse_if_finished(paths: RunPaths, step: int, end: End, is_auto: bool) -> None:
    finish = SavedSteps.of(paths).why_finished(step, end)
    if finish is None:
        return
    finished = f"the run in {paths.root} is finished: its last checkpoint is step {step}, and {finish.why}"
    if is_auto:
        raise RunFinished(f"{finished}; there is nothing left to do")
    raise RunDirError(f"{finished}; {finish.remedy} to continue it")


def _discard_stale(paths: RunPaths, resume_step: int | None) -> None:
    """Remove batches from the first step on, policies newer than the one to start from, control files, status and the
    record of an early end."""
    paths.status.unlink(missing_ok=True)
    paths.early_end.unlink(missing_ok=True)
    run, first_step = paths.orchestrator, max(resume_step or 0, 0)
    oldest_stale_broadcast = 0 if resume_step is None else first_step + 1
    if resume_step is not None and _is_of_another_attempt(paths, first_step):
        oldest_stale_broadcast = first_step
    for directory in (paths.rollouts, run.control):
        if directory.is_symlink():  # to another disk, where a launcher has put it
            _clean(directory)
        elif directory.exists():
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


def _replace_after(step: int, saved: Path) -> None:
    """Move what was saved after a step to `replaced`, in place of what an earlier resume moved there."""
    newer = [child for child in saved.glob("step_*") if (found := step_of(child)) is not None and found > step]
    for directory in newer:
        target = saved / REPLACED / directory.name
        target.parent.mkdir(exist_ok=True)
        if target.exists():
            shutil.rmtree(target)
        directory.rename(target)


def _remove_repeated(samples: Path, first_step: int) -> None:
    """Remove the kept rollouts of steps from `first_step` on, and of evaluations of later versions."""
    for file in SamplesFile.all_in(samples):
        if file.number > first_step or (file.kind == "step" and file.number == first_step):
            file.path.unlink()


def set_aside(target: Path) -> None:
    """Rename a file or folder of an earlier run to `<name>.<n>`."""
    if target.exists():
        target.rename(free_name(target))


def free_name(target: Path) -> Path:
    """The first `<name>.<n>` that does not exist."""
    names = (target.with_name(f"{target.stem}.{number}{target.suffix}") for number in itertools.count(1))
    return next(name for name in names if not name.exists())


def check_output_dir(paths: RunPaths, resuming: bool) -> None:
    """Refuse to start a new run in a directory with another run's checkpoints.

    Raises:
        RunDirError: `OUT/checkpoints` has entries, other than a save that did not end, and the run does not resume.
    """
    entries = paths.checkpoints.iterdir() if paths.checkpoints.is_dir() and not resuming else ()
    # The orchestrator may have recorded the best step before the trainer had saved it.
    if all(entry.suffix == PARTIAL or entry == paths.best_checkpoint for entry in entries):
        return
    raise RunDirError(
        f"{paths.root} holds the checkpoints of another run: choose another --output-dir, "
        "continue it with --resume latest, or replace it with --clean-output-dir"
    )


# What a run was writing or deleting when it was killed.


def settle(paths: RunPaths) -> None:
    """Leave only whole files and directories in a run's directory. The caller holds the run's lock.

    A directory that was complete, but did not have its name yet, gets it.
    """
    run = paths.orchestrator
    for parent in (paths.checkpoints, paths.weights, run.checkpoints, run.broadcasts):
        for deleted in parent.glob(f"step_*{DELETED}"):
            shutil.rmtree(deleted)
        for scratch in parent.glob(f"step_*{PARTIAL}"):
            target = scratch.with_suffix("")
            if not target.exists() and (scratch / STABLE).is_file() and find_damage(scratch, hashes=False) is None:
                scratch.rename(target)
            else:
                shutil.rmtree(scratch)
    evaluation = EvalPaths(paths.root).results.parent
    for parent in (paths.root, paths.configs, paths.checkpoints, evaluation, run.root, run.control, run.samples):
        for file in parent.glob(f"*{TEMPORARY}"):
            file.unlink()


# Who can read the files.


_UMASKS = {"owner": 0o077, "group": 0o027}


@contextlib.contextmanager
def files_readable_by(readers: FileAccess) -> Iterator[None]:
    """Create files and directories for these readers during the block, in this process and those it starts.

    Directories that exist already keep their mode.
    """
    previous = os.umask(_UMASKS["owner"])
    os.umask(_UMASKS.get(readers, previous))
    try:
        yield
    finally:
        os.umask(previous)
