"""The orchestrator ends a run early, and records the best version of the evaluated ones."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from prime_rl.configs.orchestrator import EvalConfig, OrchestratorConfig
from prime_rl.monitors import JsonlMonitor
from prime_rl.orchestrator.ckpt import Checkpoints, Progress
from prime_rl.orchestrator.early_stop import REPORT_LAG, EarlyStop
from prime_rl.orchestrator.errors import EnvironmentFault
from prime_rl.orchestrator.evaluator import EvalSchedule, Evaluator, refuse_unknown_function
from prime_rl.orchestrator.reports.rollout_log import RolloutLog
from prime_rl.orchestrator.servers.policy import AsyncLimits, Policy
from prime_rl.orchestrator.steps import Steps
from prime_rl.run.early_stop import EarlyEnd, recorded_best
from prime_rl.run.paths import RunPaths
from prime_rl.transport import TrainingBatch

METRIC = "eval/letters/avg@2"


def config(**changes: Any) -> OrchestratorConfig:
    evaluation = {"interval": 10, "rollouts_per_example": 2, "env": [{"id": "reverse-text", "name": "letters"}]}
    return OrchestratorConfig(**{"eval": evaluation, "ckpt": {"interval": 5, "keep_best": True}, **changes})


def started(run: RunPaths, progress: Progress, **changes: Any) -> EarlyStop:
    early_stop = EarlyStop.start(config(**changes), run, progress)
    assert early_stop is not None
    return early_stop


def report_entropies(run: RunPaths, entropies: dict[int, float]) -> None:
    """Report steps, as a trainer does, and lines of others between them."""
    trainer, other = JsonlMonitor(run.metrics, "trainer"), JsonlMonitor(run.metrics, "orchestrator")
    for step, entropy in entropies.items():
        other.log({"reward/mean": 0.5}, step)
        trainer.log({"entropy/mean": entropy, "loss/mean": 0.1}, step)
    for monitor in (trainer, other):
        monitor.close()


def test_the_best_version_is_recorded_and_a_resumed_run_records_the_best_of_its_past(tmp_path: Path) -> None:
    run, progress = RunPaths(tmp_path), Progress()
    early_stop = started(run, progress)
    for version, score in ((0, 0.9), (10, 0.4), (20, 0.6)):
        early_stop.evaluated(version, {METRIC: score})
    assert json.loads(run.best_checkpoint.read_text()) == {"step": 20, "metric": METRIC, "value": 0.6}

    progress.step = 20
    checkpoints = Checkpoints(run, run.orchestrator)
    checkpoints.save(progress, {})
    early_stop.evaluated(30, {METRIC: 0.7})
    assert recorded_best(run.best_checkpoint) == 30
    resumed, _ = checkpoints.load(20)
    again = started(run, resumed)
    assert recorded_best(run.best_checkpoint) == 20
    assert again.has_evaluated(20)
    assert not again.has_evaluated(30)


def test_an_evaluation_without_the_metric_does_not_count(tmp_path: Path, caplog) -> None:
    early_stop = started(RunPaths(tmp_path), Progress(), early_stop={"patience": 1})
    early_stop.evaluated(10, {METRIC: 0.4})
    early_stop.evaluated(20, {"eval/letters/failed/count": 3})
    assert early_stop.why_to_end() is None
    assert "The evaluation of version 20 has no eval/letters/avg@2: it does not count" in caplog.text


def test_without_a_metric_the_mean_over_the_environments_decides(tmp_path: Path) -> None:
    envs = [{"id": "reverse-text", "name": "a"}, {"id": "reverse-text", "name": "b", "rollouts_per_example": 4}]
    evaluation = {"interval": 10, "rollouts_per_example": 2, "env": envs}
    early_stop = started(RunPaths(tmp_path), Progress(), eval=evaluation, early_stop={"target": 0.5})
    early_stop.evaluated(10, {"eval/a/avg@2": 0.4, "eval/b/avg@4": 0.6})
    assert early_stop.why_to_end() == "eval/a/avg@2 and eval/b/avg@4 is 0.5 at step 10 (target = 0.5)"


def test_entropies_are_read_once_they_are_sure_to_be_there_so_that_a_resumed_run_decides_the_same(
    tmp_path: Path,
) -> None:
    """Steps 4 to 7 have a low entropy. The first attempt ends at step 6; the second one repeats it and what follows."""
    run, progress = RunPaths(tmp_path), Progress()
    rules = {"min_entropy": 0.1, "min_entropy_steps": 4}
    early_stop = started(run, progress, early_stop=rules)
    high, low = dict.fromkeys(range(4), 0.5), dict.fromkeys((4, 5), 0.01)
    report_entropies(run, high | low | {6: 0.9, 7: 0.9})
    lag = REPORT_LAG + 1  # max_async_level is 1
    for progress.step in range(7):
        assert early_stop.why_to_end() is None
        assert progress.history.entropies == [0.5] * max(0, progress.step - lag + 1)

    checkpoints = Checkpoints(run, run.orchestrator)
    checkpoints.save(progress, {})
    resumed, _ = checkpoints.load(6)
    again = started(run, resumed, early_stop=rules)
    report_entropies(run, {6: 0.02, 7: 0.02})
    decisions = {}
    for resumed.step in range(6, 13):
        decisions[resumed.step] = again.why_to_end()
    assert [step for step, why in decisions.items() if why] == [7 + lag, 8 + lag]
    assert resumed.history.entropies == [0.01, 0.01, 0.02, 0.02]


class Sender:
    def __init__(self) -> None:
        self.sent: list[TrainingBatch] = []

    def send(self, batch: TrainingBatch) -> None:
        self.sent.append(batch)


class Nothing:
    """Stands in for the components that an early end does not use."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return lambda *args: {}


async def test_the_trainer_gets_the_reason_in_place_of_a_batch(tmp_path: Path) -> None:
    """The evaluation of version 10 has reached the target. Nothing is collected, and the last version is evaluated."""
    run, progress, sender, calls = RunPaths(tmp_path), Progress(step=10), Sender(), []

    class Evaluations:
        async def run_if_due(self, step: int, scheduler: object) -> bool:
            early_stop.evaluated(step, {METRIC: 0.8})
            return True

        async def finish(self, version: int) -> None:
            calls.append(version)

    early_stop = started(run, progress, early_stop={"target": 0.8})
    nothing: Any = Nothing()
    with ThreadPoolExecutor(1) as sending:
        steps = Steps(
            scheduler=nothing,
            policy=nothing,
            sender=sender,  # type: ignore[arg-type]
            sending=sending,
            reporter=nothing,
            rollout_log=nothing,
            heartbeat=nothing,
            checkpoints=None,
            advantage=nothing,
            filters=[],
            sampling=nothing,
            target=nothing,
            max_steps=100,
            evaluator=Evaluations(),  # type: ignore[arg-type]
            early_stop=early_stop,
        )
        await steps.run(progress)
    why = f"{METRIC} is 0.8 at step 10 (target = 0.8)"
    assert sender.sent == [TrainingBatch([], 10, early_end=why)]
    assert calls == [10]
    end = EarlyEnd.read(run.early_end)
    assert end is not None
    assert (end.step, end.why, end.history.evaluations) == (10, why, [(10, 0.8)])


def evaluator_of(run: RunPaths, version: int, early_stop: EarlyStop) -> Evaluator:
    evaluation = EvalConfig(interval=10, env=[])
    policy = Policy(run.orchestrator, Nothing(), AsyncLimits(1), 3600.0, version)  # type: ignore[arg-type]
    evaluator = Evaluator(
        config=evaluation,
        sets=(),
        schedule=EvalSchedule.from_config(evaluation, version),
        policy=policy,
        pool=Nothing(),  # type: ignore[arg-type]
        monitor=JsonlMonitor(run.metrics, "orchestrator"),
        rollout_log=RolloutLog(run.orchestrator, None, False, "tiny"),
        max_concurrent=1,
        was_evaluated=lambda version: False,
    )
    evaluator.report_to(early_stop)
    return evaluator


async def test_an_evaluation_for_the_best_checkpoint_waits_for_the_saved_version(tmp_path: Path) -> None:
    run = RunPaths(tmp_path)
    early_stop = started(run, Progress(step=9))
    evaluator = evaluator_of(run, 9, early_stop)
    waiting = asyncio.create_task(evaluator.run_if_due(10, Nothing()))  # type: ignore[arg-type]
    for _ in range(5):
        await asyncio.sleep(0)
    assert not waiting.done(), "without ckpt.keep_best it would go on with version 9"
    await evaluator.policy.announce(10)
    assert await waiting
    assert evaluator.schedule.last == 10


async def test_an_evaluation_that_a_stop_has_cut_short_is_made_again_where_a_rule_needs_it(tmp_path: Path) -> None:
    run, progress = RunPaths(tmp_path), Progress(step=20)
    early_stop = started(run, progress)
    assert await evaluator_of(run, 20, early_stop).run_if_due(20, Nothing())  # type: ignore[arg-type]
    early_stop.evaluated(20, {METRIC: 0.5})
    assert not await evaluator_of(run, 20, early_stop).run_if_due(20, Nothing())  # type: ignore[arg-type]


def test_a_function_that_the_environment_does_not_have_is_refused() -> None:
    class Letters:
        reward_functions = {"right": 1.0, "short": 0.0}  # noqa: RUF012

    for known in ("reward_parts/right", "metrics/short", "avg@1"):
        refuse_unknown_function(EvalConfig(metric=f"eval/letters/{known}"), {"letters": Letters()})  # type: ignore[dict-item]
    with pytest.raises(EnvironmentFault, match="no evaluation makes 'eval/letters/metrics/right': the functions of"):
        refuse_unknown_function(EvalConfig(metric="eval/letters/metrics/right"), {"letters": Letters()})  # type: ignore[dict-item]
