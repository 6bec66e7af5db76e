"""Submitting to AWS: moto's server on loopback for S3, ECR, SageMaker and CloudWatch; faults are injected before it."""

from __future__ import annotations

import base64
import json
import re
import tarfile
from collections.abc import Callable, Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
from aws_machine import ACCOUNT, ROLE, Docker, make_docker, make_project
from s3_server import Fault, Handler, Proxy, reset

pytest.importorskip("boto3", reason="boto3 is not installed: `uv sync --inexact --extra sagemaker --group aws`")

from medarc_rl.backends.sagemaker.backend import LOG_GROUP, SageMaker, status_of
from medarc_rl.backends.sagemaker.docker import ImageBuild, build_and_push
from medarc_rl.backends.sagemaker.request import Aws, AwsError, Patience, calling
from medarc_rl.errors import MedarcError
from medarc_rl.jobs import JobLog, JobRecord

QUICK = Patience(connect_s=60.0, read_s=300.0, attempts=2)


def to(target: str, fault: Fault) -> Fault:
    """The fault, for one operation of a JSON API; or for requests whose path has this part."""

    def chosen(handler: Handler) -> bool:
        return fault(handler)

    def wants(handler: Handler) -> bool:
        return handler.headers.get("X-Amz-Target", "").endswith(f".{target}") or target in handler.path

    chosen.wants = wants  # type: ignore[attr-defined]
    return chosen


def saying(status: int, answer: dict[str, Any]) -> Fault:
    def fault(handler: Handler) -> bool:
        handler.answer(status, {"Content-Type": "application/x-amz-json-1.1"}, json.dumps(answer).encode())
        return True

    return fault


def refusing(code: str, message: str = "injected", status: int = 400) -> Fault:
    return saying(status, {"__type": code, "message": message})


def then_lost(handler: Handler) -> bool:
    """The server does as it is asked, and its answer is lost."""
    handler.ask()
    return reset(handler)


@pytest.fixture
def project(tmp_path: Path, proxy: Proxy, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current directory, with a job log of its own."""
    made = make_project(tmp_path / "project")
    monkeypatch.chdir(made)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return made


@pytest.fixture
def bucket(proxy: Proxy) -> str:
    Aws("us-east-1").client("s3").create_bucket(Bucket="medarc-runs")
    return "medarc-runs"


@pytest.fixture
def main(project: Path, bucket: str) -> Callable[..., int]:
    """`medarc_submit sft` to the server."""

    def run(*words: str) -> int:
        from medarc_rl.medarc_submit import app

        given = ["sft", "sft.toml", "--to", "sagemaker", *ACCOUNT, "--s3", f"s3://{bucket}/runs", *words]
        code = app(given, standalone_mode=False)
        assert isinstance(code, int)
        return code

    return run


def only_record() -> JobRecord:
    (record,), _ = JobLog.of_user().read()
    return record


def jobs(*words: str) -> int:
    from medarc_rl.medarc_jobs import app

    code = app(list(words), standalone_mode=False)
    assert isinstance(code, int)
    return code


def test_a_job_is_uploaded_created_recorded_and_waited_for(
    main: Callable[..., int], bucket: str, proxy: Proxy, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main("--wait", "--tag", "team=radiology") == 0
    record = only_record()
    assert re.fullmatch(r"medarc-\d{8}-\d{6}-[0-9a-f]{8}", record.id)
    assert (record.config, record.output) == ("sft.toml", f"s3://{bucket}/runs/{record.id}/run")
    shown = capsys.readouterr()
    assert "left out: .env: usually holds secrets" in shown.out
    assert shown.out.endswith(f"{record.name} ({record.id}): succeeded: Completed\n")
    aws = Aws("us-east-1")
    found = aws.client("sagemaker").describe_training_job(TrainingJobName=record.id)
    assert found["RoleArn"] == ROLE
    assert found["StoppingCondition"]["MaxRuntimeInSeconds"] == 86400
    stored = aws.client("s3").get_object(Bucket=bucket, Key=f"runs/{record.id}/source/source.tar.gz")
    assert stored["Metadata"]["sha256"] == found["HyperParameters"]["source_sha256"]
    with tarfile.open(fileobj=BytesIO(stored["Body"].read())) as archive:
        names = archive.getnames()
        assert {(each.uid, each.gid, each.uname, each.mtime) for each in archive.getmembers()} == {(0, 0, "", 0)}
    assert {"run.toml", "source/rows.jsonl", "source/sft.toml"} <= set(names)
    assert not [name for name in names if ".env" in name]
    order = [path for _, path in proxy.seen]
    assert order.index(next(path for path in order if "source.tar.gz" in path)) < len(order) - 2


REFUSALS = {
    "CreateTrainingJob": refusing("ResourceLimitExceeded", "account-level limit of ml.m5.xlarge is 0"),
    "source.tar.gz": lambda handler: (handler.answer(403, {}, b"<Error><Code>AccessDenied</Code></Error>"), True)[1],
}


@pytest.mark.parametrize(
    ("target", "told"),
    [("CreateTrainingJob", "Service Quotas"), ("source.tar.gz", "AccessDenied; `medarc_submit sagemaker-policy`")],
)
def test_a_refusal_is_one_line_and_no_record(
    main: Callable[..., int], proxy: Proxy, target: str, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    proxy.disturb(to(target, REFUSALS[target]), times=9)
    assert main() == 1
    (error,) = capsys.readouterr().err.splitlines()
    assert error.startswith("error: ")
    assert told in error
    assert JobLog.of_user().read() == ([], [])


def test_a_busy_service_is_asked_again_and_a_lost_answer_makes_no_second_job(
    main: Callable[..., int], proxy: Proxy
) -> None:
    proxy.disturb(to("CreateTrainingJob", refusing("ThrottlingException")), times=2)
    assert main() == 0
    first = only_record()
    proxy.calm()
    # moto takes a name twice, SageMaker does not.
    proxy.disturb(to("CreateTrainingJob", then_lost))
    proxy.disturb(to("CreateTrainingJob", refusing("ResourceInUse", "exists")))
    assert main() == 0
    records, _ = JobLog.of_user().read()
    assert len({record.id for record in records}) == 2
    assert first in records


def test_another_jobs_name_is_refused(
    main: Callable[..., int], proxy: Proxy, capsys: pytest.CaptureFixture[str]
) -> None:
    proxy.disturb(to("CreateTrainingJob", refusing("ResourceInUse", "exists")))
    assert main("--name", "taken") == 1
    assert "ResourceInUse: exists; no job was created" in capsys.readouterr().err


def test_a_name_that_was_used_before_is_refused_and_the_first_jobs_files_stay(
    main: Callable[..., int], project: Path, bucket: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main("--name", "first") == 0
    archive = {"Bucket": bucket, "Key": "runs/first/source/source.tar.gz"}
    before = Aws("us-east-1").client("s3").head_object(**archive)["ETag"]
    (project / "rows.jsonl").open("a").write("\n")
    capsys.readouterr()
    assert main("--name", "first") == 2
    assert capsys.readouterr().err.startswith("error: --name first: SageMaker already has a job with this name")
    assert Aws("us-east-1").client("s3").head_object(**archive)["ETag"] == before


def test_a_server_that_does_not_answer_is_given_up(proxy: Proxy) -> None:
    """The patience ends the call; the server answers only after that."""
    import threading

    given_up = threading.Event()

    def silent(handler: Handler) -> bool:
        given_up.wait()
        return reset(handler)

    proxy.disturb(to("DescribeTrainingJob", silent), times=2)
    aws = Aws("us-east-1", patience=Patience(connect_s=60.0, read_s=0.2, attempts=2))
    try:
        with pytest.raises(AwsError, match=r"look: Read timeout on endpoint URL.*check the network"), calling("look"):
            aws.client("sagemaker").describe_training_job(TrainingJobName="x")
    finally:
        given_up.set()


def test_no_credentials_and_no_server_are_one_line(
    main: Callable[..., int], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    assert main() == 1
    assert "log in, for example with `aws sso login`" in capsys.readouterr().err


def described_as(status: str, phase: str, **more: Any) -> dict[str, Any]:
    return {"TrainingJobName": "x", "TrainingJobStatus": status, "SecondaryStatus": phase, **more}


@pytest.mark.parametrize(
    ("status", "phase", "state"),
    [
        ("InProgress", "Starting", "queued"),
        ("InProgress", "Pending", "queued"),
        ("InProgress", "Downloading", "running"),
        ("InProgress", "Interrupted", "running"),
        ("Stopping", "Stopping", "running"),
        ("Stopped", "Stopped", "cancelled"),
        ("Stopped", "MaxRuntimeExceeded", "failed"),
        ("Stopped", "MaxWaitTimeExceeded", "failed"),
        ("Failed", "Failed", "failed"),
        ("Completed", "Completed", "succeeded"),
        ("Deleting", "?", "unknown"),
    ],
)
def test_states(status: str, phase: str, state: str) -> None:
    assert status_of(described_as(status, phase)).state == state


@pytest.fixture
def submitted(main: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> JobRecord:
    assert main() == 0
    capsys.readouterr()
    return only_record()


def test_a_failed_job_tells_why_and_a_stopped_one_is_cancelled(
    submitted: JobRecord, proxy: Proxy, capsys: pytest.CaptureFixture[str]
) -> None:
    running, failed = (
        described_as("InProgress", "Training"),
        described_as("Failed", "Failed", FailureReason="AlgorithmError: error: no rows\nexit code 1"),
    )
    proxy.disturb(to("DescribeTrainingJob", saying(200, running)), times=2)
    proxy.disturb(to("StopTrainingJob", saying(200, {})))
    assert jobs("cancel", "last") == 0
    assert ("POST", "/") in proxy.seen
    proxy.calm()
    proxy.disturb(to("DescribeTrainingJob", saying(200, failed)), times=9)
    assert jobs("wait", "last") == 1
    assert "AlgorithmError: error: no rows exit code 1" in "".join(capsys.readouterr())


def test_a_job_that_is_gone_is_unknown(submitted: JobRecord, proxy: Proxy) -> None:
    proxy.disturb(to("DescribeTrainingJob", refusing("ValidationException", "Requested resource not found.")), times=9)
    assert SageMaker(QUICK).status(submitted).state == "unknown"


def put_lines(name: str, stream: str, lines: list[str]) -> None:
    logs = Aws("us-east-1").client("logs")
    groups = [each["logGroupName"] for each in logs.describe_log_groups()["logGroups"]]
    if LOG_GROUP not in groups:
        logs.create_log_group(logGroupName=LOG_GROUP)
    path = f"{name}/{stream}"
    if not logs.describe_log_streams(logGroupName=LOG_GROUP, logStreamNamePrefix=path)["logStreams"]:
        logs.create_log_stream(logGroupName=LOG_GROUP, logStreamName=path)
    import time

    now_ms = int(time.time() * 1000)
    events = [{"timestamp": now_ms, "message": line} for line in lines]
    logs.put_log_events(logGroupName=LOG_GROUP, logStreamName=path, logEvents=events)


def test_logs_are_followed_until_the_job_has_ended(submitted: JobRecord, proxy: Proxy) -> None:
    """However long that takes: the end is told by the job's state, not by a number of looks."""
    assert list(SageMaker(QUICK).logs(submitted, follow=False)) == []
    put_lines(submitted.id, "algo-1-170", ["first", "10%\r20%", "\x1b[31mred"])
    looks = iter(range(100))
    running = saying(200, described_as("InProgress", "Training"))
    proxy.disturb(to("DescribeTrainingJob", running), times=3)

    def pause(seconds: float) -> None:
        look = next(looks)
        if look < 4:
            put_lines(submitted.id, "algo-1-170", [f"after look {look}"])

    lines = list(SageMaker(QUICK, pause).logs(submitted, follow=True))
    assert lines == ["first", "10%", "20%", "\x1b[31mred", *(f"after look {look}" for look in range(4))]


def test_waiting_goes_on_if_the_output_cannot_be_read(
    main: Callable[..., int], proxy: Proxy, capsys: pytest.CaptureFixture[str]
) -> None:
    proxy.disturb(to("DescribeLogStreams", refusing("AccessDeniedException", "not allowed")), times=9)
    assert main("--wait") == 0
    shown = capsys.readouterr()
    assert (
        "warning: its output cannot be shown: logs:DescribeLogStreams: AccessDeniedException: not allowed" in shown.err
    )
    assert "succeeded" in shown.out


def test_the_terminal_gets_no_control_characters(submitted: JobRecord, capsys: pytest.CaptureFixture[str]) -> None:
    put_lines(submitted.id, "algo-1-170", ["\x1b[2Jgone", "step 1"])
    assert jobs("logs", "last") == 0
    shown = capsys.readouterr().out
    assert "\x1b" not in shown
    assert "step 1" in shown


@pytest.fixture
def docker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Docker:
    made = make_docker(tmp_path / "docker")
    for name, value in made.env().items():
        monkeypatch.setenv(name, value)
    return made


@pytest.fixture
def repository(proxy: Proxy) -> Iterator[str]:
    ecr = Aws("us-east-1").client("ecr")
    yield "medarc-rl"
    ecr.delete_repository(repositoryName="medarc-rl", force=True)


def test_an_image_is_built_once_and_its_token_goes_through_stdin(docker: Docker, repository: str, proxy: Proxy) -> None:
    build, said = ImageBuild.of(repository, ["vllm"]), list[str]()
    image = build_and_push(build, Aws("us-east-1"), said.append)
    registry = image.partition("/")[0]
    assert image == f"{registry}/medarc-rl:{build.tag}"
    assert docker.calls == [argv[1:] for argv in build.plan(registry)]
    assert "EXTRAS=--extra sagemaker --extra vllm" in docker.calls[0]
    assert ImageBuild.of(repository).tag != build.tag
    password = (docker.directory / "login").read_bytes()
    token = Aws("us-east-1").client("ecr").get_authorization_token()["authorizationData"][0]["authorizationToken"]
    assert password == base64.b64decode(token).removeprefix(b"AWS:")
    assert password.decode() not in json.dumps(docker.calls) + "".join(said)
    with tarfile.open(docker.directory / "build") as context:
        names = set(context.getnames())
    assert {"Dockerfile", "pyproject.toml", "prime-rl/pyproject.toml", "medarc_rl/medarc_submit.py"} <= names
    assert not [name for name in names if name.startswith((".venv", ".git/", "outputs"))]
    kind = "application/vnd.docker.distribution.manifest.v2+json"
    manifest = json.dumps({"schemaVersion": 2, "mediaType": kind, "layers": []})
    Aws("us-east-1").client("ecr").put_image(repositoryName=repository, imageManifest=manifest, imageTag=build.tag)
    assert build_and_push(build, Aws("us-east-1"), said.append) == image
    assert len(docker.calls) == 3


def test_a_build_that_fails_submits_nothing(
    docker: Docker, repository: str, monkeypatch: pytest.MonkeyPatch, proxy: Proxy
) -> None:
    monkeypatch.setenv("FAKE_DOCKER_BUILD", "7")
    with pytest.raises(MedarcError, match="docker build ended with exit code 7; nothing was submitted"):
        build_and_push(ImageBuild.of(repository), Aws("us-east-1"), lambda line: None)
    assert [call[0] for call in docker.calls] == ["build"]
