"""The commands that take a run's directory: `trace`, `upload` and `watch`."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

from medarc_rl.cli import say, warn
from medarc_rl.errors import MedarcError, UsageError


@dataclass(frozen=True, kw_only=True)
class TraceOptions:
    run: Annotated[Path, Argument(metavar="RUN", help="The run's directory, or its s3:// prefix.")]
    out: Annotated[
        Path | None,
        Option(help="File to write; by default RUN/trace.json, or NAME-trace.json here for a run on S3."),
    ] = None


def trace(options: TraceOptions) -> int:
    """Merge what the processes of a run recorded with [trace] into one timeline for Perfetto.

    All processes and attempts share one clock. Open the file at ui.perfetto.dev, which reads it in the browser and
    uploads nothing, or at chrome://tracing.
    """
    from medarc_rl.stored import local_run
    from prime_rl.configs.storage import is_on_s3
    from prime_rl.history.traces import merge_traces
    from prime_rl.run.paths import RunPaths
    from prime_rl.utils.errors import UserError
    from prime_rl.utils.logger import count_of

    run = local_run(options.run)
    target = options.out or (Path(f"{run.name}-trace.json") if is_on_s3(options.run) else run / "trace.json")
    try:
        summary = merge_traces(RunPaths(run), target)
    except UserError as error:
        raise UsageError(str(error)) from error
    except OSError as error:
        raise MedarcError(f"{target} cannot be written: {error.strerror}") from error
    if summary.damaged_lines:
        warn(f"left out {count_of('damaged line', summary.damaged_lines)}")
    events, processes = count_of("event", summary.events), count_of("process", summary.processes, "es")
    typer.echo(f"{target}: {events} of {processes} in {summary.duration_s:,.1f} s; open it at ui.perfetto.dev")
    return 0


@dataclass(frozen=True, kw_only=True)
class UploadOptions:
    run: Annotated[Path, Argument(metavar="RUN", help="The run's directory.")]
    to: Annotated[
        str | None,
        Option(metavar="s3://BUCKET/PREFIX", help="Where to upload to; by default where the run was copied before."),
    ] = None
    no_samples: Annotated[bool, Option("--no-samples", help="Leave out kept rollouts and results of evaluations.")] = (
        False
    )


def upload(options: UploadOptions) -> int:
    """Upload the files of a run that are not on S3 yet: metrics, logs, checkpoints, weights, kept rollouts, receipts.

    Nothing is deleted on S3. Exit code: 0 if everything is there, 1 if something is missing.
    """
    from prime_rl.configs.storage import BadS3Name, S3Name
    from prime_rl.run.paths import RunPaths
    from prime_rl.storage.copies import upload_run
    from prime_rl.utils.errors import UserError

    if not options.run.is_dir():
        raise UsageError(f"RUN: {options.run} is not a directory")
    try:
        target = None if options.to is None else S3Name.of(options.to)
        if options.to is not None and target is None:
            raise UsageError(f"--to {options.to}: write s3://BUCKET/PREFIX")
        is_whole, line = upload_run(RunPaths(options.run.absolute()), target, not options.no_samples, say)
    except (BadS3Name, UserError) as error:
        raise UsageError(str(error)) from error
    if not is_whole:
        raise MedarcError(*line.splitlines())
    say(line)
    return 0


INTERRUPTED = 130
"""128 + SIGINT."""


@dataclass(frozen=True, kw_only=True)
class WatchOptions:
    run: Annotated[Path, Argument(metavar="RUN", help="The run's directory, also one that another machine writes.")]
    once: Annotated[bool, Option("--once", help="Print the current state and stop.")] = False
    json: Annotated[
        bool, Option("--json", help="Print JSON: with --once one object, otherwise one in a line for each change.")
    ] = False
    interval: Annotated[float, Option(min=0.1, max=3600, help="Seconds between two checks.")] = 1.0


def watch(options: WatchOptions) -> int:
    """Watch a run until it ends: state, step, metrics, what each process does, last warnings.

    On a terminal, a live view; otherwise one line for each new step, then the final state. Only the files in RUN are
    read. Ctrl-C ends watching, not the run. Exit code: 0 if the run is complete, or goes on (--once); 1 if it failed,
    stopped or was killed, or its end is unknown; 2 if RUN is not the directory of a run; 130 after Ctrl-C.
    """
    from medarc_rl.stored import local_run
    from prime_rl.configs.storage import is_on_s3
    from prime_rl.history.run import RunHistory
    from prime_rl.utils.errors import UserError
    from prime_rl.watch import overview
    from prime_rl.watch.facts import Reader

    if is_on_s3(options.run) and not options.once:
        raise UsageError("RUN: a run on S3 is downloaded once, and cannot be followed: add --once")
    try:
        reader = Reader(RunHistory.open(local_run(options.run)))
    except UserError as error:
        raise UsageError(str(error)) from error
    stream = overview.prepared(sys.stdout)
    try:
        if options.once:
            state = reader.read()
            if options.json:
                overview.print_json(state, stream, indent=1)
            else:
                overview.print_once(state, stream)
            return overview.exit_code_of(state)
        if options.json:
            return overview.follow_json(reader, stream, options.interval)
        follow = overview.follow_live if overview.is_live(stream) else overview.follow_lines
        return follow(reader, stream, options.interval)
    except KeyboardInterrupt:
        sys.stderr.write("stopped watching; the run was not touched\n")
        return INTERRUPTED
    except BrokenPipeError:
        # The reader of a pipe, such as `head`, has ended. Python must not try to write the rest at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
