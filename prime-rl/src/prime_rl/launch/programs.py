"""The engine's programs as children of a run: their command lines and their part in its end."""

from __future__ import annotations

import shutil
import signal
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Self

from prime_rl.launch.devices import mask, thread_env
from prime_rl.launch.spec import CannotStart, ProcessSpec
from prime_rl.launch.supervisor import GRACE_S
from prime_rl.run.paths import RunPaths

if TYPE_CHECKING:
    from prime_rl.configs.rl import RLConfig
    from prime_rl.configs.sft import SFTConfig
    from prime_rl.configs.trainer import TrainerConfig

RL_TRAINER = "prime_rl.trainer.rl.train"
SFT_TRAINER = "prime_rl.trainer.sft.train"


@dataclass(frozen=True, slots=True)
class Programs:
    """The programs that children run, found once."""

    python: str
    torchrun: str
    inference: str
    orchestrator: str

    @classmethod
    def find(cls, bin_dir: Path | None = None) -> Self:
        """Look in `bin_dir` (default: beside this interpreter), then on PATH.

        Raises:
            CannotStart: one is not there.
        """
        bin_dir = bin_dir or Path(sys.executable).parent
        python = shutil.which("python", path=str(bin_dir)) or sys.executable
        return cls(python, *(_program(name, bin_dir) for name in ("torchrun", "inference", "orchestrator")))


def _program(name: str, bin_dir: Path) -> str:
    found = shutil.which(name, path=str(bin_dir)) or shutil.which(name)
    if found is None:
        raise CannotStart(f"{name} is neither in {bin_dir} nor on PATH: install prime-rl in this environment")
    return found


def process_counts(config: RLConfig) -> tuple[int, int]:
    """GPUs of inference and trainer; on the CPU, processes."""
    infer = config.deployment.num_infer_gpus if config.inference_gpu_ids is None else len(config.inference_gpu_ids)
    train = config.deployment.num_train_gpus if config.trainer_gpu_ids is None else len(config.trainer_gpu_ids)
    return (0 if config.inference is None else infer), train


def cpu_env(config: RLConfig, cores: int, env: Mapping[str, str]) -> dict[str, str]:
    """The environment of each child of a run on the CPU: its share of the cores."""
    infer, train = process_counts(config)
    # At async level 0 inference and trainer take turns.
    return thread_env(cores, infer + train if config.orchestrator.max_async_level else max(infer, train), env)


def resume_flags(resume_step: int | None, config: TrainerConfig | SFTConfig) -> tuple[str, ...]:
    """What to add to a command line when "the latest step" in its config turned out to be this one."""
    configured = None if config.ckpt is None else config.ckpt.resume_step
    return () if resume_step == configured else ("--ckpt.resume-step", str(resume_step))


@dataclass(frozen=True, slots=True)
class TorchJob:
    """A training module, and the processes that run it together."""

    module: str
    config: Path
    processes: int
    rendezvous_port: int
    job_id: str
    log_dir: Path

    def under_torchrun(self, torchrun: str) -> tuple[str, ...]:
        """One process a rank, on this machine. Rank 0 writes to torchrun's own output, the others to `log_dir`.

        What another rank writes to stderr is shown as well, since that is where it says why it failed.
        """
        others = range(1, self.processes)
        redirections = [
            "--redirects=" + ",".join(f"{rank}:1" for rank in others),
            "--tee=" + ",".join(f"{rank}:2" for rank in others),
        ]
        return (
            torchrun,
            "--nnodes=1",
            f"--nproc-per-node={self.processes}",
            "--rdzv-backend=c10d",
            f"--rdzv-endpoint=localhost:{self.rendezvous_port}",
            f"--rdzv-id={self.job_id}",
            # The name of a machine may not resolve; its workers are here anyway.
            "--local-addr=127.0.0.1",
            f"--log-dir={self.log_dir}",
            f"--shutdown-timeout={GRACE_S - 5:.0f}",
            *(redirections if others else ()),
            "-m",
            self.module,
            "@",
            str(self.config),
        )

    def alone(self, python: str) -> tuple[str, ...]:
        """The one process itself, without torchrun and the seconds that it takes to import torch a second time."""
        return (python, "-m", self.module, "@", str(self.config))

    def alone_env(self) -> dict[str, str]:
        """What torchrun would tell the one process."""
        return {
            "RANK": "0",
            "LOCAL_RANK": "0",
            "WORLD_SIZE": "1",
            "LOCAL_WORLD_SIZE": "1",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(self.rendezvous_port),
        }


def inference_spec(paths: RunPaths, programs: Programs, env: Mapping[str, str], *flags: str) -> ProcessSpec:
    """The inference server. It serves until the run is complete."""
    argv = (programs.inference, "@", str(paths.config("inference")), *flags)
    return ProcessSpec("inference", argv, paths.log("inference"), _unbuffered(env))


def orchestrator_spec(paths: RunPaths, programs: Programs, env: Mapping[str, str], *flags: str) -> ProcessSpec:
    """The orchestrator, which needs no GPU and sees none."""
    argv = (programs.orchestrator, "@", str(paths.config("orchestrator")), *flags)
    return ProcessSpec("orchestrator", argv, paths.log("orchestrator"), _unbuffered(env) | mask(()), completes_run=True)


def trainer_spec(
    paths: RunPaths, programs: Programs, job: TorchJob, env: Mapping[str, str], *flags: str, torchrun: bool
) -> ProcessSpec:
    """The trainer: under torchrun, or alone when it is one process. SIGUSR1 makes it write a checkpoint."""
    return ProcessSpec(
        "trainer",
        (*(job.under_torchrun(programs.torchrun) if torchrun else job.alone(programs.python)), *flags),
        paths.log("trainer"),
        _unbuffered(env) | ({} if torchrun else job.alone_env()),
        completes_run=True,
        relays=frozenset({signal.SIGUSR1}),
    )


def _unbuffered(env: Mapping[str, str]) -> dict[str, str]:
    return {"PYTHONUNBUFFERED": "1", **env}
