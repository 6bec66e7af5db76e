"""Keeps `OUT/STATUS.md`: the state of a run in a page of Markdown, for people and for agents."""

from __future__ import annotations

import contextlib
import shlex
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from datetime import datetime

from prime_rl.history.run import RunHistory
from prime_rl.launch.logs import polled
from prime_rl.run.paths import RunPaths
from prime_rl.utils.errors import UserError
from prime_rl.utils.files import replacing_file
from prime_rl.watch.facts import Doing, Figure, Overview, Reader
from prime_rl.watch.progress import clock, printable, shown_clock, steps_words

LOOK_EVERY_S = 5.0
REFRESH_EVERY_S = 60.0
"""The file is written this often even if nothing has changed, so that its time shows whether the launcher lives."""


def status_page(overview: Overview, how_to_continue: str = "", command_prefix: str = "") -> str:
    """The page. Names and words of a run's files stand in code, so that none of them is read as Markdown."""
    return "\n".join(
        [
            f"# {_code(overview.name)}: {_headline(overview)}",
            "",
            *_timing(overview),
            *_figures(overview),
            *_processes(overview),
            *_notices(overview),
            *_commands(overview, how_to_continue, command_prefix),
            *_files(overview),
        ]
    )


def _headline(overview: Overview) -> str:
    return ", ".join(filter(None, (overview.kind, overview.state.name, overview.step_words)))


def _timing(overview: Overview) -> Iterator[str]:
    written = datetime.fromtimestamp(overview.now_s).astimezone().isoformat(timespec="seconds", sep=" ")
    if overview.is_running:
        yield (
            f"Written {written} by the launcher ({overview.state.detail}), which writes it again within "
            f"{LOOK_EVERY_S:.0f} s of a change, and every {REFRESH_EVERY_S:.0f} s. If that was more than two "
            "minutes ago, the launcher was killed."
        )
    else:
        yield f"Written {written} at the end of the run."
    yield ""
    if overview.state.detail and not overview.is_running:
        yield from (f"Why it ended: {_code(overview.state.detail)}", "")
    for line in () if overview.attempt is None else overview.attempt.lost:
        yield from (f"Warning: {_code(printable(line))}", "")
    times = [f"{clock(overview.elapsed_s)} elapsed"]
    if overview.left_s is not None:
        times.append(f"about {clock(overview.left_s)} left")
    if overview.attempt is not None:
        times.append(f"attempt {overview.attempt.number}")
    yield from (", ".join(times), "")


def _figures(overview: Overview) -> Iterator[str]:
    figures = (
        *overview.learning[:1],
        *overview.parts,
        *overview.learning[1:],
        *overview.running,
        *overview.judges,
        *overview.evals,
    )
    if figures:
        yield from ("| metric | first | last |", "|---|---|---|")
        yield from (_row(each) for each in figures)
        yield ""
    if overview.progress:
        yield from ("| environment | weights | rollouts | scores |", "|---|---|---|---|")
        for each in overview.progress:
            total = "" if each.total is None else f" of {each.total}"
            scores = ", ".join(f"{name} {value:.3f}" for name, value in each.scores.items())
            yield f"| {_code(each.env)} | {each.weights} | {each.done}{total} | {scores} |"
        yield ""
    if overview.rows:
        yield from ("Rows: " + ", ".join(f"{count} {name}" for name, count in overview.rows.items()) + ".", "")


def _row(figure: Figure) -> str:
    return f"| {_code(figure.label)} | {figure.words(figure.first)} | {figure.words(figure.last)} |"


def _processes(overview: Overview) -> Iterator[str]:
    if overview.state.name == "complete" or not overview.processes:
        return
    yield from ("## Processes", "")
    for each in overview.processes:
        yield f"- {_code(each.name)}: {_doing(each)}"
    yield ""


def _doing(each: Doing) -> str:
    waits = f" (waits for {_code(each.waits_for)})" if each.waits_for is not None else ""
    return f"{_code(each.words)}, since {shown_clock(each.at_s)}{waits}"


def _notices(overview: Overview) -> Iterator[str]:
    if overview.notices:
        yield from ("## Last warnings and errors", "")
        for each in overview.notices:
            yield f"- {each.clock} {each.level} in {_code(str(each.log))}: {_code(each.words)}"
        yield ""


def _commands(overview: Overview, how_to_continue: str, command_prefix: str) -> Iterator[str]:
    run = shlex.quote(str(overview.directory))
    yield from ("## Commands", "", "```bash")
    yield f"{command_prefix}medarc_train watch {run}    # look closer; --once, --json"
    if overview.kind != "eval":
        yield f"{command_prefix}medarc_train explain {run}    # where each config value comes from"
    if overview.is_running:
        if overview.kind != "eval":
            yield f"touch {shlex.quote(str(overview.directory / 'save'))}    # save a checkpoint now"
        yield _stop(overview)
    yield from ("```", "")
    was_refused = overview.attempt is not None and overview.attempt.result == "refused"
    if how_to_continue and not was_refused and not overview.is_running and overview.state.name != "complete":
        first, _, command = how_to_continue.partition("\n")
        yield from ((f"{first}:", "", "```bash", command.strip(), "```", "") if command else (f"{first}.", ""))


def _stop(overview: Overview) -> str:
    holder = overview.holder
    if holder is not None and holder.slurm_job:
        return f"scancel {shlex.quote(holder.slurm_job)}    # stop, and save a checkpoint if one is configured"
    if holder is not None:
        return f"kill -INT {holder.pid}    # on {holder.host}: stop, and save a checkpoint if one is configured"
    return ""


def _files(overview: Overview) -> Iterator[str]:
    root = overview.directory
    paths = RunPaths(root)
    yield from ("## Files", "")
    yield from (f"- {_code(str(log))}" for log in overview.logs)
    yield from (f"- {_code(str(file))}" for file in (paths.metrics, paths.config(overview.kind)) if file.is_file())
    if overview.checkpoints:
        yield f"- checkpoints in {_code(str(paths.checkpoints))}: {steps_words(overview.checkpoints)}"
    if overview.weights:
        yield f"- weights in {_code(str(paths.weights))}: {steps_words(overview.weights)}"
    yield ""


def _code(text: str) -> str:
    """Text as Markdown code on one line, which ends no table cell and no code early."""
    return f"`{text.replace('`', chr(39)).replace('|', '/')}`"


@dataclass
class StatusFile:
    """Writes the page of one launch."""

    paths: RunPaths
    how_to_continue: Callable[[], str] = lambda: ""
    now_s: Callable[[], float] = time.time
    command_prefix: str = ""
    _reader: Reader | None = field(default=None, init=False)
    _written: str = field(default="", init=False)
    _written_s: float = field(default=0.0, init=False)

    def look(self) -> None:
        """Write the page if it has changed, or if it was not written for `REFRESH_EVERY_S`."""
        # A full disk must not end the run, and a directory that is not complete yet has no state.
        with contextlib.suppress(OSError, UserError):
            if self._reader is None:
                self._reader = Reader(RunHistory.open(self.paths.root), look_at_gpus=False)
            overview = self._reader.read(self.now_s())
            page = self._page(overview)
            timeless = self._page(replace(overview, now_s=0.0, elapsed_s=0.0, left_s=None))
            if timeless != self._written or overview.now_s - self._written_s >= REFRESH_EVERY_S:
                with replacing_file(self.paths.status) as scratch:
                    scratch.write_text(page, encoding="utf-8")
                self._written, self._written_s = timeless, overview.now_s

    def _page(self, overview: Overview) -> str:
        return status_page(overview, self.how_to_continue(), self.command_prefix)


@contextlib.contextmanager
def kept(status: StatusFile) -> Iterator[None]:
    """Keep the page current during the block, and write it once more after it."""
    with polled(status.look, name="status", every_s=LOOK_EVERY_S):
        yield
