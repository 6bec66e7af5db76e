"""Asks another program, for a limited time and without a shell."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path


class NoAnswer(Exception):
    """The program could not be started, or did not end in time. The message is one line."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What a program that has ended said."""

    code: int
    """Exit code, or the negative number of the signal that killed it."""
    stdout: str
    stderr: str

    @property
    def last_line(self) -> str:
        """The last line of what it complained about, or else said. Not a line of a frame, such as asterisks."""
        lines = [line.strip() for line in (self.stderr.strip() or self.stdout.strip()).splitlines()]
        worded = [line for line in lines if any(map(str.isalnum, line)) and not line.startswith("**")]
        return (worded or lines)[-1] if lines else f"exit code {self.code}"


def ask(
    argv: Sequence[str],
    limit_s: float,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    stdin: str = "",
) -> Answer:
    """Run a program and return its answer. After `limit_s` seconds it and its children are killed.

    Raises:
        NoAnswer: it cannot be started, or took longer.
    """
    try:
        program = subprocess.Popen(
            argv,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=env,
            cwd=cwd,
            text=True,
            errors="replace",
            start_new_session=True,
        )
    except OSError as error:
        raise NoAnswer(f"{argv[0]}: {error.strerror}") from error
    try:
        stdout, stderr = program.communicate(stdin, timeout=limit_s)
    except subprocess.TimeoutExpired:
        raise NoAnswer(f"{Path(argv[0]).name} did not answer within {limit_s:g} s") from None
    finally:
        # A child of it may hold the pipes open. The group is gone if everything has ended.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(program.pid, signal.SIGKILL)
        program.wait()
    return Answer(program.returncode, stdout, stderr)
