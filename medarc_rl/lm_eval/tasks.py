"""Finds tasks by name, before a model is loaded. Runs in the evaluation's process, because lm-eval takes seconds."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prime_rl.utils.errors import one_line

_NEAREST = 3


class TaskFaults(Exception):
    """Tasks that do not exist or cannot be used."""

    def __init__(self, faults: Sequence[str]) -> None:
        super().__init__("\n".join(faults))
        self.faults = [one_line(fault) for fault in faults]


@dataclass(frozen=True, slots=True)
class Tasks:
    """The tasks of an evaluation."""

    manager: Any
    """lm-eval's `TaskManager`."""
    names: tuple[str, ...]
    """Tasks, groups and tags, with patterns replaced by the names that they match."""


def find_tasks(asked: Sequence[str], include_path: str | None, allow_unsafe_code: bool) -> Tasks:
    """Find tasks in `include_path` and among those of lm-eval.

    Raises:
        TaskFaults: a name is unknown, or a task runs code that a model wrote and may not.
    """
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=include_path, include_defaults=False) if include_path is not None else None
    if manager is None or not all(name in manager.task_index for name in asked):
        # Reading lm-eval's own 10,000 files takes many seconds.
        manager = TaskManager(include_path=include_path)
    names: list[str] = []
    faults: list[str] = []
    for name in asked:
        matches = manager.match_tasks([name])
        names += matches
        if not matches:
            near = difflib.get_close_matches(name, manager.task_index, n=_NEAREST, cutoff=0.6)
            hint = f"did you mean {' or '.join(near)}?" if near else "`lm-eval ls tasks` lists all"
            faults.append(f"--tasks {name}: lm-eval has no such task{_searched(include_path)}; {hint}")
    if not allow_unsafe_code:
        unsafe = [name for name in names if _runs_code(manager, name, set())]
        faults += [
            f"--tasks {name}: runs code that the model wrote, on this machine and as you; to allow it, add "
            "--allow-unsafe-code"
            for name in unsafe
        ]
    if faults:
        raise TaskFaults(faults)
    return Tasks(manager, tuple(dict.fromkeys(names)))


def _searched(include_path: str | None) -> str:
    return "" if include_path is None else f", and {Path(include_path)} has none"


def _runs_code(manager: Any, name: str, seen: set[str]) -> bool:
    """Whether a task, or one of a group's or a tag's, is marked as unsafe."""
    if name in seen or name not in manager.task_index:
        return False
    seen.add(name)
    entry = manager.task_index[name]
    config = entry.cfg or {}
    members = [*_members(config.get("task")), *(entry.tags if _is_tag(entry) else ())]
    return bool(config.get("unsafe_code")) or any(_runs_code(manager, member, seen) for member in members)


def _members(listed: object) -> Iterator[str]:
    for each in listed if isinstance(listed, list) else ():
        if isinstance(each, str):
            yield each
        elif isinstance(each, dict):
            yield from (str(each[key]) for key in ("task", "group") if isinstance(each.get(key), str))


def _is_tag(entry: Any) -> bool:
    return str(getattr(entry.kind, "name", "")) == "TAG"
