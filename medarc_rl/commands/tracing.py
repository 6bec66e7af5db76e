"""The command `medarc_train trace`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

from medarc_rl.cli import warn
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
