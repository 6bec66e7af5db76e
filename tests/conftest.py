"""What the wrapper's tests share: small configs, stand-in programs, and a Slurm cluster of this machine alone."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from prime_rl.utils.private import RUNTIME_VARIABLE

SFT_TOML = 'max_steps = 2\n[model]\nname = "some/model"\nseq_len = 64\n'
RL_TOML = 'max_steps = 2\n[model]\nname = "some/model"\n[trainer]\n[orchestrator]\n[inference]\n'

RECORDER = (
    f"#!{sys.executable}"
    + """
import json, os, sys
with open(os.environ["RECORD"], "a") as record:
    record.write(json.dumps(dict(argv=sys.argv, env=dict(os.environ), cwd=os.getcwd())) + "\\n")
print({says!r})
sys.exit({code})
"""
)


def pytest_configure(config: pytest.Config) -> None:
    """Make the tests independent of how pytest was started: nohup ignores SIGHUP, and `&` in a script Ctrl-C too.

    A handler, unlike SIG_IGN, is not inherited: children get the default action, and pytest itself still survives.
    Keys and sockets are this session's own, so that two sessions of a user do not disturb each other.
    """
    if RUNTIME_VARIABLE not in os.environ:
        # Not in pytest's own folders, whose paths are too long for a socket.
        os.environ[RUNTIME_VARIABLE] = tempfile.mkdtemp(prefix="prime-rl-tests-", dir="/tmp")
        config.add_cleanup(partial(shutil.rmtree, os.environ[RUNTIME_VARIABLE], ignore_errors=True))
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, lambda signum, frame: None)


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Nothing of the person who runs the tests: no GPU mask, no account, no token, no config, no job log."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    for name in list(os.environ):
        if name != RUNTIME_VARIABLE and name.startswith(
            ("SLURM_", "SBATCH_", "PRIME_", "CUDA_VISIBLE", "MEDARC_", "HF_", "TRITON_", "TORCHINDUCTOR_")
        ):
            monkeypatch.delenv(name)


@pytest.fixture
def sft_toml(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.toml"
    path.write_text(SFT_TOML)
    return path


@pytest.fixture
def rl_toml(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.toml"
    path.write_text(RL_TOML)
    return path


class StandIns:
    """Programs that write down how they were called."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.record = directory / "calls.jsonl"
        directory.mkdir(parents=True, exist_ok=True)

    def add(self, name: str, says: str = "", code: int = 0) -> None:
        program = self.directory / name
        program.write_text(RECORDER.format(says=says, code=code))
        program.chmod(0o755)

    @property
    def calls(self) -> list[dict]:
        return list(map(json.loads, self.record.read_text().splitlines())) if self.record.exists() else []


@pytest.fixture
def stand_ins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StandIns:
    """Stand-ins that come first on PATH."""
    programs = StandIns(tmp_path / "stand-ins")
    monkeypatch.setenv("PATH", f"{programs.directory}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("RECORD", str(programs.record))
    return programs


def make_project(directory: Path) -> StandIns:
    """A project directory whose `.venv` holds a stand-in for `python`."""
    programs = StandIns(directory / ".venv" / "bin")
    (programs.directory / "activate").write_text('PATH="$PROJECT_DIR/.venv/bin:$PATH"\nexport PATH\n')
    programs.add("python")
    return programs


@pytest.fixture
def project() -> Callable[[Path], StandIns]:
    return make_project


SLURM_CONF = """\
ClusterName=medarc
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller_port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={root}/munge.socket,cred_expire=5
StateSaveLocation={root}/state
SlurmdSpoolDir={root}/spool.%n
SlurmctldPidFile={root}/slurmctld.pid
SlurmdPidFile={root}/slurmd.%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
DefMemPerCPU=100
SlurmdParameters=config_overrides
SchedulerParameters=batch_sched_delay=0,sched_min_interval=1
GresTypes=gpu
KillWait=30
NodeName=DEFAULT CPUs=64 RealMemory=64000 Feature=fake Gres=gpu:8 State=UNKNOWN
NodeName=node0 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[0]}
NodeName=node1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]}
NodeName=node2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]}
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
JobRequeue=1
PartitionName=main Nodes=node0 Default=YES State=UP PriorityTier=1 PreemptMode=REQUEUE
PartitionName=urgent Nodes=node0 State=UP PriorityTier=10 PreemptMode=OFF
PartitionName=pair Nodes=node1,node2 State=UP
"""


class SlurmCluster:
    """munge, slurmctld and three slurmd with 8 made-up GPUs each; without systemd or cgroups, on ports of its own.

    Partition `main` is node0, and `pair` is node1 and node2.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.conf = root / "slurm.conf"
        self._daemons: list[subprocess.Popen[bytes]] = []

    def start(self) -> None:
        for name in ("state", "spool.node0", "spool.node1", "spool.node2", "dev"):
            (self.root / name).mkdir()
        for index in range(8):
            os.mknod(self.root / "dev" / f"gpu{index}", 0o666 | stat.S_IFCHR, os.makedev(1, 3))
        key = self.root / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o600)
        host = socket.gethostname().split(".")[0]
        controller_port, *node_ports = free_ports(4)
        self.conf.write_text(
            SLURM_CONF.format(root=self.root, host=host, controller_port=controller_port, ports=node_ports)
        )
        (self.root / "gres.conf").write_text(f"NodeName=node[0-2] Name=gpu File={self.root}/dev/gpu[0-7]\n")
        munge_files = [f"--{what}={self.root}/munge.{what}" for what in ("socket", "pid-file", "log-file", "seed-file")]
        self._run("munged", "--foreground", f"--key-file={key}", *munge_files)
        self._run("slurmctld", "-D", "-f", str(self.conf))
        for node in ("node0", "node1", "node2"):
            self._run("slurmd", "-D", "-N", node, "-f", str(self.conf))
        self._wait_ready()

    def _run(self, program: str, *arguments: str) -> None:
        with (self.root / f"{program}.log").open("ab") as log:
            argv = [find_daemon(program), *arguments]
            self._daemons.append(subprocess.Popen(argv, stdout=log, stderr=log, env=self.env))

    def _wait_ready(self) -> None:
        # Each question starts a process, and waits for a controller that is not there yet.
        while self.ask("sinfo", "--noheader", "--Node", "--format=%N %T").count("idle") < 4:
            if any(daemon.poll() is not None for daemon in self._daemons):
                logs = "\n".join(path.read_text(errors="replace") for path in self.root.glob("*.log"))
                raise RuntimeError(f"Slurm did not start:\n{logs}")

    def stop(self) -> None:
        self.ask("scancel", "--user=root", "--signal=KILL", "--full")
        for daemon in reversed(self._daemons):
            daemon.terminate()
            daemon.wait()

    @property
    def env(self) -> dict[str, str]:
        return {**os.environ, "SLURM_CONF": str(self.conf)}

    def ask(self, *argv: str) -> str:
        """What one of Slurm's commands prints, errors included."""
        done = subprocess.run(argv, env=self.env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False)
        return done.stdout.decode(errors="replace")

    def job(self, job_id: str) -> dict[str, str]:
        """What Slurm knows of a job; `JobName` and paths are not to be trusted where they hold spaces."""
        words = self.ask("scontrol", "--oneliner", "show", "job", job_id).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def wait_for_end(self, job_id: str) -> dict[str, str]:
        """Wait, as Slurm itself does for a job that depends on this one."""
        self.ask("sbatch", "--wait", "--output=/dev/null", f"--dependency=afterany:{job_id}", "--wrap=true")
        return self.job(job_id)


def find_daemon(name: str) -> str:
    found = shutil.which(name) or shutil.which(name, path="/usr/sbin:/sbin")
    if found is None:
        pytest.skip(f"no {name}: apt-get install slurm-wlm munge")
    return found


def free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [listening.getsockname()[1] for listening in sockets]
    for listening in sockets:
        listening.close()
    return ports


@pytest.fixture(scope="session")
def slurm_cluster() -> Iterator[SlurmCluster]:
    for program in ("munged", "slurmctld", "slurmd", "sbatch"):
        find_daemon(program)
    if os.geteuid() != 0:
        pytest.skip("Slurm's daemons need root")
    # Not pytest's own directory: munged wants every user to be able to reach its socket.
    with tempfile.TemporaryDirectory(prefix="medarc-slurm-") as directory:
        root = Path(directory)
        root.chmod(0o755)
        cluster = SlurmCluster(root)
        try:
            cluster.start()
            yield cluster
        finally:
            cluster.stop()


@pytest.fixture
def slurm(slurm_cluster: SlurmCluster, monkeypatch: pytest.MonkeyPatch) -> SlurmCluster:
    """The cluster, which `sbatch` in this test talks to."""
    monkeypatch.setenv("SLURM_CONF", str(slurm_cluster.conf))
    return slurm_cluster
