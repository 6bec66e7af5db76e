"""A part of a run that hangs ends the run, with its name, its last words and its stack: real parts, real signals."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="reads /proc"),
]

ROOT = Path(__file__).resolve().parents[1]
MEDARC_TRAIN = str(Path(sys.executable).with_name("medarc_train"))
RL = "rl examples/reverse_text/rl_cpu.toml --orchestrator.batch-size 16 --orchestrator.rollouts-per-example 4"
SFT = "sft examples/reverse_text/sft_cpu.toml"
ENDLESS = ("--max-steps", "100000")
PROGRAMS = {"trainer": "prime_rl.trainer.", "orchestrator": "/orchestrator", "inference": "/inference"}

ENVIRONMENT = '''
"""reverse-text with a fault in its first `count` rollouts: they hang, or pause the engine."""
import asyncio, itertools, os, sys, urllib.request
import reverse_text

def load_environment(fault: str, count: int):
    env, rollouts = reverse_text.load_environment(), itertools.count()
    setup_state = env.setup_state

    async def faulty_setup(state):
        if next(rollouts) < count:
            await {"hang": hang, "pause": pause_engine}[fault]()
        await setup_state(state)

    env.setup_state = faulty_setup
    return env

async def hang():
    await asyncio.Event().wait()

async def pause_engine():
    url = sys.argv[sys.argv.index("--client.base-url") + 1].removesuffix("/v1") + "/pause"
    key = {"Authorization": "Bearer " + os.environ["VLLM_API_KEY"]}
    urllib.request.urlopen(urllib.request.Request(url, method="POST", headers=key)).close()
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
def modules(tmp_path: Path) -> dict[str, str]:
    """The variables with which the environment `faulty` can be imported."""
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules" / "faulty.py").write_text(ENVIRONMENT)
    return {"PYTHONPATH": str(tmp_path / "modules")}


def with_fault(fault: str, count: int) -> tuple[str, ...]:
    args = json.dumps({"fault": fault, "count": count})
    return ("--orchestrator.env.0.id", "faulty", "--orchestrator.env.0.args", args)


@pytest.mark.parametrize("part", PROGRAMS)
def test_a_part_that_is_stopped_ends_the_run_by_name_and_with_its_stack(part: str, tmp_path: Path) -> None:
    with running(tmp_path / "out", *ENDLESS, "--stall.stopped-timeout-s", "1") as run:
        run.wait_for("step 1 (2/")
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


# The faults below come before the first batch: whatever the machine's speed, no part but the one at fault works then.


def test_an_environment_that_hangs_in_every_rollout_is_named_and_its_stack_is_shown(
    modules: dict[str, str], tmp_path: Path
) -> None:
    options = (*ENDLESS, *with_fault("hang", 1_000_000), "--stall.timeout-s", "20")
    with running(tmp_path / "out", *options, env=modules) as run:
        code, printed = run.end()
    assert code == 1, printed
    assert "error: orchestrator made no progress since " in printed
    assert "environment 'faulty', row " in printed
    assert "in faulty_setup" in printed


def test_an_engine_that_somebody_has_paused_is_named(modules: dict[str, str], tmp_path: Path) -> None:
    options = (*ENDLESS, *with_fault("pause", 1), "--stall.timeout-s", "20")
    with running(tmp_path / "out", *options, env=modules) as run:
        code, printed = run.end()
    assert code == 1, printed
    assert "error: inference made no progress since " in printed
    assert "it was: paused, with " in printed


def test_one_rollout_that_hangs_is_no_stall(modules: dict[str, str], tmp_path: Path) -> None:
    # Its group is cancelled after two weight updates, and rolled out again.
    options = ("--max-steps", "5", "--orchestrator.max-off-policy-steps", "1", *with_fault("hang", 1))
    with running(tmp_path / "out", *options, "--stall.timeout-s", "300", env=modules) as run:
        code, printed = run.end()
    assert code == 0, printed
