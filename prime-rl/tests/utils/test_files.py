from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from prime_rl.utils.contents import find_damage
from prime_rl.utils.files import (
    STABLE,
    locked_file,
    publishing_directory,
    replacing_directory,
    replacing_file,
    scratch_of,
)

REPLACES = """
import sys
from pathlib import Path
from prime_rl.utils.files import replacing_directory

for number in range(10**9):
    with replacing_directory(Path(sys.argv[1])) as scratch:
        (scratch / "one").write_text(str(number))
        (scratch / "other").write_text(str(number))
    print(number, flush=True)
"""


def write(target: Path, text: str) -> None:
    with replacing_directory(target) as scratch:
        (scratch / "file").write_text(text)


def test_a_directory_is_replaced_as_a_whole(tmp_path: Path) -> None:
    target = tmp_path / "step_3"
    for text in ("old", "new"):
        write(target, text)
        assert (target / "file").read_text() == text
        assert (target / STABLE).is_file()
        assert not scratch_of(target).exists()


def test_a_failed_replacement_leaves_the_old_directory(tmp_path: Path) -> None:
    target = tmp_path / "step_3"
    write(target, "old")
    for replacing in (replacing_directory, publishing_directory):
        with pytest.raises(OSError, match="full"), replacing(target):
            raise OSError("the disk is full")
        assert (target / "file").read_text() == "old"
        assert not scratch_of(target).exists()


@pytest.mark.skipif(sys.platform != "linux", reason="exchanges directories")
@pytest.mark.parametrize("replacements", [2, 3, 5, 8, 13, 21, 34, 55])
def test_a_killed_replacement_leaves_a_whole_directory(replacements: int, tmp_path: Path) -> None:
    target = tmp_path / "step_3"
    process = subprocess.Popen([sys.executable, "-c", REPLACES, target], stdout=subprocess.PIPE)
    assert process.stdout is not None
    for _ in range(replacements):
        process.stdout.readline()
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    assert find_damage(target) is None
    assert (target / STABLE).is_file()
    assert (target / "one").read_text() == (target / "other").read_text()


def test_a_lock_that_another_process_holds_is_told(tmp_path: Path) -> None:
    told: list[str] = []

    def release() -> None:
        told.append("waiting")
        holder.communicate()

    holds = "import fcntl, sys; file = open(sys.argv[1], 'w'); fcntl.flock(file, fcntl.LOCK_EX); print(); input()"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", holds, tmp_path / "lock"], **pipes) as holder:
        assert holder.stdout is not None
        holder.stdout.readline()
        with locked_file(tmp_path / "lock", release):
            assert told == ["waiting"]
    with locked_file(tmp_path / "lock", release):
        assert told == ["waiting"], "nobody holds it"


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP])
def test_a_file_system_without_locks_is_used_without(number: int, tmp_path: Path) -> None:
    def flock(descriptor: int, operation: int) -> None:
        raise OSError(number, os.strerror(number))

    entered = False
    with locked_file(tmp_path / "lock", flock=flock):
        entered = True
    assert entered


def test_another_fault_of_a_lock_is_raised(tmp_path: Path) -> None:
    def flock(descriptor: int, operation: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with pytest.raises(OSError, match="Input/output"), locked_file(tmp_path / "lock", flock=flock):
        pytest.fail("entered without the lock")


@pytest.mark.skipif(sys.platform != "linux", reason="has no /dev/full")
def test_what_a_full_disk_says_names_the_file(tmp_path: Path) -> None:
    target = tmp_path / "rl.toml"
    (tmp_path / "rl.toml.tmp").symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left on device") as raised, replacing_file(target) as scratch:
        scratch.write_text("text")
    assert raised.value.filename == str(target)
    assert list(tmp_path.iterdir()) == []
