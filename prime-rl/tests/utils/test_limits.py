"""What a process may use is the lowest limit of its control groups, of both versions, or all that the machine has."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from prime_rl.utils.limits import THREADS_VARIABLE, usable_cpus, usable_memory_bytes

MIB = 2**20
PHYSICAL_BYTES = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
V2 = "31 23 0:28 {root} /sys/fs/cgroup rw,relatime shared:4 - cgroup2 cgroup2 rw,nsdelegate"
V1 = "35 31 0:32 {root} /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory"
OTHER_V1 = "32 31 0:29 / /sys/fs/cgroup/cpu rw,relatime - cgroup cgroup rw,cpu"
SOURCES = Path(__file__).resolve().parents[2] / "src"
OTHERS = ["22 27 0:21 / /proc rw,relatime - proc proc rw", "27 1 254:0 / / rw - ext4 /dev/vda rw"]
UNLIMITED_V1 = 9_223_372_036_854_771_712


def usable(system: Path, groups: list[str], mounts: list[str], limits: Mapping[str, int | str]) -> int:
    """The memory of a process whose groups and mounts the kernel would list like this. `limits`: files by path."""
    write_groups(system, groups, mounts, limits)
    return usable_memory_bytes(system)


def write_groups(system: Path, groups: list[str], mounts: list[str], limits: Mapping[str, int | str]) -> None:
    process = system / "proc/self"
    process.mkdir(parents=True)
    (process / "cgroup").write_text("".join(f"{line}\n" for line in groups))
    (process / "mountinfo").write_text("".join(f"{line}\n" for line in [*OTHERS, *mounts]))
    for path, limit in limits.items():
        file = system / "sys/fs/cgroup" / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{limit}\n")


def test_a_job_of_slurm_has_the_limit_of_its_own_group_around_steps_and_tasks(tmp_path: Path) -> None:
    limits: dict[str, int | str] = {
        "system.slice/job_7/memory.max": 64 * MIB,
        "system.slice/job_7/step_0/memory.max": "max",
        "system.slice/job_7/step_0/task_0/memory.max": 96 * MIB,
        "system.slice/memory.max": "max",
        "system.slice/job_8/memory.max": 1 * MIB,
    }
    groups = ["0::/system.slice/job_7/step_0/task_0"]
    assert usable(tmp_path, groups, [V2.format(root="/")], limits) == 64 * MIB


def test_a_group_of_version_1_is_limited_by_those_around_it(tmp_path: Path) -> None:
    limits: dict[str, int | str] = {
        "memory/memory.limit_in_bytes": UNLIMITED_V1,
        "memory/slurm/job_7/memory.limit_in_bytes": 32 * MIB,
        "memory/slurm/job_7/step_0/memory.limit_in_bytes": UNLIMITED_V1,
        "cpu/slurm/memory.limit_in_bytes": 1 * MIB,
    }
    groups = ["5:cpu:/slurm", "4:blkio,memory:/slurm/job_7/step_0", "0::/"]
    assert usable(tmp_path, groups, [OTHER_V1, V1.format(root="/")], limits) == 32 * MIB


@pytest.mark.parametrize("path", ["/", "/pods/pod_1/main", "/../elsewhere"])
def test_a_container_has_the_limit_of_the_folder_that_it_sees(tmp_path: Path, path: str) -> None:
    mounts = [V2.format(root="/" if path == "/" else "/pods/pod_1/main")]
    assert usable(tmp_path, [f"0::{path}"], mounts, {"memory.max": 48 * MIB}) == 48 * MIB


def test_of_both_versions_the_lower_limit_counts(tmp_path: Path) -> None:
    limits = {"memory/memory.limit_in_bytes": 80 * MIB, "unified/a/memory.max": 40 * MIB}
    unified = V2.format(root="/").replace("/sys/fs/cgroup", "/sys/fs/cgroup/unified")
    assert usable(tmp_path, ["4:memory:/", "0::/a"], [V1.format(root="/"), unified], limits) == 40 * MIB


@pytest.mark.parametrize("limit", ["max", UNLIMITED_V1, 2 * PHYSICAL_BYTES, "", "not a number"])
def test_without_a_lower_limit_it_is_the_machines_memory(tmp_path: Path, limit: int | str) -> None:
    mounts = [V2.format(root="/")]
    assert usable(tmp_path, ["0::/a"], mounts, {"a/memory.max": limit}) == PHYSICAL_BYTES


def test_limits_that_cannot_be_read_limit_nothing(tmp_path: Path) -> None:
    (tmp_path / "sys/fs/cgroup/a/memory.max").mkdir(parents=True)  # reading it fails, also for root
    limits = {"a/b/memory.max": 16 * MIB}
    assert usable(tmp_path, ["0::/a/b"], [V2.format(root="/")], limits) == 16 * MIB
    assert usable_memory_bytes(tmp_path / "no such folder") == PHYSICAL_BYTES


def test_what_is_sized_by_memory_asks_for_the_usable_memory() -> None:
    found = {
        str(file.relative_to(SOURCES / "prime_rl"))
        for file in SOURCES.rglob("*.py")
        if re.search(r"SC_PHYS_PAGES|MemTotal|virtual_memory", file.read_text(encoding="utf-8"))
    }
    reported = {"history/attempts.py", "trainer/perf.py"}  # facts about the machine, which size nothing
    assert found - reported == {"utils/limits.py"}


def test_this_process_may_use_some_of_the_machines_memory() -> None:
    assert 0 < usable_memory_bytes() <= PHYSICAL_BYTES


BOTH = ["5:cpu,cpuacct:/slurm/job_7/task_0", "4:memory:/", "0::/pods/pod_1"]
QUOTAS = [
    # Files below the mounted folder, and the CPUs of 64.
    ({}, 64),
    ({"unified/pods/pod_1/cpu.max": "400000 100000"}, 4),
    ({"unified/pods/pod_1/cpu.max": "max 100000", "unified/pods/cpu.max": "200000 100000"}, 2),
    ({"unified/pods/pod_1/cpu.max": "300000 100000", "unified/pods/cpu.max": "800000 100000"}, 3),
    ({"unified/pods/pod_1/cpu.max": "150000 100000"}, 1),
    ({"unified/pods/pod_1/cpu.max": "20000 100000"}, 1),
    ({"unified/pods/pod_1/cpu.max": "max 100000"}, 64),
    ({"unified/pods/pod_1/cpu.max": "12800000 100000"}, 64),
    ({"unified/pods/pod_1/cpu.max": "nonsense"}, 64),
    ({"unified/pods/pod_2/cpu.max": "100000 100000"}, 64),
    ({"cpu/slurm/job_7/cpu.cfs_quota_us": "250000", "cpu/slurm/job_7/cpu.cfs_period_us": "50000"}, 5),
    ({"cpu/slurm/job_7/task_0/cpu.cfs_quota_us": "-1", "cpu/slurm/job_7/task_0/cpu.cfs_period_us": "100000"}, 64),
    ({"cpu/cpu.cfs_quota_us": "700000", "cpu/cpu.cfs_period_us": "100000"}, 7),
    ({"memory/cpu.cfs_quota_us": "100000", "memory/cpu.cfs_period_us": "100000"}, 64),
]


def test_a_quota_of_any_group_around_a_process_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(64)))
    mounts = [
        "32 31 0:29 / /sys/fs/cgroup/cpu rw,relatime - cgroup cgroup rw,cpu,cpuacct",
        V1.format(root="/"),
        V2.format(root="/").replace("/sys/fs/cgroup", "/sys/fs/cgroup/unified"),
    ]
    for number, (limits, expected) in enumerate(QUOTAS):
        system = tmp_path / str(number)
        write_groups(system, BOTH, mounts, limits)
        assert usable_cpus(system) == expected, limits
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {3})  # a quota never adds to them
    assert usable_cpus(tmp_path / "1") == 1


def test_a_container_has_the_quota_of_the_folder_that_it_sees(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(64)))
    write_groups(tmp_path, ["0::/../elsewhere"], [V2.format(root="/pods/pod_1")], {"cpu.max": "600000 100000"})
    assert usable_cpus(tmp_path) == 6


def test_what_is_sized_by_cpus_asks_for_the_usable_ones() -> None:
    found = {
        str(file.relative_to(SOURCES / "prime_rl"))
        for file in SOURCES.rglob("*.py")
        if re.search(r"os\.(sched_getaffinity|cpu_count|process_cpu_count)", file.read_text(encoding="utf-8"))
    }
    assert found - {"history/attempts.py"} == {"utils/limits.py"}  # a fact about the machine, which sizes nothing


def test_a_program_starts_as_many_threads_as_a_real_quota_pays_for() -> None:
    """In a real control group, where this machine lets us make one."""
    group = Path("/sys/fs/cgroup/cpu") / f"quota_{os.getpid()}"
    if usable_cpus() < 2:
        pytest.skip("one CPU: no quota leaves fewer")
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"no control group can be made here: {error}")
    program = (
        "import os; from prime_rl.utils.limits import usable_cpus; from prime_rl.utils.signals import start_program; "
        f"start_program(); print(usable_cpus(), os.environ.get({THREADS_VARIABLE!r}))"
    )
    enter = 'echo $$ > "$0/cgroup.procs" && exec "$@"'
    env = {name: value for name, value in os.environ.items() if name != THREADS_VARIABLE}
    try:
        if not (group / "cpu.cfs_quota_us").exists():
            pytest.skip("no control group of version 1")
        (group / "cpu.cfs_quota_us").write_text("100000")
        words = ["sh", "-c", enter, str(group), sys.executable, "-c", program]
        shown = subprocess.run(words, env=env, capture_output=True, text=True, timeout=120, check=True).stdout
    finally:
        group.rmdir()
    assert shown.split() == ["1", "1"]
