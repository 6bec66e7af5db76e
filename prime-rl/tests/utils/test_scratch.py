"""Temporary directories, keys and sockets of this user: those of dead owners go, those of live ones stay."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from prime_rl.utils.engine_keys import published_key
from prime_rl.utils.private import runtime_directory
from prime_rl.utils.scratch import remove_abandoned, scratch_directory

OWNER = """
import sys
from prime_rl.utils.engine_keys import published_key
from prime_rl.utils.scratch import scratch_directory
with scratch_directory("env-servers") as directory, published_key(8123, "key"):
    (directory / "socket").touch()
    print(directory, flush=True)
    sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def own_runtime_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PRIME_RL_RUNTIME_DIR", str(tmp_path / "private"))


def files() -> set[str]:
    return {path.name for path in runtime_directory().iterdir()} - {".lock"}


def start_owner() -> tuple[subprocess.Popen[str], Path]:
    owner = subprocess.Popen([sys.executable, "-c", OWNER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    return owner, Path(owner.stdout.readline().strip())


def test_a_live_owner_keeps_its_files_and_removes_them_at_its_end() -> None:
    owner, directory = start_owner()
    with scratch_directory("trial") as mine:
        assert files() == {directory.name, mine.name, "engine-8123.key"}
        assert (directory / "socket").exists()
    owner.communicate()
    assert files() == set()


@pytest.mark.parametrize("start", [lambda: scratch_directory("trial"), lambda: published_key(1, "other")])
def test_files_of_an_owner_that_was_killed_go_with_the_next(start) -> None:
    owner, directory = start_owner()
    owner.send_signal(signal.SIGKILL)
    owner.communicate()
    assert files() == {directory.name, "engine-8123.key"}
    with start():
        assert not files() & {directory.name, "engine-8123.key"}
    assert files() == set()


def test_what_an_owner_had_only_begun_to_make_goes_too() -> None:
    (runtime_directory() / "vllm-x").mkdir()
    (runtime_directory() / "engine-1.key.new").touch()
    remove_abandoned(runtime_directory())
    assert files() == set()


def test_sockets_that_nobody_listens_on_go_once_they_are_old() -> None:
    paths = [runtime_directory() / name for name in ("live", "dead", "new")]
    sockets = [socket.socket(socket.AF_UNIX) for _ in paths]
    for each, path in zip(sockets, paths, strict=True):
        each.bind(str(path))
    sockets[0].listen()
    for path in paths[:2]:
        os.utime(path, (0, 0))
    remove_abandoned(runtime_directory())
    assert files() == {"live", "new"}
    for each in sockets:
        each.close()


def test_other_files_of_the_user_stay() -> None:
    (runtime_directory() / "notes.txt").touch()
    remove_abandoned(runtime_directory())
    assert files() == {"notes.txt"}
