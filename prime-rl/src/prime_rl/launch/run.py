"""Launches a config: checks it, plans its processes, runs them, reports. Used by every command."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from prime_rl.checks import NotInstalled
from prime_rl.configs.shared import FileAccess
from prime_rl.configs.storage import StorageConfig
from prime_rl.history.attempts import machine_facts
from prime_rl.launch.host import Host, LocalHost
from prime_rl.launch.job import Job
from prime_rl.launch.logs import LaunchLog, polled
from prime_rl.launch.nodes.cluster import ClusterHost
from prime_rl.launch.nodes.placing import Cluster, cluster_placement, placement_lines
from prime_rl.launch.placement import Placement, ResourceRequest, Sharing, claimed_placement
from prime_rl.launch.programs import Programs
from prime_rl.launch.spec import Outcome, Signalled
from prime_rl.launch.stalling import Watchdog
from prime_rl.launch.supervisor import Supervisor
from prime_rl.run.attempts import PARTS, Receipt, next_attempt
from prime_rl.run.directory import RunFinished, files_readable_by, settle, write_configs
from prime_rl.run.early_stop import EarlyEnd
from prime_rl.run.lock import run_lock
from prime_rl.run.paths import RunPaths, stable_steps
from prime_rl.storage.copies import CopiedRun, RunCopy, copying
from prime_rl.storage.staging import has_s3_names, inputs_of, staged
from prime_rl.utils.errors import (
    PrimeError,
    StoppedEarly,
    UserError,
)

FAILURE_GRACE_S = 15.0
"""Seconds to stop after a failure on several nodes: ranks that wait for a lost one cannot save."""

ConfigT = TypeVar("ConfigT", bound="Launchable")


class Launchable(Protocol):
    """What a config must have to be launched."""

    @property
    def output_dir(self) -> Path: ...

    @property
    def dry_run(self) -> bool: ...

    @property
    def file_access(self) -> FileAccess: ...

    @property
    def storage(self) -> StorageConfig: ...


class Screen(Protocol):
    """What the user sees during a run."""

    def line(self, text: str) -> None:
        """Show one line from the launcher."""

    def summary(self, succeeded: bool) -> str | None:
        """What the run did, in one line. None adds nothing to what the processes have printed."""

    def verdict(self) -> str | None:
        """A warning that the user must not miss, such as that nothing was learned. It is the last line of the run."""

    def has_shown(self, child: str) -> bool:
        """Whether the log of a child was shown, so that an error need not repeat its end."""


ScreenFactory = Callable[[Job], AbstractContextManager[Screen]]


@dataclass(frozen=True, slots=True)
class Command(Generic[ConfigT]):
    """What differs between `sft`, `rl` and `eval`."""

    name: str
    demand: Callable[[ConfigT], ResourceRequest]
    plan: Callable[[ConfigT, RunPaths, Placement, int | None], Job]
    check: Callable[[ConfigT, Sharing], list[str]]
    """Faults of the config on this machine, one line each."""
    check_directory: Callable[[ConfigT, RunPaths], int | None]
    """Refuse a directory that the run must not use, without changing it; returns the step to resume from."""
    prepare_directory: Callable[[ConfigT, RunPaths, int | None], None]
    try_out: Callable[[ConfigT], Sequence[str]] = lambda config: ()
    """Faults that show only when something is loaded. A dry run looks for them in a process of its own; a run's own
    processes find them, before a model is loaded."""
    notes: Callable[[ConfigT, RunPaths, int | None], Sequence[str]] = lambda config, paths, resume_step: ()
    """Lines about the run to show before it starts."""
    facts: Callable[[ConfigT, RunPaths, int | None], Mapping[str, Any]] | None = None
    """What the launcher knows of an attempt, for its receipt. None keeps no receipts."""
    resume_step: Callable[[ConfigT], int | None] = lambda config: None
    """The step that the config asks to resume from: a step, -1 (`latest`) or -2 (`auto`). None starts a new run."""


def launch(
    command: Command[ConfigT],
    config: ConfigT,
    screen: ScreenFactory,
    sharing: Sharing = Sharing(),  # noqa: B008 - frozen
    bin_dir: Path | None = None,
    cluster: Cluster | None = None,
    on_ready: Callable[[], None] = lambda: None,
) -> int:
    """Run the processes of a config until all have ended. Call it in the main thread, because it handles signals.

    A config for several nodes runs on those of `cluster`. Prints one line for each fault to stderr. `on_ready` is
    called when everything has been checked and the configs are written, before a process starts; also in a dry run.

    Returns:
        0 if the run is complete or was a dry run; 2 if it cannot be started as configured, or one of its processes
        refuses that; 128 + n after signal n; otherwise 1.
    """
    try:
        with files_readable_by(config.file_access):
            _check_nodes(command, config, cluster)
            return _launch(command, config, screen, sharing, (bin_dir, cluster), on_ready)
    except RunFinished as finished:
        sys.stdout.write(f"{finished}\n")
        return 0
    except StoppedEarly as stopped:
        sys.stderr.write(f"{stopped}\n")
        return stopped.exit_code
    except PrimeError as error:
        faults, code = error.faults, error.exit_code
    except OSError as error:
        faults, code = (f"{error.filename}: {error.strerror}" if error.filename else str(error),), 1
    sys.stderr.writelines(f"error: {fault}\n" for fault in faults)
    return code


def _check_nodes(command: Command[ConfigT], config: ConfigT, cluster: Cluster | None) -> None:
    """Raise UserError if the config is for another number of nodes than the launch has."""
    needed = command.demand(config).nodes
    if needed == 1:
        return  # nothing is asked of the scheduler, which a container may not reach
    names = () if cluster is None else tuple(cluster.names)
    if needed == len(names):
        return
    has = f"the job has {len(names)}: {', '.join(names)}" if names else "this launch has one"
    raise UserError(
        f"deployment.type = 'multi_node': the run takes {needed} nodes, and {has}; "
        f"submit it with `medarc_slurm {command.name}`, or start it in a Slurm job of {needed} nodes"
    )


def _launch(
    command: Command[ConfigT],
    config: ConfigT,
    screen: ScreenFactory,
    sharing: Sharing,
    where: tuple[Path | None, Cluster | None],
    on_ready: Callable[[], None],
) -> int:
    faults = command.check(config, sharing)
    _refuse(faults, config.dry_run)
    config = _with_local_inputs(command, config, sharing)
    paths = RunPaths(config.output_dir)
    with (
        run_lock(paths.root) as lock,
        LocalHost(held_by_guard=(lock,)) as local,
        _placed(local, command.demand(config), sharing, paths, where) as (host, site),
    ):
        if not config.dry_run:
            settle(paths)
        copy = _restored_copy(command, config, paths, sharing)
        resume_step = command.check_directory(config, paths)
        if config.dry_run:
            _refuse(command.try_out(config), config.dry_run)  # last, because it takes seconds
        job = command.plan(config, paths, site, resume_step)
        # Both look at checkpoints that the next step moves.
        notes = [*placement_lines(job, site), *command.notes(config, paths, resume_step)]
        facts = None if command.facts is None else command.facts(config, paths, resume_step)
        if not config.dry_run:
            command.prepare_directory(config, paths, resume_step)
        write_configs(paths, job.configs)
        on_ready()
        if config.dry_run:
            told = ["", *notes] if notes else []
            sys.stdout.writelines(f"{line}\n" for line in (*job.describe(), *told))
            return 0
        if facts is not None:
            gpus = job.gpus if site.device == "cuda" else {}
            facts = {**facts, "gpus": gpus, "machine": machine_facts(Path.cwd())}
        with copying(copy, resume_step, partial(_asked_to_stop, host), _show) as copied:
            copied.code = _run_attempt(job, host, partial(_screen_of_copy, screen, copied), notes, facts)
        return copied.code


def _run_attempt(
    job: Job, host: Host, screen: ScreenFactory, notes: Sequence[str], facts: Mapping[str, Any] | None
) -> int:
    if facts is None:
        return run_job(job, host, screen, notes)
    number = next_attempt(job.paths)
    parts = [part for part in PARTS if any(process.name == part for process in job.processes)]
    receipt = Receipt(job.paths, number, parts, facts)
    return run_job(job.in_attempt(number), host, screen, notes, receipt)


def _restored_copy(command: Command[ConfigT], config: ConfigT, paths: RunPaths, sharing: Sharing) -> RunCopy | None:
    """The copy of the run on S3, if it has one. What the run continues from is downloaded, and the config checked."""
    copy = RunCopy.of(config.storage, paths, _show)
    if copy is not None and copy.restore(command.resume_step(config), command.name == "eval", config.dry_run):
        _refuse(command.check(config, sharing), config.dry_run)
    return copy


@contextlib.contextmanager
def _screen_of_copy(screen: ScreenFactory, copied: CopiedRun, job: Job) -> Iterator[Screen]:
    """The screen of a run, which also shows what its upload says."""
    with screen(job) as shown:
        copied.say = LaunchLog(job.paths.log(job.command), shown.line).say
        try:
            yield shown
        finally:
            copied.say = _show


def _asked_to_stop(host: Host, timeout_s: float) -> bool:
    event = host.next_event(timeout_s)
    return isinstance(event, Signalled) and event.signal is not signal.SIGUSR1


def _show(line: str) -> None:
    _write(sys.stdout.write, f"{line}\n")


def _with_local_inputs(command: Command[ConfigT], config: ConfigT, sharing: Sharing) -> ConfigT:
    """Download the inputs on S3 that a config names, and check it again. A dry run only lists them."""
    if not has_s3_names(config):
        return config
    if config.dry_run:
        sys.stdout.writelines(f"{each}, downloaded when the run starts\n" for each in inputs_of(config))
        return config
    config = staged(config, _show)
    _refuse(command.check(config, sharing), config.dry_run)
    return config


@contextlib.contextmanager
def _placed(
    local: LocalHost,
    demand: ResourceRequest,
    sharing: Sharing,
    paths: RunPaths,
    where: tuple[Path | None, Cluster | None],
) -> Iterator[tuple[Host, Placement]]:
    """Where the processes run: on this machine, or on the nodes of a cluster if the demand is for several."""
    bin_dir, cluster = where
    if cluster is None or demand.nodes == 1:
        with claimed_placement(demand, sharing, os.environ, local.directory, bin_dir) as site:
            yield local, site
        return
    programs, store = Programs.find(bin_dir), paths.control / "store"
    with (
        ClusterHost(local, cluster.channels(), say=lambda line: _write(sys.stderr.write, f"{line}\n")) as host,
        cluster_placement(host, cluster, demand, os.environ, store, programs) as site,
    ):
        yield host, site


def _refuse(faults: Sequence[str], dry_run: bool) -> None:
    """Raise UserError if there are faults. A dry run only warns of packages that are not installed here."""
    tolerated = [fault for fault in faults if dry_run and isinstance(fault, NotInstalled)]
    if len(faults) > len(tolerated):
        raise UserError(*faults)
    sys.stderr.writelines(f"warning: {fault}\n" for fault in tolerated)


def run_job(
    job: Job, host: Host, screen: ScreenFactory, notes: Sequence[str] = (), receipt: Receipt | None = None
) -> int:
    """Run a planned job to its end, show it after its `notes`, complete its receipt, and return the exit code."""
    with screen(job) as shown:
        log = LaunchLog(job.paths.log(job.command), shown.line)
        if receipt is not None:
            log.note(receipt.headline)
        for line in filter(None, (job.headline, *notes)):
            log.say(line)
        supervisor = Supervisor(
            job.processes,
            host,
            log.say,
            stopping=job.stopping,
            watchdog=Watchdog(job.stall_limits),
            failure_grace_s=FAILURE_GRACE_S if job.nodes else None,
        )
        with (
            polled(partial(pass_on_save_request, job.paths), name="save request", every_s=1.0),
            _collecting(receipt, log.say),
        ):
            outcome = supervisor.run()
        if receipt is not None:
            # Before the screen closes, which shows the end of the run for the last time.
            receipt.end(outcome.result, outcome.message, outcome.lost)
    _report(outcome, job, shown, log)
    return outcome.exit_code


def pass_on_save_request(paths: RunPaths) -> None:
    """If a user made the file that asks for a checkpoint, remove it and send this process SIGUSR1, which does the same.

    The file serves where no signal can be sent: from another machine, or through a container.
    """
    with contextlib.suppress(FileNotFoundError):
        paths.save_request.unlink()
        os.kill(os.getpid(), signal.SIGUSR1)


@contextlib.contextmanager
def _collecting(receipt: Receipt | None, say: Callable[[str], None]) -> Iterator[None]:
    """Add to the receipt what the parts report during the block, and say so."""
    if receipt is None:
        yield
        return

    def look() -> None:
        for line in receipt.collect():
            say(line)

    with polled(look, name="receipt"):
        yield


def _report(outcome: Outcome, job: Job, screen: Screen, log: LaunchLog) -> None:
    """Report how the run ended: the summary on stdout, an error on stderr."""
    summary = screen.summary(outcome.succeeded)
    if summary is not None:
        if outcome.succeeded and (early := EarlyEnd.read(job.paths.early_end)) is not None:
            summary += f"; it ended early: {early.why}"
        if not screen.has_shown("trainer") and (weights := stable_steps(job.paths.weights)):
            summary += f"; weights in {job.paths.weight(weights[-1])}"
        log.note(summary)
        _write(sys.stdout.write, f"{summary}\n")
    for line in outcome.losses:
        log.note(line)
        _write(sys.stderr.write, f"{line}\n")
    if outcome.succeeded:
        if (verdict := screen.verdict()) is not None:
            log.note(f"warning: {verdict}")
            _write(sys.stderr.write, f"warning: {verdict}\n")
        return
    known = outcome.failed is not None and screen.has_shown(outcome.failed)
    message = outcome.message if known else outcome.report()
    if outcome.was_stopped or (stable_steps(job.paths.checkpoints) and not outcome.was_refused):
        message += f"\n{job.how_to_continue(sys.argv, os.environ)}"
    log.note(message)
    _write(sys.stderr.write, f"{message}\n" if outcome.was_stopped else f"error: {message}\n")


def _write(write: Callable[[str], object], text: str) -> None:
    # After SIGHUP the terminal is gone, but the exit code must still be returned.
    with contextlib.suppress(OSError):
        write(text)
        sys.stdout.flush()
