"""Ranks started by a launch: the addresses they listen on, and the error of the others when one is killed."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from prime_rl.launch import ProcessSpec
from prime_rl.launch.programs import TrainerRanks, interface_env
from prime_rl.run.paths import RunPaths

RANK = Path(__file__).with_name("rank_of_a_launch.py")
LOOPBACK = "0100007F"
"""127.0.0.1 in the kernel's hexadecimal form."""

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


def planned_ranks(out: Path) -> tuple[ProcessSpec, ...]:
    return TrainerRanks("unused", out / "unused.toml", 2, str(out / "ranks" / "store")).processes(
        RunPaths(out), sys.executable, interface_env({}), ()
    )


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[list[subprocess.Popen[str]]]:
    """Two processes with the environment variables that a plan sets for ranks."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    started = [
        subprocess.Popen([sys.executable, str(RANK)], env=os.environ | dict(spec.env), **pipes)
        for spec in planned_ranks(tmp_path)
    ]
    yield started
    for process in started:
        process.kill()
        process.communicate()


def test_ranks_listen_on_loopback_only(ranks: list[subprocess.Popen[str]]) -> None:
    said = [process.stdout.readline().strip() for process in ranks]
    assert said == [f"rank {rank} of 2 on ['{LOOPBACK}']" for rank in range(2)]


def test_a_rank_that_loses_another_fails_with_one_line(ranks: list[subprocess.Popen[str]]) -> None:
    first, second = ranks
    for process in ranks:
        process.stdout.readline()
    second.kill()
    rest, _ = first.communicate()
    assert first.returncode == 1
    (line,) = rest.splitlines()
    assert "lost the connection to another rank of the trainer" in line
