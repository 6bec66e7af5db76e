"""The batch scripts: whatever a value looks like, bash and sbatch take it for data."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from medarc_rl.backends.options import SlurmRequest
from medarc_rl.backends.slurm.job import (
    BatchJob,
    Container,
    check_dependency,
    header,
    launcher_job,
    log_file,
    render,
    sbatch_argv,
    sbatch_env,
    sh_quote,
    walltime_s,
)
from medarc_rl.checks.job import job_environment
from medarc_rl.errors import MedarcError, UsageError
from prime_rl.launch.job import Resources
from prime_rl.run.paths import RunPaths

HOSTILE = {
    "spaces": "two  words ",
    "quotes": 'it\'s "quoted"',
    "substitution": "$(touch pwned) `touch pwned` ${HOME} $'x'",
    "backslashes": "back\\slash\\n \\",
    "leading dash": "-rf",
    "unicode": "zażółć “gęślą” 中文 \u2028",
    "line breaks": "one\ntwo\r\nthree\ttab",
    "patterns": "%j %% #comment * ? [a] {b,c} ~ !x ; & | > <",
}


def make_job(command: str, root: Path, gpus: int = 2, **changes: object) -> BatchJob:
    """A job whose every directory is below `root`."""
    job = launcher_job(command, RunPaths(root / "out"), Resources(1, gpus))
    return replace(BatchJob(job, "name", 8, root / "project", root / "hf"), **changes)


def run_script(job: BatchJob, tmp_path: Path, **popen: object) -> subprocess.CompletedProcess[str]:
    """Write the script and run it as Slurm would, with node-local scratch below `tmp_path`."""
    job.script.parent.mkdir(parents=True, exist_ok=True)
    job.script.write_text(render(job))
    scratch = tmp_path / "scratch"
    scratch.mkdir(exist_ok=True)
    env = {**os.environ, "SLURM_JOB_ID": "7", "SLURM_TMPDIR": str(scratch), "RECORD": str(tmp_path / "calls.jsonl")}
    return subprocess.run(["bash", job.script], env=env, capture_output=True, text=True, check=False, **popen)


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE)
@pytest.mark.parametrize("command", ["sft", "rl"])
def test_hostile_paths_reach_the_programs_as_they_are(command: str, text: str, project, tmp_path: Path) -> None:
    root = tmp_path / text
    programs = project(root / "project")
    programs.record = tmp_path / "calls.jsonl"
    job = make_job(command, root, hf_hub_offline=True)
    done = run_script(job, tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    (call,) = programs.calls
    component = "trainer" if command == "sft" else "rl"
    assert call["argv"][-2:] == ["@", f"{root}/out/configs/{component}.toml"]
    expected = {
        "PROJECT_DIR": f"{root}/project",
        "CONFIG_DIR": f"{root}/out/configs",
        "OUTPUT_DIR": f"{root}/out",
        "HF_CACHE_DIR": f"{root}/hf",
        "HF_HOME": f"{root}/hf",
        "HF_HUB_OFFLINE": "1",
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "PYTHONUNBUFFERED": "1",
        "OMP_NUM_THREADS": "1",
    }
    assert {name: call["env"][name] for name in expected} == expected
    assert call["cwd"] == f"{root}/project"
    assert not list(tmp_path.rglob("pwned"))


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE)
@pytest.mark.parametrize("command", ["sft", "rl"])
def test_bash_and_shellcheck_pass_on_every_script(command: str, text: str, tmp_path: Path) -> None:
    if shutil.which("shellcheck") is None:
        pytest.skip("no shellcheck: apt-get install shellcheck")
    request = SlurmRequest(time="1-0", constraint="a&b", sbatch_arg=["--comment=two words"])
    script = tmp_path / "job.sh"
    for gpus in (1, 2, 8):
        script.write_text(render(make_job(command, Path("/", text), gpus=gpus, request=request)))
        for check in (["bash", "-n"], ["shellcheck"]):
            done = subprocess.run([*check, script], capture_output=True, text=True, check=False)
            assert (done.returncode, done.stdout + done.stderr) == (0, "")


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE)
def test_a_quoted_value_is_one_word_on_one_line(text: str) -> None:
    assert "\n" not in sh_quote(text)
    assert "\r" not in sh_quote(text)
    echoed = subprocess.run(["bash", "-c", f"printf %s {sh_quote(text)}"], capture_output=True, check=True).stdout
    assert echoed.decode() == text


def test_dot_env_is_exported_and_keeps_a_compile_cache_warm(project, tmp_path: Path) -> None:
    programs = project(tmp_path / "project")
    programs.record = tmp_path / "calls.jsonl"
    (tmp_path / "project" / ".env").write_text(f"WANDB_API_KEY='a b'\nTRITON_CACHE_DIR={tmp_path}/triton\n")
    run_script(make_job("sft", tmp_path), tmp_path)
    (call,) = programs.calls
    assert call["env"]["WANDB_API_KEY"] == "a b"
    assert call["env"]["TRITON_CACHE_DIR"] == f"{tmp_path}/triton"


def test_a_number_of_threads_that_the_user_set_stays(project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    programs = project(tmp_path / "project")
    programs.record = tmp_path / "calls.jsonl"
    monkeypatch.setenv("OMP_NUM_THREADS", "6")
    run_script(make_job("sft", tmp_path), tmp_path)
    assert programs.calls[0]["env"]["OMP_NUM_THREADS"] == "6"


@pytest.mark.parametrize(("command", "config"), [("sft", "trainer"), ("rl", "rl")])
def test_the_script_becomes_the_launcher(command: str, config: str, project, tmp_path: Path) -> None:
    programs = project(tmp_path / "project")
    programs.record = tmp_path / "calls.jsonl"
    programs.add("python", code=5)
    assert run_script(make_job(command, tmp_path, shares_gpus=command == "rl"), tmp_path).returncode == 5
    (call,) = programs.calls
    launcher = f"medarc_rl.launchers.{command}_local"
    assert call["argv"][1:] == ["-m", launcher, "@", f"{tmp_path}/out/configs/{config}.toml"]
    assert call["env"].get("MEDARC_SINGLE_GPU") == ("1" if command == "rl" else None)


@pytest.mark.parametrize("command", ["sft", "rl"])
def test_a_requeued_job_goes_on_from_its_last_checkpoint(
    command: str, project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    programs = project(tmp_path / "project")
    programs.record = tmp_path / "calls.jsonl"
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    run_script(make_job(command, tmp_path, checkpoints=True), tmp_path)
    run_script(make_job(command, tmp_path, checkpoints=False), tmp_path)
    with_checkpoints, without = programs.calls
    assert with_checkpoints["argv"][-2:] == ["--resume", "auto"]
    assert without["argv"][-2] == "@"


STOPPABLE = """#!{python}
import signal, sys
stop = {{signal.SIGTERM}}
signal.pthread_sigmask(signal.SIG_BLOCK, stop)
open({gate!r}, "w").close()
signal.sigwait(stop)
# The time of a checkpoint, in which a second signal would be heard.
print("stopped once" if signal.sigtimedwait(stop, 1.5) is None else "stopped twice", flush=True)
sys.exit(143)
"""


@pytest.mark.parametrize("everyone", [False, True], ids=["the shell alone", "every process"])
@pytest.mark.parametrize("command", ["sft", "rl"])
def test_a_stop_reaches_the_launcher_once_and_is_waited_for(
    command: str, everyone: bool, project, tmp_path: Path
) -> None:
    """`--signal=B:` signals the batch shell alone, scancel every process of the job."""
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    programs = project(tmp_path / "project")
    (programs.directory / "python").write_text(STOPPABLE.format(python=sys.executable, gate=str(gate)))
    job = make_job(command, tmp_path)
    job.script.parent.mkdir()
    job.script.write_text(render(job))
    env = {**os.environ, "SLURM_TMPDIR": str(tmp_path)}
    argv = ["bash", job.script]
    with subprocess.Popen(argv, env=env, stdout=subprocess.PIPE, text=True, start_new_session=True) as shell:
        gate.read_text()
        (os.killpg if everyone else os.kill)(shell.pid, signal.SIGTERM)
        assert shell.communicate()[0] == "stopped once\n"
    assert shell.returncode == 143


@pytest.mark.parametrize("option", ["job-name", "account", "partition", "sbatch-arg"])
def test_what_the_header_cannot_carry_is_refused(option: str, tmp_path: Path) -> None:
    evil = "x\n#SBATCH --wrap=evil"
    changes = {
        "job-name": {"name": evil},
        "account": {"request": SlurmRequest(account=evil)},
        "partition": {"request": SlurmRequest(partition="\udcff")},
        "sbatch-arg": {"request": SlurmRequest(sbatch_arg=[f"--comment={evil}"])},
    }
    with pytest.raises(UsageError, match="which Slurm does not accept"):
        header(make_job("rl", tmp_path, **changes[option]))


def test_a_log_path_that_the_header_cannot_carry_goes_to_the_command_line(tmp_path: Path) -> None:
    job = make_job("rl", tmp_path / "one\ntwo")
    assert not any(line.startswith("--output") for line in header(job))
    assert sbatch_argv(job)[1] == f"--output={tmp_path}/one\ntwo/out/slurm/job_%j.log"


def test_percent_signs_and_backslashes_do_not_redirect_the_log() -> None:
    (line,) = (line for line in header(make_job("rl", Path("/100%"))) if line.startswith("--output"))
    assert line == "--output=/100%%/out/slurm/job_%j.log"
    (line,) = (line for line in header(make_job("rl", Path("/a\\b"))) if line.startswith("--output"))
    assert line == '--output="/a\\\\\\\\b/out/slurm/job.log"'
    assert log_file(RunPaths(Path("/a\\b")), "3") == Path("/a\\b/slurm/job.log")


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90", 5400),
        ("1:30", 90),
        ("2:00:00", 7200),
        ("1-12", 129600),
        ("1-2:30", 95400),
        ("0-0:0:5", 5),
        ("UNLIMITED", 0),
    ],
)
def test_slurms_notations_of_time(text: str, seconds: int) -> None:
    assert walltime_s(text) == seconds


@pytest.mark.parametrize("text", ["", "soon", "1:2:3:4", "-5", "1-", "2h"])
def test_no_notation_of_time(text: str) -> None:
    with pytest.raises(UsageError, match="--time"):
        walltime_s(text)


@pytest.mark.parametrize(
    "text",
    [
        *(f"{condition}:123" for condition in ("after", "afterok", "afternotok", "afterany", "aftercorr")),
        *("singleton", "after:1+5:2", "afterok:1_2:3_*", "afterok:1,afterany:2:3,singleton", "afterok:1?afternotok:2"),
    ],
)
def test_slurms_conditions_are_taken(text: str) -> None:
    check_dependency(text)


@pytest.mark.parametrize(
    "text",
    ["", "foo", "123", "afterok", "afterok:", "afterok:x", "aftr:1", "afterok:1,", "afterok:1,afterany:2?singleton"],
)
def test_no_condition_of_slurm(text: str) -> None:
    with pytest.raises(UsageError, match="--dependency"):
        check_dependency(text)


def test_a_short_job_is_not_stopped_before_it_starts(tmp_path: Path) -> None:
    def stops(time: str) -> bool:
        return any("--signal" in line for line in header(make_job("rl", tmp_path, request=SlurmRequest(time=time))))

    assert stops("2:00:00")
    assert not stops("10")


REQUEUE = SlurmRequest(requeue=True, max_requeues=3)


def test_a_job_that_requeues_itself_is_warned_by_a_signal_of_its_own(tmp_path: Path) -> None:
    def options(**request: object) -> list[str]:
        return header(make_job("rl", tmp_path, checkpoints=True, request=SlurmRequest(**request)))[9:]

    assert options(requeue=True) == ["--requeue", "--signal=B:USR2@120"]
    assert options(requeue=True, signal_before=300, time="2:00:00")[1:] == ["--requeue", "--signal=B:USR2@300"]
    assert options(signal_before=300) == ["--signal=B:TERM@300"]
    assert options(dependency="afterany:1:2,singleton") == ["--dependency=afterany:1:2,singleton"]


@pytest.mark.parametrize(
    ("request_", "checkpoints", "says"),
    [
        (SlurmRequest(requeue=True), False, "--requeue needs checkpoints"),
        (SlurmRequest(requeue=True, time="2"), True, "--time 2 leaves no time to train: Slurm warns the run 120 s"),
        (SlurmRequest(requeue=True, time="3"), True, "--time 3 leaves no time to train"),
        (SlurmRequest(signal_before=300, time="5"), True, "--time 5 leaves no time to train: Slurm warns the run 300"),
        (SlurmRequest(signal_before=300, time="6:00"), True, "--time 6:00 leaves no time to train"),
        (SlurmRequest(requeue=True, sbatch_arg=["--signal=USR1@60"]), True, "--requeue needs its own signal"),
        (SlurmRequest(requeue=True, sbatch_arg=["--sig=B:TERM@60"]), True, "--requeue needs its own signal"),
    ],
)
def test_a_job_that_could_never_go_on_is_refused(
    request_: SlurmRequest, checkpoints: bool, says: str, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match=says):
        header(make_job("sft", tmp_path, checkpoints=checkpoints, request=request_))


def test_a_job_submitted_from_inside_an_allocation_gets_nothing_of_it(tmp_path: Path) -> None:
    own = {"PATH": "/bin", "SLURM_CONF": "/etc/slurm.conf", "SLURM_CLUSTERS": "west", "HF_HOME": "/hf"}
    of_the_step = {
        "SLURM_JOB_ID": "7",
        "SLURM_STEP_ID": "0",
        "SLURM_CPU_BIND": "quiet,mask_cpu:0x3",
        "SLURM_CPU_BIND_LIST": "0x3",
        "SLURM_HINT": "nomultithread",
        "SLURM_MEM_PER_CPU": "2000",
        "SLURM_CPUS_PER_TASK": "2",
        "SLURM_TRES_PER_TASK": "cpu=2",
        "SLURM_DISTRIBUTION": "block",
        "PMIX_RANK": "0",
        "MEDARC_MAX_REQUEUES": "3",
    }
    job = make_job("sft", tmp_path)
    assert sbatch_env(own | of_the_step, job) == own
    by_hand = {"SLURM_HINT": "nomultithread", "SLURM_CPU_BIND": "none"}
    assert sbatch_env(own | by_hand, job) == own | by_hand


def test_dot_env_and_setup_may_use_what_is_not_set_and_dot_env_what_fails(project, tmp_path: Path) -> None:
    programs = project(tmp_path / "project")
    programs.record = tmp_path / "calls.jsonl"
    (tmp_path / "project" / ".env").write_text("A=$NOT_SET/a\n[[ -n $NOT_SET ]] && B=b\n")
    setup = tmp_path / "set up $(touch pwned).sh"
    setup.write_text("export FROM_SETUP=${ALSO_NOT_SET}yes\n")
    done = run_script(make_job("sft", tmp_path, setup=setup), tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    (call,) = programs.calls
    assert (call["env"]["A"], call["env"]["FROM_SETUP"]) == ("/a", "yes")
    assert not list(tmp_path.rglob("pwned"))


@pytest.mark.parametrize(
    ("line", "code", "says"),
    [
        ("PASSWORD=open(sesame)", 1, "error: bash cannot read {}: put quotes around"),
        ("PASSWORD='open sesame", 1, "error: bash cannot read {}: put quotes around"),
        ("PASSWORD=open sesame", 0, "warning: {}: line 2 failed"),
    ],
)
def test_a_secret_that_bash_cannot_read_stays_out_of_the_log(
    line: str, code: int, says: str, project, tmp_path: Path
) -> None:
    """bash itself prints such a line, or the word that it takes for a command, and the job began without the rest."""
    programs = project(tmp_path / "project")
    programs.record = tmp_path / "calls.jsonl"
    file = tmp_path / "project" / ".env"
    file.write_text(f"A=1\n{line}\nB=2\n")
    job = make_job("sft", tmp_path)
    done = run_script(job, tmp_path)
    assert (done.returncode, len(done.stderr.splitlines())) == (code, 1)
    assert done.stderr.startswith(says.format(file))
    assert [call["env"]["B"] for call in programs.calls] == ["2"] * (not code)
    if code:
        with pytest.raises(MedarcError, match="bash cannot read it: put quotes around"):
            job_environment(job, os.environ)


def test_a_dot_env_from_windows_is_refused_before_its_values_are_used(project, tmp_path: Path) -> None:
    """Each value would end with a carriage return, which no token may contain."""
    programs = project(tmp_path / "project")
    programs.record = tmp_path / "calls.jsonl"
    file = tmp_path / "project" / ".env"
    file.write_bytes(b"HF_TOKEN=hf_secret\r\nA=1\r\n")
    job = make_job("sft", tmp_path)
    done = run_script(job, tmp_path)
    advice = r'end as on Windows: run sed -i "s/\r$//" on it'
    assert (done.returncode, done.stderr) == (1, f"error: the lines of {file} {advice}\n")
    with pytest.raises(MedarcError, match=re.escape(f"its lines {advice}")):
        job_environment(job, os.environ)
    subprocess.run(["sed", "-i", r"s/\r$//", file], check=True)
    assert run_script(job, tmp_path).returncode == 0
    assert [call["env"]["HF_TOKEN"] for call in programs.calls] == ["hf_secret"]


@pytest.mark.parametrize("runtime", ["apptainer", "pyxis"])
def test_a_container_runs_the_launcher_with_the_runs_directories(runtime: str, stand_ins, tmp_path: Path) -> None:
    """The runtimes are stand-ins: the words that they get are what their manuals ask for."""
    stand_ins.record = tmp_path / "calls.jsonl"
    for name in ("apptainer", "srun"):
        stand_ins.add(name)
    (tmp_path / "project").mkdir()
    image = "it's $(touch pwned).sif"
    container = Container(image, runtime, ("/data:/data:ro",))
    done = run_script(make_job("sft", tmp_path, container=container), tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    (call,) = stand_ins.calls
    program, *words = call["argv"]
    places = [f"{tmp_path}/{name}:{tmp_path}/{name}" for name in ("project", "out", "hf")] + ["/data:/data:ro"]
    launcher = ["python", "-m", "medarc_rl.launchers.sft_local", "@", f"{tmp_path}/out/configs/trainer.toml"]
    if runtime == "apptainer":
        binds = [word for place in places for word in ("--bind", place)]
        assert words == ["exec", "--nv", *binds, "--pwd", f"{tmp_path}/project", image, *launcher]
    else:
        mounts = f"--container-mounts={','.join(places)}"
        workdir = f"--container-workdir={tmp_path}/project"
        assert words == ["--ntasks=1", f"--container-image={image}", mounts, workdir, *launcher]
    assert Path(program).name == ("apptainer" if runtime == "apptainer" else "srun")
    assert not list(tmp_path.rglob("pwned"))


def test_a_container_refuses_what_its_notation_cannot_hold(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot mount"):
        render(make_job("sft", tmp_path / "a:b", container=Container("image.sif")))
    with pytest.raises(UsageError, match="it has no scontrol"):
        make_job("sft", tmp_path, container=Container("image.sif"), checkpoints=True, request=REQUEUE)
