"""The nodes of a Slurm job: srun starts an agent on each."""

from __future__ import annotations

import os
import re
import socket
import subprocess
from collections.abc import Mapping, Sequence
from functools import cached_property

from prime_rl.launch.nodes.channels import Channel, PipeChannel, agent_argv
from prime_rl.utils.errors import CannotStart

_LIMIT_S = 30.0

_OF_TASKS_OR_ALL_NODES = ("SLURM_GPUS", "SLURM_GPUS_PER_TASK", "SLURM_TRES_PER_TASK")
"""GPUs of a job that are not asked for by node. srun would take their number for one node."""
_GPUS = re.compile(r"\bgpu:(?:[^:(),]+:)?(\d+)\(")
"""Number of GPUs of a type, as in `gpu:a100:2(IDX:0-1)`."""
_OF_THE_STEP = (
    *_OF_TASKS_OR_ALL_NODES,
    "SLURM_NTASKS",
    "SLURM_NPROCS",
    "SLURM_NTASKS_PER_NODE",
    "SLURM_NTASKS_PER_GPU",
    "SLURM_CPUS_PER_GPU",
    "SLURM_EXCLUSIVE",
)
"""Options of the job that srun would apply to a step, too."""


def slurm_cluster(env: Mapping[str, str] = os.environ) -> SlurmCluster | None:
    """The nodes of this Slurm job. None outside a job, and in one of a single node."""
    is_one = int(env.get("SLURM_JOB_NUM_NODES") or 1) < 2 or "SLURM_JOB_ID" not in env
    return None if is_one else SlurmCluster(dict(env))


class SlurmCluster:
    """The nodes of the job that this process runs in."""

    def __init__(self, env: Mapping[str, str]) -> None:
        self.env = env

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Raises CannotStart: Slurm does not answer."""
        return tuple(_ask("scontrol", "show", "hostnames", self.env.get("SLURM_JOB_NODELIST", "")))

    @cached_property
    def gpus(self) -> Mapping[str, int]:
        """GPUs that the job has on each node, if srun must be told. Raises CannotStart: Slurm does not answer."""
        found: dict[str, int] = {}
        if not set(_OF_TASKS_OR_ALL_NODES) & set(self.env):
            return found
        for line in _ask("scontrol", "--details", "show", "job", self.env["SLURM_JOB_ID"]):
            words = dict(word.split("=", 1) for word in line.split() if "=" in word)
            count = sum(map(int, _GPUS.findall(words.get("GRES", ""))))
            if "Nodes" in words and count:
                found |= dict.fromkeys(_ask("scontrol", "show", "hostnames", words["Nodes"]), count)
        return found

    def channels(self) -> Sequence[Channel]:
        env = {name: value for name, value in self.env.items() if name not in _OF_THE_STEP}
        return [PipeChannel(name, self.step(name), env) for name in self.names]

    def step(self, name: str) -> tuple[str, ...]:
        """The command that starts the agent of a node.

        The step takes everything that the job has on its node, and overlaps with the batch script on the first one. A
        task that fails does not make srun wait.
        """
        options = ("--nodes=1", "--ntasks=1", f"--nodelist={name}", "--overlap", "--mem=0", "--export=ALL")
        gpus = (f"--gpus={self.gpus[name]}",) if name in self.gpus else ()
        return ("srun", *options, *gpus, "--kill-on-bad-exit=1", "--job-name=agent", *agent_argv())

    def address(self, name: str) -> str | None:
        for line in _ask("scontrol", "--oneliner", "show", "node", name):
            words = dict(word.split("=", 1) for word in line.split() if "=" in word)
            try:
                return socket.gethostbyname(words["NodeAddr"])
            except (KeyError, OSError):
                return None
        return None


def _ask(*argv: str) -> list[str]:
    try:
        answer = subprocess.run(argv, capture_output=True, text=True, check=True, timeout=_LIMIT_S)
    except (OSError, subprocess.SubprocessError) as error:
        said = str(getattr(error, "stderr", "") or error).strip()
        raise CannotStart(f"{' '.join(argv[:3])}: {said}") from error
    return [line for line in answer.stdout.splitlines() if line.strip()]
