"""Which files of a run are copied to S3."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from prime_rl.run.paths import EvalPaths, RunPaths, stable_steps
from prime_rl.utils.files import DELETED, PARTIAL, TEMPORARY

_UNFINISHED = (PARTIAL, TEMPORARY, DELETED)


def small_files(paths: RunPaths, samples: bool) -> Iterator[Path]:
    """Everything but steps: metrics, logs, configs, receipts, and with `samples` the texts of rollouts."""
    run, evaluation = paths.orchestrator, EvalPaths(paths.root)
    texts = (*run.root.glob(f"{run.samples.name}*"), evaluation.results) if samples else ()
    trees = (
        *(paths.configs, paths.logs, paths.attempts, paths.traces, paths.slurm),
        *(run.logs, run.ledger, evaluation.settings, evaluation.summary),
        *(paths.status, paths.best_checkpoint),
        *sorted(paths.root.glob(f"{paths.metrics.stem}*{paths.metrics.suffix}")),
        *sorted(paths.control.glob("*.id")),
        *sorted(paths.control.glob("*.complete")),
        *texts,
    )
    for tree in trees:
        for path in sorted(tree.rglob("*")) if tree.is_dir() else (tree,):
            if path.is_file() and not path.is_symlink() and path.suffix not in _UNFINISHED:
                yield path


def step_directories(paths: RunPaths) -> list[Path]:
    """Complete steps, in the order in which they are copied: the newest checkpoint first, exported weights last."""
    run = paths.orchestrator
    # The orchestrator saves every step; only those that the trainer has saved too can be resumed.
    steps = list(reversed(stable_steps(paths.checkpoints)))
    counterparts = set(stable_steps(run.checkpoints))
    found: list[Path] = []
    for step in steps:
        found += [run.checkpoint(step).parent] if step in counterparts else []
        found.append(paths.checkpoint(step))
    return [*found, *(paths.weight(step) for step in reversed(stable_steps(paths.weights)))]
