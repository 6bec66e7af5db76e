"""Limits of this process: memory, which a job or a container may restrict, and open files."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from pathlib import Path, PurePosixPath


def usable_memory_bytes(system: Path = Path("/")) -> int:
    """The machine's memory, or the lowest limit of this process's control group and the groups around it.

    Slurm limits the group of a job, which is around those of its steps and tasks; Kubernetes limits pods and
    containers. `system` is the folder that has `proc` and in which the groups are mounted.
    """
    physical_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([physical_bytes, *_limits(system)])


def _limits(system: Path) -> Iterator[int]:
    """The limits of this process's groups, of both versions: a machine may have mounted both."""
    mounts = list(_mounts(system))
    for line in _lines(system / "proc/self/cgroup"):
        # `4:memory:/slurm/job_7` in version 1, `0::/slurm/job_7` in version 2.
        _, controllers, path = line.split(":", 2)
        version = 1 if controllers else 2
        if version == 2 or "memory" in controllers.split(","):
            for mounted_version, root, folder in mounts:
                if version == mounted_version:
                    yield from _limits_around(folder, _below(path, root), version)


def _mounts(system: Path) -> Iterator[tuple[int, PurePosixPath, Path]]:
    """Mount points of control groups: the version, and the folder of each group."""
    for line in _lines(system / "proc/self/mountinfo"):
        place, _, source = line.partition(" - ")
        root, folder = place.split()[3:5]
        kind, *_, options = source.split()
        if kind == "cgroup2" or (kind == "cgroup" and "memory" in options.split(",")):
            yield (2 if kind == "cgroup2" else 1), PurePosixPath(root), system / folder.lstrip("/")


def _below(path: str, root: PurePosixPath) -> PurePosixPath:
    """The part of a group's path below the mounted group. Empty if it is not below it: a container may see only its
    own group mounted, and a path from outside of it."""
    group = PurePosixPath(path)
    is_below = group.is_relative_to(root) and ".." not in group.parts
    return group.relative_to(root) if is_below else PurePosixPath()


def _limits_around(folder: Path, group: PurePosixPath, version: int) -> Iterator[int]:
    name = "memory.max" if version == 2 else "memory.limit_in_bytes"
    for each in (group, *group.parents):
        # `max` means no limit. Version 1 has a number for that, above every machine's memory.
        yield from (int(line) for line in _lines(folder / each / name) if line.isdigit())


def _lines(file: Path) -> list[str]:
    """The lines of a file of the kernel. None if it cannot be read: then it limits nothing that we know of."""
    try:
        return file.read_text(encoding="utf-8").splitlines()
    except OSError:
        return []


OTHER_FILES = 256
"""Files that a process keeps open besides its connections."""
MAX_CONNECTIONS = 65_535
"""As many as there are ports."""


def allow_connections(wanted: int) -> int:
    """Raise this process's limit on open files as far as `wanted` connections need it, and the system allows.

    Returns the number of connections that it leaves room for: at least 1, and at most `wanted`.
    """
    wanted = min(wanted, MAX_CONNECTIONS)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = wanted + OTHER_FILES
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return wanted
    allowed = needed if hard == resource.RLIM_INFINITY else min(hard, needed)
    resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    return max(allowed - OTHER_FILES, allowed // 2, 1)
