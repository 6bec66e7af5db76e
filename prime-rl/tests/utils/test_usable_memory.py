"""The memory that a process may use is the lowest limit of its control groups, of both versions, or the machine's."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

import pytest

from prime_rl.utils.machine.memory import usable_memory_bytes

MIB = 2**20
PHYSICAL_BYTES = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
V2 = "31 23 0:28 {root} /sys/fs/cgroup rw,relatime shared:4 - cgroup2 cgroup2 rw,nsdelegate"
V1 = "35 31 0:32 {root} /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory"
OTHER_V1 = "32 31 0:29 / /sys/fs/cgroup/cpu rw,relatime - cgroup cgroup rw,cpu"
SOURCES = Path(__file__).resolve().parents[2] / "src"
OTHERS = ["22 27 0:21 / /proc rw,relatime - proc proc rw", "27 1 254:0 / / rw - ext4 /dev/vda rw"]
UNLIMITED_V1 = 9_223_372_036_854_771_712


def usable(system: Path, groups: list[str], mounts: list[str], limits: Mapping[str, int | str]) -> int:
    """What a process may use whose groups and mounts the kernel would list like this. `limits`: files by path."""
    process = system / "proc/self"
    process.mkdir(parents=True)
    (process / "cgroup").write_text("".join(f"{line}\n" for line in groups))
    (process / "mountinfo").write_text("".join(f"{line}\n" for line in [*OTHERS, *mounts]))
    for path, limit in limits.items():
        file = system / "sys/fs/cgroup" / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{limit}\n")
    return usable_memory_bytes(system)


def test_a_job_of_slurm_has_the_limit_of_its_own_group_around_steps_and_tasks(tmp_path: Path) -> None:
    limits = {
        "system.slice/job_7/memory.max": 64 * MIB,
        "system.slice/job_7/step_0/memory.max": "max",
        "system.slice/job_7/step_0/task_0/memory.max": 96 * MIB,
        "system.slice/memory.max": "max",
        "system.slice/job_8/memory.max": 1 * MIB,
    }
    groups = ["0::/system.slice/job_7/step_0/task_0"]
    assert usable(tmp_path, groups, [V2.format(root="/")], limits) == 64 * MIB


def test_a_group_of_version_1_is_limited_by_those_around_it(tmp_path: Path) -> None:
    limits = {
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
    reported = {"history/machine.py", "trainer/perf.py"}  # facts about the machine, which size nothing
    assert found - reported == {"utils/machine/memory.py"}


def test_this_process_may_use_some_of_the_machines_memory() -> None:
    assert 0 < usable_memory_bytes() <= PHYSICAL_BYTES
