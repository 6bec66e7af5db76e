"""`medarc_train sft|rl|eval`: resolve a config and run it here."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated
from uuid import uuid4

import typer

from medarc_rl.backends.slurm import NODE_GPUS, sh_quote
from medarc_rl.cli import add_command, new_app, say, warn
from medarc_rl.deployment import GpuSplit, advice, check_rl, sft_gpus, sft_owned
from medarc_rl.errors import MedarcError, UsageError
from medarc_rl.launchers import rl_local
from medarc_rl.launchers.foreground import ForegroundChild
from medarc_rl.launchers.gpus import SINGLE_GPU_VARIABLE
from medarc_rl.launchers.rl_plan import component_configs
from medarc_rl.place import Place, find_place
from medarc_rl.utils import check_startable, load_run, prepare_directory, write_components
from prime_rl.checks import start_faults
from prime_rl.configs.eval import OfflineEvalConfig
from prime_rl.configs.rl import RLConfig
from prime_rl.configs.sft import SFTConfig
from prime_rl.configs.surface.not_built import unbuilt_faults
from prime_rl.launch import reserved_ports
from prime_rl.launch.devices import MASK_VARIABLE, thread_env, usable_cores
from prime_rl.launch.programs import SFT_TRAINER, TorchJob
from prime_rl.run.paths import RunPaths
from prime_rl.utils.pydantic_config import dump_toml

Option = typer.Option
SFT_PREFLIGHT = "prime_rl.trainer.sft.preflight"

app = new_app("Train here: on this machine's GPUs, or on its CPU.")


@dataclass(frozen=True, kw_only=True)
class SftOptions:
    output_dir: Annotated[Path | None, Option(help="Directory of the run, OUT.")] = None
    gpus: Annotated[
        int | None,
        Option(min=1, max=NODE_GPUS, help="GPUs, or processes on a CPU; by default deployment.num_gpus, which is 1."),
    ] = None
    preflight: Annotated[
        bool, Option("--preflight", help="Look at the data, say what training on it would be like, and stop.")
    ] = False


@dataclass(frozen=True, kw_only=True)
class RlOptions:
    output_dir: Annotated[Path | None, Option(help="Directory of the run, OUT.")] = None
    train_gpus: Annotated[int, Option(min=1, max=4, help="GPUs of the trainer, or its processes on a CPU.")] = 1
    infer_gpus: Annotated[int, Option(min=1, max=7, help="GPUs of the inference server.")] = 1
    single_gpu: Annotated[bool, Option("--single-gpu", help="One GPU for both.")] = False


@dataclass(frozen=True, kw_only=True)
class EvalOptions:
    output_dir: Annotated[Path | None, Option(help="Directory of the evaluation; one begun before goes on.")] = None


def sft(words: list[str], options: SftOptions) -> int:
    """Run supervised fine-tuning."""
    run = load_run(SFTConfig, words, "sft", options.output_dir, sft_owned(options.gpus))
    if options.preflight:
        return sft_preflight(run.config)
    processes = sft_gpus(run.config)
    place = find_place(run.config.device, processes, os.environ)
    check_startable(run, run.config.dry_run)
    if not run.config.dry_run:
        prepare_directory(run)
    write_components(run, {"trainer": run.config})
    with reserved_ports(1) as (port,):
        argv = sft_argv(run.paths, processes, port)
        if run.config.dry_run:
            say(" ".join(map(sh_quote, argv)))
            return 0
        return run_in_foreground(argv, sft_env(os.environ, place, processes))


def rl(words: list[str], options: RlOptions) -> int:
    """Run reinforcement learning: inference server, orchestrator and trainer."""
    split = GpuSplit(options.train_gpus, options.infer_gpus, options.single_gpu)
    run = load_run(RLConfig, words, "rl", options.output_dir, split.owned)
    check_rl(run.config, split)
    place = find_place(run.config.device, split.total, os.environ)
    for line in advice(run.config, split):
        warn(line)
    check_startable(run, run.config.dry_run)
    write_components(run, component_configs(run.config))
    os.environ[MASK_VARIABLE] = ",".join(place.ids)
    os.environ[SINGLE_GPU_VARIABLE] = str(int(split.single_gpu))
    # Looked up at the call, since outside code puts its own function there.
    return rl_local.rl_local(run.config)


def evaluate(words: list[str], options: EvalOptions) -> int:
    """Evaluate a model and its checkpoints, with a server of its own if the config has an [inference] table."""
    run = load_run(OfflineEvalConfig, words, "eval", options.output_dir, {})
    if faults := [*unbuilt_faults(run.config), *start_faults(run.config)]:
        raise UsageError(*faults)
    write_components(run, {"eval": run.config})
    argv = ["eval", "@", str(run.paths.config("eval"))]
    if run.config.dry_run:
        say(" ".join(map(sh_quote, argv)))
        return 0
    return run_in_foreground(argv, child_env(os.environ))


add_command(app, "sft", SftOptions, sft)
add_command(app, "rl", RlOptions, rl)
add_command(app, "eval", EvalOptions, evaluate)


def sft_preflight(config: SFTConfig) -> int:
    """Report on the data of a run. Its directory is left alone."""
    with TemporaryDirectory() as scratch:
        file = Path(scratch) / "sft.toml"
        dump_toml(config, file)
        return run_in_foreground([sys.executable, "-m", SFT_PREFLIGHT, "@", str(file)], dict(os.environ))


def sft_argv(paths: RunPaths, processes: int, port: int) -> list[str]:
    """The launcher `sft` for one process, torchrun for several."""
    config = paths.config("trainer")
    if processes == 1:
        return ["sft", "@", str(config)]
    job = TorchJob(SFT_TRAINER, config, processes, port, uuid4().hex, paths.torchrun_logs)
    return list(job.under_torchrun("torchrun"))


def sft_env(env: Mapping[str, str], place: Place, processes: int) -> dict[str, str]:
    """The child's environment; on a CPU its cores are shared out."""
    threads = thread_env(usable_cores(), processes, env) if place.device == "cpu" else {}
    return child_env(env) | threads


def child_env(env: Mapping[str, str]) -> dict[str, str]:
    """The environment of a child that finds the programs of this installation first."""
    programs = Path(sys.executable).parent
    return {**env, "PATH": f"{programs}{os.pathsep}{env.get('PATH', os.defpath)}"}


def run_in_foreground(argv: list[str], env: dict[str, str]) -> int:
    """Run a command to its end. Returns its exit code, 128 + n after signal n.

    Raises:
        MedarcError: there is no such program.
    """
    try:
        with ForegroundChild() as child:
            ended = subprocess.run(argv, env=env | child.env, preexec_fn=child.before_exec, check=False)
            return child.exit_code(ended.returncode)
    except FileNotFoundError:
        raise MedarcError(f"{argv[0]}: not found: install prime-rl in this environment") from None


def main() -> None:
    app()
