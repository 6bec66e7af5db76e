"""Numbers the attempts of a run, and keeps a receipt of each: where it started, and what each part restored.

`OUT/attempts/002.json` is the receipt of the second attempt. The launcher writes it. Each part reports what it restored
in a file of its own, which the launcher adds.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from prime_rl.run.paths import RunPaths
from prime_rl.utils.contents import read_contents
from prime_rl.utils.files import replacing_file
from prime_rl.utils.logger import get_logger

RESTORED_VARIABLE = "RESTORED_FILE"
"""Environment variable of a process: the file in which it reports what it restored."""

PARTS = ("trainer", "orchestrator")
"""Parts that restore something."""


def next_attempt(paths: RunPaths) -> int:
    """Number of the next attempt, from 1."""
    names = [receipt.stem for receipt in paths.attempts.glob("*.json")]
    return 1 + max((int(name) for name in names if name.isdecimal()), default=0)


def report_restored(summary: str, facts: Mapping[str, Any]) -> None:
    """Report what this part has restored. Does nothing in a process that no launcher has started.

    If the file cannot be written (for example, the disk is full), logs a warning: what was restored is sound.
    """
    file = os.environ.get(RESTORED_VARIABLE)
    if file is None:
        return
    try:
        with replacing_file(Path(file)) as scratch:
            scratch.write_text(json.dumps({"summary": summary, **facts}))
    except OSError as error:
        get_logger().warning(
            f"this part is missing from the attempt's receipt (OUT/attempts): cannot write {file}: {error.strerror}"
        )


def checked_files(step_directory: Path) -> dict[str, Any]:
    """The files of a checkpoint with the hashes that they were compared with."""
    contents = read_contents(step_directory)
    return {
        "directory": str(step_directory),
        "xxh3_128": {name: record.xxh3_128 for name, record in contents.items()},
        "bytes": sum(record.size_bytes for record in contents.values()),
    }


class Receipt:
    """The receipt of an attempt that is about to start."""

    def __init__(self, paths: RunPaths, number: int, parts: Sequence[str], facts: Mapping[str, Any]) -> None:
        """Begin the receipt with what the launcher knows.

        Args:
            parts: those of `PARTS` that this run has.
            facts: with `step`, where all parts start; None starts a new run.
        """
        self.paths = paths
        self.file = paths.receipt(number)
        self._waited_for = set(parts)
        self._table: dict[str, Any] = {
            "attempt": number,
            "started": datetime.now().astimezone().isoformat(timespec="seconds"),
            "host": socket.gethostname(),
            "slurm_job_id": os.environ.get("SLURM_JOB_ID"),
            **facts,
            "parts": {},
        }
        for part in PARTS:
            paths.restored(part).unlink(missing_ok=True)
        self._write()

    @property
    def headline(self) -> str:
        """Number and start of this attempt, in one line."""
        start = "starts a new run" if self.step is None else f"continues from step {self.step}"
        return f"attempt {self._table['attempt']} {start}"

    @property
    def step(self) -> int | None:
        step: int | None = self._table["step"]
        return step

    def collect(self) -> Iterator[str]:
        """Add what parts have reported since the last call. Yields a line for each, and one when all have."""
        for part in PARTS if self.step is not None else ():
            if part in self._table["parts"] or not (file := self.paths.restored(part)).is_file():
                continue
            section = json.loads(file.read_text())
            self._table["parts"][part] = section
            self._waited_for.discard(part)
            self._write()
            if part != "trainer":  # whose log is on the screen
                yield f"{part} resumed at {section['summary']}"
            if not self._waited_for:
                yield f"{self._agreement()}; receipt: {self.file}"

    def end(self, result: str, message: str, lost: Sequence[str] = ()) -> None:
        """Record how the attempt ended (`complete`, `stopped`, `failed`, `refused`), why, and what it lost."""
        ids = {part: self.paths.wandb_id(part) for part in PARTS}
        self._table |= {
            "ended": datetime.now().astimezone().isoformat(timespec="seconds"),
            "result": result,
            "outcome": "complete" if result == "complete" else message,
            **({"lost": list(lost)} if lost else {}),
            "wandb_ids": {part: file.read_text().strip() for part, file in ids.items() if file.is_file()},
        }
        self._write()

    def _agreement(self) -> str:
        sections = self._table["parts"]
        steps = {part: sections[part]["step"] for part in PARTS if part in sections}
        number = self._table["attempt"]
        if set(steps.values()) == {self.step}:
            return f"attempt {number} continues at step {self.step} in every part ({', '.join(steps)})"
        listed = ", ".join(f"{part} at step {step}" for part, step in steps.items())
        return (
            f"warning: attempt {number} was to continue at step {self.step}, but its parts are at these steps: {listed}"
        )

    def _write(self) -> None:
        # On a full disk the parts say so; the launcher has to survive to stop them in order.
        with contextlib.suppress(OSError), replacing_file(self.file) as scratch:
            scratch.write_text(json.dumps(self._table, indent=2) + "\n", encoding="utf-8")
