"""The job log: one small private file for each job that this user submitted from this machine, and the jobs' output."""

from __future__ import annotations

import getpass
import json
import os
import re
import secrets
import socket
import stat
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, BinaryIO, Literal, get_args

from medarc_rl.cli import say, warn
from medarc_rl.errors import MedarcError, UsageError
from prime_rl.utils.errors import NotPrivate
from prime_rl.utils.files import naming
from prime_rl.utils.private import home_directory, is_secret_name, private_directory

# Secrets in command lines and other texts, which the log must not hold.


HIDDEN = "***"

_FLAGS = {"--auto-auth", "--no-auto-auth"}
"""Options that take no value, though their names look like secrets."""
_REFERENCES = {"--kms-key", "--pull-secret", "--secret", "--secret-env"}
"""Options whose values only name a secret, or where it is kept."""

_SHAPES = re.compile(
    r"\b(?:hf_[A-Za-z0-9]{16,}|sk-[A-Za-z0-9_-]{16,}|gh[pousr]_[A-Za-z0-9]{16,}|github_pat_\w{16,}|xox[a-z]-[\w-]{10,}"
    r"|(?:AKIA|ASIA)[A-Z0-9]{16}|glpat-[\w-]{16,}|eyJ[\w-]{8,}\.eyJ[\w-]{8,}\.[\w-]+)"
)
"""Matches tokens of known services."""
_BEARER = re.compile(r"(?<=\bBearer )[^\s\"']+", re.IGNORECASE)
_USER_IN_URL = re.compile(r"(?<=://)[^/@\s]+(?=@)")
_QUERY = re.compile(r"(?<=[?&])([\w.-]*(?:key|secret|sig|signature|token))=[^&\s]+", re.IGNORECASE)
_SHORTEST = 8
"""Characters of the shortest value of a variable that is looked for in other texts."""
_SHORTEST_LINE = 16
"""Characters of the shortest line that is looked for, of a value with several lines, such as a private key."""


def secrets_of(env: Mapping[str, str]) -> list[str]:
    """The values of an environment that are secrets, as their names tell, and their lines. The longest comes first."""
    values = [value.strip() for name, value in env.items() if is_secret_name(name)]
    # Paths such as SSH_AUTH_SOCK are not secrets.
    found = {value for value in values if len(value) >= _SHORTEST and not value.startswith("/")}
    lines = {line.strip() for value in values if "\n" in value for line in value.splitlines()}
    return sorted(found | {line for line in lines if len(line) >= _SHORTEST_LINE}, key=len, reverse=True)


def redacted(text: str, env: Mapping[str, str] = os.environ) -> str:
    """A text without the tokens of known services, passwords in URLs, and values of secret variables."""
    for value in secrets_of(env):
        text = text.replace(value, HIDDEN)
    for pattern in (_SHAPES, _BEARER, _USER_IN_URL):
        text = pattern.sub(HIDDEN, text)
    return _QUERY.sub(rf"\1={HIDDEN}", text)


def redacted_argv(argv: Sequence[str], env: Mapping[str, str] = os.environ) -> list[str]:
    """The words of a command line. Values of options whose names mean a secret are hidden, too."""
    return list(_redacted_words(argv, env))


def _redacted_words(argv: Sequence[str], env: Mapping[str, str]) -> Iterator[str]:
    before = ""
    for word in argv:
        option, equals, value = word.partition("=")
        if _takes_secret(before) and not word.startswith("--"):
            yield HIDDEN
        elif _REFERENCES & {before, option}:
            yield redacted(word, env)
        elif equals and is_secret_name(option):
            yield f"{option}={HIDDEN}"
        elif "=" in value and is_secret_name(value.partition("=")[0]):
            # `--env=NAME=VALUE` holds two names.
            yield f"{option}={value.partition('=')[0]}={HIDDEN}"
        else:
            yield redacted(word, env)
        before = word


def _takes_secret(option: str) -> bool:
    """Whether the word after this option is a secret."""
    bare = option.startswith("--") and "=" not in option
    return bare and option not in _FLAGS | _REFERENCES and is_secret_name(option)


State = Literal["queued", "running", "succeeded", "failed", "stopped", "cancelled", "unknown"]
"""`stopped`: it saved and stopped, as before its time limit, and can be resumed."""
STATES: tuple[State, ...] = get_args(State)
FORMAT = 1
"""Changes when a record's layout does."""
LAST = "last"
"""Names the newest job."""
_ENDING = ".json"
_MAX_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Status:
    """The state of a job, from its back-end."""

    state: State
    detail: str = ""
    """One line: why it waits, where it runs, or why it ended."""

    @property
    def has_ended(self) -> bool:
        return self.state in ("succeeded", "failed", "stopped", "cancelled")

    @property
    def goes_on(self) -> bool:
        """Neither ended nor unknown: more output may come."""
        return self.state in ("queued", "running")


@dataclass(frozen=True, kw_only=True)
class JobRecord:
    """One job. It holds no secret: the command line is redacted."""

    key: str
    """Its name in the log, short and unique for this user."""
    name: str
    backend: str
    """`slurm`, `ray`, `kubernetes` or `sagemaker`."""
    id: str
    """The back-end's id of the job."""
    kind: str
    """`sft`, `rl` or `eval`."""
    config: str
    """The TOML files, as typed; several are separated by spaces."""
    output: str
    """The run's directory, or its s3:// prefix."""
    argv: Sequence[str]
    git: Mapping[str, Any] | None = None
    """Commit of the directory that the job was submitted from, and whether tracked files were changed."""
    user: str = ""
    host: str = ""
    directory: str = ""
    submitted: str = ""
    """UTC, as in 2026-11-22T18:00:00+00:00."""
    details: Mapping[str, str] = field(default_factory=dict)
    """Values with which the back-end finds the job again: a namespace, an address, a log file. No secret."""
    cancelled: str = ""
    """When the user cancelled it: a back-end may not know it any more then."""
    ended: Mapping[str, str] | None = None
    """`state`, `detail` and `seen` of a job that was seen to have ended. Back-ends forget their jobs."""

    @property
    def last_status(self) -> Status | None:
        """The job's last state, if it was seen to have ended."""
        if self.ended is None:
            return None
        state: State = next((each for each in STATES if each == self.ended.get("state")), "unknown")
        return Status(state, str(self.ended.get("detail", "")))

    def with_cancelling(self) -> JobRecord:
        return replace(self, cancelled=now())

    def with_end(self, status: Status) -> JobRecord:
        return replace(self, ended={"state": status.state, "detail": status.detail, "seen": now()})

    def to_table(self) -> dict[str, Any]:
        """Ready for JSON."""
        return {"format": FORMAT, **asdict(self), "argv": list(self.argv)}

    @classmethod
    def from_table(cls, table: Any) -> JobRecord:
        """Raises MedarcError."""
        if not isinstance(table, dict) or table.get("format") != FORMAT:
            raise MedarcError("not a job record of this version")
        known = {each.name: table[each.name] for each in fields(cls) if each.name in table}
        texts = ("key", "name", "backend", "id", "kind", "config", "output", "submitted")
        wrong = [name for name in texts if not isinstance(known.get(name), str)]
        wrong += [name for name in ("details", "git", "ended") if not isinstance(known.get(name), dict | None)]
        if not isinstance(known.get("argv"), list):
            wrong.append("argv")
        if wrong:
            raise MedarcError(f"{wrong[0]} is missing or of another type")
        details = {str(name): str(value) for name, value in (known.get("details") or {}).items()}
        return cls(**{**known, "details": details})


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def circumstances(program: str) -> dict[str, Any]:
    """Fields of a record that describe this process: a new key, command line, user, host, directory, time, commit."""
    from prime_rl.history.attempts import git_state

    directory = Path.cwd()
    return {
        "key": secrets.token_hex(4),
        "argv": redacted_argv([program, *sys.argv[1:]]),
        "user": _user(),
        "host": socket.gethostname(),
        "directory": str(directory),
        "submitted": now(),
        "git": git_state(directory),
    }


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container's user without a name
        return str(os.getuid())


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
            self.directory.parent.mkdir(parents=True, exist_ok=True)
            private_directory(self.directory)
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
        except MedarcError:
            return record

    def _file(self, record: JobRecord) -> Path:
        stamp = re.sub(r"[^0-9]", "", record.submitted)[:14]
        return self.directory / f"{stamp}-{record.key}{_ENDING}"

    def read(self) -> tuple[list[JobRecord], list[str]]:
        """All records, newest first, and one line for each file that is not a record."""
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
            except MedarcError as fault:
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
        # A key is unique and wins over an id, which wins over a name.
        for field_name in ("key", "id", "name"):
            found = next((record for record in records if getattr(record, field_name) == name), None)
            if found is not None:
                return found
        raise UsageError(f"{name!r}: no such job in the job log; `medarc_jobs list` shows names, keys and ids")


def record_job(record: JobRecord) -> bool:
    """Add a job that was submitted to the job log. If the log cannot be written, print a warning."""
    try:
        JobLog.of_user().save(record)
    except MedarcError as error:
        warn(f"the job was submitted, but not recorded: {error}")
        return False
    say(f"job {record.key}: medarc_jobs status|logs|cancel|wait {record.key}")
    return True


def config_files(words: Sequence[str]) -> str:
    """The TOML files among the words of a command line, as typed."""
    # `--key=x.toml` sets a key.
    files = (word.removeprefix("@") for word in words if not word.startswith("-"))
    return " ".join(file for file in files if file.endswith(".toml"))


def _read(file: Path) -> JobRecord:
    """Raises MedarcError."""
    try:
        content = _content(file)
    except OSError as error:
        raise MedarcError(str(error.strerror)) from error
    if len(content) > _MAX_BYTES:
        raise MedarcError("larger than 1 MiB")
    try:
        table = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise MedarcError("damaged") from error
    return JobRecord.from_table(table)


def _content(file: Path) -> bytes:
    """The beginning of a file that is this user's own. Raises MedarcError or OSError."""
    descriptor = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.getuid():
            raise MedarcError("no file of this user")
        with os.fdopen(descriptor, "rb", closefd=False) as reading:
            return reading.read(_MAX_BYTES + 1)
    finally:
        os.close(descriptor)


# A job's log file, read to its end or followed until the job has ended.


LOOK_EVERY_S = 0.5
ASK_EVERY = 6
"""Looks without a new line between two questions whether the job has ended."""
_CHUNK_BYTES = 1 << 16
_LONGEST_LINE_BYTES = 1 << 20
"""A longer line is cut into several."""


def log_lines(log: Path, follow: bool, status: Callable[[], Status]) -> Iterator[str]:
    """The lines of a job's log file. Following ends when the job does.

    Raises:
        MedarcError: there is no such file, or it cannot be read.
    """
    if not follow and not log.is_file():
        found = status()
        raise MedarcError(f"{log}: no log yet: the job is {found.state}{f': {found.detail}' if found.detail else ''}")
    return follow_file(log, lambda: not follow or not status().goes_on)


def follow_file(
    path: Path, has_ended: Callable[[], bool], pause: Callable[[float], object] = time.sleep
) -> Iterator[str]:
    """The lines of a file. Once `has_ended` is true, the iteration ends with the lines that were written before.

    The file may not exist yet, and may be replaced by a new one or cut. Raises MedarcError if it cannot be read.
    """
    reader, quiet = _Reader(path), 0
    while True:
        if (lines := reader.read()) is not None:
            yield from lines
            quiet = 0
            continue
        if quiet % ASK_EVERY == 0 and has_ended():
            while (lines := reader.read()) is not None:
                yield from lines
            yield from reader.rest()
            return
        quiet += 1
        pause(LOOK_EVERY_S)


class _Reader:
    """Reads what is new in a file, a piece at a time: a log may be larger than the memory."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.begun = b""
        self._file: BinaryIO | None = None

    def read(self) -> list[str] | None:
        """The whole lines of the next piece; None if there is nothing new."""
        file = self._opened()
        chunk = b"" if file is None else file.read(_CHUNK_BYTES)
        if not chunk:
            return None
        *lines, self.begun = (self.begun + chunk).split(b"\n")
        if len(self.begun) > _LONGEST_LINE_BYTES:
            lines, self.begun = [*lines, self.begun], b""
        return [line.decode(errors="replace") for line in lines]

    def rest(self) -> list[str]:
        """The last line, if it has no end."""
        return [self.begun.decode(errors="replace")] if self.begun else []

    def _opened(self) -> BinaryIO | None:
        try:
            found = self.path.stat()
        except OSError:
            return self._file
        if self._file is not None:
            here = os.fstat(self._file.fileno())
            if (here.st_ino, here.st_dev) == (found.st_ino, found.st_dev) and found.st_size >= self._file.tell():
                return self._file
            self._file.close()
            self.begun = b""
        try:
            self._file = self.path.open("rb")
        except FileNotFoundError:
            self._file = None
        except OSError as error:
            raise MedarcError(f"{self.path}: {error.strerror}") from error
        return self._file
