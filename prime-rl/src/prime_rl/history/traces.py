"""Merges the traces of a run's processes and attempts into one file for Perfetto and chrome://tracing."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from prime_rl.run.paths import RunPaths
from prime_rl.run.process import is_replica
from prime_rl.utils.errors import UserError
from prime_rl.utils.files import replacing_file

Event = dict[str, Any]
_KINDS = frozenset("MXBEibne")
_ORDER = ("orchestrator", "evaluator", "inference", "trainer")
"""Processes that come first in the viewer, in this order."""


@dataclass
class Summary:
    """Summary of the merge."""

    processes: int = 0
    events: int = 0
    damaged_lines: int = 0
    """Lines that were left out, such as the one that a process was writing when it was killed."""
    duration_s: float = 0.0


@dataclass
class _Span:
    """The times of all traces, in microseconds."""

    first_us: int
    last_us: int
    starts_us: list[int]
    """Starts of the attempts of each process, ascending."""

    def end_of_attempt(self, start_us: int) -> int:
        """When an attempt that began at `start_us` had surely ended: before the same process started again."""
        return min((each for each in self.starts_us if each > start_us), default=self.last_us)


def merge_traces(paths: RunPaths, target: Path) -> Summary:
    """Write all traces of a run to `target`, with times since the first event.

    Raises:
        UserError: the run has recorded none, or one of them cannot be read.
        OSError: `target` cannot be written.
    """
    files = sorted(paths.traces.glob("*.jsonl"), key=_rank)
    summary = Summary(processes=len(files))
    spans = {file: span for file in files if (span := _span_of(file)) is not None}
    if not spans:
        raise UserError(f"{paths.root} has no traces: start the run with --trace")
    first_us = min(span.first_us for span in spans.values())
    last_us = max(span.last_us for span in spans.values())
    summary.duration_s = (last_us - first_us) / 1e6
    with replacing_file(target) as scratch, scratch.open("w", encoding="utf-8") as out:
        out.write('{"displayTimeUnit":"ms","traceEvents":[')
        separator = "\n"
        for pid, (file, span) in enumerate(spans.items(), 1):
            span.last_us = last_us
            for event in _Process(pid, file, span, summary).events():
                event["ts"] -= first_us
                _write(out, separator, event)
                separator = ",\n"
                summary.events += event["ph"] != "M"
        out.write("\n]}\n")
        scratch.chmod(files[0].stat().st_mode & 0o777)  # the same users as the run
    return summary


def _write(out: TextIO, separator: str, event: Event) -> None:
    out.write(separator)
    json.dump(event, out, separators=(",", ":"))


@dataclass
class _Process:
    """Turns the events of one process into those of the merged file. Threads of one name share a row."""

    pid: int
    file: Path
    span: _Span
    summary: Summary
    attempt: int = 0
    attempt_start_us: int = 0
    rows: dict[str, int] = field(default_factory=dict)
    """Row by the name of its threads."""
    threads: dict[Any, int] = field(default_factory=dict)
    """Row by the id of a thread of this attempt."""
    open_blocks: list[Event] = field(default_factory=list)
    open_sessions: dict[tuple[str, str], Event] = field(default_factory=dict)

    def events(self) -> Iterator[Event]:
        yield self._named("process_name", 0, self.file.stem)
        yield {"ph": "M", "name": "process_sort_index", "pid": self.pid, "tid": 0, "ts": self.span.first_us} | {
            "args": {"sort_index": self.pid}
        }
        for event in _read(self.file, self.summary):
            if event["name"] == "process_name":
                yield from self._end_attempt()
                self.attempt += 1
                self.attempt_start_us = event["ts"]
                self.threads.clear()
            elif event["ph"] == "M":
                yield from self._take_thread(event)
            else:
                yield self._taken(event)
        yield from self._end_attempt()

    def _take_thread(self, event: Event) -> Iterator[Event]:
        args = event.get("args")
        name = str(args.get("name")) if isinstance(args, Mapping) else "thread"
        is_new = name not in self.rows
        self.threads[event["tid"]] = row = self.rows.setdefault(name, len(self.rows))
        if is_new:
            yield self._named("thread_name", row, name)

    def _taken(self, event: Event) -> Event:
        event |= {"pid": self.pid, "tid": self.threads.get(event["tid"], 0)}
        kind = event["ph"]
        if kind == "B":
            self.open_blocks.append(event)
        elif kind == "E" and self.open_blocks:
            self.open_blocks.pop()
        elif kind in "bne":
            # An attempt that resumes draws the same examples again.
            event["id"] = f"{self.attempt}:{event.get('id')}"
            key = (event["name"], event["id"])
            if kind == "b":
                self.open_sessions[key] = event
            elif kind == "e":
                self.open_sessions.pop(key, None)
        return event

    def _end_attempt(self) -> Iterator[Event]:
        """End what a process that was killed left open."""
        end_us = self.span.end_of_attempt(self.attempt_start_us)
        while self.open_blocks:
            begin = self.open_blocks.pop()
            yield {key: begin[key] for key in ("name", "pid", "tid")} | {"ph": "E", "ts": max(end_us, begin["ts"])}
        for begin in self.open_sessions.values():
            end = {"ph": "e", "ts": max(end_us, begin["ts"]), "args": {"status": "unfinished"}}
            yield {key: begin[key] for key in ("name", "cat", "id", "pid", "tid") if key in begin} | end
        self.open_sessions.clear()

    def _named(self, kind: str, row: int, name: str) -> Event:
        head: Event = {"ph": "M", "name": kind, "pid": self.pid, "tid": row, "ts": self.span.first_us}
        return head | {"args": {"name": name}}


def _rank(file: Path) -> tuple[int, str]:
    component = "inference" if is_replica(file.stem) else file.stem
    return (_ORDER.index(component) if component in _ORDER else len(_ORDER), file.stem)


def _span_of(file: Path) -> _Span | None:
    """First and last time in a trace; None if it has no event."""
    first_us, last_us, starts_us = None, 0, []
    for event in _read(file, Summary()):
        first_us = event["ts"] if first_us is None else min(first_us, event["ts"])
        last_us = max(last_us, event["ts"] + event.get("dur", 0))
        if event["name"] == "process_name":
            starts_us.append(event["ts"])
    return None if first_us is None else _Span(first_us, last_us, starts_us)


def _read(file: Path, summary: Summary) -> Iterator[Event]:
    """The events of a file. Lines that are no events are counted and left out, apart from one that is being written.

    Raises:
        UserError: the file cannot be read.
    """
    try:
        with file.open("rb") as lines:
            for line in lines:
                try:
                    event = json.loads(line)
                except (ValueError, RecursionError):
                    event = None
                if _is_event(event):
                    yield event
                elif line.strip() and line.endswith(b"\n"):
                    summary.damaged_lines += 1
    except OSError as error:
        raise UserError(f"{file} cannot be read: {error.strerror or error}") from error


def _is_event(event: Any) -> bool:
    return (
        isinstance(event, dict)
        and event.get("ph") in _KINDS
        and isinstance(event.get("name"), str)
        and type(event.get("ts")) is int
        and type(event.get("tid")) is int
        and type(event.get("dur", 0)) is int
        and 0 <= event["ts"] < 1 << 60
        and 0 <= event.get("dur", 0) < 1 << 60
    )
