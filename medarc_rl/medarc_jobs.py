"""`medarc_jobs list|status|logs|cancel|wait`: the jobs that you submitted, whatever back-end runs them."""

from __future__ import annotations

import json
import os
import sys
import time
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import datetime
from typing import Annotated, Any, Literal

from typer import Argument, Option

from medarc_rl.backends.protocol import backend
from medarc_rl.cli import add_command_without_config, new_app, say, warn
from medarc_rl.errors import MedarcError, UsageError
from medarc_rl.jobs import LAST, JobLog, JobRecord, State, Status
from prime_rl.watch.progress import printable, visible

CODES: Mapping[State, int] = {"succeeded": 0, "failed": 1, "cancelled": 3, "unknown": 4, "stopped": 5}
"""Exit codes of `wait`."""
_WORST_FIRST: Sequence[State] = ("failed", "cancelled", "unknown", "stopped")
TIMED_OUT = 124
"""The exit code of `timeout`."""
INTERRUPTED = 130
_ASKS_AT_ONCE = 8
"""Threads that ask back-ends: each call mostly waits for a program or a server."""
_MAX_LINE_CHARS = 10_000
"""A longer line of a job's output is cut: a terminal would hang on a megabyte without a line break."""
_MOST_FAILED_ASKS = 10
"""Failed calls of one job's back-end in a row after which `wait` gives up."""
_MAX_CHARS = 40
"""Characters of a column of `list`. Only the last one may be longer."""
Job = Annotated[str, Argument(metavar="JOB", help=f"Name, key or id of a job, or `{LAST}`, the newest one.")]
Jobs = Annotated[list[str], Argument(metavar="JOB", help=f"Names, keys or ids of jobs, or `{LAST}`, the newest one.")]
Json = Annotated[bool, Option("--json", help="Print JSON.")]
Row = tuple[JobRecord, Status]


@dataclass(frozen=True, kw_only=True)
class ListOptions:
    limit: Annotated[int, Option("--limit", "-n", min=1, max=100_000, help="Most jobs to list.")] = 20
    to: Annotated[
        Literal["slurm", "kubernetes", "ray", "sagemaker"] | None, Option(help="Only jobs of this back-end.")
    ] = None
    ask: Annotated[
        bool, Option("--ask/--no-ask", help="Ask the back-ends for the state of all jobs that may not have ended.")
    ] = True
    json: Json = False


@dataclass(frozen=True, kw_only=True)
class StatusOptions:
    jobs: Jobs
    json: Json = False


@dataclass(frozen=True, kw_only=True)
class LogsOptions:
    job: Job
    follow: Annotated[bool, Option("--follow", "-f", help="Follow the output until the job has ended.")] = False
    tail: Annotated[
        int | None, Option("--tail", min=0, max=10_000_000, help="Only this many last lines; not with -f.")
    ] = None


@dataclass(frozen=True, kw_only=True)
class CancelOptions:
    jobs: Jobs
    yes: Annotated[bool, Option("--yes", "-y", help="Do not ask, on a terminal, whether these are the jobs.")] = False


@dataclass(frozen=True, kw_only=True)
class WaitOptions:
    jobs: Jobs
    timeout: Annotated[
        float | None, Option(min=0, metavar="SECONDS", help="Stop waiting after this time; the job goes on.")
    ] = None
    interval: Annotated[float, Option(min=0.1, max=3600, metavar="SECONDS", help="Time between two looks.")] = 5.0


def list_jobs(options: ListOptions) -> int:
    """List the jobs that you submitted from this machine, newest first."""
    log = JobLog.of_user()
    records, faults = log.read()
    for fault in faults:
        warn(printable(fault))
    chosen = [record for record in records if options.to in (None, record.backend)][: options.limit]
    with ThreadPoolExecutor(_ASKS_AT_ONCE) as pool:
        statuses = list(pool.map(lambda record: known_status(log, record, options.ask), chosen))
    rows: list[Row] = list(zip(chosen, statuses, strict=True))
    if options.json:
        say(as_json(rows))
    elif rows:
        for line in lines(rows):
            say(line)
    elif options.to is not None:
        say(f"no jobs of {options.to}")
    else:
        say("no jobs yet: medarc_slurm and medarc_submit record what they submit")
    return 0


def status(options: StatusOptions) -> int:
    """Show what became of jobs."""
    log = JobLog.of_user()
    records = [log.find(name) for name in options.jobs]
    rows: list[Row] = [(record, asked_status(log, record)) for record in records]
    if options.json:
        say(as_json(rows))
        return 0
    for index, row in enumerate(rows):
        for line in ["", *described(*row)] if index else described(*row):
            say(line)
    return 0


def logs(options: LogsOptions) -> int:
    """Print a job's output. With -f, until the job has ended; Ctrl-C stops that, not the job."""
    if options.follow and options.tail is not None:
        raise UsageError("--tail and --follow exclude each other: give one")
    log = JobLog.of_user()
    record = log.find(options.job)
    if options.follow and (before := asked_status(log, record)).state == "queued":
        sys.stderr.write(f"{printable(f'{record.name} is queued: {before.detail}'.removesuffix(': '))}\n")
    found = backend(record.backend).logs(record, options.follow)
    try:
        for line in found if options.tail is None else deque(found, maxlen=options.tail):
            sys.stdout.write(f"{visible(line, _MAX_LINE_CHARS)}\n")
            sys.stdout.flush()
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # The reader of a pipe has ended. Python must not try to write the rest at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def cancel(options: CancelOptions) -> int:
    """End jobs. A run saves a checkpoint first, where its back-end leaves it the time."""
    log = JobLog.of_user()
    records = [log.find(name) for name in options.jobs]
    if not options.yes and not _is_confirmed(records):
        say("nothing was cancelled")
        return 1
    faults: list[str] = []
    for record in records:
        try:
            before = asked_status(log, record)
            if before.has_ended:
                raise MedarcError(f"{record.name} ({record.id}) has ended already: {before.state}")
            backend(record.backend).cancel(record)
            log.save(record.with_cancelling())
            say(printable(f"cancelled: {record.name} ({record.backend} {record.id})"))
        except MedarcError as error:
            faults += error.faults
    if faults:
        raise MedarcError(*map(printable, faults))
    return 0


def _is_confirmed(records: Sequence[JobRecord]) -> bool:
    """Name the jobs and ask, where somebody can answer: `last` may be another job than the one that they think of."""
    if not sys.stdin.isatty():
        return True
    named = [f"{each.name} ({each.backend} {each.id}, submitted {local_time(each.submitted)})" for each in records]
    sys.stderr.write(f"cancel {printable(', '.join(named), 1000)}? [y/N] ")
    sys.stderr.flush()
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def wait(options: WaitOptions) -> int:
    """Wait until all of these jobs have ended.

    Exit code: 0 if all succeeded; otherwise that of the first in the order 1 failed, 3 cancelled, 4 unknown to the
    back-end, 5 stopped so that it can be resumed; 124 after --timeout; 130 after Ctrl-C. The jobs go on after the last
    two.
    """
    log = JobLog.of_user()
    return wait_for([log.find(name) for name in options.jobs], log, options)


app = new_app("medarc_jobs", "Look after the jobs that you submitted with medarc_slurm and medarc_submit.")


add_command_without_config(app, "list", ListOptions, list_jobs)


add_command_without_config(app, "status", StatusOptions, status)


add_command_without_config(app, "logs", LogsOptions, logs)


add_command_without_config(app, "cancel", CancelOptions, cancel)


add_command_without_config(app, "wait", WaitOptions, wait)


def wait_for(records: Sequence[JobRecord], log: JobLog, options: WaitOptions) -> int:
    """Wait for jobs, print the end of each, and return the exit code. Raises MedarcError if a back-end stays silent."""
    waiting, states, silent = list(records), set(), Counter[str]()
    end_s = None if options.timeout is None else time.monotonic() + options.timeout
    try:
        while True:
            for record in tuple(waiting):
                try:
                    found = asked_status(log, record)
                except MedarcError as error:
                    silent[record.key] += 1
                    if silent[record.key] >= _MOST_FAILED_ASKS:
                        raise
                    warn(f"{printable(str(error))}; asking again")
                    continue
                silent[record.key] = 0
                if found.has_ended or found.state == "unknown":
                    waiting.remove(record)
                    states.add(found.state)
                    detail = f": {found.detail}" if found.detail else ""
                    say(printable(f"{record.name} ({record.id}): {state_words(found)}{detail}"))
            if not waiting:
                return next((CODES[state] for state in _WORST_FIRST if state in states), 0)
            if end_s is not None and time.monotonic() >= end_s:
                return TIMED_OUT
            time.sleep(options.interval)
    except KeyboardInterrupt:
        return INTERRUPTED


def asked_status(log: JobLog, record: JobRecord) -> Status:
    """The end of a job, if it was seen before; otherwise the back-end's answer now. Raises MedarcError."""
    known = record.last_status
    if known is not None:
        return known
    found = backend(record.backend).status(record)
    record = log.latest(record)
    if found.state == "unknown" and record.cancelled:
        found = Status("cancelled")
    if found.has_ended:
        try:
            log.save(record.with_end(found))
        except MedarcError as error:
            warn(printable(str(error)))
    return found


def known_status(log: JobLog, record: JobRecord, ask: bool) -> Status:
    """As `asked_status`, but a back-end that does not answer leaves the status unknown."""
    if not ask:
        return record.last_status or Status("unknown", "not asked")
    try:
        return asked_status(log, record)
    except MedarcError as error:
        return Status("unknown", str(error))


# Jobs as lines for a person, and as JSON for a program.


def as_json(rows: Sequence[Row]) -> str:
    return json.dumps([_table(*row) for row in rows], indent=1)


def _table(record: JobRecord, status: Status) -> dict[str, Any]:
    table = record.to_table()
    del table["format"], table["ended"]
    return {**table, "state": status.state, "detail": status.detail}


def lines(rows: Sequence[Row]) -> Iterator[str]:
    """One line for each job, newest first, in columns."""
    heads = ("job", "name", "to", "id", "state", "submitted", "output")
    cells = [heads, *(_cells(*row) for row in rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(heads))]
    for row in cells:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()


def _cells(record: JobRecord, status: Status) -> tuple[str, ...]:
    texts = (record.key, record.name, record.backend, record.id)
    shown = tuple(printable(text, _MAX_CHARS) for text in texts)
    return (*shown, state_words(status), local_time(record.submitted), printable(record.output))


def state_words(status: Status) -> str:
    return "stopped, can be resumed" if status.state == "stopped" else status.state


def local_time(stamp: str) -> str:
    """`2026-11-22 18:00`, in this machine's time zone."""
    try:
        return datetime.fromisoformat(stamp).astimezone().strftime("%Y-%m-%d %H:%M")
    except ValueError:
        return printable(stamp, 16)


def described(record: JobRecord, status: Status) -> Iterator[str]:
    """All about one job."""
    git = record.git or {}
    commit = f"{git.get('commit', '?')}{' with local changes' if git.get('is_changed') else ''}"
    rows = {
        "job": f"{record.key}  {record.name}",
        "state": f"{state_words(status)}{f': {status.detail}' if status.detail else ''}",
        record.backend: record.id,
        "config": f"{record.kind}  {record.config}",
        "output": record.output,
        "submitted": f"{local_time(record.submitted)} by {record.user}@{record.host} in {record.directory}",
        "commit": commit if record.git else "no git repository",
        "command": " ".join(map(str, record.argv)),
        **record.details,
    }
    width = max(map(len, rows))
    for name, text in rows.items():
        yield f"{printable(name, _MAX_CHARS):<{width}}  {printable(str(text), 2000)}"


def main() -> None:
    app()
