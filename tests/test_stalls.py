"""A part of a run that hangs ends the run, with its name, its last words and its stack: real parts, real signals."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from prime_rl.utils.engine_keys import ENGINE_KEY_VARIABLE

pytestmark = [pytest.mark.skipif(sys.platform != "linux", reason="reads /proc"), pytest.mark.timeout(600)]

ROOT = Path(__file__).resolve().parents[1]
MEDARC_TRAIN = str(Path(sys.executable).with_name("medarc_train"))
RL = "rl examples/reverse_text/rl_cpu.toml --orchestrator.batch-size 16 --orchestrator.rollouts-per-example 4"
SFT = "sft examples/reverse_text/sft_cpu.toml"
ENDLESS = ("--max-steps", "100000")
PROGRAMS = {"trainer": "prime_rl.trainer.", "orchestrator": "/orchestrator", "inference": "/inference"}

ENVIRONMENT = '''
"""reverse-text of which `count` rollouts hang, from number `first` on."""
import asyncio, itertools
import reverse_text

def load_environment(first: int, count: int):
    env, rollouts = reverse_text.load_environment(), itertools.count()
    setup_state = env.setup_state

    async def hang_in_some_rollouts(state):
        if first <= next(rollouts) < first + count:
            await asyncio.Event().wait()
        await setup_state(state)

    env.setup_state = hang_in_some_rollouts
    return env
'''


@dataclass(frozen=True)
class Run:
    """A run in progress."""

    process: subprocess.Popen[str]

    def wait_for(self, sign: str) -> None:
        assert self.process.stdout is not None
        lines = []
        for line in self.process.stdout:
            lines.append(line)
            if sign in line:
                return
        pytest.fail(f"no {sign!r} in:\n{''.join(lines[-30:])}")

    def pid_of(self, part: str, variable: str = "") -> int:
        """The process of a part, and of several the one with this variable in its environment."""
        for task in Path(f"/proc/{self.process.pid}/task").iterdir():
            for pid in map(int, (task / "children").read_text().split()):
                words, environ = (Path(f"/proc/{pid}/{file}").read_text() for file in ("cmdline", "environ"))
                if PROGRAMS[part] in words and (not variable or variable in environ.split("\0")):
                    return pid
        raise AssertionError(f"no {part} runs")

    def end(self) -> tuple[int, str]:
        """Exit code, and what was printed to the end."""
        printed, _ = self.process.communicate()
        return self.process.returncode, printed


@contextmanager
def running(out: Path, *options: str, env: dict[str, str] | None = None, command: str = RL) -> Iterator[Run]:
    process = subprocess.Popen(
        [MEDARC_TRAIN, *command.split(), "--output-dir", str(out), *options],
        cwd=ROOT,
        env={**os.environ, **(env or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        yield Run(process)
    finally:
        if process.poll() is None:
            process.terminate()
            process.communicate()


@pytest.fixture
def hanging_environment(tmp_path: Path) -> dict[str, str]:
    """The variables with which `hanging` can be imported."""
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules" / "hanging.py").write_text(ENVIRONMENT)
    return {"PYTHONPATH": str(tmp_path / "modules")}


@pytest.mark.parametrize("part", PROGRAMS)
def test_a_part_that_is_stopped_ends_the_run_by_name_and_with_its_stack(part: str, tmp_path: Path) -> None:
    with running(tmp_path / "out", *ENDLESS, "--stall.stopped-timeout-s", "1") as run:
        run.wait_for("step 2/")
        pid = run.pid_of(part)
        os.kill(pid, signal.SIGSTOP)
        code, printed = run.end()
    assert code == 1, printed
    assert f"error: {part} was stopped by a signal (process {pid}) at " in printed
    _, _, report = printed.partition("what each process was doing:\n")
    assert [line.split(":")[0] for line in report.splitlines()[:3]] == ["  inference", "  orchestrator", "  trainer"]
    assert "(stopped by a signal)" in next(line for line in report.splitlines() if line.startswith(f"  {part}: "))
    assert "its stack:\n" in report


def test_of_the_ranks_of_sft_the_one_that_is_stopped_is_named_and_all_are_shown(tmp_path: Path) -> None:
    options = ("--max-steps", "100000", "--deployment.num-gpus", "2", "--stall.stopped-timeout-s", "1")
    with running(tmp_path / "out", *options, command=SFT) as run:
        run.wait_for("Step 2 |")
        pid = run.pid_of("trainer", "RANK=1")
        os.kill(pid, signal.SIGSTOP)
        code, printed = run.end()
    assert code == 1, printed
    assert f"error: trainer_rank_1 was stopped by a signal (process {pid}) at " in printed
    _, _, report = printed.partition("what each process was doing:\n")
    assert [line.split(":")[0] for line in report.splitlines()[:2]] == ["  trainer", "  trainer_rank_1"]


def test_an_environment_that_hangs_in_every_rollout_is_named_and_its_stack_is_shown(
    hanging_environment: dict[str, str], tmp_path: Path
) -> None:
    hanging = ("--orchestrator.env.0.id", "hanging", "--orchestrator.env.0.args", '{"first": 40, "count": 1000000}')
    with running(tmp_path / "out", *ENDLESS, *hanging, "--stall.timeout-s", "20", env=hanging_environment) as run:
        code, printed = run.end()
    assert code == 1, printed
    assert "error: orchestrator made no progress since " in printed
    assert "environment 'hanging', row " in printed
    assert "waiting for a batch" in next(line for line in printed.splitlines() if line.startswith("  trainer: "))
    assert "in hang_in_some_rollouts" in printed


def test_one_rollout_that_hangs_is_no_stall(hanging_environment: dict[str, str], tmp_path: Path) -> None:
    hanging = ("--orchestrator.env.0.id", "hanging", "--orchestrator.env.0.args", '{"first": 5, "count": 1}')
    # Its group is cancelled after two weight updates, and rolled out again.
    options = ("--max-steps", "5", "--orchestrator.max-off-policy-steps", "1", "--stall.timeout-s", "60")
    with running(tmp_path / "out", *options, *hanging, env=hanging_environment) as run:
        code, printed = run.end()
    assert code == 0, printed


def test_an_engine_that_somebody_has_paused_is_named(tmp_path: Path) -> None:
    with running(tmp_path / "out", *ENDLESS, "--stall.timeout-s", "20") as run:
        run.wait_for("step 2/")
        pause(run.pid_of("inference"))
        code, printed = run.end()
    assert code == 1, printed
    assert "error: inference made no progress since " in printed
    assert "it was: paused, with " in printed


def pause(pid: int) -> None:
    argv = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    environ = dict(each.partition("=")[::2] for each in Path(f"/proc/{pid}/environ").read_text().split("\0"))
    url = f"http://127.0.0.1:{argv[argv.index('--server.port') + 1]}/pause"
    request = urllib.request.Request(
        url, method="POST", headers={"Authorization": f"Bearer {environ[ENGINE_KEY_VARIABLE]}"}
    )
    with urllib.request.urlopen(request) as answer:
        assert answer.status == 200
