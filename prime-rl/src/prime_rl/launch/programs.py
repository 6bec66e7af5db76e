"""The engine's programs, and the processes that run them."""

from __future__ import annotations

import shutil
import signal
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

from prime_rl.launch.devices import mask
from prime_rl.launch.spec import ProcessSpec
from prime_rl.run.paths import STORE_VARIABLE, RunPaths
from prime_rl.run.process import TRAINER_VARIABLE, replica_name
from prime_rl.utils.errors import CannotStart

RL_TRAINER = "prime_rl.trainer.rl.train"
SFT_TRAINER = "prime_rl.trainer.sft.train"
EVALUATOR = "prime_rl.eval.evaluate"

POLITELY = ("nice", "-n", "10")
"""Gives a process about a tenth of a core that a trainer wants, too."""

LOOPBACK = "127.0.0.1"
LOOPBACK_INTERFACE = "lo"
GLOO_VARIABLE = "GLOO_SOCKET_IFNAME"
"""Network interface of gloo, by name."""
NCCL_VARIABLE = "NCCL_SOCKET_IFNAME"


@dataclass(frozen=True, slots=True)
class Programs:
    """The programs that processes run."""

    python: str
    inference: str
    orchestrator: str

    @classmethod
    def find(cls, bin_dir: Path | None = None) -> Self:
        """Look in `bin_dir` (default: the directory of this interpreter), then on PATH.

        Raises:
            CannotStart: a program is missing.
        """
        bin_dir = bin_dir or Path(sys.executable).parent
        python = shutil.which("python", path=str(bin_dir)) or sys.executable
        return cls(python, *(_program(name, bin_dir) for name in ("inference", "orchestrator")))


def _program(name: str, bin_dir: Path) -> str:
    found = shutil.which(name, path=str(bin_dir)) or shutil.which(name)
    if found is None:
        raise CannotStart(f"{name} is neither in {bin_dir} nor on PATH: install prime-rl in this environment")
    return found


def inference_process(
    paths: RunPaths, program: str, env: Mapping[str, str], gpus: tuple[str, ...], *flags: str, replica: int = 0
) -> ProcessSpec:
    """An inference server: `inference`, or with a replica's number behind it. It serves until the run is complete."""
    name = replica_name(replica)
    argv = (program, "@", str(paths.config("inference")), *flags)
    return _server(name, argv, paths, env, gpus)


def frozen_process(
    paths: RunPaths, program: str, env: Mapping[str, str], gpus: tuple[str, ...], name: str, *flags: str
) -> ProcessSpec:
    """The server of a judge or of the teacher. It serves until the run is complete."""
    argv = (program, "@", str(paths.config(name)), *flags)
    return _server(name, argv, paths, env, gpus)


def _server(
    name: str, argv: tuple[str, ...], paths: RunPaths, env: Mapping[str, str], gpus: tuple[str, ...]
) -> ProcessSpec:
    log, heartbeat = paths.log(name), paths.heartbeat(name)
    return ProcessSpec(name, argv, log, _unbuffered(env), gets_service_keys=False, gpus=gpus, heartbeat=heartbeat)


def orchestrator_process(paths: RunPaths, program: str, env: Mapping[str, str], *flags: str) -> ProcessSpec:
    """The orchestrator. It needs no GPU and sees none."""
    argv = (program, "@", str(paths.config("orchestrator")), *flags)
    env = _unbuffered(env) | mask(())
    return _completing("orchestrator", argv, paths, env)


def evaluator_process(paths: RunPaths, python: str, env: Mapping[str, str], *flags: str) -> ProcessSpec:
    """The evaluator, which runs rollouts and scores them. It sees no GPU."""
    argv = (python, "-m", EVALUATOR, "@", str(paths.config("eval")), *flags)
    return _completing("evaluator", argv, paths, _unbuffered(env) | mask(()))


def beside_training(process: ProcessSpec, paths: RunPaths, shares_cores: bool) -> ProcessSpec:
    """A process of an evaluation that must neither end nor slow the training next to it.

    If both compute on the same cores, `nice` lets the trainer go first.
    """
    env = {**process.env, TRAINER_VARIABLE: str(paths.completion("trainer"))}
    argv = (*POLITELY, *process.argv) if shares_cores else process.argv
    return replace(process, argv=argv, env=env, if_lost=paths.evaluation_lost)


@dataclass(frozen=True, slots=True)
class TrainerRanks:
    """A training module and the processes of one node that run it, with those of other nodes."""

    module: str
    config: Path
    count: int
    """Number on this node."""
    meeting_place: str
    """Rendezvous: a file, or `tcp://ADDRESS:PORT`."""
    first: int = 0
    """Rank of the first one on this node."""
    total: int | None = None
    """Number on all nodes. None: there is only this one."""
    command: str | None = None
    """What the module trains. None: it trains one thing."""

    def processes(
        self, paths: RunPaths, python: str, env: Mapping[str, str], gpus: tuple[str, ...], *flags: str
    ) -> tuple[ProcessSpec, ...]:
        """One process per rank. Rank 0 logs to `trainer.log`, rank N to `trainer_rank_N.log`.

        SIGUSR1 makes the trainer write a checkpoint.
        """
        argv = (python, "-m", self.module, *filter(None, [self.command]), "@", str(self.config), *flags)
        return tuple(
            replace(
                _completing(rank_name(rank), argv, paths, _unbuffered(env) | self._rank_env(rank)),
                gets_service_keys=False,
                gpus=gpus,
                rank=rank,
                relays=frozenset({signal.SIGUSR1}),
            )
            for rank in range(self.first, self.first + self.count)
        )

    def _rank_env(self, rank: int) -> dict[str, str]:
        """The variables that torchrun sets too, except that ranks meet in a file and not at an address."""
        return {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank - self.first),
            "WORLD_SIZE": str(self.count if self.total is None else self.total),
            "LOCAL_WORLD_SIZE": str(self.count),
            STORE_VARIABLE: self.meeting_place,
        }


def rank_name(rank: int) -> str:
    """Name of a rank's process and log."""
    return f"trainer_rank_{rank}" if rank else "trainer"


def _completing(name: str, argv: tuple[str, ...], paths: RunPaths, env: Mapping[str, str]) -> ProcessSpec:
    """A process whose work ends, and which then makes its completion file."""
    return ProcessSpec(
        name,
        argv,
        paths.log(name),
        env,
        completes_run=True,
        completion=paths.completion(name),
        heartbeat=paths.heartbeat(name),
    )


def interface_env(
    env: Mapping[str, str], interface: str = LOOPBACK_INTERFACE, is_configured: bool = False
) -> dict[str, str]:
    """Keep gloo on a network interface, unless `env` names one. If the config names it, also NCCL.

    By default gloo listens on the address of the host's name, which may not resolve or may be public.
    """
    if is_configured:
        # For NCCL a name without "=" is the beginning of names.
        return {GLOO_VARIABLE: interface, NCCL_VARIABLE: f"={interface}"}
    return {} if sys.platform != "linux" or GLOO_VARIABLE in env else {GLOO_VARIABLE: interface}


def _unbuffered(env: Mapping[str, str]) -> dict[str, str]:
    return {"PYTHONUNBUFFERED": "1", **env}
