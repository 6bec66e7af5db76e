"""The command `medarc_train watch`."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from medarc_rl.errors import UsageError

INTERRUPTED = 130
"""128 + SIGINT."""


@dataclass(frozen=True, kw_only=True)
class WatchOptions:
    run: Annotated[Path, Argument(metavar="RUN", help="The run's directory, also one that another machine writes.")]
    once: Annotated[bool, Option("--once", help="Print the state of this moment and stop.")] = False
    json: Annotated[
        bool, Option("--json", help="Print JSON: with --once one object, otherwise one in a line for each change.")
    ] = False
    interval: Annotated[float, Option(min=0.1, max=3600, help="Seconds between two looks.")] = 1.0


def watch(options: WatchOptions) -> int:
    """Watch a run until it ends: state, step, metrics, what each process does, last warnings.

    On a terminal, a live view; otherwise one line for each new step, then the final state. Only the files in RUN are
    read. Ctrl-C ends watching, not the run. Exit code: 0 if the run is complete, or goes on (--once); 1 if it failed,
    stopped or was killed, or its end is unknown; 2 if RUN is no run; 130 after Ctrl-C.
    """
    from medarc_rl.stored import local_run
    from prime_rl.configs.storage import is_on_s3
    from prime_rl.history.run import RunHistory
    from prime_rl.utils.errors import UserError
    from prime_rl.watch.overview import screen
    from prime_rl.watch.overview.facts import Reader

    if is_on_s3(options.run) and not options.once:
        raise UsageError("RUN: a run on S3 is downloaded once, and cannot be followed: add --once")
    try:
        reader = Reader(RunHistory.open(local_run(options.run)))
    except UserError as error:
        raise UsageError(str(error)) from error
    stream = screen.prepared(sys.stdout)
    try:
        if options.once:
            overview = reader.read()
            if options.json:
                screen.print_json(overview, stream, indent=1)
            else:
                screen.print_once(overview, stream)
            return screen.exit_code_of(overview)
        if options.json:
            return screen.follow_json(reader, stream, options.interval)
        follow = screen.follow_live if screen.is_live(stream) else screen.follow_lines
        return follow(reader, stream, options.interval)
    except KeyboardInterrupt:
        sys.stderr.write("stopped watching; the run was not touched\n")
        return INTERRUPTED
    except BrokenPipeError:
        # The reader of a pipe, such as `head`, has ended. Python must not try to write the rest at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
