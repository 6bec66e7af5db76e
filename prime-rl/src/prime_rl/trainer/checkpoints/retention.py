"""Which of a run's checkpoints and exports stay on the disk, and which step was the best."""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path

from prime_rl.configs.trainer import CheckpointConfig
from prime_rl.run.paths import stable_steps
from prime_rl.run.retention import kept_steps
from prime_rl.utils.files import replacing_file
from prime_rl.utils.logger import get_logger


@dataclass(frozen=True, slots=True)
class Best:
    """The step with the lowest validation loss."""

    step: int
    val_loss: float

    @classmethod
    def read(cls, path: Path) -> Best | None:
        """What `write` left, if anything."""
        return cls(**json.loads(path.read_text())) if path.is_file() else None

    def write(self, path: Path) -> None:
        with replacing_file(path) as scratch:
            scratch.write_text(json.dumps(asdict(self)) + "\n")


class Retention:
    """Deletes the `step_<n>` directories that neither `keep_last` nor `keep_interval` keeps.

    Steps of an abandoned continuation, above the one resumed from, are no part of the run and stay as they are.
    """

    def __init__(self, config: CheckpointConfig, parent: Path) -> None:
        self.config = config
        self.parent = parent
        self.protected_step: int | None = None
        """A step that stays whatever the rules say."""
        resume_step = config.resume_step
        self.steps: set[int] = set()
        if resume_step is not None:
            self.steps = {step for step in stable_steps(parent) if resume_step == -1 or step <= resume_step}

    def keep(self, step: int) -> None:
        """Count `step` in, and delete what is due."""
        self.steps.add(step)
        kept = kept_steps(self.steps, self.config.keep_last, self.config.keep_interval)
        for old in sorted(self.steps - kept - {self.protected_step}):
            try:
                shutil.rmtree(self.parent / f"step_{old}")
            except OSError as error:
                get_logger().warning(f"could not delete an old checkpoint: {error}")
            self.steps.discard(old)
