"""Inside the job: a real run in a stand-in for the container, stopped as SageMaker does it, continued in a new one."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from aws_machine import Docker, make_docker, make_project

pytest.importorskip("boto3", reason="boto3 is not installed: `uv sync --inexact --extra sagemaker --group aws`")

from s3_server import Proxy

from medarc_rl.backends.protocol import LAUNCHERS
from medarc_rl.backends.sagemaker.docker import LocalContainer
from medarc_rl.backends.sagemaker.in_job import JobInputs, child_env, keep_off_s3, main, write_failure
from medarc_rl.backends.sagemaker.request import Aws, JobPrefixes, S3Prefix, TrainingJob, resolved
from medarc_rl.backends.sagemaker.source_files import MlPaths
from medarc_rl.errors import MedarcError
from prime_rl.run.directory import prepare_run_dir
from prime_rl.run.paths import RunPaths, stable_steps

JOB = TrainingJob(
    name="job",
    command="sft",
    source_sha256="0" * 64,
    image="medarc-rl:dev",
    role="",
    prefixes=JobPrefixes(S3Prefix("bucket", "runs")),
    instance_type="",
)
ENDLESS = ["--max-steps", "1000000", "--ckpt.interval", "100000"]


@dataclass(frozen=True)
class Stopped:
    """A job that got SIGTERM once it trained."""

    code: int
    lines: list[str]
    root: Path
    docker: Docker

    @property
    def run(self) -> RunPaths:
        return RunPaths(self.root / "checkpoints")


def until_it_trains(process: subprocess.Popen[str]) -> Iterator[str]:
    """The lines of a run, which is stopped after its first step."""
    assert process.stdout is not None
    is_asked = False
    for line in process.stdout:
        yield line.rstrip("\n")
        if "SUCCESS Step" in line and not is_asked:
            is_asked = True
            process.send_signal(signal.SIGTERM)


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Stopped:
    directory = tmp_path_factory.mktemp("job")
    project, docker = make_project(directory / "project"), make_docker(directory / "docker")
    words = ["sft", "sft.toml", "--to", "sagemaker", "--local", "--image", "medarc-rl:dev", *ENDLESS]
    words += ["--env", "OMP_NUM_THREADS=1", "--secret-env", "HF_TOKEN=arn:aws:ssm:us-east-1:123456789012:parameter/hf"]
    argv = [sys.executable, "-c", "from medarc_rl.scripts import medarc_submit; medarc_submit()", *words]
    env = {**os.environ, **docker.env(), "HF_TOKEN": "hf_only-in-the-environment"}
    with subprocess.Popen(
        argv, cwd=project, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as run:
        lines = list(until_it_trains(run))
    (root,) = (project / "outputs" / "sagemaker").iterdir()
    return Stopped(run.returncode, lines, root, docker)


@pytest.mark.slow
def test_a_stop_saves_and_is_no_failure(stopped: Stopped) -> None:
    assert stopped.code == 128 + signal.SIGTERM, stopped.lines
    assert len(stable_steps(stopped.run.checkpoints)) == 1
    assert not MlPaths(stopped.root).failure.exists()


@pytest.mark.slow
def test_the_container_is_started_without_the_secrets_value(stopped: Stopped) -> None:
    (argv,) = stopped.docker.calls
    assert argv[:3] == ["run", "--rm", "--init"]
    assert argv[argv.index("--volume") + 1] == f"{stopped.root}:/opt/ml"
    assert argv[argv.index("HF_TOKEN") - 1] == "--env"
    kept = [path for path in stopped.root.rglob("*") if path.is_file() and b"only-in-the-env" in path.read_bytes()]
    assert kept == []
    assert "only-in-the-env" not in json.dumps([argv, stopped.lines])
    assert stat.S_IMODE(stopped.root.stat().st_mode) == 0o700


@pytest.mark.slow
def test_the_next_container_continues(stopped: Stopped, tmp_path: Path) -> None:
    (step,) = stable_steps(stopped.run.checkpoints)
    argv = [sys.executable, "-m", "medarc_rl.backends.sagemaker.in_job", "--root", str(stopped.root)]
    argv += ["--local-disk", str(tmp_path)]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as run:
        lines = list(until_it_trains(run))
    assert run.returncode == 128 + signal.SIGTERM, lines
    first = next(line for line in lines if "SUCCESS Step" in line)
    assert f"Step {step} " in first
    assert len(list(stopped.run.attempts.glob("[0-9]*.json"))) == 2


def test_a_container_gets_only_the_gpus_of_the_mask(tmp_path: Path) -> None:
    for number in range(4):
        (tmp_path / f"nvidia{number}").touch()
    given = {None: "all", "1,3": '"device=1,3"', "2": '"device=2"'}
    for mask, value in given.items():
        env = {} if mask is None else {"CUDA_VISIBLE_DEVICES": mask}
        argv = LocalContainer(JOB, tmp_path, env, tmp_path).argv()
        assert argv[argv.index("--gpus") + 1] == value
    assert "--gpus" not in LocalContainer(JOB, tmp_path, {"CUDA_VISIBLE_DEVICES": ""}, tmp_path).argv()
    assert "--gpus" not in LocalContainer(JOB, tmp_path, {}, tmp_path / "none").argv()


def lay_out(root: Path, hyperparameters: object, resources: object = None) -> MlPaths:
    paths = MlPaths(root)
    paths.hyperparameters.parent.mkdir(parents=True)
    paths.hyperparameters.write_text(json.dumps(hyperparameters))
    paths.resources.write_text(json.dumps(resources or {"current_host": "algo-1", "hosts": ["algo-1"]}))
    return paths


GOOD = {"command": "sft", "source_sha256": "0" * 64}


@pytest.mark.parametrize(
    ("hyperparameters", "resources", "told"),
    [
        ({}, None, "not a job of medarc_submit"),
        ([], None, "no JSON object"),
        ({**GOOD, "command": "sh"}, None, "not a job of medarc_submit"),
        ({**GOOD, "secrets": "{"}, None, "no JSON"),
        (GOOD, {"hosts": []}, "contains no hosts"),
        (GOOD, {"hosts": ["algo-1", "algo-2"]}, "2 instances without a shared directory"),
        (GOOD, None, "source.tar.gz: missing"),
    ],
)
def test_a_wrong_job_ends_with_its_reason(
    tmp_path: Path, hyperparameters: object, resources: object, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = lay_out(tmp_path, hyperparameters, resources)
    assert main(["--root", str(tmp_path), "--local-disk", str(tmp_path / "disk")]) == 2
    (error,) = capsys.readouterr().err.splitlines()
    assert told in error
    assert paths.failure.read_text() == error


@pytest.mark.parametrize("damage", ["changed", "truncated", "no archive"])
def test_damaged_sources_are_refused(tmp_path: Path, damage: str, capsys: pytest.CaptureFixture[str]) -> None:
    import hashlib

    content = {"changed": b"x", "truncated": b"\x1f\x8b\x08\x00", "no archive": b"text"}[damage]
    digest = "0" * 64 if damage == "changed" else hashlib.sha256(content).hexdigest()
    paths = lay_out(tmp_path, {**GOOD, "source_sha256": digest})
    paths.archive.parent.mkdir(parents=True)
    paths.archive.write_bytes(content)
    assert main(["--root", str(tmp_path), "--local-disk", str(tmp_path / "disk")]) in (1, 2)
    (error,) = capsys.readouterr().err.splitlines()
    assert ("not the files that were submitted" if damage == "changed" else "cannot be unpacked") in error


def test_a_failure_is_told_without_secrets_and_control_characters(tmp_path: Path) -> None:
    paths = MlPaths(tmp_path)
    write_failure(paths, ["step 1", "error: token hf_secret \x1b[31mrefused", "last words"], ["hf_secret", ""])
    assert paths.failure.read_text() == "error: token ***  [31mrefused"
    write_failure(paths, [f"line {number}" for number in range(1000)], [])
    told = paths.failure.read_text()
    assert len(told) <= 1024
    assert told.endswith("line 999")


def test_what_processes_exchange_stays_on_the_instance(tmp_path: Path) -> None:
    run, disk = tmp_path / "checkpoints", tmp_path / "disk"
    for _ in range(2):  # a restart
        keep_off_s3(run, disk)
    paths = RunPaths(run)
    for place in (paths.orchestrator.broadcasts, paths.orchestrator.rollouts, paths.rollouts):
        assert place.is_symlink()
        assert place.resolve().is_relative_to(disk)
    (disk / "rollouts" / "step_0").mkdir()
    prepare_run_dir(paths, None, clean=False)
    assert paths.rollouts.is_symlink()
    assert list(paths.rollouts.iterdir()) == []


def test_a_checkout_runs_its_own_code(tmp_path: Path) -> None:
    paths = MlPaths(tmp_path)
    inputs = JobInputs("rl", "0" * 64, True, {}, "algo-1", ("algo-1",))
    assert "PYTHONPATH" not in child_env(inputs, paths, {}, {}, tmp_path)
    for package in ("medarc_rl", "prime-rl/src/prime_rl"):
        (paths.source / package).mkdir(parents=True)
    env = child_env(inputs, paths, {"HF_TOKEN": "x"}, {"PYTHONPATH": "/given"}, tmp_path)
    assert env["PYTHONPATH"] == f"{paths.source}/prime-rl/src:{paths.source}:/given"
    assert (env["MEDARC_SINGLE_GPU"], env["HF_TOKEN"]) == ("1", "x")


def test_the_launchers_exist() -> None:
    import importlib.util

    assert all(importlib.util.find_spec(module) is not None for module, *_ in LAUNCHERS.values())


def test_secrets_are_read_where_they_are_kept(proxy: Proxy) -> None:
    aws = Aws("us-east-1")
    kept = aws.client("secretsmanager")
    plain = kept.create_secret(Name="plain", SecretString="s1")["ARN"]
    table = kept.create_secret(Name="table", SecretString=json.dumps({"token": "s2"}))["ARN"]
    aws.client("ssm").put_parameter(Name="/medarc/wandb", Value="s3", Type="SecureString")
    parameter = "arn:aws:ssm:us-east-1:123456789012:parameter/medarc/wandb"
    wanted = {"A": plain, "B": f"{table}#token", "C": parameter}
    assert resolved(wanted) == {"A": "s1", "B": "s2", "C": "s3"}
    with pytest.raises(MedarcError, match="has no key 'nope'") as refused:
        resolved({"B": f"{table}#nope"})
    assert "s2" not in str(refused.value)
    with pytest.raises(MedarcError, match="secret D: ssm:GetParameter: ParameterNotFound"):
        resolved({"D": f"{parameter}x"})
