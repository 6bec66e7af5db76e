"""Completes or removes what a run was writing or deleting when it was killed."""

from __future__ import annotations

import shutil
from pathlib import Path

from prime_rl.run.paths import EvalPaths, RunPaths
from prime_rl.utils.contents import find_damage
from prime_rl.utils.files import DELETED, PARTIAL, STABLE, TEMPORARY


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
            if not target.exists() and _is_whole(scratch):
                scratch.rename(target)
            else:
                shutil.rmtree(scratch)
    evaluation = EvalPaths(paths.root).results.parent
    for parent in (paths.root, paths.configs, paths.checkpoints, evaluation, run.root, run.control, run.samples):
        for file in parent.glob(f"*{TEMPORARY}"):
            file.unlink()


def _is_whole(directory: Path) -> bool:
    return (directory / STABLE).is_file() and find_damage(directory, hashes=False) is None
