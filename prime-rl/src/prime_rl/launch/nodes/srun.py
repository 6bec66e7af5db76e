"""The nodes of a Slurm job: srun starts an agent on each."""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import Mapping, Sequence
from functools import cached_property

from prime_rl.launch.nodes.channels import Channel, PipeChannel, agent_argv
from prime_rl.launch.spec import CannotStart

_LIMIT_S = 30.0

_OF_THE_STEP = (
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

    def channels(self) -> Sequence[Channel]:
        env = {name: value for name, value in self.env.items() if name not in _OF_THE_STEP}
        return [PipeChannel(name, self.step(name), env) for name in self.names]

    def step(self, name: str) -> tuple[str, ...]:
        """The command that starts the agent of a node.

        The step takes everything that the job has on its node, and overlaps with the batch script on the first one. A
        task that fails does not make srun wait.
        """
        options = ("--nodes=1", "--ntasks=1", f"--nodelist={name}", "--overlap", "--mem=0", "--export=ALL")
        return ("srun", *options, "--kill-on-bad-exit=1", "--job-name=agent", *agent_argv())

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
