"""Runs one job on a Ray cluster: `python -m medarc_rl.backends.ray.driver rl @ rl.toml`.

`medarc_submit --to ray` starts it in the background. `ray job submit -- python -m …` runs it inside the cluster. Its
own options come before `sft`, `dpo`, `rm`, `rl` or `eval`; the words after it are those of the config.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn, cast, get_args

from medarc_rl.backends.options import NODE_GPUS
from medarc_rl.backends.protocol import LAUNCHERS, STOPS_ITSELF, Kind
from medarc_rl.backends.ray.cluster import RayCluster, asks_for_token, bundles_for, connected, placed
from medarc_rl.deployment import GpuSplit, device_of, gpus_of_nodes
from medarc_rl.errors import MedarcError
from medarc_rl.launchers.shared_node import SINGLE_GPU_VARIABLE, shared_node
from prime_rl.configs.areal import RecoverConfig
from prime_rl.configs.surface.root import ROOTS
from prime_rl.launch import LocalHost, ProcessSpec, Supervisor, shown
from prime_rl.launch.nodes.cluster import ClusterHost
from prime_rl.launch.restarting import until_done
from prime_rl.run.directory import files_readable_by
from prime_rl.run.paths import RunPaths
from prime_rl.utils.errors import CannotStart, StoppedEarly
from prime_rl.utils.files import replacing_file
from prime_rl.utils.pydantic_config import parse_argv_or_exit
from prime_rl.utils.terminal import say

LAUNCHER = "launcher"
REFUSED = 2
"""Exit code of a launcher whose run cannot be started as configured."""
_JOB_VARIABLE = "RAY_JOB_CONFIG_JSON_ENV_VAR"
_LIMIT_S = 60.0
"""Seconds until the signal must have come."""


def main(argv: Sequence[str] | None = None) -> int:
    options, words = _options(sys.argv[1:] if argv is None else argv)
    try:
        code = _recorded(options, words)
    except SystemExit as refused:
        if refused.code != REFUSED:
            raise
        code = REFUSED
    if code == REFUSED and options.stop_if_refused:
        _end_on_signals()
        stop_own_job()
    return code


def _recorded(options: argparse.Namespace, words: Sequence[str]) -> int:
    with _recording_end(options.end) as end:
        config = parse_argv_or_exit(cast("Any", ROOTS[options.kind]), argv=words)
        with files_readable_by(config.file_access):
            end.code = _run(options, config, words)
    return end.code


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """One line; argparse prints its usage first."""
        sys.stderr.write(f"error: {message}\n")
        raise SystemExit(REFUSED)


def _options(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    parser = _Parser(prog="python -m medarc_rl.backends.ray.driver", description=__doc__)
    parser.add_argument(
        "--address",
        default=os.environ.get("RAY_ADDRESS"),
        help="cluster, or local for one of this machine alone; by default RAY_ADDRESS",
    )
    parser.add_argument("--strategy", choices=("pack", "spread"), default="pack")
    shared = parser.add_mutually_exclusive_group()
    shared.add_argument("--single-gpu", action="store_const", const=1, dest="colocate", help="RL: one GPU for both")
    shared.add_argument(
        "--colocate",
        type=int,
        choices=range(1, NODE_GPUS + 1),
        help="RL: so many GPUs of one node, each for a process of the trainer and a server",
    )
    parser.add_argument("--end", type=Path, help="file that receives the exit code")
    parser.add_argument(
        "--stop-if-refused",
        action="store_true",
        help="in a job of `ray job submit`: stop it if its config cannot be run, so that KubeRay does not try again",
    )
    parser.add_argument("kind", choices=get_args(Kind))
    parser.add_argument("words", nargs=argparse.REMAINDER)
    options = parser.parse_args(argv)
    options.address = None if options.address == "local" else options.address
    if options.colocate is None:
        return options, options.words
    if options.kind != "rl":
        parser.error(f"--single-gpu and --colocate are options of rl, not of {options.kind}")
    counts = GpuSplit(options.colocate, 1, shares_gpus=True).owned
    return options, [*options.words, *(f"--{key}={value}" for key, value in counts.items() if value is not None)]


def _run(options: argparse.Namespace, config: Any, words: Sequence[str]) -> int:
    try:
        _end_on_signals()
        with connected(options.address):
            # Ray has replaced the handlers: its own exit with the number of the signal.
            _end_on_signals()
            if options.address is not None and not asks_for_token():
                say(
                    f"warning: Ray at {options.address} requires no token: any user who can reach it can run code there"
                )
            bundles = bundles_for(gpus_of_nodes(config, options.colocate is not None), device_of(config))
            with placed(bundles, options.strategy) as cluster:
                for placement in cluster.placements:
                    gpus = f"GPU {','.join(placement.gpus)}" if placement.gpus else "no GPU"
                    say(f"{placement.name} ({placement.address}): {gpus}")
                if len(bundles) > 1:
                    return _on_several_nodes(options, cluster, words)
                return _on_one_node(options, config, cluster, words)
    except StoppedEarly as stopped:
        sys.stderr.write(f"{stopped}\n")
        return stopped.exit_code
    except (MedarcError, CannotStart, OSError) as error:
        faults = error.faults if isinstance(error, MedarcError) else (str(error),)
        sys.stderr.writelines(f"error: {fault}\n" for fault in faults)
        return 1


def _on_one_node(options: argparse.Namespace, config: Any, cluster: RayCluster, words: Sequence[str]) -> int:
    """Run the command's launcher on the node. It chooses ports and shares out the GPUs that Ray gave to the actor."""
    # Not in OUT/logs, which the launcher may clean.
    log = RunPaths(Path(config.output_dir)).ray / "launcher.log"
    env = {SINGLE_GPU_VARIABLE: str(int(options.colocate is not None))}

    def start(more: Sequence[str]) -> tuple[int, RecoverConfig]:
        argv = (sys.executable, "-m", *LAUNCHERS[options.kind], *words, *more)
        spec = ProcessSpec(LAUNCHER, argv, log, env, completes_run=True, relays=frozenset({signal.SIGUSR1}))
        with (
            LocalHost() as local,
            ClusterHost(local, cluster.channels(), say) as host,
            shown(log),
        ):
            outcome = Supervisor([spec], host, say).run()
            refused = outcome.failed is not None and host.exit_code(LAUNCHER) == REFUSED
        if not outcome.succeeded:
            sys.stderr.write(f"{'' if outcome.was_stopped else 'error: '}{outcome.message}\n")
        return REFUSED if refused else outcome.exit_code, getattr(config, "recover", RecoverConfig())

    return until_done(start, say)


def _on_several_nodes(options: argparse.Namespace, cluster: RayCluster, words: Sequence[str]) -> int:
    """Plan the processes for all nodes here, and supervise them through the agents."""
    from prime_rl.launch.commands import RL, TRAININGS
    from prime_rl.launch.run import launch
    from prime_rl.watch.screens import rl_screen, sft_screen

    def start(more: Sequence[str]) -> tuple[int, RecoverConfig]:
        config = parse_argv_or_exit(cast("Any", ROOTS[options.kind]), argv=[*words, *more])
        sharing = shared_node(os.environ)
        if options.kind == "rl":
            return launch(RL, config, rl_screen, sharing, cluster=cluster), config.recover
        command = TRAININGS[options.kind]
        return launch(command, config, sft_screen, sharing, cluster=cluster), config.recover

    return until_done(start, say)


def _end_on_signals() -> None:
    for signum in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signum, _stop)


def _stop(signum: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + signum)


class _End:
    """The driver's exit code, once it is known."""

    code = 1


@contextlib.contextmanager
def _recording_end(file: Path | None) -> Iterator[_End]:
    """Write the exit code to `file` at the end of the block, however it ends."""
    end = _End()
    try:
        yield end
    except SystemExit as error:
        end.code = error.code if isinstance(error.code, int) else 1
        raise
    finally:
        if file is not None:
            with replacing_file(file) as scratch:
                scratch.write_text(f"{end.code}\n", encoding="ascii")


# KubeRay restarts a RayJob whose Ray job has failed, whatever its exit code. One that was stopped has ended, so that a
# run that cannot start as configured stops its own Ray job.


def stop_own_job() -> None:
    """Ask Ray to stop this job, and wait for its signal, which ends the process. Returns if it cannot be stopped."""
    job = submission_id(os.environ)
    if job is None:
        sys.stderr.write("warning: --stop-if-refused: this process was not started by `ray job submit`\n")
        return
    import requests
    from ray.job_submission import JobSubmissionClient

    sys.stderr.write(f"{STOPS_ITSELF}\n")
    sys.stderr.flush()
    try:
        JobSubmissionClient().stop_job(job)
    except (RuntimeError, ConnectionError, ValueError, requests.RequestException) as error:
        sys.stderr.write(f"warning: it could not be stopped: {type(error).__name__}: {error}\n")
        return
    # The handler of SIGTERM ends the wait.
    threading.Event().wait(_LIMIT_S)


def submission_id(env: Mapping[str, str]) -> str | None:
    """The job's id of `ray job submit`; None if this process is in no such job."""
    try:
        found = json.loads(env[_JOB_VARIABLE])["metadata"]["job_submission_id"]
    except (KeyError, TypeError, ValueError):
        return None
    return found if isinstance(found, str) else None


if __name__ == "__main__":
    raise SystemExit(main())
