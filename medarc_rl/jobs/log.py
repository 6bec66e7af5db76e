"""The job log: one small private file for each job that this user submitted from this machine."""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Mapping, Sequence
from pathlib import Path

from medarc_rl.errors import MedarcError, UsageError
from medarc_rl.jobs.record import JobRecord, NotARecord
from prime_rl.utils.errors import NotPrivate
from prime_rl.utils.files import naming
from prime_rl.utils.private import home_directory, private_directory

LAST = "last"
"""Names the newest job."""
_ENDING = ".json"
_MAX_BYTES = 1 << 20


class JobLog:
    """The records of one directory. Several processes may add records at once."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    @classmethod
    def of_user(cls, env: Mapping[str, str] = os.environ) -> JobLog:
        """`$XDG_STATE_HOME/medarc-rl/jobs`, or else `~/.local/state/medarc-rl/jobs`."""
        state = Path(env.get("XDG_STATE_HOME") or home_directory() / ".local" / "state")
        return cls(state.absolute() / "medarc-rl" / "jobs")

    def save(self, record: JobRecord) -> Path:
        """Write a record, or replace it. Raises MedarcError if it cannot be written."""
        target = self._file(record)
        # Its name is this process's own, because two may see the end of one job.
        scratch = target.with_name(f".{target.name}.{os.getpid()}.tmp")
        try:
            self._prepare()
            descriptor = os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
            with naming(target), os.fdopen(descriptor, "w", encoding="utf-8", errors="backslashreplace") as writing:
                json.dump(record.to_table(), writing, indent=1)
                writing.flush()
                os.fsync(writing.fileno())
            scratch.replace(target)
        except NotPrivate as error:
            raise MedarcError(f"the job log cannot be written: {error}") from error
        except OSError as error:
            scratch.unlink(missing_ok=True)
            raise MedarcError(f"the job log cannot be written: {error.filename}: {error.strerror}") from error
        return target

    def latest(self, record: JobRecord) -> JobRecord:
        """The record as the log has it now: another process may have cancelled the job meanwhile."""
        try:
            return _read(self._file(record))
        except NotARecord:
            return record

    def _file(self, record: JobRecord) -> Path:
        stamp = re.sub(r"[^0-9]", "", record.submitted)[:14]
        return self.directory / f"{stamp}-{record.key}{_ENDING}"

    def _prepare(self) -> None:
        self.directory.parent.mkdir(parents=True, exist_ok=True)
        private_directory(self.directory)

    def read(self) -> tuple[list[JobRecord], list[str]]:
        """All records, the newest first, and one line for each file that is none."""
        records, faults = [], []
        try:
            files = sorted(path for path in self.directory.iterdir() if path.suffix == _ENDING)
        except FileNotFoundError:
            return [], []
        except OSError as error:
            raise MedarcError(f"the job log cannot be read: {error.filename}: {error.strerror}") from error
        for file in files:
            try:
                records.append(_read(file))
            except NotARecord as fault:
                faults.append(f"{file.name} in the job log is left out: {fault}")
        # Jobs of the same second are in the order of their files.
        return sorted(records, key=lambda record: record.submitted, reverse=True), faults

    def find(self, name: str) -> JobRecord:
        """The newest job with this key, back-end's id or name; or the newest of all, for `last`.

        Raises:
            UsageError: there is none.
        """
        records, _ = self.read()
        if name == LAST and records:
            return records[0]
        for fits in (_has_key, _has_id, _has_name):
            found = next((record for record in records if fits(record, name)), None)
            if found is not None:
                return found
        raise UsageError(f"{name!r}: no such job in the job log; `medarc_jobs list` shows names, keys and ids")


def _has_key(record: JobRecord, name: str) -> bool:
    return record.key == name


def _has_id(record: JobRecord, name: str) -> bool:
    return record.id == name


def _has_name(record: JobRecord, name: str) -> bool:
    return record.name == name


def _read(file: Path) -> JobRecord:
    """Raises NotARecord."""
    try:
        content = _content(file)
    except OSError as error:
        raise NotARecord(str(error.strerror)) from error
    if len(content) > _MAX_BYTES:
        raise NotARecord("larger than 1 MiB")
    try:
        table = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise NotARecord("damaged") from error
    return JobRecord.from_table(table)


def _content(file: Path) -> bytes:
    """The beginning of a file that is this user's own. Raises NotARecord or OSError."""
    descriptor = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.getuid():
            raise NotARecord("no file of this user")
        with os.fdopen(descriptor, "rb", closefd=False) as reading:
            return reading.read(_MAX_BYTES + 1)
    finally:
        os.close(descriptor)


def config_files(words: Sequence[str]) -> str:
    """The TOML files among the words of a command line, as typed."""
    return " ".join(word for word in (each.removeprefix("@") for each in words) if word.endswith(".toml"))
