"""The commands with a real Slurm: what a finished job saw, wrote and left."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from medarc_rl import medarc_slurm, medarc_train

ROOT = Path(__file__).resolve().parents[1]
HOSTILE = 'it\'s "a" $(touch pwned) `id` \\back #hash %j é'

CHILD = """#!{python}
import json, os, signal, sys
name = "trainer" if "prime_rl.trainer.rl.train" in sys.argv else os.path.basename(sys.argv[0])
signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
with open({record!r}, "a") as record:
    record.write(json.dumps([name, os.environ["CUDA_VISIBLE_DEVICES"]]) + "\\n")
if {gate!r} and name == "trainer" and os.environ["RANK"] == "0":
    gate = open({gate!r}, "w")
    gate.write("training\\n")
    gate.flush()
if {gate!r} or name == "inference":
    signal.pause()
open(os.environ["COMPLETION_MARKER"], "w").close()
"""

PYTHON = """#!/bin/bash
here=${BASH_SOURCE[0]%/*}
# The trainer is a stand-in, everything else is real.
if [[ $2 == prime_rl.trainer.* ]]; then exec "$here/trainer" "$@"; fi
exec "$here/python3" "$@"
"""

pytestmark = [pytest.mark.slurm, pytest.mark.slow]


def submit(command: str, *words: object) -> Result:
    """Run `medarc_slurm` without its checks, which test_readiness.py tests."""
    return CliRunner().invoke(medarc_slurm.app, [command, "--no-check", *map(str, words)])


def submit_and_wait(command: str, *words: object) -> Result:
    return submit(command, *words, "--sbatch-arg=--wait")


def job_id_of(result: Result) -> str:
    match = re.search(r"Submitted batch job (\d+)", result.output)
    assert match, result.output
    return match[1]


def make_real_project(directory: Path, **child: object) -> Path:
    """A project whose Python has this one's packages, but whose engine is made of stand-ins.

    Each stand-in records its GPUs. Then `inference` serves until it is stopped, and the others exit with 0. With a
    `gate`, all of them wait.
    """
    venv = directory / ".venv"
    (venv / "bin").mkdir(parents=True)
    (venv / "pyvenv.cfg").write_text(f"home = {Path(sys._base_executable).parent}\n")
    (venv / "bin" / "python3").symlink_to(sys._base_executable)
    (venv / "bin" / "python").write_text(PYTHON)
    (venv / "bin" / "python").chmod(0o755)
    site_packages = venv / Path(sysconfig.get_path("purelib")).relative_to(sys.prefix)
    site_packages.mkdir(parents=True)
    (site_packages / "real.pth").write_text(f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n")
    (venv / "bin" / "activate").write_text('PATH="$PROJECT_DIR/.venv/bin:$PATH"\nexport PATH\n')
    for name in ("inference", "orchestrator", "trainer"):
        program = venv / "bin" / name
        program.write_text(CHILD.format(python=sys.executable, **child))
        program.chmod(0o755)
    return directory


@pytest.fixture
def three_gpus_taken(slurm, tmp_path: Path) -> Iterator[None]:
    """Somebody else's job holds GPUs 0, 1 and 2 of the node."""
    gate, started = tmp_path / "their-gate", tmp_path / "their-start"
    os.mkfifo(gate)
    os.mkfifo(started)
    slurm.ask("sbatch", "--output=/dev/null", "--gres=gpu:3", f"--wrap=echo up > {started}; cat {gate}")
    started.read_text()
    yield
    gate.write_text("")


GPUS_OF_JOBS = {"--train-gpus 2 --infer-gpus 1": ("3,4,5", "0"), "--colocate 2": ("3,4", "1")}
"""The GPUs that a job gets, and whether each serves and trains."""


@pytest.mark.parametrize("split", GPUS_OF_JOBS)
@pytest.mark.usefixtures("three_gpus_taken")
def test_an_rl_job_runs_the_launcher_on_the_gpus_that_slurm_gave(
    slurm, stand_ins, project, rl_toml: Path, tmp_path: Path, split: str
) -> None:
    project(tmp_path / "project")
    out = tmp_path / "out"
    words = (*split.split(), "--project-dir", tmp_path / "project", "--output-dir", out)
    result = submit_and_wait("rl", rl_toml, *words)
    assert result.exit_code == 0, result.output
    job = slurm.job(job_id_of(result))
    assert (job["JobState"], job["ExitCode"], job["JobName"]) == ("COMPLETED", "0:0", "tiny-rl")
    (call,) = stand_ins.calls
    assert call["argv"][1:] == ["-m", "medarc_rl.launchers.rl_local", "@", f"{out}/configs/rl.toml"]
    assert (call["env"]["CUDA_VISIBLE_DEVICES"], call["env"]["MEDARC_SINGLE_GPU"]) == GPUS_OF_JOBS[split]
    assert call["cwd"] == str(tmp_path / "project")


def test_each_child_of_an_rl_job_sees_its_own_of_those_gpus(
    slurm, three_gpus_taken, rl_toml: Path, tmp_path: Path
) -> None:
    record = tmp_path / "children.jsonl"
    project_dir = make_real_project(tmp_path / "project", record=str(record), gate="")
    words = ("--train-gpus", 2, "--infer-gpus", 1, "--project-dir", project_dir, "--output-dir", tmp_path / "out")
    result = submit_and_wait("rl", rl_toml, *words)
    job = slurm.job(job_id_of(result))
    log = Path(job["StdOut"]).read_text()
    assert (job["JobState"], job["ExitCode"]) == ("COMPLETED", "0:0"), log
    gpus = dict(map(json.loads, record.read_text().splitlines()))
    assert gpus == {"inference": "3", "orchestrator": "", "trainer": "4,5"}
    assert "trainer finished" in log


def test_scancel_stops_a_job_in_order_and_leaves_nothing_behind(slurm, rl_toml: Path, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    project_dir = make_real_project(tmp_path / "project", record=str(tmp_path / "children.jsonl"), gate=str(gate))
    words = ("--train-gpus", 2, "--project-dir", project_dir, "--output-dir", tmp_path / "out")
    job_id = job_id_of(submit("rl", rl_toml, *words))
    with gate.open() as running:
        assert running.readline() == "training\n"
        slurm.ask("scancel", job_id)
        assert running.read() == "", "end of the pipe: all processes that held it have exited"
    job = slurm.wait_for_end(job_id)
    assert job["JobState"] == "CANCELLED"
    assert "SIGTERM" in Path(job["StdOut"]).read_text()
    assert processes_of_job(job_id) == []


def processes_of_job(job_id: str) -> list[str]:
    mark = f"SLURM_JOB_ID={job_id}".encode()
    found = []
    for environ in Path("/proc").glob("[0-9]*/environ"):
        try:
            if mark in environ.read_bytes().split(b"\0"):
                found.append(environ.parent.joinpath("cmdline").read_text())
        except OSError:
            continue  # it ended while we looked
    return found


def test_paths_and_names_arrive_as_they_are(slurm, stand_ins, project, sft_toml: Path, tmp_path: Path) -> None:
    place = tmp_path / HOSTILE
    project(place / "project")
    name = f"-{HOSTILE}"
    result = submit_and_wait(
        "sft", sft_toml, "--output-dir", place / "out", "--project-dir", place / "project", "--job-name", name
    )
    assert result.exit_code == 0, result.output
    job = slurm.ask("scontrol", "show", "job", job_id_of(result))
    assert f"JobName={name}\n" in job
    (call,) = stand_ins.calls
    assert call["argv"][-1] == f"{place}/out/configs/trainer.toml"
    assert call["cwd"] == call["env"]["PROJECT_DIR"] == f"{place}/project"
    assert not list(tmp_path.rglob("pwned"))
    # A backslash switches the patterns of Slurm's log names off.
    assert (place / "out" / "slurm" / "job.log").is_file()


def test_a_failing_sft_job_keeps_its_exit_code_and_its_words(
    slurm, stand_ins, project, sft_toml: Path, tmp_path: Path
) -> None:
    project(tmp_path / "project").add("python", says="nan in the loss", code=7)
    out = tmp_path / "out"
    words = ("--gpus", 2, "--project-dir", tmp_path / "project", "--output-dir", out)
    result = submit_and_wait("sft", sft_toml, *words)
    assert result.exit_code == 1
    assert "exit code 7" in result.stderr
    job_id = job_id_of(result)
    assert slurm.job(job_id)["ExitCode"] == "7:0"
    assert "nan in the loss" in (out / "slurm" / f"job_{job_id}.log").read_text()
    (call,) = stand_ins.calls
    assert call["argv"][1:3] == ["-m", "medarc_rl.launchers.sft_local"]
    assert len(call["env"]["CUDA_VISIBLE_DEVICES"].split(",")) == 2


def test_a_missing_environment_is_one_line_in_the_log(slurm, sft_toml: Path, tmp_path: Path) -> None:
    result = submit_and_wait("sft", sft_toml, "--project-dir", tmp_path, "--output-dir", tmp_path / "out")
    log = tmp_path / "out" / "slurm" / f"job_{job_id_of(result)}.log"
    assert log.read_text().splitlines() == [
        f"error: {tmp_path}/.venv is missing; run 'uv sync' there, or name another place with --project-dir"
    ]


def test_slurm_gets_what_was_asked_of_it(slurm, stand_ins, project, sft_toml: Path, tmp_path: Path) -> None:
    project(tmp_path)
    asked = ("--time=1-2:30", "--mem=3G", "--partition=main", "--constraint=fake", "--nodelist=node0", "--gpus=4")
    words = ("--cpus-per-gpu=4", "--sbatch-arg=--comment=two words", "--sbatch-arg=--nice=5", "--project-dir", tmp_path)
    result = submit_and_wait("sft", sft_toml, *asked, *words, "--output-dir", tmp_path / "out")
    assert result.exit_code == 0, result.output
    job = slurm.job(job_id_of(result))
    assert (job["TimeLimit"], job["MinMemoryNode"], job["Partition"]) == ("1-02:30:00", "3G", "main")
    assert (job["Features"], job["ReqNodeList"], job["NumCPUs"]) == ("fake", "node0", "16")
    assert "Comment=two words" in slurm.ask("scontrol", "show", "job", job_id_of(result))


def test_what_was_asked_for_wins_over_the_variables_of_a_login_script_and_of_an_outer_job(
    slurm, project, sft_toml: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """sbatch itself lets its variables win over a script's header."""
    project(tmp_path)
    monkeypatch.setenv("RECORD", str(tmp_path / "record"))
    login = {"PARTITION": "urgent", "TIMELIMIT": "5", "ACCOUNT": "theirs", "JOB_NAME": "shell", "NO_REQUEUE": "1"}
    for name, value in {**login, "GRES": "gpu:7", "EXPORT": "NONE", "OPEN_MODE": "truncate"}.items():
        monkeypatch.setenv(f"SBATCH_{name}", value)
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    asked = ("--time=1:00:00", "--partition=main", "--account=mine", "--sbatch-arg=--requeue", "--ckpt.interval=1")
    result = submit_and_wait("sft", sft_toml, *asked, "--project-dir", tmp_path, "--output-dir", tmp_path / "out")
    assert result.exit_code == 0, result.output
    job = slurm.job(job_id_of(result))
    assert (job["Partition"], job["TimeLimit"], job["Account"]) == ("main", "01:00:00", "mine")
    assert (job["JobName"], job["Requeue"], job["TresPerNode"]) == ("tiny-sft", "1", "gres:gpu:1")
    (call,) = map(json.loads, (tmp_path / "record").read_text().splitlines())
    assert "--resume" not in call["argv"]


def test_tasks_of_an_array_never_share_a_directory(
    slurm, stand_ins, project, sft_toml: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The option is refused before anything is submitted; here someone submits the script himself."""
    project(tmp_path)
    out, words = tmp_path / "out", ("--project-dir", tmp_path)
    with monkeypatch.context() as patched:
        patched.setenv("SBATCH_ARRAY_INX", "0-1")
        refused = submit("sft", sft_toml, *words, "--output-dir", out)
        assert (refused.exit_code, slurm.ask("squeue", "--noheader")) == (2, "")
        assert "SBATCH_ARRAY_INX=0-1: the tasks of a job array would share one directory" in refused.stderr
    log = tmp_path / "task_%a.log"
    done = subprocess.run(["sbatch", "--wait", "--array=0-1", f"--output={log}", f"--error={log}", out / "sft.sh"])
    assert done.returncode != 0
    for task in range(2):
        assert "error: the tasks of a job array would share" in (tmp_path / f"task_{task}.log").read_text()
    # A task of an array may submit jobs with directories of their own.
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "3")
    assert submit_and_wait("sft", sft_toml, *words, "--output-dir", out).exit_code == 0


def test_the_config_of_a_job_that_waits_is_never_overwritten(
    slurm, stand_ins, project, sft_toml: Path, tmp_path: Path
) -> None:
    project(tmp_path / "project")
    out, config = tmp_path / HOSTILE, tmp_path / HOSTILE / "configs" / "trainer.toml"
    where = (sft_toml, "--project-dir", tmp_path / "project", "--output-dir", out)
    job_id = job_id_of(submit("sft", *where, "--sbatch-arg=--hold"))
    of_the_job = config.read_bytes()
    says = f"{out} belongs to job {job_id} of root (pending), which reads its config there when it starts"

    for again in (("--resume", "auto"), ("--dry-run",)):
        refused = submit("sft", *where, "--max-steps", 3, *again)
        assert (refused.exit_code, config.read_bytes()) == (2, of_the_job)
        assert says in refused.stderr
        assert f"`scancel {job_id}`, continue after it with --dependency afterany:{job_id} --resume auto, or" in (
            refused.stderr
        )
    here = CliRunner().invoke(medarc_train.app, ["sft", str(sft_toml), "--output-dir", str(out), "--device=cpu"])
    assert (here.exit_code, config.read_bytes()) == (2, of_the_job)
    assert says in here.stderr
    chained = submit("sft", *where, "--dependency", f"afterany:{job_id}", "--resume", "auto")
    assert (chained.exit_code, config.read_bytes()) == (0, of_the_job)

    slurm.ask("scancel", job_id, job_id_of(chained))
    again = submit_and_wait("sft", *where, "--max-steps", 3)
    assert again.exit_code == 0, again.output
    assert "max_steps = 3" in config.read_text()


def test_what_slurm_refuses_is_told_in_its_own_words(slurm, sft_toml: Path, tmp_path: Path) -> None:
    result = submit("sft", sft_toml, "--partition", "nowhere", "--output-dir", tmp_path / "out")
    assert result.exit_code == 1
    assert "invalid partition specified: nowhere" in result.stderr
    assert result.stderr.splitlines()[-1] == f"error: nothing was submitted; the script is {tmp_path}/out/sft.sh"
    assert (tmp_path / "out" / "sft.sh").is_file()


@pytest.mark.slow
def test_a_real_rl_run_on_the_cpu_ends_with_weights(slurm, tmp_path: Path) -> None:
    out = tmp_path / "out"
    words = ("--max-steps", 2, "--train-gpus", 2, "--cpus-per-gpu", 1, "--device", "cpu")
    where = ("--project-dir", make_cpu_project(tmp_path / "project"), "--output-dir", out)
    result = submit_and_wait("rl", ROOT / "examples" / "reverse_text" / "rl_cpu.toml", *words, *where)
    job = slurm.job(job_id_of(result))
    assert (job["JobState"], job["ExitCode"]) == ("COMPLETED", "0:0"), Path(job["StdOut"]).read_text()
    assert (out / "weights" / "step_2" / "model.safetensors").is_file()


SHORT_SFT = (
    *("sft", ROOT / "examples" / "reverse_text" / "sft_cpu.toml", "--device", "cpu", "--max-steps", 40),
    *("--scheduler.warmup-steps", 1, "--scheduler.decay-steps", 1, "--cpus-per-gpu", 1),
    *("--data.seq-len", 64, "--data.batch-size", 4, "--data.micro-batch-size", 4),
    *("--ckpt.interval", 2, "--ckpt.keep-last", 2),
)


def make_cpu_project(directory: Path) -> Path:
    directory.mkdir()
    (directory / ".venv").symlink_to(sys.prefix)
    (directory / "examples").symlink_to(ROOT / "examples")
    return directory


@pytest.mark.slow
def test_a_requeued_run_ends_with_the_weights_of_an_undisturbed_one(slurm, tmp_path: Path) -> None:
    where = ("--project-dir", make_cpu_project(tmp_path / "project"), "--output-dir")
    disturbed, undisturbed = tmp_path / "disturbed", tmp_path / "undisturbed"
    job_id = job_id_of(submit(*SHORT_SFT, *where, disturbed, "--requeue"))
    while not (disturbed / "checkpoints" / "step_2").is_dir():
        assert slurm.job(job_id)["JobState"] in ("PENDING", "RUNNING"), "asking starts a process, which takes time"
    (disturbed / "save").touch()
    while (disturbed / "save").exists():
        assert slurm.job(job_id)["JobState"] == "RUNNING"
    slurm.ask("scancel", "--batch", "--signal=USR2", job_id)  # what Slurm sends before the time limit
    result = submit_and_wait(*SHORT_SFT, *where, undisturbed)
    assert result.exit_code == 0, result.output
    job = slurm.wait_for_end(job_id)
    log = Path(job["StdOut"]).read_text()
    assert (job["JobState"], job["ExitCode"], job["Restarts"]) == ("COMPLETED", "0:0", "1"), log
    assert f"requeueing job {job_id} (1 of at most 20 times)" in log
    assert f"job {job_id}, attempt 2, on " in log
    assert "SIGUSR1 passed on to trainer" in log, "a touched file saves a checkpoint"
    weights = [out / "weights" / "step_40" / "model.safetensors" for out in (disturbed, undisturbed)]
    assert weights[0].read_bytes() == weights[1].read_bytes()
