"""A process with all its descendants, from /proc."""

from __future__ import annotations

from pathlib import Path


def process_tree(root: int) -> list[int]:
    """`root` and all its descendants that are still running."""
    try:
        tasks = list(Path(f"/proc/{root}/task").iterdir())
        children = [int(child) for task in tasks for child in (task / "children").read_text().split()]
    except OSError:
        return []
    return [root, *(process for child in children for process in process_tree(child))]
