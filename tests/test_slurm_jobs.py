"""Jobs of Slurm after their submission: what `medarc_jobs` and `medarc_slurm` say about them."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from medarc_rl import medarc_jobs, medarc_slurm
from medarc_rl.backends.slurm.queue import accounted, status_of
from medarc_rl.jobs import JobLog, Status
from prime_rl.run.paths import STABLE, RunPaths

BIN = Path(sys.executable).parent


def jobs(*words: str) -> Result:
    return CliRunner().invoke(medarc_jobs.app, list(words))


def state_of(name: str) -> tuple[str, str]:
    (table,) = json.loads(jobs("status", name, "--json").stdout)
    return table["state"], table["detail"]


@pytest.fixture
def submit(project: Callable, sft_toml: Path, tmp_path: Path) -> Callable[[str, str], str]:
    """Submits a job whose launcher is a shell script, and returns Slurm's id of it."""

    def submitted(name: str, script: str) -> str:
        place = tmp_path / name
        program = project(place).directory / "python"
        program.write_text(f"#!/bin/sh\n{script}\n")
        words = ["sft", str(sft_toml), "--no-check", "--job-name", name, "--project-dir", str(place)]
        result = CliRunner().invoke(medarc_slurm.app, [*words, "--output-dir", str(place / "out")])
        assert result.exit_code == 0, result.output
        found = re.search(r"Submitted batch job (\d+)", result.stdout)
        assert found is not None
        return found[1]

    return submitted


def wait_until_running(name: str) -> None:
    while (state := state_of(name)[0]) != "running":
        assert state == "queued", "each look starts a process, which takes time"


@pytest.mark.slurm
def test_a_submitted_job_is_recorded_followed_and_waited_for(slurm, submit: Callable, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    job_id = submit("good", f"echo step 1; cat {gate}")
    record = JobLog.of_user().find(job_id)
    assert (record.name, record.kind, record.config) == ("good", "sft", str(tmp_path / "tiny.toml"))
    assert (record.backend, record.output) == ("slurm", str(tmp_path / "good" / "out"))
    wait_until_running("good")
    assert re.fullmatch(r"on node0, ends by \S+", state_of("good")[1])
    with subprocess.Popen([BIN / "medarc_slurm", "logs", "good", "-f"], stdout=subprocess.PIPE, text=True) as following:
        assert following.stdout is not None
        assert next(line for line in following.stdout if line.startswith("step")) == "step 1\n"
        gate.write_text("step 2\n")
        assert following.stdout.read() == "step 2\n"
    assert following.returncode == 0
    assert jobs("wait", job_id).exit_code == 0
    assert JobLog.of_user().find(job_id).last_status == Status("succeeded")
    assert jobs("logs", "good").stdout.endswith("step 1\nstep 2\n")


@pytest.mark.slurm
@pytest.mark.slow
def test_jobs_that_fail_are_preempted_or_cancelled_are_told_apart(slurm, submit: Callable, tmp_path: Path) -> None:
    submit("bad", "exit 7")
    result = jobs("wait", "bad", "--interval", "0.1")
    assert (result.exit_code, result.stdout.splitlines()[-1].partition(": ")[2]) == (1, "failed: exit code 7")
    job_id = submit("long", "exec sleep 1000")
    wait_until_running("long")
    # A job of a partition that may preempt takes all GPUs of the node.
    slurm.ask("sbatch", "--partition=urgent", "--gres=gpu:8", "--output=/dev/null", "--wrap=true")
    while not (found := state_of("long"))[1].endswith("requeued once"):
        assert found[0] in ("queued", "running")
    assert CliRunner().invoke(medarc_slurm.app, ["cancel", "long"]).exit_code == 0
    assert jobs("wait", "long", "--interval", "0.1").exit_code == 3
    again = jobs("cancel", "long")
    assert (again.exit_code, again.stderr) == (1, f"error: long ({job_id}) has ended already: cancelled\n")


@pytest.mark.parametrize(
    ("shown", "expected"),
    [
        ({"JobState": "PENDING", "Reason": "Resources"}, Status("queued", "waits: Resources")),
        ({"JobState": "PENDING", "Reason": "None"}, Status("queued")),
        (
            {"JobState": "PENDING", "Reason": "BeginTime", "Restarts": "2"},
            Status("queued", "waits: BeginTime; requeued 2 times"),
        ),
        (
            {"JobState": "REQUEUE_HOLD", "Reason": "JobHeldAdmin"},
            Status("queued", "requeued and held: `scontrol release` lets it start; waits: JobHeldAdmin"),
        ),
        (
            {"JobState": "TIMEOUT", "ExitCode": "0:0", "TimeLimit": "01:00:00"},
            Status("failed", "the time limit was reached; TimeLimit=01:00:00"),
        ),
        ({"JobState": "PREEMPTED", "ExitCode": "0:15"}, Status("failed", "preempted; signal 15")),
        ({"JobState": "OUT_OF_MEMORY", "ExitCode": "0:125"}, Status("failed", "out of memory; signal 125")),
        ({"JobState": "NODE_FAIL"}, Status("failed", "a node failed")),
        ({"JobState": "COMPLETED", "ExitCode": "0:0"}, Status("succeeded")),
        ({"JobState": "NEW_STATE"}, Status("unknown", "NEW_STATE")),
        ({}, Status("unknown")),
    ],
)
def test_states_of_slurm(shown: dict[str, str], expected: Status) -> None:
    assert status_of(shown) == expected


def test_the_last_row_of_a_requeued_job_counts_in_accounting(stand_ins) -> None:
    rows = ["7|PREEMPTED|0:15|1:00|n1|Unknown", "7|CANCELLED by 1000|0:15|1:00|n2|Unknown", "70|FAILED|1:0|1:00|n2|X"]
    stand_ins.add("sacct", says="\n".join(rows))
    assert accounted("7") == Status("cancelled", "requeued once")
    assert accounted("70") == Status("failed", "exit code 1")
    assert accounted("8") is None
    stand_ins.add("sacct", says="Slurm accounting storage is disabled", code=1)
    assert accounted("7") is None


@pytest.mark.parametrize(
    ("end", "state"), [("complete", "succeeded"), ("stopped", "cancelled"), ("failed", "failed"), ("refused", "failed")]
)
def test_a_job_that_slurm_forgot_is_told_from_the_runs_directory(
    stand_ins, submit_stand_in: Path, end: str, state: str
) -> None:
    assert state_of("forgotten") == ("unknown", "Slurm does not know the job any more")
    (submit_stand_in / "attempts").mkdir()
    receipt = {"started": "2026-11-22T12:00:00+00:00", "host": "n1"}
    for number, job, result in ((1, "12", end), (2, "13", "failed")):
        table = {**receipt, "attempt": number, "slurm_job_id": job, "result": result}
        (submit_stand_in / "attempts" / f"00{number}.json").write_text(json.dumps(table))
    assert state_of("forgotten") == (state, f"Slurm does not know the job any more; its run: {end}")


@pytest.mark.parametrize("slurm_state", ["FAILED ExitCode=143:0", "TIMEOUT ExitCode=0:15"])
def test_a_planned_stop_at_the_time_limit_can_be_resumed(submit_stand_in: Path, stand_ins, slurm_state: str) -> None:
    stand_ins.add("scontrol", says=f"JobId=12 JobState={slurm_state}")
    (submit_stand_in / "attempts").mkdir()
    receipt = {"started": "2026-11-22T12:00:00+00:00", "host": "n1", "attempt": 1, "slurm_job_id": "12"}
    table = {**receipt, "result": "stopped", "outcome": "stopped by SIGTERM"}
    (submit_stand_in / "attempts" / "001.json").write_text(json.dumps(table))
    assert jobs("list").stdout.splitlines()[1].split()[4] == "failed", "nothing is saved"
    log = JobLog.of_user()
    record = log.find("forgotten")
    log.save(replace(record, ended=None))
    checkpoint = RunPaths(submit_stand_in).checkpoint(4)
    checkpoint.mkdir(parents=True)
    (checkpoint / STABLE).touch()
    assert "stopped, can be resumed" in jobs("list").stdout
    detail = "stopped by SIGTERM; submit it again with --resume latest: step 4 is saved"
    assert state_of("forgotten") == ("stopped", detail)
    assert jobs("wait", "forgotten").exit_code == 5


def test_a_job_of_another_cluster_is_looked_up_and_cancelled_there(
    stand_ins, project: Callable, sft_toml: Path, tmp_path: Path
) -> None:
    stand_ins.add("sbatch", says="Submitted batch job 12 on cluster west")
    stand_ins.add("scontrol", says="JobId=12 JobState=RUNNING")
    stand_ins.add("scancel")
    project(tmp_path / "project")
    words = [
        "--no-check",
        "--job-name",
        "far",
        "--project-dir",
        str(tmp_path / "project"),
        "--sbatch-arg=--clusters=west",
    ]
    result = CliRunner().invoke(medarc_slurm.app, ["sft", str(sft_toml), *words, "--output-dir", str(tmp_path / "out")])
    assert result.exit_code == 0, result.output
    assert jobs("cancel", "far").exit_code == 0
    asked = [call["argv"][1:] for call in stand_ins.calls if Path(call["argv"][0]).name in ("scontrol", "scancel")]
    assert asked[-2:] == [["--clusters=west", "--oneliner", "show", "job", "12"], ["--clusters=west", "12"]]


@pytest.fixture
def submit_stand_in(stand_ins, project: Callable, sft_toml: Path, tmp_path: Path) -> Path:
    """The directory of a run that was submitted to a Slurm that knows nothing later."""
    stand_ins.add("sbatch", says="Submitted batch job 12")
    stand_ins.add("scontrol", says="slurm_load_jobs error: Invalid job id specified", code=1)
    stand_ins.add("sacct", says="", code=1)
    project(tmp_path / "project")
    words = ["--no-check", "--job-name", "forgotten", "--project-dir", str(tmp_path / "project")]
    out = tmp_path / "out"
    result = CliRunner().invoke(medarc_slurm.app, ["sft", str(sft_toml), *words, "--output-dir", str(out)])
    assert result.exit_code == 0, result.output
    return out


def test_a_slurm_that_does_not_answer_is_one_line(submit_stand_in: Path, stand_ins) -> None:
    stand_ins.add("scontrol", says="slurm_load_jobs error: Unable to contact slurm controller", code=1)
    result = jobs("status", "forgotten")
    assert (result.exit_code, result.stderr.count("\n")) == (1, 1)
    assert result.stderr.endswith("Unable to contact slurm controller\n")
    listed = jobs("list")
    assert (listed.exit_code, "unknown" in listed.stdout) == (0, True)
