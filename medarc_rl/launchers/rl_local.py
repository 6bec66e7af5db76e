"""One RL run on this machine, beside other people's: `rl_local(config)`, or `python -m … @ rl.toml`.

Inference server, orchestrator and trainer become three children with GPUs, ports and caches of their own; they end
together, and nothing of them is left.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from uuid import uuid4

from medarc_rl.errors import MedarcError, UsageError
from medarc_rl.launchers.gpus import SINGLE_GPU_VARIABLE, split_gpus
from medarc_rl.launchers.rl_plan import Device, Ports, Site, component_configs, plan_run, resume_step_of
from prime_rl.configs.rl import RLConfig
from prime_rl.configs.surface.not_built import unbuilt_faults
from prime_rl.launch import CannotStart, Follower, LocalHost, Outcome, Supervisor, reserved_ports
from prime_rl.launch.caches import private_caches
from prime_rl.launch.devices import (
    DeviceError,
    GpuAssignment,
    assign_gpus,
    choose_device,
    indices_by_uuid,
    masked_gpus,
    usable_cores,
    usable_gpus,
)
from prime_rl.launch.launch_log import LaunchLog
from prime_rl.launch.programs import Programs, process_counts
from prime_rl.run.directory import OutputDirInUse, RunDirError, check_run_dir, prepare_run_dir, write_configs
from prime_rl.run.paths import RunPaths, stable_steps
from prime_rl.utils.pydantic_config import parse_argv_or_exit
from prime_rl.watch.display import display_for
from prime_rl.watch.progress import RunProgress
from prime_rl.watch.watcher import Watcher, watching


def rl_local(config: RLConfig, bin_dir: Path | None = None) -> int:
    """Run one RL launch to its end and return the exit code; what went wrong is on stderr.

    0 when orchestrator and trainer both ended well; 2 for what this launcher cannot do or this machine does not have;
    128 + n after signal n; 1 otherwise. Call it from the main thread: it handles signals.

    Args:
        config: a resolved config, with the GPU counts in `deployment`.
        bin_dir: where the engine's programs are, if not beside this interpreter.
    """
    try:
        check_supported(config)
        device, gpus = choose_gpus(config, os.environ)
        programs = Programs.find(bin_dir)
        with LocalHost() as host, private_caches(os.environ) as caches, reserved_ports(3) as ports:
            host.remove_if_killed(caches)
            site = Site(
                programs=programs,
                device=device,
                gpus=gpus,
                gpu_indices={} if all(gpu.isdigit() for gpu in gpus.inference) else indices_by_uuid(),
                cores=usable_cores(),
                env=dict(os.environ),
                caches=caches,
                ports=Ports(*ports),
                launch_id=uuid4().hex,
            )
            return _launch(config, site, host)
    except MedarcError as error:
        faults, code = error.faults, error.exit_code
    except (DeviceError, OutputDirInUse, RunDirError) as error:
        faults, code = (str(error),), 2
    except (CannotStart, OSError) as error:
        faults, code = (str(error),), 1
    sys.stderr.writelines(f"error: {fault}\n" for fault in faults)
    return code


def check_supported(config: RLConfig) -> None:
    """Raises UsageError for a run that is not one on this machine alone, or that needs what is not built."""
    faults = []
    if config.deployment.type != "single_node":
        faults.append("deployment.type = 'multi_node': this launcher runs on one node")
    elif config.deployment.num_teacher_gpus:
        faults.append(f"deployment.num_teacher_gpus = {config.deployment.num_teacher_gpus}: no teacher is started here")
    if config.teacher_inference is not None:
        faults.append("teacher_inference: no teacher is started here")
    faults = faults or unbuilt_faults(config)
    if faults:
        raise UsageError(*faults)


def choose_gpus(config: RLConfig, env: Mapping[str, str]) -> tuple[Device, GpuAssignment]:
    """Where the run happens, and who gets which of the visible ids.

    On the CPU, ids that do not fit are no error: nobody computes on them.

    Raises:
        UsageError, DeviceError: these are not the GPUs that the run needs.
    """
    usable = usable_gpus(env)
    device = choose_device(config.device, usable)
    ids = usable if device == "cuda" else masked_gpus(env) or ()
    infer, train = process_counts(config)
    named = (config.inference_gpu_ids, config.trainer_gpu_ids)
    try:
        if named != (None, None):
            return device, assign_gpus(ids, infer, train, *named)
        return device, split_gpus(ids, infer, train, single=env.get(SINGLE_GPU_VARIABLE) == "1")
    except (UsageError, DeviceError):
        if device == "cuda":
            raise
        return device, GpuAssignment()


def _launch(config: RLConfig, site: Site, host: LocalHost) -> int:
    paths = RunPaths(config.output_dir)
    resume_step = check_run_dir(paths, resume_step_of(config), config.clean_output_dir)
    specs = plan_run(config, paths, site, resume_step)
    if not config.dry_run:
        prepare_run_dir(paths, resume_step, config.clean_output_dir)
    write_configs(paths, component_configs(config))
    if config.dry_run:
        sys.stdout.writelines(f"{spec.describe()}\n" for spec in specs)
        return 0
    progress, display = RunProgress(config.trainer.max_steps), display_for(sys.stdout)
    logs = {spec.name: Follower.at_end(spec.log) for spec in specs}
    watcher = Watcher(progress, display, Follower.at_end(paths.metrics), logs)
    log = LaunchLog(paths.log("rl"), watcher.say)
    started_s = time.monotonic()
    with watching(watcher, display):
        log.say(_where(config, site))
        outcome = Supervisor(specs, host, log.say).run()
    return _report(outcome, progress.summary(time.monotonic() - started_s), paths, log)


def _where(config: RLConfig, site: Site) -> str:
    infer, train = process_counts(config)
    if site.device == "cuda":
        return f"inference on GPU {','.join(site.gpus.inference)}, trainer on GPU {','.join(site.gpus.trainer)}"
    why = 'device = "cpu"' if config.device == "cpu" else "no GPU here"
    return f"{why}: everything runs on the CPU ({infer} inference + {train} training, {site.cores} cores)"


def _report(outcome: Outcome, summary: str, paths: RunPaths, log: LaunchLog) -> int:
    """Tell how the run ended, on stdout what it did and on stderr what went wrong."""
    weights = stable_steps(paths.weights)
    if weights:
        summary += f"; weights in {paths.weight(weights[-1])}"
    log.note(summary)
    # After SIGHUP there is no terminal to write to, and still an exit code to return.
    with contextlib.suppress(OSError):
        sys.stdout.write(f"{summary}\n")
        sys.stdout.flush()
    if outcome.succeeded:
        return 0
    message = outcome.report()
    if stable_steps(paths.checkpoints):
        message += "\ncontinue from the last checkpoint with --ckpt.resume-step -1"
    log.note(message)
    with contextlib.suppress(OSError):
        sys.stderr.write(f"error: {message}\n")
    return outcome.exit_code


def main() -> None:
    raise SystemExit(rl_local(parse_argv_or_exit(RLConfig)))


if __name__ == "__main__":
    main()
