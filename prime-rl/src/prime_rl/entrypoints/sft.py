"""The `sft` command: the SFT trainer on this machine, one process a GPU."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from uuid import uuid4

from prime_rl.checks import refuse_unstartable
from prime_rl.configs.sft import SFTConfig
from prime_rl.configs.surface.not_built import refuse_unbuilt
from prime_rl.entrypoints.launch import launch
from prime_rl.launch import ProcessSpec
from prime_rl.launch.devices import (
    DeviceError,
    choose_device,
    spin_env,
    thread_env,
    usable_cores,
    usable_gpus,
)
from prime_rl.launch.programs import SFT_TRAINER, Programs, TorchJob, resume_flags, trainer_spec
from prime_rl.run.paths import RunPaths
from prime_rl.utils.pydantic_config import parse_argv_or_exit


def main() -> None:
    """`sft @ sft.toml`. Exits with 0 when training ends well, and at once after a dry run."""
    config = parse_argv_or_exit(SFTConfig)
    refuse_unbuilt(config)
    refuse_unstartable(config)
    raise SystemExit(run(config))


def run(config: SFTConfig, bin_dir: Path | None = None) -> int:
    """Train to the end; the exit code. What went wrong is on stderr.

    Programs are in `bin_dir`, by default beside this interpreter.
    """
    resume_step = None if config.ckpt is None else config.ckpt.resume_step
    return launch("sft", config, {"sft": config}, resume_step, partial(plan_run, bin_dir=bin_dir))


def plan_run(
    config: SFTConfig, paths: RunPaths, rendezvous_port: int, resume_step: int | None, bin_dir: Path | None = None
) -> tuple[ProcessSpec, ...]:
    """The trainer: alone when it is one process, else under torchrun.

    Raises:
        DeviceError: there are fewer GPUs than processes.
    """
    processes, usable = config.deployment.num_gpus, usable_gpus(os.environ)
    device = choose_device(config.device, usable)
    if device == "cuda" and len(usable) < processes:
        raise DeviceError(f"deployment.num_gpus = {processes}, but {len(usable)} can be used: {','.join(usable)}")
    env = {} if device == "cuda" else thread_env(usable_cores(), processes, os.environ) | spin_env(os.environ)
    job = TorchJob(SFT_TRAINER, paths.config("sft"), processes, rendezvous_port, uuid4().hex, paths.torchrun_logs)
    return (
        trainer_spec(
            paths, Programs.find(bin_dir), job, env, *resume_flags(resume_step, config), torchrun=processes > 1
        ),
    )
