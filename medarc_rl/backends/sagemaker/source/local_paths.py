"""Makes sure that the files which a config names are in the job, under the paths that it names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from medarc_rl.backends.sagemaker.source.staging import Staged, is_never_staged

JOB_ROOT = "/opt/ml"
_NAMES = ("name", "path", "directory", "file")
"""Last parts of keys whose value may be a path without a slash."""


def relocated(table: Mapping[str, Any], project: Path, staged: Staged) -> tuple[dict[str, Any], list[str]]:
    """A config whose absolute paths in the project are relative to it, and one line for each path that is not staged.

    Only whole values are replaced, at their own keys. Hub ids, URLs and paths that exist only in the job stay.
    """
    faults: list[str] = []
    moved: dict[str, Any] = _moved(table, "", project.resolve(), staged, faults)
    return moved, faults


def _moved(value: Any, key: str, project: Path, staged: Staged, faults: list[str]) -> Any:
    if isinstance(value, Mapping):
        where = f"{key}." if key else ""
        return {name: _moved(item, f"{where}{name}", project, staged, faults) for name, item in value.items()}
    if isinstance(value, list):
        return [_moved(item, f"{key}[{at}]", project, staged, faults) for at, item in enumerate(value)]
    if not isinstance(value, str) or not _may_be_path(key, value):
        return value
    try:
        path = project / value
        if not path.exists():
            return value
        # Not resolved: a link in the project is staged under its own name.
        name = _name_in(project, path)
    except (OSError, ValueError):  # too long, or with a zero byte
        return value
    faults.extend(_path_faults(key, value, name, path, staged))
    return name if name is not None and value.startswith("/") else value


def _may_be_path(key: str, value: str) -> bool:
    if not value or value in (".", "/") or "://" in value or value.startswith(f"{JOB_ROOT}/"):
        return False
    last = key.rpartition(".")[2].partition("[")[0]
    return "/" in value or "." in value or last in _NAMES


def _name_in(project: Path, path: Path) -> str | None:
    for place in (path, path.resolve()):
        if place.is_relative_to(project) and ".." not in place.parts:
            return place.relative_to(project).as_posix()
    return None


def _path_faults(key: str, value: str, name: str | None, path: Path, staged: Staged) -> Iterator[str]:
    if name is None:
        yield (
            f"{key} = {value}: outside of the project, so the job does not have it; copy it there, or upload it and "
            f"give --input NAME=s3://… ({JOB_ROOT}/input/data/NAME in the job)"
        )
    elif missing := _first_missing(name, path, staged):
        yield f"{key} = {value}: an ignore file leaves {missing} out of the job; add --include {name}"


def _first_missing(name: str, path: Path, staged: Staged) -> str | None:
    """A file of the path that is not staged. A model without its weights would be found missing only in the job."""
    if name == ".":
        return None
    if not path.is_dir():
        return None if name in staged.files else name
    files = sorted(child.relative_to(path).as_posix() for child in path.rglob("*") if child.is_file())
    expected = [f"{name}/{file}" for file in files if not is_never_staged(file)]
    return next((file for file in expected if file not in staged.files), None)
