"""Time that a run spent: phases of its steps, GPU-hours of its attempts."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import fmean

from prime_rl.history.attempts import Attempt
from prime_rl.history.run import RunHistory

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
