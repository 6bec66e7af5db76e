"""Values of a launch: processes, events, and the outcome."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from prime_rl.run.process import REFUSED_EXIT_CODE

_RECORDED = "WANDB_"
"""Prefix of variables that only tell W&B which command started the run."""


@dataclass(frozen=True, slots=True)
class ProcessSpec:
    """One process of a run: its command, its log, and what its exit means."""

    name: str
    argv: tuple[str, ...]
    log: Path
    """Its stdout and stderr are appended here."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Added to the launcher's environment."""
    secrets: Mapping[str, str] = field(default_factory=dict, repr=False)
    """More environment variables, which are never printed or written to a file."""
    gets_service_keys: bool = True
    """Whether it inherits keys of other services, such as OPENAI_API_KEY. A trainer and a server ask none of them."""
    node: int = 0
    """Index of the node that it runs on."""
    gpus: tuple[str, ...] = ()
    """GPUs that it may use, by the ids of its node."""
    rank: int = 0
    """Rank among the processes of its component."""
    completes_run: bool = False
    """The run succeeds when every such child has exited with 0. Every other child must live until then."""
    completion: Path | None = None
    """File that the child makes when its work is done. Without it, exit code 0 is a failure. None trusts the code."""
    heartbeat: Path | None = None
    """File in which the child reports its progress. None: it reports none."""
    attempt: int | None = None
    """Number of the attempt, for the log. None outside of runs that can resume."""
    if_lost: Path | None = None
    """The run can go on without this child, and the launcher makes this file if it does. None: it cannot."""
    relays: frozenset[signal.Signals] = frozenset()
    """Signals to the launcher that are forwarded to this child."""

    @property
    def typed_env(self) -> dict[str, str]:
        """The variables that a person would type before the command, sorted by name."""
        return {name: self.env[name] for name in sorted(self.env) if not name.startswith(_RECORDED)}


@dataclass(frozen=True, slots=True)
class Exited:
    """A child has exited or was killed."""

    name: str
    code: int
    """Exit code, or the negative number of the signal that killed it."""
    node: str | None = None
    """Name of the node that it ran on, in a launch on several."""

    @property
    def signal(self) -> signal.Signals | None:
        """The signal that killed it, as the kernel (-n) or a shell (128 + n) reports it."""
        number = -self.code if self.code < 0 else self.code - 128
        return signal.Signals(number) if number in set(signal.Signals) else None

    def __str__(self) -> str:
        if self.signal is None:
            return f"exited with code {self.code}"
        return (
            f"was ended by {self.signal.name}"
            if self.code < 0
            else f"exited with code {self.code} ({self.signal.name})"
        )


@dataclass(frozen=True, slots=True)
class Signalled:
    """The launcher itself received a signal."""

    signal: signal.Signals


@dataclass(frozen=True, slots=True)
class NodeLost:
    """A node is gone, and with it the children that ran there."""

    node: int
    """Its index."""
    fault: str
    """Name of the node and the reason; further lines are the last ones of its agent."""


Event = Exited | Signalled | NodeLost


@dataclass(frozen=True, slots=True)
class Outcome:
    """End of a run: the launcher's exit code, and a message for the user."""

    exit_code: int
    message: str
    log_tail: tuple[str, ...] = ()
    """Lines that may explain the failure: the last ones of the child that failed, or its stack."""
    log_title: str = "its last lines"
    failed: str | None = None
    """Name of the child that failed."""
    was_stopped: bool = False
    """Whether a signal to the launcher ended the run."""
    lost: tuple[str, ...] = ()
    """Processes without which the run continued, one line each."""

    def report(self) -> str:
        """The message, and log lines that may explain it."""
        lines = [f"{self.log_title}:", *(f"  | {line}" for line in self.log_tail)] if self.log_tail else []
        return "\n".join([self.message, *lines])

    @property
    def losses(self) -> list[str]:
        """`lost` as lines for the user."""
        return [f"warning: {line}" for line in self.lost]

    @property
    def was_refused(self) -> bool:
        """Whether the same run would be refused again."""
        return self.exit_code == REFUSED_EXIT_CODE

    @property
    def succeeded(self) -> bool:
        return self.exit_code == 0

    @property
    def result(self) -> str:
        """As a receipt has it."""
        if self.succeeded:
            return "complete"
        return "stopped" if self.was_stopped else "refused" if self.was_refused else "failed"
