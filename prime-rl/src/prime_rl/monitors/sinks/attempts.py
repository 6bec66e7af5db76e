"""Keeps the id that a sink gave a run, so that all attempts log to the same run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from prime_rl.utils.files import replacing_file
from prime_rl.utils.logger import get_logger


@dataclass(frozen=True, slots=True)
class Attempt:
    """Keeps the id of a sink's run for later attempts of the same run."""

    id_file: Path
    resumes: bool
    sink: str = "W&B"
    advice: str = ": set wandb.id"

    def run_id(self) -> str | None:
        """The id of the attempt that this one resumes. None makes a new one."""
        if not self.resumes:
            return None
        if not self.id_file.is_file():
            get_logger().warning(
                f"{self.sink} starts another run, because {self.id_file} with the id of the first is missing"
                f"{self.advice}"
            )
            return None
        return self.id_file.read_text(encoding="utf-8").strip()

    def keep(self, run_id: str) -> None:
        self.id_file.parent.mkdir(parents=True, exist_ok=True)
        with replacing_file(self.id_file) as scratch:
            scratch.write_text(f"{run_id}\n", encoding="utf-8")
