"""The sandbox holds: no program forges a verdict, gets out, or stays. What honest programs need works."""

from __future__ import annotations

import itertools
import os
import select
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import pytest

from prime_rl.environments.sandbox.attacks import ATTACKS, ESCAPES, FORGERIES, Attack, try_attack
from prime_rl.environments.sandbox.layers import Layer, LayerName, ProgramLimits, SandboxFault, layer
from prime_rl.environments.sandbox.sandbox import Sandbox, Verdict
from prime_rl.utils.private import RUNTIME_VARIABLE
from prime_rl.utils.scratch import scratch_directory

PATIENT = ProgramLimits(time_s=300, output_bytes=10_000)
"""An honest program passes on a slow machine, too."""


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WANDB_TOKEN", "a secret of the trainer")
        try:
            sandbox = Sandbox(limits=PATIENT)
        except SandboxFault as error:
            pytest.skip(str(error))
        yield sandbox
        sandbox.close()


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.name)
def test_an_attack_scores_0_and_leaves_nothing_behind(sandbox: Sandbox, attack: Attack) -> None:
    outcome = try_attack(sandbox, attack)
    assert outcome.held, outcome


@pytest.mark.parametrize("name", get_args(LayerName))
def test_every_layer_that_can_run_holds(sandbox: Sandbox, name: LayerName) -> None:
    if name == sandbox.layer.name:
        pytest.skip("it ran the whole table")
    try:
        other = Sandbox(name, PATIENT)
    except SandboxFault as error:
        pytest.skip(str(error))
    try:
        assert name in other.describe() or name == "seccomp"
        for attack in (*FORGERIES[:3], *ESCAPES[::3]):
            assert try_attack(other, attack).held, attack
        pids = other.pids()
        assert len(pids) == 2
    finally:
        other.close()
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


def test_a_program_reads_its_input_and_prints(sandbox: Sandbox) -> None:
    ran = sandbox.run("import sys\na = int(input())\nprint(a + int(sys.stdin.readline()), sys.stdin.read())", "1\n2\nx")
    assert (ran.ended, ran.code, ran.output) == ("exit", 0, "3 x\n")
    assert sandbox.run("import asyncio\nprint(asyncio.run(asyncio.sleep(0, 'é')))").output == "é\n"
    assert sandbox.run("raise ValueError('no')")[1:] == (1, "", "ValueError: no")
    assert sandbox.run("import sys; sys.exit(3)").code == 3
    assert sandbox.run("while True: print('x' * 1000)").ended == "output"
    assert sandbox.run("import os, time\nos.close(1)\ntime.sleep(1000)", time_s=0.2).ended == "time"
    assert sandbox.run("import ctypes; ctypes.string_at(0)").code == -signal.SIGSEGV


PROGRAM = """
import collections, dataclasses, decimal

@dataclasses.dataclass
class Point:
    x: int
    y: int

def kinds():
    return [1, 2.5, float("inf"), "é", None, True, (1, [2]), {3, 4}, {1: "a", (2, 3): {"b"}}, b"\\x00", range(3), 1j,
            decimal.Decimal("0.1"), collections.Counter("aab"), 10**5000]

def squares(n):
    for i in range(n):
        yield i * i

def shifted(point, dx=0):
    return Point(point.x + dx, point.y)

def fails(kind):
    raise {"value": ValueError, "own": type("Own", (KeyError,), {})}[kind]("no")
"""


def test_tests_see_the_same_values_as_in_one_process(sandbox: Sandbox) -> None:
    tests = [
        "assert kinds()[:8] == [1, 2.5, float('inf'), 'é', None, True, (1, [2]), {3, 4}]",
        "assert kinds()[8:13] == [{1: 'a', (2, 3): {'b'}}, b'\\x00', range(3), 1j, decimal.Decimal('0.1')]",
        "assert kinds()[13:] == [{'a': 2, 'b': 1}, 10**5000] and type(kinds()[6]) is tuple",
        "assert list(squares(4)) == [0, 1, 4, 9]",
        "assert shifted(Point(1, y=2), dx=3) == Point(4, 2) and shifted(Point(1, 2)).x == 1",
        "assert Point(1, 2) != Point(1, 3) and Point(1, 2) != 1",
        "try:\n    fails('value')\n    assert False\nexcept ValueError as error:\n    assert 'no' in str(error)",
        "try:\n    fails('own')\n    assert False\nexcept KeyError:\n    pass",
        "assert math.isclose(sum(squares(3)), 5.0)",
    ]
    assert sandbox.check(PROGRAM, tests) == Verdict(len(tests), len(tests), "")
    assert (
        sandbox.check(PROGRAM, ["assert list(squares(2)) == [0, 1]", "assert kinds() == 1", "assert False"]).passed == 1
    )
    assert sandbox.check("def f(x): return x", ["assert f(len) is len"]).reason.startswith("Unsendable")
    assert not sandbox.check(PROGRAM, []).all_passed


def test_the_sandbox_dies_with_its_owner(sandbox: Sandbox) -> None:
    code = (
        "import os, sys\nfrom prime_rl.environments.sandbox.sandbox import Sandbox\n"
        f"sandbox = Sandbox({sandbox.layer.name!r})\nprint('ready', flush=True)\n"
        "sandbox.run('while True: pass', time_s=600)"
    )
    reader, writer = os.pipe()  # every process of the sandbox holds its end until it is gone
    owner = subprocess.Popen([sys.executable, "-c", code], stdout=writer, stderr=writer)
    os.close(writer)
    assert os.read(reader, 5) == b"ready"
    owner.kill()
    owner.wait()
    while os.read(reader, 100):
        pass
    os.close(reader)


@pytest.mark.parametrize("name", ["docker", "podman"])
def test_a_container_ends_with_its_owner(name: LayerName) -> None:
    try:
        Sandbox(name, PATIENT).close()
    except SandboxFault as error:
        pytest.skip(str(error))
    code = (
        "from prime_rl.environments.sandbox.sandbox import Sandbox\n"
        f"sandbox = Sandbox({name!r})\nprint(*sandbox.pids(), flush=True)\n"
        "sandbox.run('while True: pass', time_s=600)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        container = os.pidfd_open(int(owner.stdout.readline()))
        owner.kill()
    select.select([container], [], [])  # readable once that process has ended
    os.close(container)


def test_a_container_has_no_network_no_privileges_and_the_limits_of_its_programs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = tmp_path / "podman"
    engine.write_text(
        f"#!/bin/sh\n[ $1 = image ] && exit\nprintf '%s\\n' \"$@\" > {tmp_path}/asked\necho no >&2; exit 125"
    )
    engine.chmod(0o700)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    with pytest.raises(SandboxFault, match=r"podman: no\)"):
        Sandbox("podman", ProgramLimits(memory_mb=300, threads=7))
    asked = (tmp_path / "asked").read_text().split("\n")
    flags = "--network none --cap-drop ALL --user 65534:65534 --memory 428m --pids-limit 9".split()
    wanted = {
        ("--security-opt", "no-new-privileges"),
        ("/usr/bin/env", "-i"),
        *zip(flags[::2], flags[1::2], strict=True),
    }
    assert wanted <= set(itertools.pairwise(asked))
    assert {"--rm", "--read-only"} <= set(asked)
    assert all(each.endswith(",readonly") for each in asked if each.startswith("type=bind"))
    assert not list(tmp_path.glob("medarc-sandbox-*"))


def test_an_engine_that_does_not_run_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    if shutil.which("docker") is None:
        pytest.skip("docker is not installed")
    monkeypatch.setenv("DOCKER_HOST", "unix:///no/such/socket")
    with pytest.raises(SandboxFault, match=r"docker: .*daemon"):
        Sandbox("docker")


def test_a_layer_that_is_not_there_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(SandboxFault, match=r"`bwrap` is not installed .package bubblewrap."):
        Sandbox("bubblewrap")


def test_a_layer_in_which_no_program_runs_is_not_used(sandbox: Sandbox) -> None:
    def broken(name: LayerName) -> Layer:
        return layer(name)._replace(folder="/no/such/folder")

    with pytest.raises(SandboxFault, match="an empty program ends with 70"):
        Sandbox(sandbox.layer.name, PATIENT, broken)


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The user's runtime directory. Its path is short, as that of a socket must be."""
    with tempfile.TemporaryDirectory(dir="/tmp") as directory:
        monkeypatch.setenv(RUNTIME_VARIABLE, directory)
        yield Path(directory)


def test_what_a_killed_owner_leaves_of_a_starting_container_is_removed_by_the_next_program(
    runtime: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, starting = tmp_path / "podman", tmp_path / "starting"
    os.mkfifo(starting)
    engine.write_text(f"#!/bin/sh\n[ $1 = image ] && exit\necho $$ > {starting}\nexec sleep infinity")
    engine.chmod(0o700)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setenv("TMPDIR", f"/tmp/{'long' * 40}")  # the path of a socket has at most 107 bytes
    code = "from prime_rl.environments.sandbox.sandbox import Sandbox\nSandbox('podman')"
    owner = subprocess.Popen([sys.executable, "-c", code], umask=0o077)
    command = int(starting.read_text())
    shared = next(runtime.glob("sandbox-*/control"))
    assert (stat.S_IMODE(shared.parent.stat().st_mode), stat.S_IMODE(shared.stat().st_mode)) == (0o700, 0o755)
    owner.kill()
    owner.wait()
    os.killpg(command, signal.SIGKILL)
    with scratch_directory("other"):
        assert not list(runtime.glob("sandbox-*"))


def test_a_container_without_a_place_for_its_socket_is_refused_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, runtime = tmp_path / "podman", tmp_path / ("long" * 30)
    engine.write_text("#!/bin/sh\n")
    engine.chmod(0o700)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setenv(RUNTIME_VARIABLE, str(runtime))
    with pytest.raises(SandboxFault, match=rf"too long; {RUNTIME_VARIABLE} can be set") as refused:
        Sandbox("podman", PATIENT)
    assert "\n" not in str(refused.value)
    assert not list(runtime.glob("sandbox-*"))
