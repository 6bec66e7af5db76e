"""Decides the children of an RL run on one machine: pure values from a config and a site."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

from medarc_rl.launchers.gpus import mask_for_vllm
from prime_rl.configs.rl import RLConfig
from prime_rl.launch import ProcessSpec
from prime_rl.launch.caches import cache_env
from prime_rl.launch.devices import GpuAssignment, allocator_env, mask
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
from prime_rl.utils.pydantic_config import BaseSettings

Device = Literal["cuda", "cpu"]


class Ports(NamedTuple):
    """Ports of this launch alone."""

    inference: int
    rendezvous: int
    broadcast: int


@dataclass(frozen=True, slots=True)
class Site:
    """What a plan needs to know besides the config: this machine, and what this launch was given of it."""

    programs: Programs
    device: Device
    gpus: GpuAssignment
    gpu_indices: Mapping[str, str]
    """Index by `GPU-…` id, for a server that knows only indices."""
    cores: int
    env: Mapping[str, str]
    """The launcher's own environment."""
    caches: Path
    ports: Ports
    launch_id: str


def resume_step_of(config: RLConfig) -> int | None:
    """The step to continue from, which the shared `ckpt` has copied to both components."""
    return config.trainer.ckpt.resume_step if config.trainer.ckpt is not None else None


def component_configs(config: RLConfig) -> dict[str, BaseSettings]:
    """What goes to `OUT/configs`: the whole, and each child's section."""
    sections = {"rl": config, "trainer": config.trainer, "orchestrator": config.orchestrator}
    return sections if config.inference is None else {**sections, "inference": config.inference}


def plan_run(config: RLConfig, paths: RunPaths, site: Site, resume_step: int | None) -> tuple[ProcessSpec, ...]:
    """Decide every child of the run. Starts nothing, writes nothing, reads no environment.

    `resume_step` is what "the latest" (-1) in the config turned out to be.
    """
    resume = resume_flags(resume_step, config.trainer)
    broadcast = _broadcast_flags(config, site)
    specs = [
        _plan_orchestrator(config, paths, site, *broadcast, *resume),
        _plan_trainer(config, paths, site, *broadcast, *resume),
    ]
    if config.inference is not None:
        specs.insert(0, _plan_inference(config, paths, site))
    return tuple(specs)


def _plan_inference(config: RLConfig, paths: RunPaths, site: Site) -> ProcessSpec:
    may_be_vllm = site.device == "cuda" and config.inference.backend != "embedded"
    gpus = mask_for_vllm(site.gpus.inference, site.gpu_indices) if may_be_vllm else mask(site.gpus.inference)
    env = _child_env(config, site, "inference") | gpus
    address = ("--server.host", "127.0.0.1", "--server.port", str(site.ports.inference))
    return inference_spec(paths, site.programs, env, *address)


def _plan_orchestrator(config: RLConfig, paths: RunPaths, site: Site, *flags: str) -> ProcessSpec:
    own_server = f"http://127.0.0.1:{site.ports.inference}/v1"
    server = () if config.inference is None else ("--client.base-url", own_server)
    return orchestrator_spec(paths, site.programs, _child_env(config, site, "orchestrator"), *server, *flags)


def _plan_trainer(config: RLConfig, paths: RunPaths, site: Site, *flags: str) -> ProcessSpec:
    _, processes = process_counts(config)
    job = TorchJob(
        RL_TRAINER, paths.config("trainer"), processes, site.ports.rendezvous, site.launch_id, paths.torchrun_logs
    )
    env = _child_env(config, site, "trainer") | mask(site.gpus.trainer)
    if site.device == "cuda":
        env |= allocator_env(site.env)
    torchrun = site.device == "cuda" or processes > 1
    return trainer_spec(paths, site.programs, job, env, *flags, torchrun=torchrun)


def _child_env(config: RLConfig, site: Site, child: str) -> dict[str, str]:
    env = cache_env(site.caches, child, site.env)
    return env if site.device == "cuda" else env | cpu_env(config, site.cores, site.env)


def _broadcast_flags(config: RLConfig, site: Site) -> tuple[str, ...]:
    if config.trainer.weight_broadcast.type != "nccl":
        return ()
    return ("--weight_broadcast.host", "127.0.0.1", "--weight_broadcast.port", str(site.ports.broadcast))
