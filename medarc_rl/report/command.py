"""The command `medarc_train report`."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from medarc_rl.cli import say, warn
from medarc_rl.errors import MedarcError, UsageError


@dataclass(frozen=True, kw_only=True)
class ReportOptions:
    runs: Annotated[
        list[Path],
        Argument(metavar="RUN...", help="Directory of a run, OUT; several are compared, the first with the others."),
    ]
    out: Annotated[
        Path | None,
        Option(help="Directory for report.html and the PNGs; by default, OUT/report of the first run."),
    ] = None
    label: Annotated[
        list[str] | None,
        Option(
            metavar="RUN=LABEL",
            help="Label of a run in the report, as RUN=LABEL. Runs with the same label become one curve.",
        ),
    ] = None
    price: Annotated[float | None, Option(min=0, metavar="USD", help="Price of one GPU for one hour.")] = None
    rollouts: Annotated[
        bool, Option("--rollouts/--no-rollouts", help="Whether the page contains the texts of rollouts.")
    ] = True
    pictures: Annotated[bool, Option("--pictures/--no-pictures", help="Whether to draw PNGs.")] = True
    open: Annotated[bool, Option("--open/--no-open", help="Show the page in the browser of this machine.")] = False


def report(options: ReportOptions) -> int:
    """Write a report of a run, or a comparison of several: one HTML file, and PNGs of its charts."""
    from medarc_rl.report.charts import group_runs, open_runs
    from medarc_rl.report.write import write_report
    from medarc_rl.stored import local_run
    from prime_rl.configs.storage import is_on_s3

    if options.price is not None and not math.isfinite(options.price):
        raise UsageError(f"--price {options.price}: give an amount of USD, such as 2.50")
    runs = open_runs([local_run(run) for run in options.runs])
    groups = group_runs(runs, options.label or ())
    first = options.runs[0]
    # The local copy of a run on S3 is in a cache.
    directory = options.out or (Path(f"{first.name}-report") if is_on_s3(first) else first / "report")
    try:
        written = write_report(groups, directory, options.price, options.rollouts, options.pictures)
    except OSError as error:
        raise MedarcError(f"{error.filename or directory}: {error.strerror or error}") from error
    for line in written.warnings:
        warn(line)
    size = written.page.stat().st_size
    pictures = f", {len(written.pictures)} PNGs" if written.pictures else ""
    say(f"{written.page}: {size / 1e6:.1f} MB, {written.rollouts:,} rollouts{pictures}")
    if options.open:
        import webbrowser

        webbrowser.open(written.page.resolve().as_uri())
    return 0
