"""The `rl` command: inference server, orchestrator and trainer on this machine, from one config.

It takes the machine as its own: the first GPUs that are visible, and the ports that the config names. Beside other
people's jobs, `medarc_train rl` gives each launch GPUs, ports and caches of its own.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit
from uuid import uuid4

from prime_rl.checks import refuse_unstartable
from prime_rl.configs.rl import RLConfig
from prime_rl.configs.surface.not_built import refuse_unbuilt
from prime_rl.entrypoints.launch import LaunchRefused, launch
from prime_rl.launch import ProcessSpec
from prime_rl.launch.devices import (
    GpuAssignment,
    allocator_env,
    assign_gpus,
    choose_device,
    mask,
    processes_on,
    usable_cores,
    usable_gpus,
)
from prime_rl.launch.programs import (
    RL_TRAINER,
    Programs,
    TorchJob,
    cpu_env,
    inference_spec,
    orchestrator_spec,
    process_counts,
    resume_flags,
    trainer_spec,
)
from prime_rl.run.paths import RunPaths
from prime_rl.utils.pydantic_config import parse_argv_or_exit


def main() -> None:
    """`rl @ rl.toml`. Exits with 0 when orchestrator and trainer both end well, and at once after a dry run."""
    config = parse_argv_or_exit(RLConfig)
    refuse_unbuilt(config)
    refuse_unstartable(config)
    raise SystemExit(run(config))


def run(config: RLConfig, bin_dir: Path | None = None) -> int:
    """Run the children of `config` to their common end; the exit code. What went wrong is on stderr.

    Their programs are in `bin_dir`, by default beside this interpreter.
    """
    sections = {"trainer": config.trainer, "orchestrator": config.orchestrator}
    if config.inference is not None:
        sections["inference"] = config.inference
    ckpt = config.trainer.ckpt
    plan = partial(plan_run, bin_dir=bin_dir)
    return launch("rl", config, sections, None if ckpt is None else ckpt.resume_step, plan)


def plan_run(
    config: RLConfig, paths: RunPaths, rendezvous_port: int, resume_step: int | None, bin_dir: Path | None = None
) -> tuple[ProcessSpec, ...]:
    """Decide every child of the run.

    Raises:
        LaunchRefused: server and client name different ports, or other programs compute on the GPUs.
        DeviceError: the machine lacks the GPUs that the run needs.
    """
    check_ports(config)
    gpus, env = place(config, usable_gpus(os.environ), os.environ)
    programs = Programs.find(bin_dir)
    resume = resume_flags(resume_step, config.trainer)
    processes = process_counts(config)[1]
    job = TorchJob(RL_TRAINER, paths.config("trainer"), processes, rendezvous_port, uuid4().hex, paths.torchrun_logs)
    env |= {"WANDB_PROGRAM": "rl", "WANDB_ARGS": json.dumps(sys.argv[1:])}
    trainer_env = env | mask(gpus.trainer) | (allocator_env(os.environ) if gpus.trainer else {})
    torchrun = bool(gpus.trainer) or processes > 1
    specs = [
        orchestrator_spec(paths, programs, env, *resume),
        trainer_spec(paths, programs, job, trainer_env, *resume, torchrun=torchrun),
    ]
    if config.inference is not None:
        specs.insert(0, inference_spec(paths, programs, env | mask(gpus.inference)))
    return tuple(specs)


def check_ports(config: RLConfig) -> None:
    """Raises LaunchRefused when the orchestrator would look for the server at another port."""
    if config.inference is None or config.orchestrator.client.is_elastic:
        return
    url, port = config.orchestrator.client.base_url[0], config.inference.server.port
    if not urlsplit(url).netloc.endswith(f":{port}"):
        raise LaunchRefused(
            f"orchestrator.client.base_url is {url}, but the server listens on port {port} (inference.server.port): "
            "set both to the same port"
        )


def place(config: RLConfig, usable: Sequence[str], env: Mapping[str, str]) -> tuple[GpuAssignment, dict[str, str]]:
    """The GPUs of each side, none on the CPU; and what the environment of every child gets.

    Raises:
        LaunchRefused, DeviceError: as `plan_run`.
    """
    infer, train = process_counts(config)
    if choose_device(config.device, usable) == "cpu":
        return GpuAssignment(), cpu_env(config, usable_cores(), env)
    gpus = assign_gpus(usable, infer, train, config.inference_gpu_ids, config.trainer_gpu_ids)
    if busy := processes_on((*gpus.inference, *gpus.trainer)):
        raise LaunchRefused(f"other programs compute on the GPUs of this run: {'; '.join(busy)}")
    return gpus, {}
