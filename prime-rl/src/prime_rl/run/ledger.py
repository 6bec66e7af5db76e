"""The ledger of a run: every example that the orchestrator drew, and what became of it.

`RUN/ledger.jsonl` grows by one JSON object per event, about 150 bytes for an example that is trained on:

    {"started": 3, "from_bytes": 812, "draws": 9}    an attempt starts with step 3 and undoes what follows byte 812
    {"drawn": 9, "env": "letters", "row": 5, "id": "9f86d081884c7d65"}
    {"requeued": 9, "reason": "5 weight updates"}
    {"finished": 9, "reward": 0.5}
    {"trained": [9, 11], "step": 3}
    {"dropped": 10, "reason": "equal rewards"}
    {"saved": 4}                                     the orchestrator's checkpoint of step 4 holds the size up to here

Draws have consecutive numbers. `python -m prime_rl.run.ledger OUT` reads the ledger and exits with 1 if a draw was
skipped or trained on twice.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from prime_rl.run.paths import OrchestratorPaths, RunPaths
from prime_rl.utils.signals import start_program

ID_LENGTH = 16
"""Hexadecimal digits of an example's fingerprint that the ledger keeps."""


class Ledger:
    """Appends to the ledger of a run. A crash may cut off the last line; readers skip it.

    Without a path it records nothing, as for the buffer of a validation. All methods raise OSError if the file cannot
    be written.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        self._followers: list[Callable[[Mapping[str, Any]], None]] = []
        self._file: int | None = None
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
            self._end_torn_line(self._file)

    def follow(self, follower: Callable[[Mapping[str, Any]], None]) -> None:
        """Call `follower` with every event that is recorded."""
        self._followers.append(follower)

    def start(self, step: int, from_bytes: int, draws: int) -> None:
        """Begin an attempt at `step`, after `draws` draws. What was recorded after `from_bytes` is undone."""
        self._append({"started": step, "from_bytes": from_bytes, "draws": draws})

    def drawn(self, draw: int, env: str, row: int, fingerprint: str) -> None:
        self._append({"drawn": draw, "env": env, "row": row, "id": fingerprint[:ID_LENGTH]})

    def requeued(self, draw: int | None, reason: str) -> None:
        """The group of a draw was cancelled or failed, and is attempted again."""
        self._append_of(draw, {"requeued": draw, "reason": reason})

    def finished(self, draw: int | None, reward: float) -> None:
        """The group of a draw is complete, with this mean reward."""
        self._append_of(draw, {"finished": draw, "reward": round(reward, 4)})

    def trained(self, draws: Iterable[int | None], step: int) -> None:
        """The batch of `step`, with the groups of `draws`, is on its way to the trainer."""
        self._append({"trained": [draw for draw in draws if draw is not None], "step": step})

    def dropped(self, draw: int | None, reason: str) -> None:
        """The draw will not be trained on."""
        self._append_of(draw, {"dropped": draw, "reason": reason})

    def save(self, step: int) -> int:
        """Record a checkpoint of `step` and flush to disk. Returns the size of the ledger in bytes."""
        if self._file is None:
            return 0
        self._append({"saved": step})
        os.fsync(self._file)
        return os.fstat(self._file).st_size

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _append(self, record: dict[str, Any]) -> None:
        for follower in self._followers:
            follower(record)
        if self._file is None:
            return
        line = memoryview(json.dumps(record, separators=(",", ":")).encode() + b"\n")
        # A nearly full disk takes a part of a line; the next write says why.
        try:
            while line:
                line = line[os.write(self._file, line) :]
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self._path)) from error

    def _append_of(self, draw: int | None, record: dict[str, Any]) -> None:
        # Examples in the checkpoints of older versions have no number.
        if draw is not None:
            self._append(record)

    @staticmethod
    def _end_torn_line(file: int) -> None:
        size_bytes = os.fstat(file).st_size
        if size_bytes and os.pread(file, 1, size_bytes - 1) != b"\n":
            os.write(file, b"\n")


@dataclass(slots=True)
class Draw:
    """Fate of one draw."""

    env: str
    row: int
    steps: list[int] = field(default_factory=list)
    """Steps that trained on it."""
    drop_reason: str | None = None


@dataclass(slots=True)
class Account:
    """The ledger without the events that a resume has undone."""

    draws: dict[int, Draw] = field(default_factory=dict)
    """By number. After a resume with `skip_buffer`, only the draws of the new buffer."""
    open: set[int] = field(default_factory=set)
    """Draws that were neither trained on nor dropped."""
    starts: int = 0
    """Attempts, also those that were undone."""
    last_step: int = -1
    """The last step whose batch was sent."""
    saved_step: int | None = None
    """Step of the last checkpoint."""
    saved_bytes: int = 0
    """Size of the ledger at the last checkpoint."""
    saved_open: frozenset[int] = frozenset()
    """Draws that were open at the last checkpoint."""
    first_draw: int = 0
    requeued: Counter[str] = field(default_factory=Counter)
    dropped: Counter[str] = field(default_factory=Counter)
    num_trained: int = 0
    num_drawn: int = 0
    faults: list[str] = field(default_factory=list)
    """Events that contradict each other."""

    @property
    def twice(self) -> list[int]:
        """Draws that were trained on more than once, or trained on and dropped."""
        return [n for n, draw in self.draws.items() if len(draw.steps) + (draw.drop_reason is not None) > 1]

    @property
    def skipped(self) -> list[int]:
        """Numbers that were never drawn although later ones were."""
        return sorted(set(range(self.first_draw, max(self.draws, default=-1) + 1)) - set(self.draws))


def read_ledger(path: Path) -> Account:
    """Read a ledger. A cut-off last line and what resumes have undone do not count.

    Raises:
        FileNotFoundError: there is no ledger.
    """
    account = Account()
    with path.open("rb") as file:
        for begin, end in _kept_parts(path, account):
            file.seek(begin)
            while (offset := file.tell()) < end:
                _enter(account, file.readline(), offset, file.tell())
    return account


def check_ledger(paths: OrchestratorPaths) -> tuple[Account, list[str]]:
    """Read a run's ledger and compare it with the newest checkpoint's examples in flight.

    Returns:
        The account, and one line for each fault: a draw that was skipped, trained on twice, or lost by the checkpoint.

    Raises:
        FileNotFoundError: there is no ledger.
    """
    account = read_ledger(paths.ledger)
    faults = list(account.faults)
    if account.skipped:
        faults.append(f"draws that were skipped: {_list(account.skipped)}")
    if account.twice:
        faults.append(f"draws that were used twice: {_list(account.twice)}")
    faults += _checkpoint_faults(paths, account)
    return account, faults


def report(account: Account, faults: Sequence[str]) -> str:
    """The account in a few lines."""
    lines = [
        f"{account.starts} starts, trained up to step {account.last_step}",
        f"{account.num_drawn} draws: {account.num_trained} trained on, {sum(account.dropped.values())} dropped, "
        f"{len(account.open)} in flight",
        *(f"  dropped: {count} ({reason})" for reason, count in account.dropped.most_common()),
        *(f"  attempted again: {count} ({reason})" for reason, count in account.requeued.most_common()),
        f"{len(account.skipped)} skipped, {len(account.twice)} used twice",
    ]
    return "\n".join([*lines, *(f"fault: {fault}" for fault in faults)]) + "\n"


def _kept_parts(path: Path, account: Account) -> list[tuple[int, int]]:
    """Ranges of bytes that led to the last attempt: of each attempt, those up to where the next one went on from."""
    starts: list[tuple[int, int]] = []
    end = 0
    with path.open("rb") as file:
        for line in file:
            if line.startswith(b'{"started":'):
                match _parse(line):
                    case {"from_bytes": int(from_bytes)}:
                        starts.append((end, min(from_bytes, end)))
            end += len(line)
    account.starts = len(starts)
    parts: list[tuple[int, int]] = []
    for offset, from_bytes in reversed(starts):
        # An attempt may continue an older one; those in between do not count.
        if offset < end:
            parts.append((offset, end))
            end = from_bytes
    return parts[::-1]


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        record = json.loads(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) and line.endswith(b"\n") else None


def _enter(account: Account, line: bytes, offset: int, end: int) -> None:
    match _parse(line):
        case {"started": int(step), "draws": int(draws)}:
            _start(account, step, draws)
        case {"drawn": int(number), "env": str(env), "row": int(row)}:
            if number in account.draws:
                account.faults.append(f"draw {number} was drawn twice")
            account.draws[number] = Draw(env, row)
            account.open.add(number)
            account.num_drawn += 1
        case {"requeued": int(number), "reason": str(reason)}:
            account.requeued[reason] += 1
            _of(account, number, "attempted again")
        case {"finished": int(number)}:
            _of(account, number, "finished")
        case {"trained": [*numbers], "step": int(step)}:
            account.last_step = step
            account.num_trained += len(numbers)
            for number in numbers:
                _of(account, number, "trained on").steps.append(step)
            account.open.difference_update(numbers)
        case {"dropped": int(number), "reason": str(reason)}:
            account.dropped[reason] += 1
            _of(account, number, "dropped").drop_reason = reason
            account.open.discard(number)
        case {"saved": int(step)}:
            account.saved_step, account.saved_bytes, account.saved_open = step, end, frozenset(account.open)
        case None if not line.endswith(b"\n") or not line.strip():
            pass
        case _:
            account.faults.append(f"byte {offset} begins a line that cannot be read")


def _start(account: Account, step: int, draws: int) -> None:
    if not account.draws:
        account.first_draw = draws
    elif draws == 0:
        # A new buffer: its draws have the numbers of the old one again.
        account.dropped["a new buffer"] += len(account.open)
        account.draws, account.open, account.first_draw = {}, set(), 0
    elif draws != (drawn := max(account.draws) + 1):
        account.faults.append(f"step {step} was resumed with draw {draws} as the next, not {drawn}")


def _of(account: Account, number: int, event: str) -> Draw:
    if number not in account.draws:
        account.faults.append(f"draw {number} was {event}, but never drawn")
        account.draws[number] = Draw("", -1)
    return account.draws[number]


def _checkpoint_faults(paths: OrchestratorPaths, account: Account) -> Iterator[str]:
    if account.saved_step is None:
        return
    try:
        progress = json.loads(paths.saved_progress(account.saved_step).read_text())
        waiting = json.loads(paths.saved_buffer(account.saved_step).read_text())["waiting"]
    except FileNotFoundError:
        # Stopped while saving, or deleted with old checkpoints.
        return
    if progress.get("ledger_bytes") != account.saved_bytes:
        return
    saved = {example.get("draw") for example in waiting} - {None}
    step = f"the checkpoint of step {account.saved_step}"
    if lost := sorted(account.saved_open - saved):
        yield f"{step} lost draws: {_list(lost)}"
    if again := sorted(saved - account.saved_open):
        yield f"{step} would repeat draws: {_list(again)}"


def _list(numbers: Sequence[int], most: int = 10) -> str:
    return ", ".join(map(str, numbers[:most])) + (f" and {len(numbers) - most} more" if len(numbers) > most else "")


def main() -> None:
    start_program()
    parser = argparse.ArgumentParser(
        prog="python -m prime_rl.run.ledger",
        description=(
            "Shows what became of the examples of an RL run. The exit code is 1 if one was skipped or used twice."
        ),
    )
    parser.add_argument("out", metavar="OUT", type=Path, help="directory of the run")
    paths = RunPaths(parser.parse_args().out).orchestrator
    try:
        account, faults = check_ledger(paths)
    except OSError as error:
        parser.error(f"{paths.ledger} cannot be read: {error.strerror}")
    sys.stdout.write(report(account, faults))
    sys.exit(1 if faults else 0)


if __name__ == "__main__":
    main()
