"""When a job requeues itself, and the head of its log."""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path

import pytest

from medarc_rl.launchers.batch_job import TERMINATED, WARNED, header_lines, in_batch_job, requeue_if_stopped
from prime_rl.run.paths import STABLE, RunPaths

RUNNING = "JobId=7 JobState=RUNNING Reason=None Restarts=0"
TIME_LIMIT = "JobId=7 JobState=COMPLETING Reason=TimeLimit"
CANCELLED = "JobId=7 JobState=COMPLETING Reason=None Restarts=0"
REQUEUED = "JobId=7 JobState=COMPLETING Reason=None Restarts=1"


@pytest.fixture
def scontrol(stand_ins):
    """Makes `scontrol show job` print a line; `scontrol requeue` exits with a code."""

    def describe(job: str, code: int = 0) -> None:
        stand_ins.add("scontrol", says=job)
        program = stand_ins.directory / "scontrol"
        program.write_text(program.read_text().replace(f"sys.exit({0})", f"sys.exit({code} * ('requeue' in sys.argv))"))

    return describe


def job(restarts: int = 0, bound: int | None = 2) -> dict[str, str]:
    env = {"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": str(restarts)}
    return env if bound is None else env | {"MEDARC_MAX_REQUEUES": str(bound)}


def requeues(stand_ins) -> list[list[str]]:
    return [call["argv"][1:] for call in stand_ins.calls if "requeue" in call["argv"]]


def test_the_warnings_exit_code_is_that_of_its_signal() -> None:
    assert (WARNED, TERMINATED) == (128 + signal.SIGUSR2, 128 + signal.SIGTERM)


@pytest.mark.parametrize(
    ("code", "state", "env", "expected"),
    [
        pytest.param(WARNED, RUNNING, job(), True, id="warned"),
        pytest.param(WARNED, TIME_LIMIT, job(restarts=1), True, id="warned, and not saved before the limit"),
        pytest.param(TERMINATED, RUNNING, job(), True, id="terminated without a warning"),
        pytest.param(TERMINATED, TIME_LIMIT, job(), True, id="the limit came without a warning"),
        pytest.param(TERMINATED, CANCELLED, job(), False, id="cancelled"),
        pytest.param(WARNED, CANCELLED, job(), False, id="cancelled while it saves"),
        pytest.param(TERMINATED, REQUEUED, job(), False, id="preempted, or requeued by somebody"),
        pytest.param(WARNED, RUNNING, job(restarts=2), False, id="often enough"),
        pytest.param(WARNED, RUNNING, job(bound=None), False, id="not asked for"),
        pytest.param(0, RUNNING, job(), False, id="complete"),
        pytest.param(1, RUNNING, job(), False, id="failed"),
        pytest.param(130, RUNNING, job(), False, id="interrupted"),
        pytest.param(WARNED, "slurm_load_jobs error: Invalid job id", job(), False, id="unknown to Slurm"),
    ],
)
def test_a_stopped_job_starts_again_unless_somebody_wants_it_gone(
    code: int, state: str, env: dict[str, str], expected: bool, scontrol, stand_ins
) -> None:
    scontrol(state)
    said = list(requeue_if_stopped(code, env))
    assert requeues(stand_ins) == ([["requeue", "7"]] if expected else [])
    assert all("--resume latest" in line for line in said if line.startswith("not requeued"))


@pytest.mark.parametrize(
    ("begun", "saved", "restarts", "expected"),
    [
        pytest.param([None, None], [], 1, True, id="twice without a step"),
        pytest.param([None, None, None], [], 2, False, id="three times without a step"),
        pytest.param([], [], 2, False, id="stopped before a receipt, three times"),
        pytest.param([None, 2, 4], [2, 4, 6], 2, True, id="each went on"),
        pytest.param([None, 4, 4, 4], [2, 4], 3, False, id="no step after the first start"),
        pytest.param([4, 4, 4], [2, 4, 5], 2, True, id="slow, but it went on"),
    ],
)
def test_a_job_whose_starts_make_no_step_does_not_start_for_ever(
    begun: list[int | None], saved: list[int], restarts: int, expected: bool, scontrol, stand_ins, tmp_path: Path
) -> None:
    scontrol(RUNNING)
    paths = RunPaths(tmp_path / "run")
    paths.attempts.mkdir(parents=True)
    for number, step in enumerate(begun, 1):
        receipt = {"attempt": number, "started": "2026-11-22T18:00:00+00:00", "host": "a", "slurm_job_id": "7"}
        paths.receipt(number).write_text(json.dumps({**receipt, "step": step}))
    for step in saved:
        paths.checkpoint(step).mkdir(parents=True)
        (paths.checkpoint(step) / STABLE).touch()
    said = list(requeue_if_stopped(WARNED, job(restarts, bound=20) | {"OUTPUT_DIR": str(paths.root)}))
    assert bool(requeues(stand_ins)) == expected
    assert expected or "saved no new step" in said[-1]


def test_a_requeue_that_slurm_refuses_is_told(scontrol) -> None:
    scontrol(RUNNING, code=1)
    assert list(requeue_if_stopped(WARNED, job()))[-1].startswith("not requeued: ")


def test_without_scontrol_the_job_ends_with_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    (line,) = requeue_if_stopped(WARNED, job())
    assert line.startswith("not requeued: scontrol: No such file")


def test_a_launch_outside_slurm_says_nothing_more(capsys: pytest.CaptureFixture[str]) -> None:
    assert in_batch_job(lambda: 5, {}) == 5
    assert capsys.readouterr().out == ""


def test_the_log_is_headed_by_host_gpus_job_commit_and_versions(scontrol, tmp_path: Path) -> None:
    scontrol(f"{RUNNING} EndTime=2030-01-01T00:00:00")
    where, gpus, code, save = header_lines(job(restarts=1) | {"CUDA_VISIBLE_DEVICES": "2,3"}, tmp_path)
    assert where.startswith("job 7, attempt 2, on ")
    assert where.endswith("ends by 2030-01-01T00:00:00")
    assert gpus.startswith("GPUs 2,3; ")
    assert code.startswith("commit unknown: no git repository; Python ")
    assert "torch 2" in code
    assert save == "a checkpoint on demand: scancel --batch --signal=USR1 7"
    commit = list(header_lines(job(), Path(__file__).parent))[2]
    assert f"Python {sys.version.split()[0]}" in commit
