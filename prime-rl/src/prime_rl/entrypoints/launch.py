"""What `rl` and `sft` share: from a plan to the end of its children."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, TypeVar

from prime_rl.launch import CannotStart, LocalHost, Outcome, ProcessSpec, Supervisor, reserved_ports
from prime_rl.launch.devices import DeviceError
from prime_rl.run.directory import OutputDirInUse, RunDirError, check_run_dir, prepare_run_dir, write_configs
from prime_rl.run.paths import RunPaths
from prime_rl.utils.logger import SUCCESS, get_logger, setup_logger
from prime_rl.utils.pydantic_config import BaseSettings
from prime_rl.watch.trainer_log import followed

if TYPE_CHECKING:
    from prime_rl.configs.rl import RLConfig
    from prime_rl.configs.sft import SFTConfig

ConfigT = TypeVar("ConfigT", "RLConfig", "SFTConfig")

Plan = Callable[[ConfigT, RunPaths, int, int | None], tuple[ProcessSpec, ...]]
"""Decides the children from a config, the run's paths, a rendezvous port of its own, and the step to resume from."""


class LaunchRefused(Exception):
    """The run cannot be started here as configured."""


def launch(
    name: str, config: ConfigT, sections: Mapping[str, BaseSettings], resume_step: int | None, plan: Plan[ConfigT]
) -> int:
    """Write the configs of `sections`, run the children, and return the exit code; what went wrong is on stderr.

    0 when the run is complete, or was a dry one; 2 when it cannot be started as asked; 128 + n after signal n; else 1.
    The trainer's log is shown as it grows, on a terminal with a bar below it.
    """
    paths = RunPaths(config.output_dir)
    try:
        with LocalHost() as host, reserved_ports(1) as (rendezvous_port,):
            resume_step = check_run_dir(paths, resume_step, config.clean_output_dir)
            if config.dry_run:
                write_configs(paths, sections)
                return 0
            specs = plan(config, paths, rendezvous_port, resume_step)
            prepare_run_dir(paths, resume_step, config.clean_output_dir)
            write_configs(paths, sections)
            setup_logger("info", paths.log(name))
            trainer = sections.get("trainer") or sections["sft"]
            with followed(trainer, paths):
                outcome = Supervisor(specs, host, get_logger().info).run()
            return _report(outcome, specs, paths)
    except (LaunchRefused, DeviceError, OutputDirInUse, RunDirError) as error:
        fault, code = error, 2
    except (CannotStart, OSError) as error:
        fault, code = error, 1
    sys.stderr.write(f"error: {fault}\n")
    return code


def _report(outcome: Outcome, specs: tuple[ProcessSpec, ...], paths: RunPaths) -> int:
    if outcome.succeeded:
        get_logger().log(SUCCESS, f"Done; the run is in {paths.root}")
        return 0
    get_logger().info(f"Ended with exit code {outcome.exit_code}: {outcome.message}")
    # The log of an only child has just been shown.
    sys.stderr.write(f"error: {outcome.message if len(specs) == 1 else outcome.report()}\n")
    return outcome.exit_code
