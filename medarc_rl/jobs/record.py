"""What the job log keeps about one submitted job."""

from __future__ import annotations

import getpass
import os
import secrets
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, get_args

from medarc_rl.jobs.redaction import redacted_argv

State = Literal["queued", "running", "succeeded", "failed", "cancelled", "unknown"]
STATES: tuple[State, ...] = get_args(State)
FORMAT = 1
"""Changes when a record's layout does."""


class NotARecord(ValueError):
    """A file of the job log that is damaged, or another program's. The message is one line."""


@dataclass(frozen=True, slots=True)
class Status:
    """What became of a job, as its back-end tells."""

    state: State
    detail: str = ""
    """One line: why it waits, where it runs, or why it ended."""

    @property
    def has_ended(self) -> bool:
        return self.state in ("succeeded", "failed", "cancelled")


@dataclass(frozen=True, kw_only=True)
class JobRecord:
    """One job. It holds no secret: the command line is redacted."""

    key: str
    """Its name in the log, short and unique for this user."""
    name: str
    backend: str
    """`slurm`, `ray`, `kubernetes` or `sagemaker`."""
    id: str
    """How the back-end calls the job."""
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
    """What the back-end needs to find the job again: a namespace, an address, a log file. No secret."""
    cancelled: str = ""
    """When the user cancelled it: a back-end may not know it any more then."""
    ended: Mapping[str, str] | None = None
    """`state`, `detail` and `seen` of a job that was seen to have ended. Back-ends forget their jobs."""

    @property
    def last_status(self) -> Status | None:
        """How the job ended, if that is known."""
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
        """Raises NotARecord."""
        if not isinstance(table, dict) or table.get("format") != FORMAT:
            raise NotARecord("no job record of this version")
        known = {each.name: table[each.name] for each in fields(cls) if each.name in table}
        texts = ("key", "name", "backend", "id", "kind", "config", "output", "submitted")
        wrong = [name for name in texts if not isinstance(known.get(name), str)]
        wrong += [name for name in ("details", "git", "ended") if not isinstance(known.get(name), dict | None)]
        if not isinstance(known.get("argv"), list):
            wrong.append("argv")
        if wrong:
            raise NotARecord(f"{wrong[0]} is missing or of another type")
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
