"""Decides which checkpoints and exports stay on disk: by age, by validation loss, and until they are evaluated."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import msgspec
import torch.distributed as dist

from prime_rl.configs.trainer import CheckpointConfig
from prime_rl.run.evaluations import EvaluatedSteps
from prime_rl.run.paths import RunPaths, stable_steps
from prime_rl.run.retention import kept_steps
from prime_rl.storage.holding import Hold
from prime_rl.trainer.process.errors import CheckpointError
from prime_rl.trainer.process.world import Process
from prime_rl.utils.files import remove_directory, replacing_file
from prime_rl.utils.logger import get_logger


@dataclass(frozen=True, slots=True)
class Best:
    """The step with the lowest validation loss."""

    step: int
    val_loss: float

    @classmethod
    def read(cls, path: Path) -> Best | None:
        """Read the record at `path`. None if the file does not exist.

        Raises:
            CheckpointError: the record is damaged.
        """
        if not path.exists():
            return None
        try:
            return msgspec.json.decode(path.read_bytes(), type=cls)
        except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise CheckpointError(
                f"{path} cannot be read ({error}): delete it, and the best step is chosen from here on"
            ) from error

    def write(self, path: Path) -> None:
        with replacing_file(path) as scratch:
            scratch.write_text(json.dumps(asdict(self)) + "\n")


class Retention:
    """Deletes `step_<n>` directories that neither `keep_last` nor `keep_interval` keeps.

    Without either, it keeps the newest `default_kept`; None keeps all.

    If a run resumes from an earlier step, later ones belong to an abandoned continuation and are left alone.
    With `hold`, steps that are not on S3 yet stay too.
    """

    def __init__(
        self, config: CheckpointConfig, parent: Path, default_kept: int | None, hold: Hold | None = None
    ) -> None:
        has_rule = config.keep_last is not None or config.keep_interval is not None
        self.keep_last = config.keep_last if has_rule else default_kept
        self.keep_interval = config.keep_interval
        self.parent = parent
        self.hold = hold
        self.protected_step: int | None = None
        """A step that is kept regardless of the rules."""
        self.left_to_others: Callable[[int], bool] = lambda step: False
        """Whether somebody else deletes a step that the rules no longer keep."""
        resume_step = config.resume_step
        self.steps: set[int] = set()
        if resume_step is not None:
            self.steps = {step for step in stable_steps(parent) if resume_step < 0 or step <= resume_step}

    def keep(self, step: int) -> None:
        """Add `step`, and delete the steps that the rules no longer keep."""
        self.steps.add(step)
        kept = kept_steps(self.steps, self.keep_last, self.keep_interval)
        old = {self.parent / f"step_{each}": each for each in sorted(self.steps - kept - {self.protected_step})}
        for directory in list(old) if self.hold is None else self.hold.released(list(old)):
            try:
                if not self.left_to_others(old[directory]):
                    remove_directory(directory)
            except OSError as error:
                get_logger().warning(f"could not delete an old checkpoint: {error}")
            self.steps.discard(old[directory])


@dataclass(frozen=True, slots=True)
class EvaluationQueue:
    """The exports that wait for an evaluation."""

    paths: RunPaths
    process: Process
    interval: int

    def is_due(self, step: int) -> bool:
        """Whether somebody waits for the weights after `step` updates. The same on all processes. Collective."""
        if step % self.interval != 0:
            return False
        # Read once: an evaluation may end at any time.
        found = [self.process.is_main and not self.paths.evaluation_lost.is_file()]
        if self.process.world_size > 1:
            dist.broadcast_object_list(found, src=0)
        return found[0]

    def leave(self, step: int) -> bool:
        """Let the evaluator delete an export. False if it waits for none or has evaluated it: then delete it here."""
        is_waited_for = step % self.interval == 0 and not self.paths.evaluation_lost.is_file()
        return is_waited_for and EvaluatedSteps(self.paths).leave(step)
