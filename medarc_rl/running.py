"""Runs a config on this machine: reads it, checks it, launches it."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TypeVar, cast

from medarc_rl.backends.slurm.queue import refuse_if_queued
from medarc_rl.cli import resume_words, warn
from medarc_rl.commands.estimating import print_rl_estimate, print_sft_estimate
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
from medarc_rl.launchers import rl_local, sft_local
from medarc_rl.launchers.options import DpoOptions, EvalOptions, RlOptions, RmOptions, SftOptions
from medarc_rl.launchers.shared_node import first_gpus, shared_node
from medarc_rl.stored import with_local_inputs
from medarc_rl.utils import (
    GivenConfig,
    load_run,
    refuse_other_launcher,
    refuse_unstartable,
    reporting_directory_errors,
    write_components,
)
from prime_rl.checks.environments import EXAMINATION, loss_faults
from prime_rl.configs.areal import RecoverConfig
from prime_rl.configs.eval import OfflineEvalConfig
from prime_rl.configs.rl import RLConfig
from prime_rl.configs.sft import SFTConfig
from prime_rl.configs.surface.root import ROOTS
from prime_rl.launch import LocalHost, ProcessSpec, Supervisor, shown
from prime_rl.launch.commands import EVAL
from prime_rl.launch.placement import Sharing
from prime_rl.launch.restarting import until_done
from prime_rl.launch.run import launch
from prime_rl.utils.pydantic_config import BaseSettings, dump_toml
from prime_rl.watch.screens import eval_screen

OptionsT = TypeVar("OptionsT", SftOptions, RlOptions)

SFT_PREFLIGHT = "prime_rl.trainer.sft.preflight"
ONCE = RecoverConfig()
"""For commands that are not started again."""


def run_sft(words: list[str], options: SftOptions) -> int:
    """Run `medarc_train sft`. Returns its exit code."""
    return _until_done(partial(_start_sft, "sft"), words, options)


def run_dpo(words: list[str], options: DpoOptions) -> int:
    """Run `medarc_train dpo`. Returns its exit code."""
    return _until_done(partial(_start_sft, "dpo"), words, options)


def run_rm(words: list[str], options: RmOptions) -> int:
    """Run `medarc_train rm`. Returns its exit code."""
    return _until_done(partial(_start_sft, "rm"), words, options)


def run_rl(words: list[str], options: RlOptions) -> int:
    """Run `medarc_train rl`. Returns its exit code."""
    return _until_done(_start_rl, words, options)


def _until_done(
    start: Callable[[list[str], OptionsT], tuple[int, RecoverConfig]], words: list[str], options: OptionsT
) -> int:
    """Start a run, and again after a failure as often as the config's `recover` says."""

    def again(more: Sequence[str]) -> tuple[int, RecoverConfig]:
        # The words of a later start say how to resume.
        return start([*words, *more], replace(options, resume=None)) if more else start(words, options)

    return until_done(again, warn)


def _start_sft(command: str, words: list[str], options: SftOptions) -> tuple[int, RecoverConfig]:
    """Start `sft`, `dpo` or `rm`. Returns the exit code, and what to do after a failure."""
    root = cast("type[SFTConfig]", ROOTS[command])
    given = GivenConfig.read(root, [*words, *resume_words(options.resume)])
    run = load_run(given, command, options.output_dir, sft_owned(given, options.gpus))
    check_one_node(run.config)
    if options.preflight or options.estimate:
        config = with_local_inputs(run.config)
        refuse_unstartable(config, is_estimate=not options.preflight)
        if options.preflight:
            return preflight((SFT_PREFLIGHT, command), config), ONCE
        return print_sft_estimate(config, training_gpus(config), options, in_job=False), ONCE
    refuse_other_launcher(run.config, "local", given.words)
    first_gpus(run.config.device, sft_gpus(run.config), os.environ)
    with reporting_directory_errors():
        refuse_if_queued(run.paths, submits=False)
    # A batch job of SFT reads trainer.toml, and so does whoever starts the trainer by hand.
    components = {"trainer": run.config} if command == "sft" else {}
    record = partial(write_components, run, components, run.config.dry_run)
    # Looked up at the call, because outside code replaces the function.
    return sft_local.sft_local(run.config, on_ready=record), run.config.recover


def _start_rl(words: list[str], options: RlOptions) -> tuple[int, RecoverConfig]:
    """Returns the exit code, and what to do after a failure."""
    given = GivenConfig.read(RLConfig, [*words, *resume_words(options.resume)])
    split = rl_split(given, options)
    run = load_run(given, "rl", options.output_dir, split.owned)
    check_rl(run.config, split)
    if options.preflight or options.estimate:
        config = with_local_inputs(run.config)
        refuse_unstartable(config, is_estimate=not options.preflight)
        if options.preflight:
            for fault in (faults := loss_faults(config.trainer)):
                sys.stderr.write(f"error: {fault}\n")
            return preflight((EXAMINATION,), config.orchestrator) or int(bool(faults)), ONCE
        return print_rl_estimate(config, split.shares_gpus, options, in_job=False), ONCE
    refuse_other_launcher(run.config, "local", given.words)
    gpus = first_gpus(run.config.device, split.total + frozen_gpus(run.config), os.environ)
    for line in advice(run.config, split):
        warn(line)
    with reporting_directory_errors():
        refuse_if_queued(run.paths, submits=False)
    sharing = Sharing(free_ports=True, exact_gpus=True, shares_gpus=split.shares_gpus, gpus=gpus)
    record = partial(write_components, run, {}, run.config.dry_run)
    return rl_local.rl_local(run.config, sharing=sharing, on_ready=record), run.config.recover


def run_eval(words: list[str], options: EvalOptions) -> int:
    """Run `medarc_train eval`. Returns its exit code."""
    run = load_run(GivenConfig.read(OfflineEvalConfig, words), "eval", options.output_dir, {})
    return launch(EVAL, run.config, eval_screen, shared_node(os.environ))


def preflight(program: tuple[str, ...], config: BaseSettings) -> int:
    """Report on the data of a run, with a module and its words before the config. OUT is not touched."""
    with LocalHost() as host:
        file, log = host.directory / "config.toml", host.directory / "preflight.log"
        dump_toml(config, file)
        # The child writes to a file, and this process shows it: rich must be told about the terminal.
        terminal = {"FORCE_COLOR": "1", "COLUMNS": str(shutil.get_terminal_size().columns)}
        env = terminal if sys.stdout.isatty() else {}
        argv = (sys.executable, "-m", *program, "@", str(file))
        process = ProcessSpec("preflight", argv, log, env, completes_run=True)
        with shown(log):
            return Supervisor([process], host, say=lambda line: None).run().exit_code
