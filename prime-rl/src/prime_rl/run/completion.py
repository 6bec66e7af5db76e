"""Tells the launcher that a process has done all of its work, or refuses the run.

Exit code 0 is not enough: the code of an environment, or a library, may call `sys.exit(0)` or `os._exit(0)` at any
time.
"""

from __future__ import annotations

import os
from pathlib import Path

COMPLETION_VARIABLE = "COMPLETION_MARKER"
"""Environment variable of a process: the file that it makes when its work is done."""
REFUSED_EXIT_CODE = 2
"""Exit code of a process that refuses the run as configured, and would refuse it again."""

TRAINER_VARIABLE = "TRAINER_COMPLETION"
"""Environment variable of an evaluator next to a training: the file that the trainer makes when it is done."""


def report_completion() -> None:
    """Make the file that the launcher looks for. Does nothing in a process that no launcher has started."""
    marker = os.environ.get(COMPLETION_VARIABLE)
    if marker is not None:
        Path(marker).touch()


def clear_completion(marker: Path) -> None:
    """Remove the marker of an earlier launch, and make its directory."""
    marker.parent.mkdir(parents=True, exist_ok=True)
    marker.unlink(missing_ok=True)
