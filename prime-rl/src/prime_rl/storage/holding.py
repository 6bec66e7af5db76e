"""Keeps checkpoints on this disk until they are on S3, up to a number."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from prime_rl.run.paths import RunPaths
from prime_rl.utils.contents import STABLE
from prime_rl.utils.files import replacing_file
from prime_rl.utils.logger import get_logger


def write_plan(paths: RunPaths, target: str, max_held: int) -> None:
    """Tell the processes of a run that it is copied to S3."""
    with replacing_file(paths.upload_plan) as scratch:
        scratch.write_text(json.dumps({"upload_to": target, "max_held": max_held}) + "\n", encoding="utf-8")


def read_plan(paths: RunPaths) -> dict[str, Any] | None:
    """Where a run is copied; None if it is not, or the file is damaged."""
    try:
        plan = json.loads(paths.upload_plan.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return plan if isinstance(plan, dict) else None


def mark_uploaded(paths: RunPaths, step_directory: Path, target: str) -> None:
    marker = paths.uploaded(step_directory)
    marker.parent.mkdir(parents=True, exist_ok=True)
    with replacing_file(marker) as scratch:
        scratch.write_text(_what_is_uploaded(step_directory, target), encoding="utf-8")


def is_uploaded(paths: RunPaths, step_directory: Path, target: str) -> bool:
    """Whether a step is on S3 at `target` as it is now.

    A run may be copied to several places, one after the other, and a resumed run writes steps again.
    """
    try:
        marker = paths.uploaded(step_directory).read_text(encoding="utf-8")
        return marker == _what_is_uploaded(step_directory, target)
    except (FileNotFoundError, UnicodeDecodeError):
        return False


def _what_is_uploaded(step_directory: Path, target: str) -> str:
    return f"{target}\n{(step_directory / STABLE).stat().st_mtime_ns}\n"


class Hold:
    """Decides which checkpoints that a run no longer needs may be deleted."""

    def __init__(self, paths: RunPaths) -> None:
        self._paths = paths
        plan = read_plan(paths)
        self._max_held = None if plan is None else int(plan.get("max_held", 0))
        self._target = "" if plan is None else str(plan.get("upload_to", ""))

    def released(self, doomed: Sequence[Path]) -> list[Path]:
        """Those of the step directories, oldest first, that may be deleted now: the uploaded ones, and the oldest of
        the others beyond `storage.max_held`."""
        if self._max_held is None:
            return list(doomed)
        waiting = [each for each in doomed if not is_uploaded(self._paths, each, self._target)]
        lost = waiting[: max(0, len(waiting) - self._max_held)]
        for each in lost:
            get_logger().warning(
                f"{each} is deleted before it is on S3: {len(waiting)} checkpoints wait, and storage.max_held is "
                f"{self._max_held}"
            )
        return [each for each in doomed if each not in waiting or each in lost]
