"""A run as its directory tells it: what it is, how far it is, who works on it, and what it spent its time on."""

from __future__ import annotations

import contextlib
import math
import os
import socket
import time
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

from prime_rl.configs.surface.renamed import SFT_COMMANDS
from prime_rl.history.attempts import Attempt, read_attempts
from prime_rl.history.metrics import MetricLog
from prime_rl.run.early_stop import EarlyEnd
from prime_rl.run.lock import LOCK_NAME, STALE_S, Holder
from prime_rl.run.paths import EvalPaths, RunPaths
from prime_rl.run.process import Heartbeat, read_heartbeats
from prime_rl.utils.errors import UserError

Kind = Literal["rl", "sft", "eval"]
_MAIN_CONFIGS: Mapping[str, Kind] = {
    "rl": "rl",
    **dict.fromkeys(SFT_COMMANDS, "sft"),
    "eval": "eval",
    "trainer": "sft",
}
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
        raise UserError(f"{directory} is not the directory of a run: {_instead(directory)}")

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
            early = EarlyEnd.read(self.paths.early_end) if last.result == "complete" else None
            detail = last.message if early is None else f"early end: {early.why}"
            return RunState(_RESULTS.get(last.result, "unknown"), detail, last.ended_s)
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
                "unknown",
                "no end is recorded and there is no run.lock, for example because this is a copy",
                self._last_seen_s(last),
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
        return "there is no such directory" if not directory.exists() else "it is a file; give the run's directory"
    runs = [child.name for child in sorted(directory.iterdir()) if _is_run(child)]
    if runs:
        return f"it contains runs; give one of them: {', '.join(runs[:5])}{', …' if len(runs) > 5 else ''}"
    if any(_is_run(parent) for parent in directory.resolve().parents[:3]):
        return "it is inside a run's directory; give that directory"
    return "it has no configs/rl.toml, sft.toml or eval.toml"


def _is_run(directory: Path) -> bool:
    return any(RunPaths(directory).config(component).is_file() for component in _MAIN_CONFIGS)


# The time that a run spent: phases of its steps, GPU-hours of its attempts.


TRAINER, SFT, ORCHESTRATOR = "trainer", "sft", "orchestrator"
OTHER = "other"
_TRAINER_PHASES = {
    "time/wait_for_batch": "wait for a batch",
    "time/load_data": "load data",
    "time/forward_backward": "forward and backward",
    "time/broadcast_weights": "publish weights",
    "time/keep_logprobs": "keep log-probabilities",
    "time/save_ckpt": "save",
}
_SFT_PHASES = {"time/forward_backward": "forward and backward", "time/save_ckpt": "save"}
MIN_HINT_STEPS = 10
FIRST_STEPS = 2
"""Steps at the start whose waits say nothing: the first batch waits for the servers to load the model."""
WAIT_SHARE = 0.25
"""One side is the bottleneck if the other waits at least this share of its time …"""
IDLE_SHARE = 0.1
"""… and it waits at most this share of its own."""

Seconds = Mapping[int, float]


@dataclass(frozen=True, slots=True)
class Phases:
    """Seconds of each phase of a process by step. The phases add up to the steps' time."""

    source: str
    by_title: Mapping[str, Seconds]

    @property
    def totals_s(self) -> dict[str, float]:
        return {title: sum(values.values()) for title, values in self.by_title.items()}

    @property
    def steps(self) -> int:
        """Number of steps that any phase has a value for; at least 1."""
        return len({step for values in self.by_title.values() for step in values}) or 1

    @property
    def total_s(self) -> float:
        return sum(self.totals_s.values())


@dataclass(frozen=True, slots=True)
class Spending:
    """Time and GPUs of one attempt."""

    attempt: Attempt
    seconds: float
    """From its start to its end, or to its last sign of life."""
    startup_s: float | None
    """Until its first step began. None if it finished no step, or an attempt after it repeated that step."""

    @property
    def gpu_hours(self) -> dict[str, float] | None:
        """GPU-hours of each component. None if the receipt does not name the GPUs."""
        if self.attempt.gpus is None:
            return None
        return {component: len(ids) * self.seconds / 3600 for component, ids in self.attempt.gpus.items()}

    @property
    def all_gpu_hours(self) -> float | None:
        """GPU-hours of the attempt: a GPU that two components share counts once."""
        if self.attempt.gpus is None:
            return None
        return len({gpu for ids in self.attempt.gpus.values() for gpu in ids}) * self.seconds / 3600


def phases_of(history: RunHistory) -> list[Phases]:
    """The phases of each process that reports them."""
    found = []
    trainer = history.trainer
    if steps := history.metrics.series("time/step", trainer):
        titles = _SFT_PHASES if trainer == SFT else _TRAINER_PHASES
        parts = {title: history.metrics.series(name, trainer) for name, title in titles.items()}
        found.append(_complete(trainer, steps, parts))
    if steps := history.metrics.series("time/step", ORCHESTRATOR):
        found.append(_complete(ORCHESTRATOR, steps, _orchestrator_parts(history), outside=("save", "evaluate")))
    return found


def _orchestrator_parts(history: RunHistory) -> dict[str, Seconds]:
    """Waiting for weights happens while a batch is collected. Saving and evaluating lie outside of `time/step`."""

    def series(name: str) -> Seconds:
        return history.metrics.series(name, ORCHESTRATOR)

    waits = series("time/wait_for_ckpt")
    collecting = series("time/generate_completions")
    evaluations: dict[int, float] = {}
    for name in history.metrics.names(ORCHESTRATOR):
        env, _, last = name.removeprefix("eval/").rpartition("/")  # the name of an environment may have a slash
        is_function = env.endswith(("/metrics", "/reward_parts"))
        if name.startswith("eval/") and last == "time" and not is_function:
            for step, seconds in series(name).items():
                evaluations[step] = max(seconds, evaluations.get(step, 0.0))
    return {
        "generate and score": {step: max(0.0, s - waits.get(step, 0.0)) for step, s in collecting.items()},
        "wait for weights": waits,
        "prepare the batch": series("time/parallel_preprocess"),
        "keep rollouts": series("time/keep_rollouts"),
        "save": series("time/save_ckpt"),
        "evaluate": evaluations,
    }


def _complete(source: str, steps: Seconds, parts: Mapping[str, Seconds], outside: tuple[str, ...] = ()) -> Phases:
    """Add what no phase covers, and leave out phases that took no time."""
    inside = [values for title, values in parts.items() if title not in outside]
    other = {step: max(0.0, s - sum(values.get(step, 0.0) for values in inside)) for step, s in steps.items()}
    every = {**parts, OTHER: other}
    return Phases(source, {title: values for title, values in every.items() if sum(values.values()) > 0})


def spending_of(history: RunHistory, now_s: float) -> list[Spending]:
    """Time of each attempt. `now_s` ends one that runs."""
    times = history.metrics.times_s("time/step", history.trainer)
    lengths = history.metrics.series("time/step", history.trainer)
    starts = [attempt.started_s for attempt in history.attempts]
    found = []
    for attempt, next_start in zip(history.attempts, [*starts[1:], math.inf], strict=False):
        own = {step: at for step, at in times.items() if attempt.started_s <= at < next_start}
        end_s = attempt.ended_s
        if end_s is None:
            state = history.state(now_s)
            is_running = state.name == "running" and attempt is history.attempts[-1]
            seen = [now_s if is_running else attempt.started_s, *own.values()]
            end_s = min(max([*seen, *([state.at_s] if state.at_s and state.at_s < next_start else [])]), next_start)
        first = min(own, default=None)
        starts_here = first is not None and first == (attempt.step or 0)
        startup_s = None
        if first is not None and starts_here:
            startup_s = max(0.0, own[first] - lengths[first] - attempt.started_s)
        found.append(Spending(attempt, max(0.0, end_s - attempt.started_s), startup_s))
    return found


def split_hint(phases: list[Phases], is_on_cpu: bool = False) -> str | None:
    """Sentences about which part of RL waits for the other. None if the run is too short."""
    by_source = {each.source: each for each in phases}
    trainer, orchestrator = by_source.get(TRAINER), by_source.get(ORCHESTRATOR)
    if trainer is None or orchestrator is None:
        return None
    shares = [_wait_share(trainer, "wait for a batch"), _wait_share(orchestrator, "wait for weights")]
    if shares[0] is None or shares[1] is None:
        return None
    trainer_waits, servers_wait = shares[0], shares[1]
    facts = (
        f"The trainer waits for batches {trainer_waits:.0%} of its time; "
        f"the orchestrator waits for new weights {servers_wait:.0%} of its time."
    )
    if trainer_waits >= WAIT_SHARE and servers_wait <= IDLE_SHARE:
        advice = "" if is_on_cpu else ": give inference more GPUs, or the trainer fewer"
        return f"{facts} Generation limits the speed{advice}."
    if servers_wait >= WAIT_SHARE and trainer_waits <= IDLE_SHARE:
        advice = "" if is_on_cpu else ": give it more GPUs, or inference fewer"
        return f"{facts} The trainer limits the speed{advice}."
    return f"{facts} Neither side clearly limits the speed."


def _wait_share(phases: Phases, title: str) -> float | None:
    steps = sorted({step for values in phases.by_title.values() for step in values})[FIRST_STEPS:]
    if len(steps) < MIN_HINT_STEPS:
        return None
    waits = phases.by_title.get(title, {})
    whole = fmean(sum(values.get(step, 0.0) for values in phases.by_title.values()) for step in steps)
    return fmean(waits.get(step, 0.0) for step in steps) / whole if whole else None
