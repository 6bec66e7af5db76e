"""`medarc_train sft|rl|eval`: resolve a config and run it here."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, TypeVar

import typer

from medarc_rl.backends.options import NODE_GPUS
from medarc_rl.cli import Resume, add_command, add_command_without_config, examples_of, new_app, resume_words, warn
from medarc_rl.commands.chat import ChatOptions, chat
from medarc_rl.commands.estimating import EstimateOptions, print_rl_estimate, print_sft_estimate
from medarc_rl.commands.passing import PasskOptions, passk
from medarc_rl.commands.tracing import TraceOptions, trace
from medarc_rl.commands.watching import WatchOptions, watch
from medarc_rl.deployment import (
    advice,
    check_one_node,
    check_rl,
    frozen_gpus,
    rl_split,
    sft_gpus,
    sft_owned,
    training_gpus,
)
from medarc_rl.environments.command import add_environment_commands
from medarc_rl.explain.command import ExplainOptions, explain
from medarc_rl.launchers import rl_local, sft_local
from medarc_rl.launchers.shared_node import SINGLE_GPU_VARIABLE, first_gpus, shared_node
from medarc_rl.lm_eval.command import LmEvalOptions, lm_eval
from medarc_rl.migrate.command import command as migrate
from medarc_rl.report.command import ReportOptions, report
from medarc_rl.rollouts.command import RolloutsOptions, rollouts
from medarc_rl.stored import UploadOptions, upload, with_local_inputs
from medarc_rl.utils import check_startable, load_run, refuse_other_launcher, write_components
from prime_rl.checks.environments import EXAMINATION
from prime_rl.configs.areal.launched import RecoverConfig
from prime_rl.configs.eval import OfflineEvalConfig
from prime_rl.configs.rl import RLConfig
from prime_rl.configs.sft import SFTConfig
from prime_rl.launch import LocalHost, ProcessSpec, Supervisor, shown
from prime_rl.launch.commands import EVAL
from prime_rl.launch.plan import component_configs
from prime_rl.launch.restarts.restarting import until_done
from prime_rl.launch.run import launch
from prime_rl.utils.gpus import MASK_VARIABLE
from prime_rl.utils.pydantic_config import BaseSettings, dump_toml
from prime_rl.watch.screens import eval_screen

Option = typer.Option
SFT_PREFLIGHT = "prime_rl.trainer.sft.preflight"

app = new_app("medarc_train", "Train here: on this machine's GPUs, or on its CPU.")


@dataclass(frozen=True, kw_only=True)
class SftOptions(EstimateOptions):
    output_dir: Annotated[Path | None, Option(help="Directory of the run, OUT.")] = None
    gpus: Annotated[
        int | None,
        Option(min=1, max=NODE_GPUS, help="GPUs, or processes on a CPU; by default deployment.num_gpus, which is 1."),
    ] = None
    resume: Resume = None
    preflight: Annotated[
        bool, Option("--preflight", help="Report on the data and stop: samples, lengths, packing, faults.")
    ] = False


@dataclass(frozen=True, kw_only=True)
class RlOptions(EstimateOptions):
    output_dir: Annotated[Path | None, Option(help="Directory of the run, OUT.")] = None
    train_gpus: Annotated[
        int | None, Option(min=1, max=4, help="GPUs of the trainer, or its processes on a CPU; by default 1.")
    ] = None
    infer_gpus: Annotated[int | None, Option(min=1, max=7, help="GPUs of the inference server; by default 1.")] = None
    single_gpu: Annotated[bool, Option("--single-gpu", help="One GPU for both.")] = False
    resume: Resume = None
    preflight: Annotated[
        bool,
        Option("--preflight", help="Load the environments, report on them and stop: rows, prompts, tools, faults."),
    ] = False


@dataclass(frozen=True, kw_only=True)
class EvalOptions:
    output_dir: Annotated[Path | None, Option(help="Directory of the evaluation; an earlier one continues.")] = None


RunOptionsT = TypeVar("RunOptionsT", SftOptions, RlOptions)
ONCE = RecoverConfig()
"""Of what is not started again."""


def sft(words: list[str], options: SftOptions) -> int:
    """Run supervised fine-tuning."""
    return until_done(lambda more: _sft(*with_more(words, options, more)), warn)


def _sft(words: list[str], options: SftOptions) -> tuple[int, RecoverConfig]:
    words = [*words, *resume_words(options.resume)]
    run = load_run(SFTConfig, words, "sft", options.output_dir, sft_owned(words, options.gpus))
    check_one_node(run.config)
    if options.preflight:
        return preflight(SFT_PREFLIGHT, with_local_inputs(run.config)), ONCE
    if options.estimate:
        return print_sft_estimate(with_local_inputs(run.config), training_gpus(run.config), options, in_job=False), ONCE
    refuse_other_launcher(run.config, "local", words)
    first_gpus(run.config.device, sft_gpus(run.config), os.environ)
    check_startable(run, run.config.dry_run)
    write_components(run, {"trainer": run.config}, run.config.dry_run)
    return sft_local.sft_local(run.config), run.config.recover


def rl(words: list[str], options: RlOptions) -> int:
    """Run reinforcement learning: inference server, orchestrator and trainer."""
    return until_done(lambda more: _rl(*with_more(words, options, more)), warn)


def _rl(words: list[str], options: RlOptions) -> tuple[int, RecoverConfig]:
    words = [*words, *resume_words(options.resume)]
    split = rl_split(words, options.train_gpus, options.infer_gpus, options.single_gpu)
    run = load_run(RLConfig, words, "rl", options.output_dir, split.owned)
    if options.preflight:
        return preflight(EXAMINATION, with_local_inputs(run.config).orchestrator), ONCE
    check_rl(run.config, split)
    if options.estimate:
        return print_rl_estimate(with_local_inputs(run.config), split.single_gpu, options, in_job=False), ONCE
    refuse_other_launcher(run.config, "local", words)
    gpus = first_gpus(run.config.device, split.total + frozen_gpus(run.config), os.environ)
    for line in advice(run.config, split):
        warn(line)
    check_startable(run, run.config.dry_run)
    write_components(run, component_configs(run.config), run.config.dry_run)
    os.environ[MASK_VARIABLE] = ",".join(gpus)
    os.environ[SINGLE_GPU_VARIABLE] = str(int(split.single_gpu))
    # Looked up at the call, because outside code replaces the function.
    return rl_local.rl_local(run.config), run.config.recover


def with_more(words: list[str], options: RunOptionsT, more: Sequence[str]) -> tuple[list[str], RunOptionsT]:
    """Words and options of a start, with more words; these say how to resume."""
    return ([*words, *more], replace(options, resume=None)) if more else (words, options)


def evaluate(words: list[str], options: EvalOptions) -> int:
    """Evaluate a model and its checkpoints. Starts its own server unless client.base_url names one."""
    run = load_run(OfflineEvalConfig, words, "eval", options.output_dir, {})
    return launch(EVAL, run.config, eval_screen, shared_node(os.environ))


add_command(app, "sft", SftOptions, sft)
add_command(app, "rl", RlOptions, rl)
add_command(app, "eval", EvalOptions, evaluate)
add_command(app, "passk", PasskOptions, passk)
add_command(app, "explain", ExplainOptions, explain)
add_command_without_config(app, "chat", ChatOptions, chat)
add_command_without_config(app, "watch", WatchOptions, watch)
add_command_without_config(app, "report", ReportOptions, report)
add_command_without_config(app, "rollouts", RolloutsOptions, rollouts)
add_command_without_config(app, "trace", TraceOptions, trace)
add_command_without_config(app, "upload", UploadOptions, upload)
add_command_without_config(app, "lm-eval", LmEvalOptions, lm_eval)
add_environment_commands(app)
app.command("migrate", epilog=examples_of(app, "migrate"))(migrate)


def preflight(module: str, config: BaseSettings) -> int:
    """Report on the data of a run, with a module that takes the config. The run's directory is not touched."""
    with LocalHost() as host:
        file, log = host.directory / "config.toml", host.directory / "preflight.log"
        dump_toml(config, file)
        # The child writes to a file, and this process shows it: rich must be told about the terminal.
        terminal = {"FORCE_COLOR": "1", "COLUMNS": str(shutil.get_terminal_size().columns)}
        env = terminal if sys.stdout.isatty() else {}
        argv = (sys.executable, "-m", module, "@", str(file))
        process = ProcessSpec("preflight", argv, log, env, completes_run=True)
        with shown(log):
            return Supervisor([process], host, say=lambda line: None).run().exit_code


def main() -> None:
    app()
