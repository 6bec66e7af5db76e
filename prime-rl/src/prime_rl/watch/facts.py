"""Collects the state of a run at one moment from its directory: progress, processes, evaluations, GPUs, warnings."""

from __future__ import annotations

import json
import math
import re
import shutil
import socket
import subprocess
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

from prime_rl.history.attempts import Attempt
from prime_rl.history.metrics import MetricLog
from prime_rl.history.run import Kind, RunHistory, RunState
from prime_rl.launch.logs import HEAD, Follower, tail
from prime_rl.run.lock import LOCK_NAME, Holder
from prime_rl.run.paths import EvalPaths, stable_steps
from prime_rl.run.process import ANYONE
from prime_rl.watch.progress import Pace, printable, step_text

# Finished rollouts of `eval`, by weights and environment.


@dataclass(frozen=True, slots=True)
class EvalProgress:
    """One environment with the weights of one step. Step 0 is the base model, if that is evaluated."""

    env: str
    step: int
    done: int
    """Finished rollouts."""
    total: int | None
    """None if the config leaves it to the environment, or asked for more rows than it has."""
    scores: Mapping[str, float] = field(default_factory=dict)
    """`avg@4` and others, once the environment is done."""

    @property
    def weights(self) -> str:
        return "base or step 0" if self.step == 0 else f"step {self.step}"


class EvalTally:
    """Follows `OUT/eval/results.jsonl`. Of each line it keeps no more than the environment and the step."""

    def __init__(self, root: Path) -> None:
        self._lines = Follower(EvalPaths(root).results)
        self._done: Counter[tuple[int, str]] = Counter()

    def progress(self, config: Mapping[str, Any], metrics: MetricLog) -> tuple[EvalProgress, ...]:
        """The progress of every environment that has begun, and of those of the config that have not."""
        for line in self._lines.lines():
            try:
                result = json.loads(line)
                self._done[int(result["step"]), str(result["env"])] += 1
            except (ValueError, TypeError, KeyError, RecursionError):
                continue
        totals = expected_rollouts(config)
        begun = sorted(self._done)
        waiting = [(0, env) for env in totals if not any(env == name for _, name in begun)]
        return tuple(
            _progress(env, step, self._done[step, env], totals.get(env), metrics) for step, env in [*begun, *waiting]
        )


def _progress(env: str, step: int, done: int, total: int | None, metrics: MetricLog) -> EvalProgress:
    found = _reported(metrics, env, step)
    scores = {name: value for name, value in found.items() if name.startswith(("avg@", "pass@"))}
    # An earlier start with more rows has done more. A dataset with fewer is done, and has scores, before the total.
    is_known = total is not None and (total == done + found.get("failed/count", 0) if scores else total >= done)
    return EvalProgress(printable(env), step, done, total if is_known else None, scores)


def expected_rollouts(config: Mapping[str, Any]) -> dict[str, int | None]:
    """Rollouts of each environment with one set of weights. A dataset with fewer rows has fewer."""
    environments = config.get("env", [])
    if not isinstance(environments, Sequence):
        return {}
    counts, repeats = config.get("num_examples"), config.get("rollouts_per_example")
    found: dict[str, int | None] = {}
    for index, env in enumerate(environments):
        if isinstance(env, Mapping):
            rows, each = _item(counts, index), _item(repeats, index)
            name = str(env.get("name") if env.get("name") not in (None, "None") else env.get("id"))
            found[name] = rows * each if rows is not None and each is not None and rows > 0 else None
    return found


def _item(values: Any, index: int) -> int | None:
    """A number for all environments, or the list's own for each."""
    if isinstance(values, list):
        values = values[index] if index < len(values) else values[0] if len(values) == 1 else None
    return values if isinstance(values, int) and not isinstance(values, bool) else None


def _reported(metrics: MetricLog, env: str, step: int) -> dict[str, float]:
    prefix = f"eval/{env}/"
    found = {}
    for source in metrics.sources:
        names = [name for name in metrics.names(source) if name.startswith(prefix)]
        for name, value in metrics.of_step(step, names, source).items():
            found[name.removeprefix(prefix)] = value
    return found


# GPUs of the run, if this machine runs it.


_LIMIT_S = 3.0
_MIB = 2**20


@dataclass(frozen=True, slots=True)
class GpuUse:
    """Memory and load of one GPU."""

    index: str
    used_bytes: int
    total_bytes: int
    busy_percent: int | None


def gpu_use(holder: Holder | None) -> tuple[GpuUse, ...]:
    """The GPUs of this machine, if the holder of a run's lock is on it. Empty without nvidia-smi, or if it fails."""
    if holder is None or holder.host != socket.gethostname() or shutil.which("nvidia-smi") is None:
        return ()
    fields = "index,memory.used,memory.total,utilization.gpu"
    command = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=_LIMIT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ()
    return uses_of(answer.stdout) if answer.returncode == 0 else ()


def uses_of(table: str) -> tuple[GpuUse, ...]:
    """Read the table that nvidia-smi prints. A line with a figure that it does not know is left out."""
    found = []
    for line in table.splitlines():
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) == 4 and cells[1].isdigit() and cells[2].isdigit():
            busy = int(cells[3]) if cells[3].isdigit() else None
            found.append(GpuUse(cells[0], int(cells[1]) * _MIB, int(cells[2]) * _MIB, busy))
    return tuple(found)


# The last warnings and errors in the run's logs.


_LINE = re.compile(
    r"^(?:\d{4}-\d{2}-\d{2} )?(\d{2}:\d{2}:\d{2})\s+(?:(WARNING|ERROR|CRITICAL)\s+|(warning|error): )(.*)"
)
_ANSI = re.compile(r"\x1b\[[0-9;]*m")
_TAIL_LINES = 400
MAX_CHARS = 400


@dataclass(frozen=True, slots=True)
class Notice:
    """A warning or an error."""

    log: Path
    clock: str
    """As in the log: local time of the machine that wrote it."""
    level: str
    words: str


def last_notices(logs: Iterable[Path], started_s: float | None = None, most: int = 5) -> list[Notice]:
    """The last warnings and errors of the newest attempt, oldest first, without repetitions.

    Only the first line of each, shortened: what follows it may hold text of the data.
    """
    found: dict[tuple[str, str], Notice] = {}
    for log in logs:
        for notice in _of_log(log):
            found.pop((notice.level, notice.words), None)
            found[notice.level, notice.words] = notice
    return sorted(found.values(), key=lambda notice: notice.clock)[-most:]


def _of_log(log: Path) -> Iterator[Notice]:
    lines = tail(log, _TAIL_LINES)
    heads = [index for index, line in enumerate(lines) if line.startswith(HEAD)]
    for line in lines[heads[-1] + 1 :] if heads else lines:
        notice = _of_line(log, line)
        if notice is not None:
            yield notice


def _of_line(log: Path, line: str) -> Notice | None:
    match = _LINE.match(_ANSI.sub("", line))
    if match is None:
        return None
    clock, level, launcher_level, words = match.groups()
    return Notice(log, clock, (level or launcher_level).lower(), printable(words, MAX_CHARS))


PACE_STEPS = 11
LOSS = "loss/mean"


class Shown(NamedTuple):
    """A metric that a run shows."""

    label: str
    source: str
    name: str
    form: str = "{:.3f}"


_TRAINER, _ORCHESTRATOR, _SFT = "trainer", "orchestrator", "sft"
LEARNING: dict[Kind, tuple[Shown, ...]] = {
    "rl": (
        Shown("reward", _ORCHESTRATOR, "reward/mean"),
        Shown("loss", _TRAINER, LOSS, "{:.4f}"),
        Shown("entropy", _TRAINER, "entropy/mean"),
        Shown("mismatch KL", _TRAINER, "mismatch_kl/mean", "{:.5f}"),
        Shown("explained by the critic", _TRAINER, "critic/explained_variance", "{:.1%}"),
        Shown("gradient norm", _TRAINER, "optim/grad_norm"),
        Shown("completion tokens", _ORCHESTRATOR, "decode_len/mean", "{:.1f}"),
        Shown("truncated", _ORCHESTRATOR, "is_truncated/mean", "{:.1%}"),
    ),
    "sft": (
        Shown("loss", _SFT, LOSS, "{:.4f}"),
        Shown("validation loss", _SFT, "val/loss", "{:.4f}"),
        Shown("accuracy of pairs", _SFT, "rewards/accuracies", "{:.1%}"),
        Shown("held-out accuracy", _SFT, "val/rewards/accuracies", "{:.1%}"),
        Shown("reward margin", _SFT, "rewards/margins"),
        Shown("gradient norm", _SFT, "optim/grad_norm"),
        Shown("learning rate", _SFT, "optim/lr", "{:.2e}"),
        Shown("epoch", _SFT, "progress/epoch", "{:g}"),
    ),
    "eval": (),
}
RUNNING: dict[Kind, tuple[Shown, ...]] = {
    "rl": (
        Shown("trainer tokens/s", _TRAINER, "perf/throughput", "{:,.0f}"),
        Shown("rollout tokens/s", _ORCHESTRATOR, "perf/throughput", "{:,.0f}"),
        Shown("step seconds", _TRAINER, "time/step", "{:.2f}"),
        Shown("waiting for batch, s", _TRAINER, "time/wait_for_batch", "{:.2f}"),
        Shown("rollouts in flight", _ORCHESTRATOR, "batch/inflight_rollouts", "{:.0f}"),
        Shown("off-policy level, max", _ORCHESTRATOR, "batch/off_policy_level/max", "{:.0f}"),
        Shown("lag of versions", _ORCHESTRATOR, "batch/lag/mean", "{:.2f}"),
        Shown("peak memory, GiB", _TRAINER, "perf/peak_memory", "{:.2f}"),
    ),
    "sft": (
        Shown("tokens/s", _SFT, "perf/throughput", "{:,.0f}"),
        Shown("MFU, %", _SFT, "perf/mfu", "{:.0f}"),
        Shown("step seconds", _SFT, "time/step", "{:.2f}"),
        Shown("peak memory, GiB", _SFT, "perf/peak_memory", "{:.2f}"),
    ),
    "eval": (),
}
JUDGE = (
    ("calls", "calls", "{:,.0f}"),
    ("from cache", "cache_hit_rate", "{:.0%}"),
    ("seconds a call", "latency_s", "{:.2f}"),
    ("failed calls", "failed_calls", "{:,.0f}"),
    ("prompt tokens", "prompt_tokens", "{:,.0f}"),
    ("answer tokens", "completion_tokens", "{:,.0f}"),
    ("cost", "cost", "{:.3g}"),
)
"""Metrics of judges that are shown for each step."""
JUDGE_CALLS = re.compile("judge/[^/]+/calls")
ROW_COUNTS = ("seen", "truncated", "overlong", "untrainable", "unmaskable", "bad")
"""Metrics `data/…` of SFT: rows so far."""
PART = "reward_parts/"


@dataclass(frozen=True, slots=True)
class Figure:
    """A metric over the steps."""

    label: str
    first: float
    last: float
    course: tuple[float, ...] = field(repr=False)
    """Values in the order of the steps: all, or of a long run some of them."""
    form: str = "{:.3f}"

    @classmethod
    def of(cls, label: str, values: Sequence[float], form: str) -> Figure | None:
        """None without a finite value."""
        finite = [value for value in values if math.isfinite(value)]
        if not finite:
            return None
        # The last value is shown as it is: a loss that became NaN must not hide behind the one before.
        return cls(label, finite[0], values[-1], tuple(values), form)

    def words(self, value: float) -> str:
        return self.form.format(value) if math.isfinite(value) else "nan"


@dataclass(frozen=True, slots=True)
class Doing:
    """Activity of a process when it last made progress."""

    name: str
    words: str
    at_s: float
    """Seconds since the epoch."""
    waits_for: str | None
    is_idle: bool


@dataclass(frozen=True, slots=True)
class Overview:
    """A run at one moment."""

    name: str
    directory: Path
    kind: Kind
    state: RunState
    now_s: float
    holder: Holder | None = None
    """The launcher that works on the run."""
    attempt: Attempt | None = None
    steps_done: int = 0
    max_steps: int | None = None
    elapsed_s: float = 0.0
    """Time over all attempts."""
    left_s: float | None = None
    learning: tuple[Figure, ...] = ()
    parts: tuple[Figure, ...] = ()
    """Reward functions, if the reward is a sum of several."""
    running: tuple[Figure, ...] = ()
    judges: tuple[Figure, ...] = ()
    """Questions to judges in each step."""
    evals: tuple[Figure, ...] = ()
    """Scores of evaluations during training, over the steps."""
    progress: tuple[EvalProgress, ...] = ()
    """Finished work of `eval`."""
    rows: dict[str, int] = field(default_factory=dict)
    """Rows of SFT data by what happened to them."""
    processes: tuple[Doing, ...] = ()
    gpus: tuple[GpuUse, ...] = ()
    notices: tuple[Notice, ...] = ()
    checkpoints: tuple[int, ...] = ()
    weights: tuple[int, ...] = ()
    logs: tuple[Path, ...] = ()
    damaged_lines: int = 0

    @property
    def is_running(self) -> bool:
        return self.state.name == "running"

    @property
    def step_words(self) -> str:
        """`step 79 (80/80)`: the last finished step, counted from 0, and how many are done."""
        if not self.steps_done:
            return "" if self.kind == "eval" else "no step yet"
        return step_text(self.steps_done, self.max_steps)

    @property
    def share_done(self) -> float | None:
        """Between 0 and 1; None if the end is not known."""
        if self.kind == "eval":
            known = [each for each in self.progress if each.total]
            total = sum(each.total or 0 for each in known)
            return min(1.0, sum(each.done for each in known) / total) if known and total else None
        return min(1.0, self.steps_done / self.max_steps) if self.max_steps else None


class Reader:
    """Reads overviews of one run. Each reads only what is new in files that grow."""

    def __init__(self, history: RunHistory, look_at_gpus: bool = True) -> None:
        self.history = history
        self._look_at_gpus = look_at_gpus
        self._tally = EvalTally(history.paths.root)

    def read(self, now_s: float | None = None) -> Overview:
        """The run as it is now."""
        now_s = time.time() if now_s is None else now_s
        history = self.history
        history.refresh()
        state = history.state(now_s)
        config = history.config()
        source = history.trainer
        ends_s = history.metrics.newest_times_s(LOSS, source, PACE_STEPS)
        max_steps = history.max_steps
        holder = Holder.read(history.paths.root / LOCK_NAME) if state.name == "running" else None
        logs = tuple(sorted(history.paths.logs.glob("*.log")))
        return Overview(
            name=printable(history.name),
            directory=history.paths.root.resolve(),
            kind=history.kind,
            state=RunState(state.name, printable(state.detail), state.at_s),
            now_s=now_s,
            holder=holder,
            attempt=history.attempts[-1] if history.attempts else None,
            steps_done=history.steps_done,
            max_steps=max_steps,
            elapsed_s=_elapsed_s(history, state, now_s),
            left_s=_left_s(ends_s, max_steps) if state.name == "running" else None,
            learning=tuple(self._figures(LEARNING[history.kind])),
            parts=tuple(self._parts()),
            running=tuple(self._figures(RUNNING[history.kind])),
            judges=tuple(self._judges()),
            evals=tuple(self._evals()) if history.kind != "eval" else (),
            progress=self._tally.progress(config, history.metrics) if history.kind == "eval" else (),
            rows=self._rows(),
            processes=tuple(_doing(history)),
            gpus=gpu_use(holder) if self._look_at_gpus else (),
            notices=tuple(last_notices(logs, history.attempts[-1].started_s if history.attempts else None)),
            checkpoints=tuple(stable_steps(history.paths.checkpoints)),
            weights=tuple(stable_steps(history.paths.weights)),
            logs=logs,
            damaged_lines=history.metrics.damaged_lines,
        )

    def _figures(self, shown: Sequence[Shown]) -> Iterator[Figure]:
        for label, source, name, form in shown:
            figure = Figure.of(label, self.history.metrics.course(name, source), form)
            if figure is not None:
                yield figure

    def _parts(self) -> Iterator[Figure]:
        names = [name for name in self.history.metrics.names(_ORCHESTRATOR) if name.startswith(PART)]
        if len(names) > 1:
            labels = (printable(name.removeprefix(PART)) for name in names)
            shown = [Shown(label, _ORCHESTRATOR, name) for label, name in zip(labels, names, strict=True)]
            yield from self._figures(shown)

    def _judges(self) -> Iterator[Figure]:
        """`judge/<name>/…`. What a judge never had, such as failed calls, is left out."""
        for source in self.history.metrics.sources:
            names = self.history.metrics.names(source)
            for judge in [name.split("/")[1] for name in names if JUDGE_CALLS.fullmatch(name)]:
                for label, name, form in JUDGE:
                    shown = Shown(f"{printable(judge)}: {label}", source, f"judge/{judge}/{name}", form)
                    yield from (each for each in self._figures([shown]) if any(each.course))

    def _evals(self) -> Iterator[Figure]:
        """`eval/<environment>/avg@n` and `pass@k`."""
        for source in self.history.metrics.sources:
            for name in self.history.metrics.names(source):
                score = name.rpartition("/")[2]
                if name.startswith("eval/") and score.startswith(("avg@", "pass@")):
                    yield from self._figures([Shown(printable(name.removeprefix("eval/")), source, name)])

    def _rows(self) -> dict[str, int]:
        last = {name: self.history.metrics.last(f"data/{name}", _SFT) for name in ROW_COUNTS}
        return {name: int(value) for name, value in last.items() if value is not None and math.isfinite(value)}


def _doing(history: RunHistory) -> Iterator[Doing]:
    for name, beat in history.heartbeats().items():
        waits_for = None if beat.waits_for is None else printable(str(beat.waits_for))
        idle = waits_for == ANYONE
        yield Doing(printable(name), printable(str(beat.doing)), float(beat.at_s), None if idle else waits_for, idle)


def _elapsed_s(history: RunHistory, state: RunState, now_s: float) -> float:
    """Seconds of all attempts. One without an end lasted until the next, or until it was last seen."""
    total_s = 0.0
    attempts = history.attempts
    for attempt, following in zip_longest(attempts, attempts[1:]):
        end_s = attempt.ended_s
        if end_s is None and following is not None:
            end_s = following.started_s
        if end_s is None:
            end_s = now_s if state.name == "running" else state.at_s
        total_s += max(0.0, (end_s or attempt.started_s) - attempt.started_s)
    return total_s


def _left_s(ends_s: dict[int, float], max_steps: int | None) -> float | None:
    pace = Pace(max_steps)
    left_s = None
    for step, end_s in ends_s.items():
        left_s = pace.left_s(step + 1, end_s)
    return left_s


def as_json(overview: Overview) -> dict[str, Any]:
    """The overview for programs. Times are seconds since the epoch; NaN is null."""
    from dataclasses import asdict

    table = asdict(overview)
    for group in ("learning", "parts", "running", "judges", "evals"):
        table[group] = {
            figure.label: {"first": _number(figure.first), "last": _number(figure.last)}
            for figure in getattr(overview, group)
        }
    table["last_step"] = overview.steps_done - 1 if overview.steps_done else None
    table["directory"] = str(overview.directory)
    table["logs"] = [str(log) for log in overview.logs]
    table["notices"] = [{**asdict(notice), "log": str(notice.log)} for notice in overview.notices]
    table["attempt"] = None if overview.attempt is None else overview.attempt.number
    return table


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None
