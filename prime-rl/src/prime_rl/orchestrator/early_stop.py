"""Follows evaluations, rewards and entropies of an RL run: records the best version, and ends the run early."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import fmean

from prime_rl.configs.orchestrator import OrchestratorConfig
from prime_rl.configs.shared import EarlyStopConfig
from prime_rl.monitors.base import records_after
from prime_rl.orchestrator.ckpt import Progress
from prime_rl.run.early_stop import EarlyEnd, record_best
from prime_rl.run.paths import RunPaths
from prime_rl.utils.logger import count_of, get_logger

REPORT_LAG = 3
"""Before the batch of step s, the servers have held version s - 1 - `max_async_level`. The trainer reports a step after
it has published the version that the step makes, so the last step that is surely reported is two below that version."""


@dataclass(slots=True)
class EarlyStop:
    """The rules of `[early_stop]` and `ckpt.keep_best`, with the history that they look at."""

    rules: EarlyStopConfig | None
    keeps_best: bool
    compared_metrics: list[str]
    max_async_level: int
    run: RunPaths
    progress: Progress
    """Holds the history, so that checkpoints do."""
    first_step: int
    """Step of this start."""
    earlier_bytes: int
    """Size of `metrics.jsonl` at this start. Reports of `first_step` and later steps in it are of an earlier start."""

    @classmethod
    def start(cls, config: OrchestratorConfig, run: RunPaths, progress: Progress) -> EarlyStop | None:
        """Continue the history of `progress`. None without rules."""
        keeps_best = config.ckpt is not None and config.ckpt.keep_best
        if config.early_stop is None and not keeps_best:
            return None
        compared = [] if config.eval is None else config.eval.compared_metrics
        progress.history = progress.history.by(" and ".join(compared), higher_is_better=True)
        size = run.metrics.stat().st_size if run.metrics.is_file() else 0
        if keeps_best:
            record_best(progress.history, run.best_checkpoint)
        rules, level = config.early_stop, config.max_async_level
        return cls(rules, keeps_best, compared, level, run, progress, progress.step, size)

    def has_evaluated(self, version: int) -> bool:
        return any(version == step for step, _ in self.progress.history.evaluations)

    def evaluated(self, version: int, metrics: Mapping[str, float]) -> None:
        """Note the evaluation of a version, if it has all compared metrics."""
        missing = [name for name in self.compared_metrics if name not in metrics]
        if missing:
            get_logger().warning(
                f"The evaluation of version {version} has no {' and no '.join(missing)}: it does not count for "
                "ckpt.keep_best and early_stop"
            )
            return
        history = self.progress.history
        history.evaluated(version, fmean(metrics[name] for name in self.compared_metrics))
        if self.keeps_best:
            record_best(history, self.run.best_checkpoint)

    def rewarded(self, reward: float) -> None:
        """Note the mean reward of a step."""
        if self.rules is not None:
            self.progress.history.stepped(self.rules, reward=reward)

    def why_to_end(self) -> str | None:
        """The rule that ends the run before the batch of the next step, in words."""
        if self.rules is None:
            return None
        if self.rules.min_entropy is not None:
            self._read_entropies(self.rules, self.progress.step - REPORT_LAG - self.max_async_level)
        return self.progress.history.why_to_end(self.rules)

    def _read_entropies(self, rules: EarlyStopConfig, last_step: int) -> None:
        """Read what the trainer has reported up to a step.

        Whether later reports are there depends on which process was faster, and a resumed run is to decide the same.
        """
        for record, end in records_after(self.run.metrics, self.progress.metrics_bytes):
            step = None if record is None or record.get("source") != "trainer" else record.get("step")
            if record is not None and isinstance(step, int):
                is_repeated = step >= self.first_step and end <= self.earlier_bytes
                if step > last_step and not is_repeated:
                    return
                # A NaN is null in the file.
                if not is_repeated and (entropy := record.get("entropy/mean")) is not None:
                    self.progress.history.stepped(rules, entropy=entropy)
            self.progress.metrics_bytes = end

    def end(self, why: str) -> None:
        """Record an early end, for the next launch and for reports."""
        EarlyEnd(self.progress.step, why, self.progress.history).write(self.run.early_end)
        get_logger().info(f"The run ends early, after {count_of('step', self.progress.step)}: {why}")
