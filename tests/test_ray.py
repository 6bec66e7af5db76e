"""Runs on a real Ray: a local cluster, and one of two nodes with made-up GPUs on this machine."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil
import pytest

from medarc_rl.backends.ray.cluster import open_listeners, shortage
from medarc_rl.backends.ray.driver import STOPS_ITSELF
from prime_rl.utils.scratch import scratch_directory

ROOT = Path(__file__).resolve().parents[1]
DRIVER = (sys.executable, "-m", "medarc_rl.backends.ray.driver")
ACTOR = "ray::AgentRunner"

pytestmark = [
    pytest.mark.ray,
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("ray") is None, reason="the extra ray is not installed"),
]

SFT = f"""
max_steps = 100000
[model]
name = "{ROOT}/examples/reverse_text/model"
attn = "sdpa"
[model.debug]
random_init = true
[data]
type = "fake"
batch_size = 2
seq_len = 64
"""


CLUSTER = """
import os, sys
from pathlib import Path
from medarc_rl.backends.ray.cluster import _keep_to_this_user

_keep_to_this_user(os.environ, Path(sys.argv[1]))
from ray.cluster_utils import Cluster

nodes = Cluster()
for index in range(2):
    for left in (3, 2, 1, 0):
        try:
            # The first one also runs Ray's job server.
            nodes.add_node(
                num_cpus=2,
                num_gpus=2,
                include_dashboard=index == 0,
                dashboard_host="127.0.0.1",
                dashboard_port=0,
                temp_dir=sys.argv[1],
            )
            break
        except Exception as error:
            # Ray gives a node 30 seconds to start.
            if not left or "timed out" not in str(error):
                raise
print(nodes.address, nodes.webui_url, flush=True)
sys.stdin.read()
nodes.shutdown()
"""


@dataclass
class RayNodes:
    """Two nodes with two GPUs each, that only this user can use."""

    address: str
    jobs: str
    """URL of the job server."""
    env: dict[str, str]
    pid: int


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayNodes]:
    with scratch_directory("ray") as directory:
        argv = [sys.executable, "-c", CLUSTER, str(directory)]
        pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        env = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": f"{directory}/token"}
        # Under `uv run`, Ray would upload the directory and start workers without ray.
        env["RAY_ENABLE_UV_RUN_RUNTIME_ENV"] = "0"
        # Where `Cluster` writes its address, which it does not make itself.
        env["RAY_TMPDIR"] = str(directory)
        (directory / "ray").mkdir()
        with subprocess.Popen(argv, cwd=ROOT, env=os.environ | env, text=True, **pipes) as process:
            address, jobs = process.stdout.readline().split()
            yield RayNodes(address, f"http://{jobs}", env, process.pid)
            process.stdin.close()


EIGHT = ("--deployment.num-gpus", "8", "--data.batch-size", "8")


class Driver:
    """A driver in a process of its own, and what it prints."""

    def __init__(self, cluster: RayNodes, *words: str) -> None:
        self.process = subprocess.Popen(
            [*DRIVER, "--address", cluster.address, *words],
            cwd=ROOT,
            env=os.environ | cluster.env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.lines: list[str] = []

    def until(self, text: str) -> str:
        """Read to the first line with this text. Fails if the driver ends before."""
        for line in self.process.stdout or ():
            self.lines.append(line.rstrip())
            if text in line:
                return line
        raise AssertionError(f"the driver never said {text!r}:\n" + "\n".join(self.lines))

    def end(self) -> tuple[int, str]:
        """Wait for its end. Returns the exit code and everything that it printed."""
        self.lines += [line.rstrip() for line in self.process.stdout or ()]
        return self.process.wait(), "\n".join(self.lines)


def ours(out: Path) -> dict[int, psutil.Process]:
    """Processes that work for a run: its directory is in their command line."""
    found = {}
    for process in psutil.process_iter(["cmdline"]):
        words = " ".join(process.info["cmdline"] or ())
        if str(out) in words and "ray.driver" not in words:
            found[process.pid] = process
    return found


def seen_gpus(out: Path) -> set[str]:
    """What the run's trainers see."""
    return {
        process.environ().get("CUDA_VISIBLE_DEVICES", "unset")
        for process in ours(out).values()
        if "prime_rl.trainer.sft.train" in process.cmdline()
    }


@pytest.fixture
def sft(tmp_path: Path) -> Path:
    file = tmp_path / "sft.toml"
    file.write_text(SFT)
    return file


def the_actor(cluster: RayNodes) -> psutil.Process:
    """The process of the one actor that runs there. Other clusters of this machine have their own."""
    below = psutil.Process(cluster.pid).children(recursive=True)
    (actor,) = (each for each in below if (words_of(each) or [""])[0].startswith(ACTOR))
    return actor


def words_of(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.NoSuchProcess:
        return []


def started(cluster: RayNodes, sft: Path, out: Path) -> Driver:
    driver = Driver(cluster, "sft", "@", str(sft), "--output-dir", str(out), "--deployment.num-gpus", "2")
    driver.until("trainer started")
    return driver


def test_children_see_the_gpus_that_ray_gave(cluster: RayNodes, sft: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    driver = started(cluster, sft, out)
    given = next(line for line in driver.lines if "GPU" in line).rpartition("GPU ")[2]
    assert seen_gpus(out) == {given}
    assert len(given.split(",")) == 2
    processes = list(ours(out).values())
    driver.process.send_signal(signal.SIGTERM)
    code, _ = driver.end()
    assert code == 143
    psutil.wait_procs(processes)


@pytest.mark.parametrize("victim", ["actor", "driver"])
def test_a_killed_part_ends_the_run(cluster: RayNodes, sft: Path, tmp_path: Path, victim: str) -> None:
    out = tmp_path / "run"
    driver = started(cluster, sft, out)
    processes = list(ours(out).values())
    actor = the_actor(cluster)
    (actor if victim == "actor" else psutil.Process(driver.process.pid)).kill()
    code, said = driver.end()
    psutil.wait_procs([*processes, actor])
    if victim == "actor":
        assert code == 1
        assert "is gone" in said
        assert "Ray actor on" in said


def job(cluster: RayNodes, *words: object) -> subprocess.CompletedProcess[str]:
    """`ray job submit` of the driver, as docs/submit.md has it. Waits for its end."""
    ray = str(Path(sys.executable).with_name("ray"))
    module = [sys.executable, *DRIVER[1:]]
    argv = [ray, "job", "submit", "--address", cluster.jobs, "--", "env", "-C", str(ROOT), *module, *map(str, words)]
    while True:
        ended = subprocess.run(argv, env=os.environ | cluster.env, capture_output=True, text=True, check=False)
        # The job server answers before the agents of the cluster's nodes have told it that they are there.
        if "No available agent" not in ended.stderr:
            return ended


def end_of(cluster: RayNodes, submitted: subprocess.CompletedProcess[str]) -> str:
    """The last status of a job. The log of a job ends before its status is known."""
    (name,) = set(re.findall(r"raysubmit_\w+", submitted.stdout))
    argv = [str(Path(sys.executable).with_name("ray")), "job", "status", "--address", cluster.jobs, name]
    while True:
        shown = subprocess.run(argv, env=os.environ | cluster.env, capture_output=True, text=True, check=True)
        said = (shown.stdout + shown.stderr).lower()
        for status in ("stopped", "failed", "succeeded"):
            if f"{name.lower()}' {status}" in said or f"{name.lower()}' was {status}" in said:
                return status.upper()


def test_reverse_text_learns_in_a_job_of_ray_on_two_gpus_of_the_cluster(cluster: RayNodes, tmp_path: Path) -> None:
    out = tmp_path / "run"
    # `auto`, so that the run takes the cluster's GPUs; there is none behind them.
    words = ("rl", "@", "examples/reverse_text/rl_cpu.toml", "--output-dir", out, "--device", "auto")
    ended = job(cluster, *words, "--max-steps", 20)
    assert ended.returncode == 0, ended.stdout
    assert "127.0.0.1): GPU " in ended.stdout
    records = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    rewards = [record["reward/mean"] for record in records if "reward/mean" in record]
    assert len(rewards) == 20
    # In 80 steps it goes from 0.3 to 0.9.
    assert sum(rewards[-4:]) / 4 > sum(rewards[:4]) / 4 + 0.1
    assert not ours(out)


def test_a_job_that_is_refused_stops_itself(cluster: RayNodes, sft: Path, tmp_path: Path) -> None:
    ended = job(cluster, "--stop-if-refused", "sft", "@", sft, "--max-stepz", 2, "--output-dir", tmp_path / "run")
    assert "error: --max-stepz: unknown option" in ended.stdout, ended.stdout
    assert STOPS_ITSELF in ended.stdout
    # KubeRay starts a job again that failed, and no stopped one.
    assert end_of(cluster, ended) == "STOPPED"


def test_two_nodes_of_the_cluster_train_together(cluster: RayNodes, sft: Path, tmp_path: Path) -> None:
    nodes = ("--launcher", "ray", "--deployment.type", "multi_node", "--deployment.num-nodes", "2")
    words = ("--deployment.gpus-per-node", "1", "--max-steps", "2", "--device", "cpu")
    driver = Driver(cluster, "sft", "@", str(sft), "--output-dir", str(tmp_path / "run"), *nodes, *words)
    code, said = driver.end()
    assert code == 0, said
    assert "trainer rank 0" in said
    assert "trainer rank 1" in said


PLACING = """
import sys
from medarc_rl.backends.ray.cluster import placed
from medarc_rl.backends.ray.cluster import connected

with connected(sys.argv[1]), placed([{"CPU": 1, "GPU": 1}] * 2, sys.argv[2]):
    from ray.util import placement_group_table

    (group,) = [each for each in placement_group_table().values() if each["state"] == "CREATED"]
    print("nodes", len(set(group["bundles_to_node_id"].values())))
"""


@pytest.mark.parametrize(("strategy", "nodes"), [("pack", 1), ("spread", 2)])
def test_the_strategy_puts_two_parts_on_one_node_or_on_two(cluster: RayNodes, strategy: str, nodes: int) -> None:
    argv = [sys.executable, "-c", PLACING, cluster.address, strategy]
    done = subprocess.run(argv, env=os.environ | cluster.env, capture_output=True, text=True, check=False)
    assert f"nodes {nodes}" in done.stdout.splitlines(), done.stdout + done.stderr


def test_a_cluster_that_is_too_small_is_a_fault(cluster: RayNodes, sft: Path, tmp_path: Path) -> None:
    driver = Driver(cluster, "sft", "@", str(sft), "--output-dir", str(tmp_path), *EIGHT)
    code, said = driver.end()
    assert code == 1
    assert "error: the run takes 1 node with 8 GPUs; the GPUs of the cluster's nodes: 127.0.0.1 2, 127.0.0.1 2" in said


def test_the_cluster_listens_on_loopback_alone(cluster: RayNodes) -> None:
    assert open_listeners(cluster.pid) == []


def test_a_killed_node_ends_the_run(cluster: RayNodes, sft: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    driver = started(cluster, sft, out)
    processes = list(ours(out).values())
    raylet = psutil.Process(the_actor(cluster).ppid())
    raylet.kill()
    code, said = driver.end()
    psutil.wait_procs(processes)
    assert code == 1
    assert "is gone" in said


def node(gpus: float, alive: bool = True) -> dict[str, Any]:
    return {"Alive": alive, "NodeManagerAddress": "10.0.0.1", "Resources": {"CPU": 8.0, "GPU": gpus}}


@pytest.mark.parametrize(
    ("bundles", "nodes", "fits"),
    [
        ([4], [4], True),
        ([4, 4], [8], True),
        ([4, 4], [4, 4], True),
        ([4, 4], [6, 2], False),
        ([2, 8], [8, 2], True),
        ([1], [], False),
        ([0], [0], True),
    ],
)
def test_what_a_cluster_can_hold(bundles: list[int], nodes: list[int], fits: bool) -> None:
    fault = shortage([{"CPU": 1, "GPU": count} for count in bundles], [node(count) for count in nodes])
    assert (fault is None) == fits


def test_a_dead_node_holds_nothing() -> None:
    assert shortage([{"CPU": 1}], [node(4, alive=False)]) is not None


def test_listeners_on_other_addresses_are_found() -> None:
    import socket

    with socket.create_server(("127.0.0.1", 0)), socket.create_server(("0.0.0.0", 0)) as open_to_all:
        assert open_listeners(os.getpid()) == [f"0.0.0.0:{open_to_all.getsockname()[1]}"]
