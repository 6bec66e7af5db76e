"""Jobs on two nodes of a real Slurm: where each process runs, what it computes, how the job ends, and what is left."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from medarc_rl import medarc_slurm

ROOT = Path(__file__).resolve().parents[1]

RECORDED = ("SLURMD_NODENAME", "RANK", "LOCAL_RANK", "WORLD_SIZE", "CUDA_VISIBLE_DEVICES")
CHILD = f"""#!{sys.executable}
import json, os, signal, sys
def save(signum, frame):
    print("saved", flush=True)
    sys.exit(143)
signal.signal(signal.SIGTERM, save)
print("last words", flush=True)
with open(os.environ["GATE"], "w") as gate:
    gate.write(json.dumps([os.getpid(), *(os.environ.get(name) for name in {RECORDED!r})]) + "\\n")
    gate.flush()
    signal.pause()
"""
PYTHON = """#!/bin/bash
here=${BASH_SOURCE[0]%/*}
# The trainer is a stand-in, everything else is real.
if [[ $2 == prime_rl.trainer.* ]]; then exec "$here/trainer"; fi
exec "$here/python3" "$@"
"""

SFT_TOML = """
max_steps = 3
device = "cpu"
[model]
attn = "sdpa"
[data]
type = "fake"
input_ids = "random"
seq_len = 64
batch_size = 8
"""
RL_TOML = """
max_steps = 2
max_async_level = 1
seq_len = 128
device = "cpu"
[trainer.model]
attn = "sdpa"
[trainer.optim]
lr = 3e-4
[trainer.rollout_transport]
type = "zmq"
[orchestrator]
batch_size = 8
rollouts_per_example = 4
[orchestrator.rollout_transport]
type = "zmq"
[orchestrator.sampling]
max_tokens = 16
[[orchestrator.env]]
id = "reverse-text"
[weight_broadcast]
type = "nccl"
[inference]
backend = "embedded"
[inference.model]
max_model_len = 128
enforce_eager = true
"""
MODEL = ("--model.name", ROOT / "examples" / "reverse_text" / "checkpoint")

pytestmark = [pytest.mark.slurm, pytest.mark.slow]


def submit(command: str, *words: object) -> Result:
    result = CliRunner().invoke(medarc_slurm.app, [command, "--no-check", "--partition=pair", *map(str, words)])
    assert result.exit_code == 0, result.output
    return result


def job_id_of(result: Result) -> str:
    match = re.search(r"Submitted batch job (\d+)", result.output)
    assert match, result.output
    return match[1]


def processes_of_job(job_id: str) -> list[str]:
    mark = f"SLURM_JOB_ID={job_id}".encode()
    found = []
    for environ in Path("/proc").glob("[0-9]*/environ"):
        try:
            if mark in environ.read_bytes().split(b"\0"):
                found.append((environ.parent / "cmdline").read_text())
        except OSError:  # it has just ended
            continue
    return found


@pytest.fixture
def real_project(tmp_path: Path) -> Path:
    project = tmp_path / "project"
    project.mkdir()
    (project / ".venv").symlink_to(sys.prefix)
    return project


@pytest.fixture
def stand_in_project(tmp_path: Path) -> Path:
    """A project with this one's packages, whose trainer waits with the gate open."""
    venv = tmp_path / "project" / ".venv"
    site_packages = venv / Path(sysconfig.get_path("purelib")).relative_to(sys.prefix)
    for directory in (venv / "bin", site_packages):
        directory.mkdir(parents=True)
    (venv / "pyvenv.cfg").write_text(f"home = {Path(sys._base_executable).parent}\n")
    (venv / "bin" / "python3").symlink_to(sys._base_executable)
    (site_packages / "real.pth").write_text(f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n")
    (venv / "bin" / "activate").write_text('PATH="$PROJECT_DIR/.venv/bin:$PATH"\nexport PATH\n')
    for name, text in (("trainer", CHILD), ("python", PYTHON), ("inference", ""), ("orchestrator", "")):
        (venv / "bin" / name).write_text(text)
        (venv / "bin" / name).chmod(0o755)
    return tmp_path / "project"


class Waiting:
    """A job of two nodes x 2 ranks, all of which wait with the gate open."""

    def __init__(self, project: Path, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.out, gate = directory / "out", directory / "gate"
        os.mkfifo(gate)
        monkeypatch.setenv("GATE", str(gate))
        (directory / "sft.toml").write_text(SFT_TOML)
        words = ("--nodes", 2, "--gpus", 2, "--project-dir", project, "--output-dir", self.out)
        self.job_id = job_id_of(submit("sft", directory / "sft.toml", *words))
        self._gate = gate.open()
        lines = [json.loads(self._gate.readline()) for _ in range(4)]
        self.ranks = {int(rank): (node, local, world, gpus) for _, node, rank, local, world, gpus in lines}
        self.pids = {int(rank): pid for pid, _, rank, *_ in lines}

    def wait_until_all_are_gone(self) -> None:
        with self._gate:
            assert self._gate.read() == "", "end of the pipe: all processes that held it have exited"


@pytest.fixture
def two_gpus_taken(slurm, tmp_path: Path) -> Iterator[None]:
    """Somebody else's job holds GPUs 0 and 1 of the first node."""
    gate, started = tmp_path / "their-gate", tmp_path / "their-start"
    os.mkfifo(gate)
    os.mkfifo(started)
    where = ("--partition=pair", "--nodelist=node1", "--gres=gpu:2", "--output=/dev/null")
    slurm.ask("sbatch", *where, f"--wrap=echo up > {started}; cat {gate}")
    started.read_text()
    yield
    gate.write_text("")


@pytest.fixture
def waiting(
    slurm, two_gpus_taken, stand_in_project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Waiting]:
    job = Waiting(stand_in_project, tmp_path, monkeypatch)
    yield job
    slurm.ask("scancel", job.job_id)
    slurm.wait_for_end(job.job_id)


def agent_of(node: str, job_id: str) -> int:
    """Process id of the agent that Slurm runs on a node."""
    for environ in Path("/proc").glob("[0-9]*/environ"):
        try:
            marks = environ.read_bytes().split(b"\0")
            is_agent = b"prime_rl.launch.nodes.agent" in (environ.parent / "cmdline").read_bytes()
        except OSError:
            continue
        if is_agent and {f"SLURM_JOB_ID={job_id}".encode(), f"SLURMD_NODENAME={node}".encode()} <= set(marks):
            return int(environ.parent.name)
    raise AssertionError(f"no agent on {node}")


def log_of(job: dict[str, str]) -> str:
    return Path(job["StdOut"]).read_text()


def test_ranks_get_the_gpus_that_slurm_gave_on_their_node_and_scancel_lets_all_of_them_save(slurm, waiting) -> None:
    assert waiting.ranks == {
        0: ("node1", "0", "4", "2,3"),
        1: ("node1", "1", "4", "2,3"),
        2: ("node2", "0", "4", "0,1"),
        3: ("node2", "1", "4", "0,1"),
    }
    slurm.ask("scancel", waiting.job_id)
    waiting.wait_until_all_are_gone()
    job = slurm.wait_for_end(waiting.job_id)
    assert job["JobState"] == "CANCELLED"
    logs = [path.read_text() for path in (waiting.out / "logs").glob("trainer*.log")]
    assert len(logs) == 4
    assert all("saved" in text for text in logs)
    assert "stopped by SIGTERM" in log_of(job)
    assert processes_of_job(waiting.job_id) == []


def test_a_rank_that_is_killed_on_the_second_node_ends_the_job_by_its_name(slurm, waiting) -> None:
    os.kill(waiting.pids[3], signal.SIGKILL)
    waiting.wait_until_all_are_gone()
    job = slurm.wait_for_end(waiting.job_id)
    assert job["JobState"] == "FAILED"
    assert "error: trainer_rank_3 was ended by SIGKILL on node2; its log is" in log_of(job)
    assert "its last lines:\n  | last words" in log_of(job)
    assert processes_of_job(waiting.job_id) == []


def test_a_step_that_is_killed_ends_the_job_by_the_name_of_its_node(slurm, waiting) -> None:
    os.kill(agent_of("node2", waiting.job_id), signal.SIGKILL)
    waiting.wait_until_all_are_gone()
    job = slurm.wait_for_end(waiting.job_id)
    assert job["JobState"] == "FAILED"
    assert "error: node node2 is gone: its agent ended (srun " in log_of(job)
    assert "it ran trainer_rank_2, trainer_rank_3\nthe last lines of trainer_rank_2:\n  | last words" in log_of(job)
    assert processes_of_job(waiting.job_id) == []


@pytest.mark.parametrize(
    ("asked", "gpus"),
    [
        (("--gpus-per-node=2", "--ntasks-per-gpu=1"), 2),
        (("--gpus-per-task=1", "--ntasks=4", "--ntasks-per-node=2"), 2),
        (("--gpus=16",), 8),
    ],
)
def test_a_node_has_one_agent_with_all_its_gpus_however_the_job_asks_for_them(
    asked: tuple[str, ...], gpus: int, slurm, tmp_path: Path
) -> None:
    """srun would start a task for each GPU, or want the job's number of them on one node, because the job says so."""
    nodes = f'[deployment]\ntype = "multi_node"\nnum_nodes = 2\ngpus_per_node = {gpus}\n[slurm]\n'
    (tmp_path / "sft.toml").write_text(SFT_TOML + nodes)
    sft = [Path(sys.executable).parent / "sft", "@", tmp_path / "sft.toml", *MODEL, "--data.batch-size=16", "--dry-run"]
    log, line = tmp_path / "job.log", shlex.join(map(str, [*sft, "--output-dir", tmp_path / "out"]))
    where = ("--partition=pair", "--nodes=2")
    slurm.ask("sbatch", "--wait", *where, *asked, f"--output={log}", f"--wrap=exec {line}")
    all_of_a_node = ",".join(map(str, range(gpus)))
    assert re.findall(r"^export CUDA_VISIBLE_DEVICES=(\S+)$", log.read_text(), re.MULTILINE) == [all_of_a_node]
    assert len(re.findall(r"^# trainer", log.read_text(), re.MULTILINE)) == 2 * gpus


def losses(out: Path) -> list[tuple[float, float]]:
    records = map(json.loads, (out / "metrics.jsonl").read_text().splitlines())
    return [(record["loss/mean"], record["optim/grad_norm"]) for record in records if "loss/mean" in record]


def test_two_nodes_have_the_losses_of_one_with_or_without_a_copy_of_the_model_on_each(
    slurm, real_project: Path, tmp_path: Path
) -> None:
    (tmp_path / "sft.toml").write_text(SFT_TOML)
    together, apart, one = tmp_path / "together", tmp_path / "apart", tmp_path / "one"
    words = (*MODEL, "--nodes", 2, "--gpus", 2, "--project-dir", real_project, "--sbatch-arg=--wait")
    submit("sft", tmp_path / "sft.toml", *words, "--output-dir", together)
    submit("sft", tmp_path / "sft.toml", *words, "--output-dir", apart, "--deployment.nodes-per-fsdp-group", 1)
    sft = [Path(sys.executable).with_name("sft"), "@", tmp_path / "sft.toml", *MODEL]
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run([*sft, "--deployment.num-gpus", "4", "--output-dir", one], env=environ, check=True)
    assert len(losses(one)) == 3
    assert losses(together) == losses(one)
    # The sums of gradients of copies are made in another order.
    assert losses(apart) == [pytest.approx(step, rel=1e-6) for step in losses(one)]
    assert not (together / "control" / "store").exists()


def test_rl_trains_on_one_node_what_the_server_on_the_other_samples_from(
    slurm, real_project: Path, tmp_path: Path
) -> None:
    """Rollouts travel through encrypted sockets, and weights from memory to memory."""
    (tmp_path / "rl.toml").write_text(RL_TOML)
    words = (*MODEL, "--train-nodes", 1, "--infer-nodes", 1, "--project-dir", real_project, "--sbatch-arg=--wait")
    job_id = job_id_of(submit("rl", tmp_path / "rl.toml", *words, "--output-dir", tmp_path / "out"))
    log = log_of(slurm.job(job_id))
    assert "node1 (127.0.0.1): inference; CPU" in log
    assert "node2 (127.0.0.1): orchestrator, trainer rank 0; CPU" in log
    assert "RL trainer finished!" in log
    records = map(json.loads, (tmp_path / "out" / "metrics.jsonl").read_text().splitlines())
    mismatches = [record["mismatch_kl/mean"] for record in records if "mismatch_kl/mean" in record]
    assert len(mismatches) == 2
    # Both have the first weights in the first step. The second batch may be sampled before the update.
    assert mismatches[0] < 1e-4
    assert mismatches[1] < 0.05
    assert processes_of_job(job_id) == []
