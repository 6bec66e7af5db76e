from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from prime_rl.configs.orchestrator import EvalConfig, EvalSamplingConfig, ValConfig
from prime_rl.monitors import JsonlMonitor
from prime_rl.orchestrator.evaluator import EvalSchedule, EvalSet, Evaluator, Validator, is_reported
from prime_rl.orchestrator.reports.rollout_log import RolloutLog
from prime_rl.orchestrator.rollouts.evaluation import EvalGroup, Outcome, run_eval_groups
from prime_rl.orchestrator.rollouts.rollout import ExampleRef, Rollout
from prime_rl.orchestrator.rollouts.sampling import eval_sampling_args, rollout_seed
from prime_rl.orchestrator.scores import eval_metrics, has_response, score_titles
from prime_rl.orchestrator.servers.policy import AsyncLimits, Policy
from prime_rl.run.paths import OrchestratorPaths, RunPaths
from prime_rl.utils.files import replacing_directory


class Server:
    def __init__(self) -> None:
        self.groups_in_flight = 0
        self.lost = asyncio.Event()


class Pool:
    def __init__(self) -> None:
        self.server = Server()

    def least_loaded(self) -> Server:
        return self.server


class Environment:
    """Every third attempt raises."""

    def __init__(self, rollout: Any) -> None:
        self.make_rollout = rollout
        self.started = 0
        self.running = 0
        self.peak_concurrency = 0
        self.seeds: list[int | None] = []

    async def evaluate(self, example, size, server, sampling_args, version, max_retries=0) -> list[Rollout]:
        self.started += 1
        self.seeds.append(sampling_args.get("seed"))
        number = self.started
        self.running += 1
        self.peak_concurrency = max(self.peak_concurrency, self.running)
        await asyncio.sleep(0)
        self.running -= 1
        if number % 3 == 0:
            raise RuntimeError("the sandbox\nis down")
        return [self.make_rollout(reward=1.0)]


def due_at(schedule: EvalSchedule, versions: list[int]) -> list[int]:
    due = []
    for version in versions:
        if schedule.due(version):
            schedule.last = version
            due.append(version)
    return due


def test_an_evaluation_is_due_when_the_version_crosses_the_interval_even_in_a_jump() -> None:
    schedule = EvalSchedule.from_config(EvalConfig(interval=10), 0)
    assert due_at(schedule, [0, 0, 4, 9, 13, 14, 19, 41, 42, 50]) == [0, 13, 41, 50]


def test_the_base_model_can_be_left_out() -> None:
    schedule = EvalSchedule.from_config(EvalConfig(interval=10, eval_base_model=False), 0)
    assert due_at(schedule, [0, 1, 9, 10, 11]) == [10]


def test_after_a_resume_the_same_version_is_not_evaluated_again_unless_asked() -> None:
    assert due_at(EvalSchedule.from_config(EvalConfig(interval=10), 20), [20, 21, 30]) == [30]
    again = EvalConfig(interval=10, skip_eval_on_resume=False)
    assert due_at(EvalSchedule.from_config(again, 20), [20, 21, 30]) == [20, 30]
    assert due_at(EvalSchedule.from_config(again, 21), [21, 22, 30]) == [30]


async def test_attempts_run_a_few_at_a_time_and_one_that_raises_is_counted(rollout) -> None:
    environment, pool = Environment(rollout), Pool()
    attempts = [EvalGroup(environment, ExampleRef("letters", row), {}) for row in range(7)]
    outcomes = await run_eval_groups(attempts, pool, 0, max_concurrent=2)
    assert environment.peak_concurrency == 2
    assert [outcome.failed for outcome in outcomes] == [0, 0, 1, 0, 0, 1, 0]
    assert [outcome.example.row for outcome in outcomes] == list(range(7))
    assert outcomes[2].reason == "RuntimeError: the sandbox is down"
    assert pool.server.groups_in_flight == 0


def test_the_metrics_of_an_evaluation_have_their_documented_names(turn, rollout) -> None:
    outcomes = [
        Outcome(ExampleRef("letters", 0), [rollout(turn([1], [2] * length), reward=reward)])
        for length, reward in ((2, 1.0), (4, 0.0), (3, 0.0), (3, 0.0))
    ]
    metrics = eval_metrics(outcomes, 4)
    assert metrics["avg@4"] == 0.25
    assert [metrics[f"pass@{k}"] for k in (1, 2, 4)] == [0.25, 0.5, 1.0]
    assert [metrics[f"completion_len/{name}"] for name in ("mean", "max", "min")] == [3, 4, 2]
    assert set(metrics) >= {"no_response/mean", "no_response/count", "is_truncated/mean", "failed/count"}


def test_failures_have_no_score_and_partial_rewards_no_pass_at_k(rollout) -> None:
    example = ExampleRef("letters", 0)
    outcomes = [Outcome(example, [rollout(reward=0.5)]), Outcome(example, [], failed=1, reason="down")]
    metrics = eval_metrics(outcomes, 2)
    assert (metrics["avg@2"], metrics["failed/count"], metrics["failed/mean"]) == (0.5, 1, 0.5)
    assert not any(name.startswith("pass@") for name in metrics)
    assert eval_metrics(outcomes[1:], 2) == {"failed/count": 1, "failed/mean": 1.0}


def test_an_example_counts_alike_if_some_of_its_rollouts_failed(rollout) -> None:
    solved = [rollout(reward=1.0, metrics={"right": 1.0}) for _ in range(3)]
    missed = [replace(rollout(reward=0.0, metrics={"right": 0.0}), example=ExampleRef("letters", 1))]
    outcomes = [Outcome(each.example, [each]) for each in (*solved, *missed)]
    failed = [Outcome(ExampleRef("letters", 1), [], failed=1, reason="down")] * 2
    metrics = eval_metrics([*outcomes, *failed], 3, {"right": 1.0})
    assert (metrics["avg@3"], metrics["pass@1"], metrics["reward_parts/right"]) == (0.5, 0.5, 0.5)


def test_reward_functions_are_averaged_over_the_rollouts_that_they_scored(rollout) -> None:
    scored = [rollout(reward=value, metrics={"right": value, "words": 3.0, "num_turns": 1.0}) for value in (0.0, 1.0)]
    outcomes = [Outcome(ExampleRef("letters", 0), [*scored, rollout(reward=0.0)])]
    metrics = eval_metrics(outcomes, 3, {"right": 1.0, "layout": 0.5, "words": 0.0})
    assert (metrics["reward_parts/right"], metrics["metrics/words"]) == (0.5, 3.0)
    assert not {"reward_parts/layout", "metrics/num_turns"} & metrics.keys()
    # The only part is the reward itself.
    assert list(score_titles(metrics).values()) == ["avg@3", "pass@1", "pass@2", "words"]


def test_an_empty_answer_is_no_response(rollout) -> None:
    assert not has_response(rollout(completion=[{"role": "assistant", "content": ""}]))
    assert has_response(rollout(completion=[{"role": "assistant", "content": "", "tool_calls": [{"id": "1"}]}]))
    assert has_response(rollout(completion="text"))


async def test_the_servers_keep_one_version_while_an_evaluation_runs(tmp_path: Path) -> None:
    loaded: list[Path] = []

    class Receiver:
        async def update_weights(self, weight_dir: Path | None) -> None:
            loaded.append(weight_dir)

    paths = OrchestratorPaths(tmp_path)
    policy = Policy(paths, Receiver(), AsyncLimits(1), timeout_s=3600.0)
    async with policy.pinned() as version:
        following = asyncio.create_task(policy.follow())
        with replacing_directory(paths.broadcast(1)):
            pass
        for _ in range(5):
            await asyncio.sleep(0)
        assert (version, policy.version, loaded) == (0, 0, [])
    await policy.require_version(1)
    assert loaded == [paths.broadcast(1)]
    following.cancel()


def evaluator_of(run: RunPaths, resumed_version: int, sets: Sequence[EvalSet] = ()) -> Evaluator:
    return Evaluator(
        config=EvalConfig(),
        sets=sets,
        schedule=EvalSchedule.from_config(EvalConfig(), resumed_version),
        policy=Policy(run.orchestrator, Pool(), AsyncLimits(1), 3600.0, resumed_version),
        pool=Pool(),
        monitor=JsonlMonitor(run.metrics, "orchestrator"),
        rollout_log=RolloutLog(run.orchestrator, None, False, "tiny"),
        max_concurrent=1,
        was_evaluated=partial(is_reported, run),
    )


async def test_an_evaluation_says_that_failed_reward_functions_lowered_its_scores(
    tmp_path: Path, rollout, caplog
) -> None:
    environment = Environment(partial(rollout, reward_errors={"right": "ValueError: no score today"}))
    environment.name, environment.reward_functions = "letters", {"right": 1.0}
    evaluator = evaluator_of(RunPaths(tmp_path), 0, [EvalSet(environment, range(2), 1, 0)])
    await evaluator.finish(0)
    assert (
        "Evaluation on 'letters': 2 of 2 rollouts had a reward function that failed, which counts as 0; "
        "the first: right: ValueError: no score today"
    ) in caplog.messages


@pytest.mark.parametrize(("evaluated", "is_evaluated_again"), [([], True), ([0, 1], True), ([0, 2], False)])
async def test_a_run_that_was_stopped_in_its_last_evaluation_makes_it_when_it_resumes(
    tmp_path: Path, evaluated: list[int], is_evaluated_again: bool
) -> None:
    run = RunPaths(tmp_path)
    monitor = JsonlMonitor(run.metrics, "orchestrator")
    for version in evaluated:
        monitor.log({"progress/ckpt_step": version, "eval/a/avg@1": 0.5}, version)
    await evaluator_of(run, 2).finish(2)
    steps = [json.loads(line)["step"] for line in run.metrics.read_text().splitlines()]
    assert steps == [*evaluated, *([2] if is_evaluated_again else [])]


def test_eval_requests_carry_what_is_set_and_nothing_else() -> None:
    assert eval_sampling_args(EvalSamplingConfig(), ExampleRef("env", 4), 0) == {"extra_body": {}}
    config = EvalSamplingConfig(temperature=0.0, max_tokens=5, top_k=3, seed=7, extra_body={"stop": "x"})
    assert eval_sampling_args(config, ExampleRef("env", 4), 2) == {
        "temperature": 0.0,
        "max_tokens": 5,
        "seed": rollout_seed(7, ExampleRef("env", 4), 2),
        "extra_body": {"stop": "x", "top_k": 3, "exact_seed": True},
    }


def seeds_of(seed: int, env: str, attempt: int) -> list[int]:
    """Of 100 examples."""
    config = EvalSamplingConfig(seed=seed)
    return [eval_sampling_args(config, ExampleRef(env, row), attempt)["seed"] for row in range(100)]


def test_every_rollout_of_an_evaluation_has_its_own_seed_which_the_next_evaluation_repeats() -> None:
    keys = [(seed, env, attempt) for seed in (0, 1, -(10**18)) for env in ("a", "b") for attempt in range(4)]
    seeds = [seed for key in keys for seed in seeds_of(*key)]
    assert len(set(seeds)) == len(seeds) == 2400
    assert all(0 <= seed < 2**31 for seed in seeds)
    assert [seed for key in keys for seed in seeds_of(*key)] == seeds


def test_a_seed_is_the_same_in_another_process_and_on_another_machine() -> None:
    assert rollout_seed(0, ExampleRef("med-calc", 3, draw=9), 1) == 704_998_514


async def test_each_example_of_a_validation_has_a_seed_of_its_own_which_the_next_validation_repeats(rollout) -> None:
    environment = Environment(rollout)
    examples = [ExampleRef("env", row, draw=row) for row in range(4)]
    validator = Validator(ValConfig(num_examples=4), {"env": environment}, examples, Pool(), max_concurrent=1)
    for step in range(2):
        await validator.run(step, {"temperature": 1.0, "seed": 7}, version=step)
    assert environment.seeds[:4] == environment.seeds[4:]
    assert len(set(environment.seeds)) == 4


def test_the_means_of_attempts_agree_within_the_sampling_error() -> None:
    """100 examples of which a model answers one in four: the embedded engine draws from `random.Random(seed)`."""
    means = [
        fmean(random.Random(each).random() < 0.25 for each in seeds_of(seed, "med-calc", attempt))
        for seed in range(5)
        for attempt in range(4)
    ]
    standard_error = (0.25 * 0.75 / 100) ** 0.5
    assert all(abs(mean - 0.25) < 4 * standard_error for mean in means), means
    assert abs(fmean(means) - 0.25) < 3 * standard_error / len(means) ** 0.5
