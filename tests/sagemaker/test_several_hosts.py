"""A job of two instances: processes with loopback addresses of their own, as one request describes them."""

from __future__ import annotations

import json
import os
import queue
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil
import pytest
from aws_machine import ACCOUNT, make_project, submit
from s3_server import Proxy

pytest.importorskip("boto3", reason="boto3 is not installed: `uv sync --inexact --extra sagemaker --group aws`")

from medarc_rl.backends.sagemaker.in_job import Rendezvous, connect, proof_of, read_line
from medarc_rl.backends.sagemaker.request import SHARED_CHANNEL, Aws
from medarc_rl.backends.sagemaker.source_files import MlPaths
from medarc_rl.errors import MedarcError
from prime_rl.run.paths import RunPaths, stable_steps

needs_ray = pytest.mark.skipif(find_spec("ray") is None, reason="the extra ray is not installed")

HOSTS = ("127.0.0.2", "127.0.0.3")
FILE_SYSTEM = "fsx:fs-0123456789abcdef0:/mount/runs"
NETWORK = ("--subnet", "subnet-0123456789abcdef0", "--security-group", "sg-0123456789abcdef0")


@dataclass
class Instance:
    process: subprocess.Popen[str]
    paths: MlPaths
    lines: list[str] = field(default_factory=list)

    def until(self, text: str) -> None:
        for line in self.process.stdout or ():
            self.lines.append(line.rstrip())
            if text in line:
                return
        raise AssertionError(f"it never said {text!r}:\n" + "\n".join(self.lines))

    def lose(self) -> None:
        """Kill everything that runs there, at once."""
        if self.process.poll() is None:
            tree = psutil.Process(self.process.pid)
            for each in [tree, *tree.children(recursive=True)]:
                with suppress(psutil.NoSuchProcess):
                    each.kill()
            self.process.wait()

    def end(self) -> int:
        self.lines += [line.rstrip() for line in self.process.stdout or ()]
        return self.process.wait()


def submitted(directory: Path, *words: str) -> dict[str, Any]:
    """Submit to the server. Returns what it knows about the job."""
    aws = Aws("us-east-1")
    aws.client("s3").create_bucket(Bucket="several-hosts")
    project = make_project(directory / "project")
    given = ["--nodes", "2", "--gpus", "1", "--file-system", FILE_SYSTEM, *NETWORK]
    place = ["--s3", "s3://several-hosts/runs"]
    done = submit(
        project, "sft", "sft.toml", "--to", "sagemaker", *ACCOUNT, *place, *given, *words,
        env={"XDG_STATE_HOME": str(directory / "state")},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    name = done.stdout.split("submitted to sagemaker: ")[1].split()[0]
    found: dict[str, Any] = aws.client("sagemaker").describe_training_job(TrainingJobName=name)
    return found


@contextmanager
def instances(directory: Path, job: dict[str, Any]) -> Iterator[list[Instance]]:
    """What SageMaker makes of the job: containers with its inputs, in the order of HOSTS."""
    with socket.create_server((HOSTS[0], 0)) as free:
        port = free.getsockname()[1]
    shared = directory / "file-system"
    shared.mkdir()
    archive = directory / "source.tar.gz"
    place = job["InputDataConfig"][0]["DataSource"]["S3DataSource"]["S3Uri"].removeprefix("s3://several-hosts/")
    Aws("us-east-1").client("s3").download_file("several-hosts", f"{place}source.tar.gz", str(archive))
    with ExitStack() as stack:
        found = []
        for host in HOSTS:
            paths = MlPaths(directory / host)
            for made in (paths.hyperparameters.parent, paths.archive.parent, paths.run):
                made.mkdir(parents=True)
            paths.archive.symlink_to(archive)
            paths.channel(SHARED_CHANNEL).symlink_to(shared)
            paths.hyperparameters.write_text(json.dumps(job["HyperParameters"]))
            paths.resources.write_text(json.dumps({"current_host": host, "hosts": list(HOSTS)}))
            argv = [sys.executable, *job["AlgorithmSpecification"]["ContainerEntrypoint"][1:]]
            argv += ["--root", str(paths.root), "--local-disk", str(directory / "disk"), "--ray-port", str(port)]
            process = subprocess.Popen(
                argv,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            found.append(Instance(process, paths))
            stack.callback(found[-1].lose)
        yield found


@pytest.mark.ray
@pytest.mark.slow
@needs_ray
def test_two_instances_train_one_run_and_keep_it_on_s3(tmp_path: Path, proxy: Proxy) -> None:
    job = submitted(tmp_path)
    assert job["ResourceConfig"]["InstanceCount"] == 2
    assert "CheckpointConfig" not in job
    with instances(tmp_path, job) as (first, second):
        codes = first.end(), second.end()
    assert codes == (0, 0), [*first.lines, *second.lines]
    assert any(line.startswith(f"{HOSTS[1]} (") and line.endswith("has joined") for line in first.lines)
    said = "\n".join(first.lines)
    assert "trainer rank 0" in said
    assert "trainer rank 1" in said
    shared = first.paths.shared(job["TrainingJobName"])
    run = RunPaths(shared / "run")
    assert stable_steps(run.checkpoints) == [1, 2]
    assert stat.S_IMODE(shared.stat().st_mode) == 0o700
    assert not (shared / "hosts" / "token").exists()
    place = job["HyperParameters"]["upload_to"].removeprefix("s3://several-hosts/")
    kept = Aws("us-east-1").client("s3").list_objects_v2(Bucket="several-hosts", Prefix=f"{place}/")
    keys = {each["Key"].removeprefix(f"{place}/") for each in kept["Contents"]}
    assert {name.split("/")[0] for name in keys} >= {"checkpoints", "weights", "metrics.jsonl"}, keys
    assert any("step_2/" in name for name in keys), keys


@pytest.mark.ray
@pytest.mark.chaos
@needs_ray
def test_a_lost_instance_ends_the_job_by_name(tmp_path: Path, proxy: Proxy) -> None:
    job = submitted(tmp_path, "--max-steps", "1000000", "--ckpt.interval", "100000")
    with instances(tmp_path, job) as (first, second):
        first.until("SUCCESS Step")
        second.lose()
        code = first.end()
    assert code == 1, first.lines
    assert any(line.startswith(f"error: host {HOSTS[1]} ") for line in first.lines)
    assert first.paths.failure.read_text().startswith(f"error: host {HOSTS[1]} is gone")


@pytest.mark.ray
@pytest.mark.chaos
@needs_ray
def test_a_stop_saves_on_all_instances(tmp_path: Path, proxy: Proxy) -> None:
    job = submitted(tmp_path, "--max-steps", "1000000", "--ckpt.interval", "100000")
    with instances(tmp_path, job) as (first, second):
        first.until("SUCCESS Step")
        for instance in (second, first):
            instance.process.send_signal(signal.SIGTERM)
        codes = first.end(), second.end()
    assert codes == (143, 143), [*first.lines, *second.lines]
    assert not first.paths.failure.exists()
    run = RunPaths(first.paths.shared(job["TrainingJobName"]) / "run")
    assert len(stable_steps(run.checkpoints)) == 1


@dataclass
class OpenRendezvous:
    port: int
    rendezvous: Rendezvous
    lost: list[str]
    said: queue.Queue[str]
    losses: queue.Queue[str]


@pytest.fixture
def rendezvous() -> Iterator[OpenRendezvous]:
    """A rendezvous for the hosts b and c, whose token is "secret"."""
    said: queue.Queue[str] = queue.Queue()
    losses: queue.Queue[str] = queue.Queue()
    lost: list[str] = []
    with socket.create_server((HOSTS[0], 0)) as server:
        made = Rendezvous(server, "secret", ("b", "c"), lost, said.put, lambda: losses.put(lost[-1]))
        made.open()
        yield OpenRendezvous(server.getsockname()[1], made, lost, said, losses)
        made.close(1)


def test_hosts_join_at_the_rendezvous_and_hear_how_the_job_ended(rendezvous: OpenRendezvous) -> None:
    with connect(HOSTS[0], rendezvous.port) as second, connect(HOSTS[0], rendezvous.port) as third:
        for name, connection in (("b", second), ("c", third)):
            connection.sendall(f"{name} {proof_of('secret', name)}\n".encode())
        rendezvous.rendezvous.await_all()
        rendezvous.rendezvous.close(143)
        assert (read_line(second), read_line(third)) == ("143", "143")
    assert rendezvous.losses.empty()


def test_the_rendezvous_names_a_lost_host(rendezvous: OpenRendezvous) -> None:
    with connect(HOSTS[0], rendezvous.port) as second:
        second.sendall(f"b {proof_of('secret', 'b')}\n".encode())
        assert rendezvous.said.get().endswith(") has joined")
    assert rendezvous.losses.get() == "b"
    assert rendezvous.said.get().startswith("error: host b (")
    with pytest.raises(MedarcError, match="host b is gone"):
        rendezvous.rendezvous.await_all()


@pytest.mark.parametrize(
    "line", [b"b wrong\n", b"d " + proof_of("secret", "d").encode() + b"\n", b"b \xff\xc3\n", b"x" * 300]
)
def test_the_rendezvous_takes_no_host_without_the_token_or_of_another_name(
    rendezvous: OpenRendezvous, line: bytes
) -> None:
    with connect(HOSTS[0], rendezvous.port) as stranger:
        stranger.sendall(line)
        assert read_line(stranger) == ""
    assert rendezvous.said.empty()
    assert rendezvous.lost == []
