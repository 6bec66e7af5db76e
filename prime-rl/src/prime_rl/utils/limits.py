"""Limits of this process: CPUs and memory, which a job or a container may restrict, and open files."""

from __future__ import annotations

import os
import resource
import sys
from collections.abc import Iterator, MutableMapping
from pathlib import Path, PurePosixPath

THREADS_VARIABLE = "OMP_NUM_THREADS"
"""How many threads OpenMP starts, and with it torch, NumPy's libraries and Arrow."""


def usable_cpus(system: Path = Path("/")) -> int:
    """Number of CPUs that this process may use: those that it may run on, or fewer if a quota pays for fewer.

    `docker --cpus` and the limits of Kubernetes leave all CPUs visible, and stop a group once it has used its share of
    each tenth of a second. Threads above the quota then wait for each other: two on one CPU run at half the speed.
    A part of a CPU is not counted, for the same reason. `system` is as in `usable_memory_bytes`.
    """
    return max(1, min([_visible_cpus(), *(int(quota) for quota in _cpu_quotas(system))]))


def keep_threads_to_quota(env: MutableMapping[str, str]) -> None:
    """Let this process start as many threads as a quota pays for, unless `env` sets a number.

    OpenMP sees the CPUs that it may run on, but no quota. Launchers do not call it: their children would inherit it.
    """
    cpus = usable_cpus()
    if THREADS_VARIABLE in env or cpus == _visible_cpus():
        return
    env[THREADS_VARIABLE] = str(cpus)
    # Who has loaded torch already has read the variable.
    if (torch := sys.modules.get("torch")) is not None:
        torch.set_num_threads(cpus)


def _visible_cpus() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def usable_memory_bytes(system: Path = Path("/")) -> int:
    """The machine's memory, or the lowest limit of this process's control group and the groups around it.

    Slurm limits the group of a job, which is around those of its steps and tasks; Kubernetes limits pods and
    containers. `system` is the folder that has `proc` and in which the groups are mounted.
    """
    physical_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([physical_bytes, *_memory_limits(system)])


def _memory_limits(system: Path) -> Iterator[int]:
    for group, version in _groups(system, "memory"):
        # `max` means no limit. Version 1 has a number for that, above every machine's memory.
        name = "memory.max" if version == 2 else "memory.limit_in_bytes"
        yield from (int(line) for line in _lines(group / name) if line.isdigit())


def _cpu_quotas(system: Path) -> Iterator[float]:
    """CPUs that each group pays for: the time that it may use in a period, by the length of the period."""
    for group, version in _groups(system, "cpu"):
        if version == 2:
            # `50000 100000` is half a CPU; `max 100000` means no limit.
            words = [word for line in _lines(group / "cpu.max") for word in line.split()]
        else:
            # -1 means no limit.
            words = [*_lines(group / "cpu.cfs_quota_us"), *_lines(group / "cpu.cfs_period_us")]
        if len(words) == 2 and all(word.isdigit() and int(word) for word in words):
            yield int(words[0]) / int(words[1])


def _groups(system: Path, controller: str) -> Iterator[tuple[Path, int]]:
    """This process's groups that `controller` may limit, and the groups around them, each with its version.

    Of both versions: a machine may have mounted both.
    """
    mounts = list(_mounts(system, controller))
    for line in _lines(system / "proc/self/cgroup"):
        # `4:memory:/slurm/job_7` in version 1, `0::/slurm/job_7` in version 2.
        _, controllers, path = line.split(":", 2)
        version = 1 if controllers else 2
        if version == 2 or controller in controllers.split(","):
            for mounted_version, root, folder in mounts:
                if version == mounted_version:
                    group = _below(path, root)
                    yield from ((folder / each, version) for each in (group, *group.parents))


def _mounts(system: Path, controller: str) -> Iterator[tuple[int, PurePosixPath, Path]]:
    """Mount points of control groups: the version, and the folder of each group."""
    for line in _lines(system / "proc/self/mountinfo"):
        place, _, source = line.partition(" - ")
        root, folder = place.split()[3:5]
        kind, *_, options = source.split()
        if kind == "cgroup2" or (kind == "cgroup" and controller in options.split(",")):
            yield (2 if kind == "cgroup2" else 1), PurePosixPath(root), system / folder.lstrip("/")


def _below(path: str, root: PurePosixPath) -> PurePosixPath:
    """The part of a group's path below the mounted group. Empty if it is not below it: a container may see only its
    own group mounted, and a path from outside of it."""
    group = PurePosixPath(path)
    is_below = group.is_relative_to(root) and ".." not in group.parts
    return group.relative_to(root) if is_below else PurePosixPath()


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
