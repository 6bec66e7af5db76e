"""A run as its directory tells it: what it is, how far it is, and who works on it."""

from __future__ import annotations

import contextlib
import os
import socket
import time
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from prime_rl.history.attempts import Attempt, read_attempts
from prime_rl.history.metrics import MetricLog
from prime_rl.run.beats import Heartbeat, read_heartbeats
from prime_rl.run.lock import LOCK_NAME, STALE_S, Holder
from prime_rl.run.paths import EvalPaths, RunPaths
from prime_rl.utils.errors import UserError

Kind = Literal["rl", "sft", "eval"]
_MAIN_CONFIGS: Mapping[str, Kind] = {"rl": "rl", "sft": "sft", "eval": "eval", "trainer": "sft"}
"""Configs that tell the kind of a run, and the kind."""


StateName = Literal["running", "complete", "stopped", "failed", "killed", "unknown"]
_RESULTS: Mapping[str, StateName] = {
    "complete": "complete",
    "stopped": "stopped",
    "failed": "failed",
    "refused": "failed",
}


@dataclass(frozen=True, slots=True)
class RunState:
    """Whether a run is going on."""

    name: StateName
    """`killed` left its lock, and no end in its last receipt. `unknown` has no receipt; or neither end nor lock, as a
    copy from S3 of a run that may go on elsewhere."""
    detail: str = ""
    """Why it stopped or failed, or who runs it."""
    at_s: float | None = None
    """When it ended, or was last seen; for a running one, when this attempt started."""


@dataclass
class RunHistory:
    """One run's directory. `refresh` reads what is new; nothing is ever written."""

    paths: RunPaths
    kind: Kind
    component: str
    """Name of its main config: `rl`, `sft`, `eval` or `trainer`."""
    attempts: list[Attempt] = field(default_factory=list)
    metrics: MetricLog = field(init=False)

    def __post_init__(self) -> None:
        self.metrics = MetricLog(self.paths.metrics)
        self.refresh()

    @classmethod
    def open(cls, directory: Path) -> RunHistory:
        """Read a run. Raises UserError."""
        paths = RunPaths(directory)
        for component, kind in _MAIN_CONFIGS.items():
            if paths.config(component).is_file():
                return cls(paths, kind, component)
        raise UserError(f"{directory} is no run: {_instead(directory)}")

    def refresh(self) -> bool:
        """Read what is new. True if there are new metrics."""
        self.attempts = read_attempts(self.paths)
        return self.metrics.refresh(self.attempts)

    @property
    def name(self) -> str:
        return self.paths.root.resolve().name

    def config(self) -> dict[str, Any]:
        """The resolved config, without defaults that are None. Empty if the file is damaged."""
        try:
            return tomllib.loads(self.paths.config(self.component).read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError):
            return {}

    @property
    def max_steps(self) -> int | None:
        value = self.config().get("max_steps")
        return value if isinstance(value, int) else None

    @property
    def steps_done(self) -> int:
        """Number of finished steps: the last step with a loss, plus 1."""
        return 1 + max(self.metrics.newest("loss/mean", self.trainer, 1), default=-1)

    @property
    def trainer(self) -> str:
        """The source of the loss: `trainer`, or `sft`."""
        return "sft" if self.kind == "sft" and "trainer" not in self.metrics.sources else "trainer"

    def heartbeats(self) -> dict[str, Heartbeat]:
        """Last heartbeat of each process of the newest attempt, by name."""
        files = sorted((self.paths.root / "control").glob("*.beat"))
        newest = {file.stem: next(read_heartbeats(file), None) for file in files}
        return {name: beat for name, beat in newest.items() if beat is not None}

    def state(self, now_s: float | None = None) -> RunState:
        """Whether the run is going on, as far as its files tell."""
        now_s = time.time() if now_s is None else now_s
        last = self.attempts[-1] if self.attempts else None
        if last is not None and last.result is not None:
            return RunState(_RESULTS.get(last.result, "unknown"), last.message, last.ended_s)
        lock = self.paths.root / LOCK_NAME
        seen_s = None
        with contextlib.suppress(OSError):
            seen_s = lock.stat().st_mtime
        holder = Holder.read(lock)
        if holder is not None and seen_s is not None and _is_alive(holder, now_s - seen_s):
            return RunState("running", str(holder), None if last is None else last.started_s)
        if last is None:
            is_complete = self.kind == "eval" and EvalPaths(self.paths.root).summary.is_file()
            return RunState("complete" if is_complete else "unknown")
        if seen_s is None:
            return RunState(
                "unknown", "no end is recorded, and there is no lock, as in a copy", self._last_seen_s(last)
            )
        return RunState("killed", "the launcher was killed", seen_s)

    def _last_seen_s(self, attempt: Attempt) -> float:
        """When an attempt without a lock last wrote something."""
        beats = [beat.at_s for beat in self.heartbeats().values()]
        return max([attempt.started_s, *beats, *self.metrics.newest_times_s("loss/mean", self.trainer, 1).values()])


def _is_alive(holder: Holder, silent_s: float) -> bool:
    """Whether the holder of a lock lives. On another machine, only its touches of the file tell."""
    if holder.host != socket.gethostname():
        return silent_s < STALE_S
    try:
        os.kill(holder.pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # another user's
        pass
    return True


def _instead(directory: Path) -> str:
    if not directory.is_dir():
        return "there is no such directory" if not directory.exists() else "it is a file; name the run's directory"
    runs = [child.name for child in sorted(directory.iterdir()) if _is_run(child)]
    if runs:
        return f"it holds runs; name one: {', '.join(runs[:5])}{', …' if len(runs) > 5 else ''}"
    if any(_is_run(parent) for parent in directory.resolve().parents[:3]):
        return "it lies in one; name that run's own directory"
    return "it has no configs/rl.toml, sft.toml or eval.toml"


def _is_run(directory: Path) -> bool:
    return any(RunPaths(directory).config(component).is_file() for component in _MAIN_CONFIGS)
