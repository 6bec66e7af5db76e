"""The request of a training job: checked against the API's own rules before anything is uploaded."""

from __future__ import annotations

import json
import os
import re
import socket
from dataclasses import replace
from pathlib import Path

import pytest
from aws_machine import ACCOUNT, ROLE, command, make_project, submit
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("boto3", reason="boto3 is not installed: `uv sync --inexact --extra sagemaker`")

from medarc_rl import deployment
from medarc_rl.backends.protocol import Request
from medarc_rl.backends.sagemaker.backend import gpu_faults
from medarc_rl.backends.sagemaker.request import (
    FileSystem,
    JobPrefixes,
    S3Prefix,
    TrainingJob,
    gpus_of,
    name_fault,
    nearest_name,
    opaque_name,
    references,
    request_faults,
)
from medarc_rl.errors import UsageError
from medarc_rl.utils import GivenConfig
from prime_rl.configs.sft import SFTConfig
from prime_rl.utils.pydantic_config import load_config

GOLDEN = Path(__file__).parent / "golden"
SECRET = "arn:aws:secretsmanager:us-east-1:123456789012:secret:hf-AbCdEf"
EFS_ACTIONS = ("ClientMount", "ClientRootAccess", "ClientWrite", "DescribeFileSystems", "DescribeMountTargets")
JOB = TrainingJob(
    name="medarc-20260131-120000-1a2b3c4d",
    command="rl",
    source_sha256="0" * 64,
    image="123456789012.dkr.ecr.us-east-1.amazonaws.com/medarc-rl:1",
    role=ROLE,
    prefixes=JobPrefixes(S3Prefix("bucket", "runs/medarc-20260131-120000-1a2b3c4d")),
    instance_type="ml.g5.12xlarge",
    volume_gb=200,
    limit_s=3600,
    wait_s=7200,
    shares_gpus=True,
    env={"OMP_NUM_THREADS": "8"},
    secrets={"HF_TOKEN": SECRET},
    inputs={"data": "s3://bucket/corpus"},
    tags={"team": "radiology"},
    subnets=("subnet-1",),
    security_groups=("sg-1",),
    kms_key="key-1",
)


@pytest.fixture
def project(tmp_path: Path) -> Path:
    return make_project(tmp_path / "project")


@given(st.text(max_size=80))
def test_any_name_is_taken_or_gets_a_name_that_is(name: str) -> None:
    fault = name_fault(name)
    taken = len(name) <= 63 and re.fullmatch(r"[a-zA-Z0-9](-*[a-zA-Z0-9])*", name, re.ASCII)
    assert (fault is None) == bool(taken)
    if near := nearest_name(name):
        assert name_fault(near) is None


def test_the_pattern_alone_would_let_a_longer_name_through() -> None:
    assert name_fault("a" * 62 + "-b") is not None


def test_generated_names_are_opaque_and_do_not_collide() -> None:
    names = {opaque_name(0.0) for _ in range(1000)}
    assert len(names) == 1000
    assert all(re.fullmatch(r"medarc-19700101-000000-[0-9a-f]{8}", name) for name in names)


def test_the_request_is_as_recorded_and_the_api_takes_it() -> None:
    assert json.loads((GOLDEN / "request.json").read_text()) == JOB.request()
    assert request_faults(JOB.request()) == []


def test_the_request_of_several_nodes_is_as_recorded() -> None:
    shared = FileSystem.of("fsx:fs-0123456789abcdef0:/mountname/runs")
    job = replace(JOB, nodes=4, shares_gpus=False, file_system=shared)
    assert json.loads((GOLDEN / "request_of_nodes.json").read_text()) == job.request()
    assert request_faults(job.request()) == []


def test_the_request_has_the_types_that_boto3_wants() -> None:
    import boto3
    from botocore.exceptions import ParamValidationError
    from botocore.stub import Stubber

    client = boto3.client("sagemaker", region_name="us-east-1", aws_access_key_id="x", aws_secret_access_key="x")
    with Stubber(client) as stub:
        for _ in range(2):
            stub.add_response("create_training_job", {"TrainingJobArn": "arn:aws:sagemaker:us-east-1:1:training-job/x"})
        client.create_training_job(**JOB.request())
        with pytest.raises(ParamValidationError):
            client.create_training_job(**JOB.request() | {"ResourceConfig": "one node"})


def test_trainer_and_server_share_gpus_of_the_instance(
    project: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(project)
    (project / "rl.toml").write_text(
        'max_steps = 2\nmodel.name = "some/model"\n[trainer]\n[orchestrator]\n[inference]\n'
    )
    sent = ("rl", "rl.toml", "--to", "sagemaker", *ACCOUNT, "--s3", "s3://bucket/runs", "--device", "auto", "--dry-run")
    for words, seen in ((("--colocate", "2"), "0,1"), (("--single-gpu",), "0"), (("--colocate", "4"), None)):
        assert _main(*sent, "--instance-type", "ml.g5.12xlarge", *words) == 0
        shown = json.loads(capsys.readouterr().out)
        made = shown["create_training_job"]
        assert made["HyperParameters"]["single_gpu"] == "1"
        assert made.get("Environment", {}).get("CUDA_VISIBLE_DEVICES") == seen
        assert shown["config"]["deployment"]["num_train_gpus"] == (4 if seen is None else seen.count(",") + 1)
    for words, says in (
        (("--train-gpus", "4"), "has 4 GPUs, and the run takes 5; take ml.g5.48xlarge, or --colocate 4"),
        (("--colocate", "5"), "has 4 GPUs, and the run takes 5; take ml.g5.48xlarge"),
        (
            ("--colocate", "2", "--weight-broadcast.type=nccl", "--max-async-level=1"),
            "--colocate 2: weight_broadcast.type = 'nccl' needs two GPUs, one on each side",
        ),
    ):
        assert _main(*sent, "--instance-type", "ml.g5.12xlarge", *words) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert says in line


def test_gpus_that_evaluate_an_sft_run_count(tmp_path: Path) -> None:
    file = tmp_path / "sft.toml"
    file.write_text("max_steps = 2\n[model]\nname = 'm'\n[eval]\n[[eval.env]]\nid = 'reverse-text'\n")
    config = load_config(SFTConfig, [file])
    words = GivenConfig.read(SFTConfig, [str(file)])
    request = Request(kind="sft", given=words, config="", name=None, output_dir=None, nodes=1)
    (fault,) = gpu_faults(request, config, "ml.g5.2xlarge")
    assert fault.endswith("has 1 GPU, and the run takes 2; take ml.g5.12xlarge")
    assert deployment.gpus_of_nodes(config, shares_gpus=False) == [2], "on Ray, too"


REFUSED = {
    "--name med_calc.v2": "'med_calc.v2'.*for example med-calc-v2",
    "--role arn:aws:iam::1:role/r": "--role 'arn:aws:iam::1:role/r'.*123456789012",
    "--instance-type ml.g5.2xlrge": "nearest: ml.g5.2xlarge",
    "--instance-type ml.m5.xlarge --volume-gb 0": "--volume-gb 0: 1 to 16384; nearest: 1",
    "--deadline 9999999": "--deadline 9999999: SageMaker takes 60 to 2419200 s; nearest: 2419200",
    "--spot --max-wait 60": "--max-wait 60 is shorter.*nearest: 86400",
    "--max-wait 60": "--max-wait belongs to --spot",
    "--subnet subnet-1": "--subnet and --security-group belong together",
    "--subnet sub_net --security-group sg-1": "--subnet 'sub_net'",
    "--tag team": "--tag: write NAME=VALUE",
    "--tag te$m=x": "--tag 'te\\$m'",
    "--tag aws:team=x": "--tag aws:team: AWS reserves tag names that begin with aws:",
    "--env 1X=2": "--env '1X'.*OMP_NUM_THREADS=8",
    "--env A=1 --env A=2": "--env A: given twice",
    "--env SM_X=1": "--env SM_X: SageMaker sets",
    "--env HF_TOKEN=hf_verysecretvalue": "--env HF_TOKEN: .*--secret-env HF_TOKEN=ARN",
    "--secret-env HF_TOKEN=hf_verysecretvalue": "--secret-env 'HF_TOKEN': write NAME=arn",
    "--input source=s3://b/x": "--input source: this name is taken",
    "--input data=/tmp/x": "--input data=/tmp/x: write s3://",
    "--input da$ta=s3://bucket/x": "--input 'da\\$ta'",
    "--s3 bucket/runs": "--s3 'bucket/runs': write s3://BUCKET/PREFIX",
    "--s3 s3://Bucket_A/runs": "not a bucket's name",
    "--output-dir /somewhere": "the job's disk is lost",
    "--include ../outside": "--include ../outside",
    "--include missing": "--include missing: no such file",
    "--include .env": "--include .env: usually holds secrets",
    "--nodes 2": "2 nodes: they share a directory, and instances do not: give --file-system",
    "--nodes 2 --local": "2 nodes: --local runs one container|docker",
    "--file-system fsx:fs-01234567:/m/runs --subnet subnet-1 --security-group sg-1": "belongs to several nodes",
    "--nodes 2 --gpus 1 --file-system efs:fs-0123456789abcdef0:/": "--file-system needs --subnet",
    "--nodes 2 --gpus 1 --file-system nfs:fs-0123456789abcdef0:/": "write fsx:ID:/PATH or efs:ID:/PATH",
    "--nodes 2 --gpus 1 --file-system efs:fs-012:/ --subnet subnet-1 --security-group sg-1": "'fs-012' is no",
    "--nodes 2 --gpus 1 --file-system efs:fs-01234567:runs --subnet subnet-1 --security-group sg-1": "begins with /",
    "--nodes 2 --gpus 1 --file-system fsx:fs-01234567:/ --subnet subnet-1 --security-group sg-1": "its mount name",
    "--project-dir nowhere": "no such directory",
    "--launcher slurm": "launcher = 'slurm': start this run with `medarc_slurm",
    "--resume latest": "a new job begins with an empty directory",
    "--build --build-extra vlm": "--build-extra vlm: medarc-rl has no such extra; nearest: vllm",
    "--build": "--image and --build: give one of them",
    "--gpus 2 --instance-type ml.g5.2xlarge --device auto": "has 1 GPU, and the run takes 2; take ml.g5.12xlarge",
    "--device cuda": "ml.m5.xlarge has no GPU",
    "--namespace x": "--namespace is an option of --to kubernetes",
    "--data.name ../outside.jsonl": "outside of the project",
    "--data.name nowhere.jsonl": "no such file",
    "--max-upload-mb 0": "max-upload-mb",
}


@pytest.mark.parametrize("words", REFUSED, ids=str)
def test_a_mistake_is_one_line_before_anything_is_sent(
    project: Path, words: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (project.parent / "outside.jsonl").write_text((project / "rows.jsonl").read_text())
    monkeypatch.chdir(project)
    assert _main("sft", "sft.toml", "--to", "sagemaker", *ACCOUNT, "--s3", "s3://bucket/runs", *words.split()) == 2
    errors = capsys.readouterr().err.splitlines()
    assert len(errors) == 1, errors
    assert re.search(REFUSED[words], errors[0]), errors
    assert errors[0].startswith("error: ")
    assert "verysecret" not in errors[0]


def _main(*words: str) -> int:
    from medarc_rl.medarc_submit import app

    code = app(list(words), standalone_mode=False)
    assert isinstance(code, int)
    return code


def test_all_mistakes_are_told_at_once(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = str(project / "sft.toml")
    words = ["--to", "sagemaker", "--region", "us-east-1", "--image", "x:1", "--project-dir", str(project)]
    words += ["--spot", "--max-wait", "0", "--tag", "te$m=x"]
    assert _main("sft", config, *words) == 2
    assert capsys.readouterr().err.splitlines() == [
        "error: --role: missing; give the ARN of the job's role, or export MEDARC_SAGEMAKER_ROLE",
        "error: --s3: missing; give s3://BUCKET/PREFIX, or export MEDARC_SAGEMAKER_S3",
        "error: --instance-type: missing; give one, as in --instance-type ml.g5.2xlarge",
        "error: --max-wait 0 is shorter than the time that the job may run; nearest: 86400",
        "error: --tag 'te$m': SageMaker does not take this; write it as in --tag team=radiology",
    ]


def test_a_secret_is_given_by_reference_only() -> None:
    both = ["A=arn:aws:ssm:eu-west-1:123456789012:parameter/a/b", f"B={SECRET}#key"]
    assert references(both) == dict(each.split("=", 1) for each in both)
    with pytest.raises(UsageError) as refused:
        references(["A=plain-secret", "B", f"C={SECRET}", f"C={SECRET}"])
    assert len(refused.value.faults) == 3
    assert "plain-secret" not in str(refused.value)


def test_gpus_of_instances() -> None:
    known = {"ml.p4d.24xlarge": 8, "ml.g5.xlarge": 1, "ml.g5.24xlarge": 4, "ml.m5.xlarge": 0, "ml.c7i-flex.large": 0}
    assert {name: gpus_of(name) for name in known} == known
    assert gpus_of("ml.trn1.2xlarge") is None
    assert gpus_of("nonsense") is None


@pytest.mark.parametrize(
    ("option", "expected"), [([], "eu-central-1"), (["--region", "us-west-2"], "us-west-2")], ids=["none", "given"]
)
def test_the_region_is_that_of_the_option_or_of_the_variable_that_the_message_names(
    option: list[str], expected: str, project: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(project)
    monkeypatch.setenv("AWS_CONFIG_FILE", os.devnull)
    monkeypatch.delenv("AWS_DEFAULT_REGION", raising=False)
    monkeypatch.setenv("AWS_REGION", "eu-central-1")
    account = ["--role", "arn:aws:iam::123456789012:role/r", "--image", "x:1", "--instance-type", "ml.m5.xlarge"]
    words = ["sft", "sft.toml", "--to", "sagemaker", *account, "--s3", "s3://bucket/runs", *option, "--dry-run"]
    assert _main(*words) == 0
    assert json.loads(capsys.readouterr().out)["create_training_job"]["region"] == expected


def test_a_dry_run_prints_all_that_would_be_sent_and_contacts_nobody(
    project: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*given: object) -> None:
        raise AssertionError("a connection")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.chdir(project)
    monkeypatch.setenv("AWS_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("MEDARC_SAGEMAKER_S3", "s3://bucket/runs")
    assert _main("sft", "sft.toml", "--to", "sagemaker", *ACCOUNT, "--dry-run") == 0
    shown = json.loads(capsys.readouterr().out)
    files = {"model/chat_template.jinja", "model/config.json", "model/tokenizer.json", "model/tokenizer_config.json"}
    assert set(shown["files"]) == {*files, "rows.jsonl", "sft.toml"}
    assert shown["left_out"] == [".env: usually holds secrets"]
    assert shown["config"]["output_dir"] == "/opt/ml/checkpoints"
    assert shown["config"]["ckpt"]["resume_step"] == -2
    request = shown["create_training_job"]
    assert shown["upload"]["sha256"] == request["HyperParameters"]["source_sha256"]
    assert (
        shown["upload"]["to"] == request["InputDataConfig"][0]["DataSource"]["S3DataSource"]["S3Uri"] + "source.tar.gz"
    )
    assert not list(project.rglob("outputs"))
    # Nothing in the request tells what is trained on what.
    assert not re.search(r"sft\.toml|rows|model/|reverse", json.dumps(request))


def test_the_policies_are_as_recorded(tmp_path: Path) -> None:
    words = ["sagemaker-policy", "--role", ROLE, "--s3", "s3://bucket/runs", "--region", "us-east-1"]
    more = ["--input", "data=s3://other/corpus", "--secret-env", f"HF_TOKEN={SECRET}#key", "--subnet", "subnet-1"]
    parameter = ["--secret-env", "WANDB_API_KEY=arn:aws:ssm:us-east-1:123456789012:parameter/wandb", "--kms-key", "abc"]
    done = command("medarc_submit", tmp_path, [*words, *more, *parameter])
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == json.loads((GOLDEN / "policies.json").read_text())


def test_a_policy_covers_what_configs_name_on_s3(tmp_path: Path) -> None:
    (tmp_path / "sft.toml").write_text(
        'output_dir = "s3://kept/runs/a"\n[model]\nname = "s3://models/qwen"\n[data]\nname = "s3://data/train.jsonl"\n'
    )
    words = ["sagemaker-policy", "--role", ROLE, "--s3", "s3://bucket/runs", "--region", "us-east-1"]
    done = command("medarc_submit", tmp_path, [*words, "--config", "sft.toml"])
    assert done.returncode == 0, done.stderr
    rights = {each["Sid"]: each for each in json.loads(done.stdout)["job_role"]["Statement"]}
    assert rights["ReadInputs"]["Resource"] == [
        *("arn:aws:s3:::data/train.jsonl/*", "arn:aws:s3:::models/qwen/*"),
        *("arn:aws:s3:::data/train.jsonl", "arn:aws:s3:::models/qwen"),
    ]
    assert rights["ReadAndWriteRuns"]["Resource"] == ["arn:aws:s3:::bucket/runs/*", "arn:aws:s3:::kept/runs/a/*"]
    assert rights["FindPartsOfUploads"]["Resource"] == ["arn:aws:s3:::bucket", "arn:aws:s3:::kept"]
    listed = rights["ListItsPrefixes"]
    assert {"arn:aws:s3:::data", "arn:aws:s3:::kept", "arn:aws:s3:::models"} < set(listed["Resource"])
    assert {"train.jsonl", "qwen", "qwen/*", "runs/a/*"} < set(listed["Condition"]["StringLike"]["s3:prefix"])


@pytest.mark.parametrize(
    ("kind", "actions"),
    [
        ("fsx", {"fsx:DescribeFileSystems"}),
        ("efs", {f"elasticfilesystem:{name}" for name in EFS_ACTIONS}),
    ],
)
def test_a_policy_lets_the_job_mount_its_file_system(tmp_path: Path, kind: str, actions: set[str]) -> None:
    words = ["sagemaker-policy", "--role", ROLE, "--s3", "s3://bucket/runs", "--region", "us-east-1"]
    done = command("medarc_submit", tmp_path, [*words, "--file-system", f"{kind}:fs-0123456789abcdef0:/mount/runs"])
    assert done.returncode == 0, done.stderr
    rights = {each["Sid"]: each for each in json.loads(done.stdout)["job_role"]["Statement"]}
    (mounting,) = (each for name, each in rights.items() if name.endswith("TheFileSystem"))
    assert set(mounting["Action"]) == actions
    (resource,) = mounting["Resource"]
    assert resource.endswith(":123456789012:file-system/fs-0123456789abcdef0")
    assert "JoinTheNetwork" in rights


def test_no_policy_allows_more_than_its_prefix() -> None:
    policies = json.loads((GOLDEN / "policies.json").read_text())
    unlimited = [
        action
        for policy in (policies["submitter"], policies["job_role"])
        for statement in policy["Statement"]
        if statement["Resource"] == ["*"] and "Condition" not in statement
        for action in statement["Action"]
    ]
    # These have no resources.
    assert {action for action in unlimited if not action.startswith("ec2:")} == {"ecr:GetAuthorizationToken"}
    assert "*" not in "".join(
        action for policy in policies.values() for each in policy["Statement"] for action in each["Action"]
    )


def test_a_missing_extra_is_one_line(project: Path) -> None:
    hidden = project.parent / "hidden"
    hidden.mkdir()
    (hidden / "sitecustomize.py").write_text(
        "import importlib.util as u\nfind = u.find_spec\n"
        "u.find_spec = lambda name, *more: None if name == 'boto3' else find(name, *more)\n"
    )
    done = submit(project, "sft", "sft.toml", "--to", "sagemaker", env={"PYTHONPATH": str(hidden)})
    assert (done.returncode, done.stderr) == (
        2,
        "error: boto3 is not installed: run `uv sync --inexact --extra sagemaker`\n",
    )
