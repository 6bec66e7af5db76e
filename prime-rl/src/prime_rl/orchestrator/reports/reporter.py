"""Computes the metrics of a step, and reports them to monitors and log, with a sample rollout every few steps."""

from __future__ import annotations

import random
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from prime_rl.configs.orchestrator import OrchestratorConfig
from prime_rl.configs.shared import LogExtrasConfig
from prime_rl.history.rollouts import content_text
from prime_rl.monitors import JsonlMonitor, Monitor, MultiMonitor
from prime_rl.monitors.base import BenchTable
from prime_rl.monitors.prometheus import ORCHESTRATOR, MetricsServer
from prime_rl.monitors.sinks import SinkRun, open_sinks
from prime_rl.orchestrator.batches.batch import Batch, Filter
from prime_rl.orchestrator.ckpt import Progress
from prime_rl.orchestrator.reports.reward_watch import RewardWatch, reward_parts
from prime_rl.orchestrator.rollouts.rollout import Group, Rollout
from prime_rl.run.paths import OrchestratorPaths, RunPaths
from prime_rl.transport.messages import TrainingSample
from prime_rl.utils.logger import SUCCESS, get_logger

SAMPLE_INTERVAL = 10
COLUMNS = ("step", "task", "example_id", "messages", "input_ids", "reward")
MAX_SAMPLES = 8


class Reporter:
    """Reports steps. Logs a sample every `sample_interval` steps; None logs no samples."""

    def __init__(
        self,
        monitor: Monitor,
        filters: list[Filter],
        sample_interval: int | None = SAMPLE_INTERVAL,
        extras: Extras | None = None,
        reward_watch: RewardWatch | None = None,
    ) -> None:
        self.monitor = monitor
        self.filters = filters
        self.reward_watch = reward_watch or RewardWatch({})
        self.sample_interval = sample_interval
        self.extras = extras

    def record(
        self, batch: Batch, progress: Progress, status: StepStatus, times: StepTimes, extra: dict[str, float]
    ) -> None:
        """Report the step that `progress` has just completed."""
        step = progress.step - 1
        metrics = {
            **progress_metrics(batch, progress, status.policy_version),
            **rollout_metrics(batch),
            **reward_metrics(batch.groups),
            **part_metrics(reward_parts(batch.rollouts, self.reward_watch.parts)),
            **environment_metrics(batch.rollouts, self.filters),
            **status_metrics(batch.groups, status),
            **{f"time/{name}": value for name, value in asdict(times).items()},
            **extra,
        }
        metrics["perf/throughput"] = metrics["progress/tokens"] / max(times.generate_completions, 1e-9)
        self.monitor.log(metrics, step)
        get_logger().log(SUCCESS, log_line(step, metrics))
        for warning in self.reward_watch.observe(step, batch.groups):
            get_logger().warning(warning)
        if self.extras is not None:
            self.extras.record(batch, step)
        if self.sample_interval and step % self.sample_interval == 0:
            # A separate generator, so that logging does not change which examples are drawn.
            sample = random.Random(step).choice(batch.rollouts)
            get_logger().info(f"A sample of step {step}: {sample_text(sample)}")

    def close(self, exit_code: int) -> None:
        self.monitor.close(exit_code)


class ExtrasMonitor(Protocol):
    """The part of the W&B monitor that `Extras` uses."""

    def log_table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], step: int) -> None: ...

    def log_distributions(self, values: Mapping[str, Sequence[float]], step: int) -> None: ...


class Extras:
    """Logs what `log_extras` enables: a table of up to 8 rollouts, and histograms of rewards and advantages."""

    def __init__(self, monitor: ExtrasMonitor, config: LogExtrasConfig) -> None:
        self.monitor = monitor
        self.config = config

    def record(self, batch: Batch, step: int) -> None:
        """Log the batch of `step`, if `step` is a multiple of `interval`."""
        if step % self.config.interval:
            return
        rollouts = batch.rollouts
        if self.config.samples:
            # A separate generator, so that logging does not change which examples are drawn.
            chosen = random.Random(step).sample(rollouts, min(MAX_SAMPLES, len(rollouts)))
            self.monitor.log_table("samples", COLUMNS, [sample_row(each, step) for each in chosen], step)
        if self.config.distributions:
            values = {
                "distributions/rewards": [rollout.reward for rollout in rollouts],
                "distributions/advantages": [rollout.advantage or 0.0 for rollout in rollouts],
            }
            self.monitor.log_distributions(values, step)


def sample_row(rollout: Rollout, step: int) -> list[Any]:
    """One row of the table; the token ids are those of the last model call."""
    last = rollout.trace.calls[-1] if rollout.trace else None
    ids = last.prompt_ids + last.completion_ids if last is not None else []
    return [step, rollout.example.env, rollout.example.row, sample_text(rollout), str(ids), rollout.reward]


def setup_monitor(config: OrchestratorConfig, run: RunPaths, paths: OrchestratorPaths) -> tuple[Monitor, Extras | None]:
    """Create the monitors: `OUT/metrics.jsonl`, the sinks that are configured, and a summary table with `bench`."""
    extras = None
    monitors: list[Monitor] = [JsonlMonitor(run.metrics, "orchestrator")]
    if config.metrics_server is not None:
        monitors.append(MetricsServer(config.metrics_server, gauges=ORCHESTRATOR))
    if config.bench:
        monitors.append(BenchTable({"time/step": "Step time (s)", "perf/throughput": "Throughput (tokens/s)"}))
    resumes = config.ckpt is not None and config.ckpt.resume_step is not None
    sinks = open_sinks(
        config.wandb, config.monitor, SinkRun("orchestrator", run, config.model_dump(mode="json"), resumes), paths.root
    )
    monitors.append(sinks)
    if config.wandb is not None and config.wandb.log_extras is not None and sinks.wandb is not None:
        extras = Extras(sinks.wandb, config.wandb.log_extras)
    return MultiMonitor(monitors), extras


def sample_interval(config: OrchestratorConfig) -> int:
    """Steps between two samples in the log. With W&B, `wandb.log_extras` sets it."""
    extras = None if config.wandb is None else config.wandb.log_extras
    return SAMPLE_INTERVAL if extras is None else extras.interval


# The metrics of a step, by group of names.


@dataclass(slots=True)
class StepTimes:
    """Seconds spent in the phases of one step."""

    step: float = 0.0
    generate_completions: float = 0.0
    parallel_preprocess: float = 0.0
    teacher_logprobs: float = 0.0
    save_ckpt: float = 0.0
    wait_for_ckpt: float = 0.0
    update_weights: float = 0.0


@dataclass(frozen=True, slots=True)
class StepStatus:
    """State of the scheduler and the policy at the end of a step."""

    step: int
    policy_version: int
    groups_in_flight: int
    group_size: int
    cancelled_groups: int
    temperature: float


@dataclass(frozen=True, slots=True)
class TokenCounts:
    """Number of tokens that are trained on (`decode`), and of all others (`prefill`)."""

    prefill: int
    decode: int

    @property
    def total(self) -> int:
        return self.prefill + self.decode


def count_tokens(samples: Iterable[TrainingSample]) -> TokenCounts:
    prefill = decode = 0
    for sample in samples:
        trained = sum(sample.completion_mask)
        decode += trained
        prefill += len(sample.prompt_ids) + len(sample.completion_ids) - trained
    return TokenCounts(prefill, decode)


def progress_metrics(batch: Batch, progress: Progress, policy_version: int) -> dict[str, float]:
    """`progress/*`. `progress` must already include this batch."""
    tokens = count_tokens(sample for _, samples in batch.samples for sample in samples)
    return {
        "progress/tokens": tokens.total,
        "progress/prefill_tokens": tokens.prefill,
        "progress/decode_tokens": tokens.decode,
        "progress/samples": len(batch.rollouts),
        "progress/problems": len(batch.groups),
        "progress/total_tokens": progress.total_tokens,
        "progress/total_samples": progress.total_samples,
        "progress/total_problems": progress.total_problems,
        "progress/ckpt_step": policy_version,
    }


def rollout_metrics(batch: Batch) -> dict[str, float]:
    """Mean, max and min over rollouts of lengths (tokens), turns, durations (ms) and truncation."""
    counts = {id(rollout): (count_tokens(samples), len(samples)) for rollout, samples in batch.samples}
    readers: dict[str, Callable[[Rollout], float]] = {
        "seq_len": lambda rollout: counts[id(rollout)][0].total,
        "prefill_len": lambda rollout: counts[id(rollout)][0].prefill,
        "decode_len": lambda rollout: counts[id(rollout)][0].decode,
        "is_truncated": lambda rollout: rollout.is_truncated,
        "samples_per_rollout": lambda rollout: counts[id(rollout)][1],
        "num_turns": lambda rollout: rollout.num_turns,
        "generation_ms": lambda rollout: rollout.generation_ms,
        "scoring_ms": lambda rollout: rollout.scoring_ms,
    }
    metrics: dict[str, float] = {}
    for name, read in readers.items():
        values = [read(rollout) for rollout in batch.rollouts]
        metrics |= {f"{name}/mean": statistics.fmean(values), f"{name}/max": max(values), f"{name}/min": min(values)}
    return metrics


def reward_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """`reward/*` over rollouts, and fractions of groups that were solved by all or none of their rollouts.

    With several environments, also the mean reward and the fraction of rollouts of each.
    """
    every = [rollout for group in groups for rollout in group.rollouts]
    # A rejected rollout has no reward.
    rollouts = [rollout for rollout in every if not rollout.is_rejected] or every
    rewards = [rollout.reward for rollout in rollouts]
    solved_none, solved_all = (
        sum(group.every_reward_is(reward) for group in groups) / len(groups) for reward in (0.0, 1.0)
    )
    metrics = {
        "reward/mean": statistics.fmean(rewards),
        "reward/std": statistics.pstdev(rewards),
        "reward/min": min(rewards),
        "reward/max": max(rewards),
        "reward/median": statistics.median(rewards),
        "batch/solve_none": solved_none,
        "batch/solve_all": solved_all,
        "batch/effective_batch_size": 1.0 - solved_none - solved_all,
    }
    by_env = _group_by(rollouts, lambda rollout: rollout.example.env)
    if len(by_env) > 1:
        for env, env_rollouts in by_env.items():
            metrics[f"reward/{env}"] = statistics.fmean(rollout.reward for rollout in env_rollouts)
            metrics[f"batch/{env}"] = len(env_rollouts) / len(rollouts)
    return metrics


def part_metrics(parts: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """`reward_parts/<function>`: the mean of each reward function with a weight.

    With several environments `reward_parts/<environment>/<function>`.
    """
    return {
        f"reward_parts/{name}" if len(parts) == 1 else f"reward_parts/{env}/{name}": value
        for env, values in parts.items()
        for name, value in values.items()
    }


def environment_metrics(rollouts: Sequence[Rollout], filters: Sequence[Filter]) -> dict[str, float]:
    """`metrics/*` of the environments, `error/*`, and the number and fraction of rollouts that each filter detected."""
    errors = Counter(rollout.error for rollout in rollouts if rollout.error)
    metrics = {"error/mean": errors.total() / len(rollouts)}
    metrics |= {f"error/{name}": count / errors.total() for name, count in errors.items()}
    values: dict[str, list[float]] = {}
    for rollout in rollouts:
        for name, value in (rollout.metrics or {}).items():
            values.setdefault(name, []).append(value)
    metrics |= {f"metrics/{name}": statistics.fmean(each) for name, each in values.items()}
    detected = 0.0
    for each in filters:
        count = sum(values.get(f"filter/{each.name}", []))
        detected += count
        metrics |= {f"filter/{each.name}_count": count, f"filter/{each.name}_rate": count / len(rollouts)}
    if filters:
        enforced = sum(rollout.masked_by is not None for rollout in rollouts)
        metrics["filter/total_detected_rate"] = detected / len(rollouts)
        metrics["filter/total_enforced_rate"] = enforced / len(rollouts)
    return metrics


def status_metrics(groups: Sequence[Group], status: StepStatus) -> dict[str, float]:
    """`batch/*` of the scheduler and the policy, and the sampling temperature."""
    levels = [group.off_policy_level for group in groups]
    return {
        "batch/async_level": status.step - status.policy_version,
        "batch/inflight_rollouts": status.groups_in_flight,
        "batch/inflight_samples": status.groups_in_flight * status.group_size,
        "batch/cancelled_rollouts": status.cancelled_groups * status.group_size,
        "batch/off_policy_level/max": max(levels),
        "batch/off_policy_level/mean": statistics.fmean(levels),
        "batch/off_policy_level/min": min(levels),
        **staleness_metrics(groups, status.step),
        "sampling/temperature": status.temperature,
    }


def staleness_metrics(groups: Sequence[Group], step: int) -> dict[str, float]:
    """Staleness in steps: `batch/lag/*` of rollouts, and `batch/token_lag/*` of the tokens that are trained on.

    The staleness of a token is the step that trains on it minus the policy version that sampled it; a rollout's is that
    of its oldest token.
    """
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    staleness = [step - rollout.version for rollout in rollouts]
    tokens: Counter[int] = Counter()
    for rollout in rollouts:
        if rollout.trains:
            tokens += rollout.trace.trainable_by_version(rollout.version)
    metrics = {"batch/lag/mean": statistics.fmean(staleness), "batch/lag/max": max(staleness)}
    if tokens:
        total = sum((step - version) * count for version, count in tokens.items())
        metrics |= {"batch/token_lag/mean": total / tokens.total(), "batch/token_lag/max": step - min(tokens)}
    return metrics


def delay_metrics(delays_s: Sequence[float]) -> dict[str, float]:
    """`event_loop_lag/*` of the orchestrator's event loop, in seconds; empty if there was no measurement."""
    delays_s = sorted(delays_s)
    if not delays_s:
        return {}
    return {
        "event_loop_lag/min": delays_s[0],
        "event_loop_lag/mean": statistics.fmean(delays_s),
        "event_loop_lag/med": statistics.median(delays_s),
        "event_loop_lag/p90": delays_s[int(0.9 * (len(delays_s) - 1))],
        "event_loop_lag/max": delays_s[-1],
    }


def log_line(step: int, metrics: dict[str, float]) -> str:
    """The log line of a finished step. Scripts parse it."""
    validation = f"Val. Reward: {metrics['val_reward/mean']:.4f} | " if "val_reward/mean" in metrics else ""
    return (
        f"Step {step} | Time: {metrics['time/step']:.2f}s | Reward: {metrics['reward/mean']:.4f} | {validation}"
        f"Throughput: {metrics['perf/throughput']:.1f} tokens/s | "
        f"Seq. Length: {metrics['seq_len/mean']:.1f} tokens/sample | "
        f"Async Level: {metrics['batch/async_level']} | "
        f"Max. Off-Policy Level: {metrics['batch/off_policy_level/max']} | "
        f"Lag: {metrics['batch/lag/mean']:.2f} (max. {metrics['batch/lag/max']})"
    )


def sample_text(rollout: Rollout) -> str:
    """A rollout as readable text: prompt, completion and reward."""
    outcome = f"error {rollout.error}" if rollout.error else rollout.stop_condition or "no stop condition"
    messages = [*_messages(rollout.prompt), *_messages(rollout.completion)]
    text = "\n".join(f"  [{role}] {content}" for role, content in messages)
    return f"{rollout.example.env} row {rollout.example.row}, reward {rollout.reward:.4f}, {outcome}:\n{text}"


def _messages(messages: object) -> list[tuple[str, str]]:
    if not isinstance(messages, list):
        return [("text", str(messages))] if messages else []
    return [(str(message.get("role")), _shortened(content_text(message.get("content")))) for message in messages]


def _shortened(text: str, limit: int = 1000) -> str:
    return text if len(text) <= limit else f"{text[: limit // 2]} … {text[-limit // 2 :]}"


def _group_by(rollouts: Iterable[Rollout], key: Callable[[Rollout], str]) -> dict[str, list[Rollout]]:
    groups: dict[str, list[Rollout]] = {}
    for rollout in rollouts:
        groups.setdefault(key(rollout), []).append(rollout)
    return groups
