"""Evaluates candidates (a base model, checkpoints): loads weights, makes missing rollouts, scores and keeps all."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self, TextIO

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from prime_rl.checks.chat_templates import model_template, read_template
from prime_rl.configs.eval import OfflineEvalConfig
from prime_rl.configs.inference import InferenceConfig
from prime_rl.configs.orchestrator import EvalSamplingConfig
from prime_rl.history.attempts import read_attempts
from prime_rl.history.metrics import MetricLog
from prime_rl.monitors import JsonlMonitor, Monitor, MultiMonitor
from prime_rl.monitors.base import Relay
from prime_rl.monitors.sinks import SinkRun, open_sinks
from prime_rl.orchestrator.errors import InferenceFault
from prime_rl.orchestrator.evaluator import EvalSet
from prime_rl.orchestrator.leaks import Overlap, tell
from prime_rl.orchestrator.reports.rollout_log import kept_messages
from prime_rl.orchestrator.rollouts.evaluation import EvalGroup, Outcome, run_eval_groups
from prime_rl.orchestrator.rollouts.rollout import ExampleRef, Rollout
from prime_rl.orchestrator.rollouts.sampling import eval_sampling_args
from prime_rl.orchestrator.rollouts.trace import TokenTrace
from prime_rl.orchestrator.scores import eval_metrics, score_titles, unscored_line, zero_line
from prime_rl.orchestrator.servers.channel import ServerAnswered
from prime_rl.orchestrator.servers.elastic import inference_pool
from prime_rl.orchestrator.servers.pool import InferencePool
from prime_rl.orchestrator.servers.server import InferenceServer
from prime_rl.orchestrator.stopping import Ending, StopSignals
from prime_rl.orchestrator.workers.blocked import BlockedLoops
from prime_rl.orchestrator.workers.environment import Environment
from prime_rl.orchestrator.workers.inside.blocking import LoopWatch
from prime_rl.orchestrator.workers.judges import RunJudges, run_judges
from prime_rl.orchestrator.workers.loading import load_environments, modules_here
from prime_rl.orchestrator.workers.remote import run_in_processes
from prime_rl.run.directory import free_name
from prime_rl.run.evaluations import Candidate, EvaluatedSteps, Following, has_other_weights
from prime_rl.run.paths import EvalPaths, RunPaths
from prime_rl.run.pictures import PictureWriter
from prime_rl.run.process import ANYONE, TRAINER_VARIABLE, own_beats
from prime_rl.storage.staging import StoredImages
from prime_rl.utils.errors import RunError
from prime_rl.utils.files import replacing_file
from prime_rl.utils.images import ImageLimits, ShownImages
from prime_rl.utils.logger import SUCCESS, get_logger

# Results of an evaluation: the file of finished rollouts, the table on the terminal, and the summary file.
#
# A second start with the same directory makes only the rollouts that the file lacks.


PLAIN_WIDTH = 240
"""Width of the table in a file or a pipe."""


class Key(NamedTuple):
    """Identifies a rollout: its number (from 0) among those of a row, with the weights of one step."""

    step: int
    env: str
    example: int
    rollout: int


@dataclass(frozen=True, slots=True)
class Result:
    """One finished rollout, as stored in the file."""

    step: int
    env: str
    example: int
    rollout: int
    reward: float
    completion_tokens: int
    is_truncated: bool
    stop_condition: str | None
    seconds: float
    """Seconds from the first request to the score."""
    metrics: Mapping[str, float]
    """Other metrics of the environment's rubric."""
    prompt: Any
    completion: Any
    reward_errors: Mapping[str, str] = field(default_factory=dict)
    """Tracebacks of failed reward functions, by name."""
    prompt_id: str = ""
    """Id of the prompt, independent of its row. Empty in results of earlier versions."""
    tools: Sequence[Mapping[str, Any]] = field(default_factory=list)
    """The tools that the model was offered."""
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def from_rollout(cls, key: Key, rollout: Rollout, seconds: float) -> Self:
        return cls(
            *key,
            reward=rollout.reward,
            completion_tokens=rollout.completion_tokens,
            is_truncated=rollout.is_truncated,
            stop_condition=rollout.stop_condition,
            seconds=round(seconds, 3),
            metrics=rollout.metrics or {},
            prompt=rollout.prompt,
            completion=rollout.completion,
            reward_errors=rollout.reward_errors,
            prompt_id=rollout.prompt_id,
            **rollout.rendering,
        )

    @property
    def key(self) -> Key:
        return Key(self.step, self.env, self.example, self.rollout)

    def as_rollout(self) -> Rollout:
        """The rollout, with the fields that scores need."""
        return Rollout(
            ExampleRef(self.env, self.example),
            self.reward,
            trace=TokenTrace(),
            temperature=1.0,
            version=self.step,
            is_truncated=self.is_truncated,
            stop_condition=self.stop_condition,
            usage_output_tokens=self.completion_tokens,
            completion=self.completion,
            metrics=dict(self.metrics),
            reward_errors=dict(self.reward_errors),
        )


class ResultsFile:
    """All results so far, in memory and in `results.jsonl`. A context manager.

    Lines are written immediately, so a crash loses at most the rollouts in flight. An incomplete last line is dropped.
    Rollouts of an earlier start whose reward functions failed do not count: they are made again.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._results: dict[Key, Result] = {}

    def __enter__(self) -> Self:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._descriptor = os.open(self._path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
        written = self._path.read_bytes()
        whole = written[: written.rfind(b"\n") + 1]
        os.ftruncate(self._descriptor, len(whole))
        found = [Result(**json.loads(line)) for line in whole.split(b"\n") if line]
        self._results = {result.key: result for result in found if not result.reward_errors}
        if len(self._results) < len(found):
            self._rewrite()  # otherwise a reader of the file would count a rollout twice
        return self

    def _rewrite(self) -> None:
        with replacing_file(self._path) as scratch:
            scratch.write_bytes(b"".join(map(_line, self._results.values())))
        os.close(self._descriptor)
        self._descriptor = os.open(self._path, os.O_RDWR | os.O_APPEND)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._descriptor)

    def __contains__(self, key: Key) -> bool:
        return key in self._results

    def __len__(self) -> int:
        return len(self._results)

    def add(self, result: Result) -> None:
        os.write(self._descriptor, _line(result))
        self._results[result.key] = result

    def set_aside(self, step: int) -> Path | None:
        """Keep a copy of the file, and forget the results of a step. Returns the copy; None if there are none."""
        if not any(key.step == step for key in self._results):
            return None
        copy = free_name(self._path)
        with replacing_file(copy) as scratch:
            scratch.write_bytes(self._path.read_bytes())
        self._results = {key: result for key, result in self._results.items() if key.step != step}
        self._rewrite()
        return copy

    def select(self, step: int, env: str) -> Iterator[Result]:
        """The results of one step in one environment."""
        return (result for result in self._results.values() if (result.step, result.env) == (step, env))


def _line(result: Result) -> bytes:
    def plain(message: Any) -> Any:  # messages may be Pydantic models
        return message.model_dump() if hasattr(message, "model_dump") else str(message)

    return (json.dumps(asdict(result), ensure_ascii=False, default=plain) + "\n").encode()


@dataclass(frozen=True, slots=True)
class CandidateScores:
    """The scores of one candidate in one environment."""

    candidate: str
    step: int
    env: str
    metrics: Mapping[str, float]
    """As in `metrics.jsonl`, without the prefix `eval/<env>/`."""


def write_summary(rows: Sequence[CandidateScores], path: Path) -> None:
    """Write all rows as a JSON list."""
    with replacing_file(path) as scratch:
        scratch.write_text(json.dumps([asdict(row) for row in rows], indent=2) + "\n", encoding="utf-8")


def print_table(rows: Sequence[CandidateScores], file: TextIO = sys.stdout) -> None:
    """Print one line per candidate and environment: with colours and rules on a terminal, otherwise plain."""
    on_terminal = file.isatty()
    scores = {name: title for row in rows for name, title in score_titles(row.metrics).items()}
    is_unscored = any(row.metrics.get("reward_errors/mean", 0) > 0 for row in rows)
    table = Table(box=SIMPLE_HEAD if on_terminal else None, pad_edge=False, header_style="bold")
    for title in ("weights", "environment"):
        table.add_column(title)
    for title in (
        *scores.values(),
        "length",
        "truncated",
        "failed",
        "seconds",
        *(["reward errors"] if is_unscored else []),
    ):
        table.add_column(title, justify="right")
    for row in rows:
        unscored = [_cell(row.metrics, "reward_errors/mean", "{:.1%}")] if is_unscored else []
        shown = (*(_cell(row.metrics, name, "{:.3f}") for name in scores), *_others(row), *unscored)
        table.add_row(row.candidate, row.env, *shown)
    Console(file=file, width=None if on_terminal else PLAIN_WIDTH, highlight=False).print(table)


def _others(row: CandidateScores) -> list[str]:
    return [
        _cell(row.metrics, "completion_len/mean", "{:.1f}"),
        _cell(row.metrics, "is_truncated/mean", "{:.1%}"),
        _cell(row.metrics, "failed/count", "{:.0f}"),
        _cell(row.metrics, "time", "{:.1f}"),
    ]


def _cell(metrics: Mapping[str, float], name: str, form: str) -> str:
    """A cell. Empty without the metric, for example `pass@k` of graded rewards."""
    return form.format(metrics[name]) if name in metrics else ""


UNLIMITED = 1_000_000
LOOK_EVERY_S = 1.0
SOURCE = "eval"
"""Source of these lines in `metrics.jsonl`."""


@dataclass(frozen=True, slots=True)
class Recorded:
    """Wraps an environment to store its rollout as soon as it succeeds."""

    environment: Environment
    key: Key
    results: ResultsFile
    pictures: PictureWriter

    async def evaluate(
        self,
        example: ExampleRef,
        size: int,
        server: InferenceServer,
        sampling_args: dict[str, Any],
        version: int,
        max_retries: int = 0,
    ) -> list[Rollout]:
        started_s = time.perf_counter()
        rollouts = await self.environment.evaluate(example, size, server, sampling_args, version, max_retries)
        return [rollout if rollout.error else await self._kept(rollout, started_s) for rollout in rollouts]

    async def _kept(self, rollout: Rollout, started_s: float) -> Rollout:
        """Store a rollout. Returns what scores need of it: its tokens and images would fill the memory."""
        seconds = time.perf_counter() - started_s
        messages = await asyncio.to_thread(kept_messages, rollout, self.pictures)
        result = Result.from_rollout(self.key, replace(rollout, **messages), seconds)
        self.results.add(result)
        return result.as_rollout()


@dataclass(slots=True)
class Evaluation:
    """All candidates in all environments. Failures are reported at the end; everything else still runs."""

    config: OfflineEvalConfig
    sets: Sequence[EvalSet]
    pool: InferencePool
    results: ResultsFile
    pictures: PictureWriter
    monitor: Monitor
    judges: RunJudges
    reported: MetricLog
    rows: list[CandidateScores] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    zeros: list[str] = field(default_factory=list)
    """Why every score of a candidate in an environment is 0. Told last, below the table."""

    async def run(self, candidates: Sequence[Candidate]) -> None:
        own_beats().started()
        for candidate in candidates:
            await self._evaluate(candidate)
        if self.config.watch and self.config.weights_dir is not None:
            known = [candidate.step for candidate in candidates]
            following = Following(self.config.weights_dir, known, self.config.interval, trainer_completion())
            await self._follow(following, self.config.weights_dir)

    async def _follow(self, following: Following, weights_dir: Path) -> None:
        """Evaluate checkpoints as they appear, until the run has ended."""
        while not following.has_ended:
            new = following.look()
            if new and following.has_ended:
                get_logger().info(f"The training is done; still to evaluate: {_listed(new)}")
            for step in new:
                await self._evaluate(Candidate(step, weights_dir / f"step_{step}"))
            own_beats().say(f"waiting for the next checkpoint in {weights_dir}", waits_for=ANYONE)
            own_beats().tick()
            if new and not following.has_ended:
                get_logger().info(f"Waiting for the next checkpoint in {weights_dir}, until the run ends")
            await asyncio.sleep(0 if following.has_ended else LOOK_EVERY_S)

    async def _evaluate(self, candidate: Candidate) -> None:
        await self._complete(candidate)
        if trainer_completion() is not None and candidate.weights is not None:
            EvaluatedSteps(RunPaths(self.config.output_dir)).add(candidate.step)

    async def _complete(self, candidate: Candidate) -> None:
        """Make and score the rollouts of one candidate that are missing."""
        self._forget_other_weights(candidate)
        keys = [key for each in self.sets for key in keys_of(each, candidate.step)]
        missing = [key for key in keys if key not in self.results]
        if len(missing) < len(keys):
            get_logger().info(f"{candidate}: {len(keys) - len(missing)} of {len(keys)} rollouts are there already")
        outcomes: list[Outcome] = []
        started_s = time.perf_counter()
        if missing:
            try:
                sampling = sampling_of(candidate, self.config.sampling)
                await self._load(candidate)
                if line := other_template(candidate, self.config.inference):
                    get_logger().warning(line)
            except InferenceFault as fault:
                self._fail(f"{candidate}: {fault}")
                return
            outcomes = await run_eval_groups(
                [self._group(key, sampling) for key in missing],
                self.pool,
                candidate.step,
                self.config.max_concurrent or UNLIMITED,
            )
        for each in self.sets:
            self._report(candidate, each, [one for one in outcomes if one.example.env == each.name], started_s)

    def _forget_other_weights(self, candidate: Candidate) -> None:
        fingerprint = candidate.fingerprint(self.config.model.name)
        if not has_other_weights(EvalPaths(self.config.output_dir), candidate.step, fingerprint):
            return
        if copy := self.results.set_aside(candidate.step):
            get_logger().warning(
                f"{candidate}: its weights have changed since it was evaluated: it is evaluated again; "
                f"the earlier rollouts are in {copy}"
            )

    async def _load(self, candidate: Candidate) -> None:
        """Load the candidate's weights into the servers. Raises InferenceFault."""
        own_beats().say(f"loading {candidate}", waits_for="inference")
        try:
            await self.pool.load(candidate.weights)
        except InferenceFault as fault:
            # A foreign server cannot change its weights, so it still has the base model's.
            cannot = isinstance(fault.__cause__, ServerAnswered) and fault.__cause__.status in (404, 405)
            if not cannot or candidate.weights is not None:
                raise

    def _group(self, key: Key, sampling: EvalSamplingConfig) -> EvalGroup:
        (of_env,) = [each for each in self.sets if each.name == key.env]
        example = ExampleRef(key.env, key.example)
        return EvalGroup(
            Recorded(of_env.environment, key, self.results, self.pictures),
            example,
            eval_sampling_args(sampling, example, key.rollout),
            max_retries=of_env.max_retries,
        )

    def _report(self, candidate: Candidate, of_env: EvalSet, ran: Sequence[Outcome], started_s: float) -> None:
        """Score all rollouts of a candidate in one environment, including those of earlier starts."""
        wanted = set(keys_of(of_env, candidate.step))
        stored = self.results.select(candidate.step, of_env.name)
        rollouts = [each.as_rollout() for each in stored if each.key in wanted]
        failed = [outcome for outcome in ran if outcome.failed]
        metrics = eval_metrics(
            [*(Outcome(rollout.example, [rollout]) for rollout in rollouts), *failed],
            of_env.rollouts,
            of_env.environment.reward_functions,
        )
        if ran:
            metrics["time"] = max(outcome.ended_s for outcome in ran) - started_s
        named = {f"eval/{of_env.name}/{name}": value for name, value in metrics.items()}
        # An earlier start may have made the last rollouts without reporting them, or reported more or fewer rows.
        if ran or not self._is_reported(candidate.step, named):
            named |= self.judges.take_metrics()
            self.monitor.log({"progress/ckpt_step": candidate.step, **named}, candidate.step)
        self.rows.append(CandidateScores(str(candidate), candidate.step, of_env.name, metrics))
        get_logger().log(SUCCESS, f"{candidate} | {of_env.name} | {_scores(metrics)}")
        if line := unscored_line(rollouts):
            get_logger().warning(f"{candidate} | {of_env.name} | {line}")
        if line := zero_line(rollouts, of_env.environment):
            self.zeros.append(f"{candidate} | {of_env.name} | {line}")
        if failed:
            self._fail(
                f"{candidate}, {of_env.name}: {len(failed)} of {len(wanted)} rollouts failed, "
                f"one with {failed[0].reason}"
            )

    def _is_reported(self, step: int, metrics: Mapping[str, float]) -> bool:
        """Whether `metrics.jsonl` ends with these values."""
        self.reported.refresh(read_attempts(RunPaths(self.config.output_dir)))
        return self.reported.of_step(step, list(metrics), SOURCE) == metrics

    def _fail(self, line: str) -> None:
        get_logger().error(line)
        self.failures.append(line)


def keys_of(eval_set: EvalSet, step: int) -> list[Key]:
    """Every rollout, row by row, so that servers find the prompt of a row in their cache."""
    return [Key(step, eval_set.name, row, number) for row in eval_set.rows for number in range(eval_set.rollouts)]


def sampling_of(candidate: Candidate, sampling: EvalSamplingConfig) -> EvalSamplingConfig:
    """`sampling`, with stops at the tokens that end an answer of these weights, by their `generation_config.json`.

    A server stops at those of the model that it was started with. SFT of a base model teaches it another one.

    Raises:
        InferenceFault: the file is damaged.
    """
    file = None if candidate.weights is None else candidate.weights / "generation_config.json"
    if file is None or not file.is_file() or sampling.extra_body.get("ignore_eos"):
        return sampling
    try:
        listed = json.loads(file.read_bytes()).get("eos_token_id")
    except (OSError, ValueError, AttributeError) as error:
        raise InferenceFault(f"{file} cannot be read: {error}") from error
    ends = listed if isinstance(listed, list) else [] if listed is None else [listed]
    stops = [*sampling.extra_body.get("stop_token_ids", []), *ends]
    return sampling.model_copy(update={"extra_body": {**sampling.extra_body, "stop_token_ids": stops}})


def other_template(candidate: Candidate, server: InferenceConfig | None) -> str | None:
    """A warning if the server, started with the base model, does not ask with the chat template of these weights.

    None for a server that runs elsewhere, which tells nobody its template.
    """
    own = None if candidate.weights is None or server is None else model_template(str(candidate.weights))
    if own is None or server is None:
        return None
    named = server.model.chat_template
    asked = model_template(server.model.name) if named is None else read_template("chat_template", named)
    if asked is None or asked.strip() == own.strip():
        return None
    return (
        f"{candidate}: asked with another chat template than its own, that of "
        f"{server.model.name if named is None else 'inference.model.chat_template'}; for its own, set "
        f"inference.model.chat_template to {candidate.weights}/chat_template.jinja"
    )


async def evaluate(evaluation: Evaluation, candidates: Sequence[Candidate]) -> None:
    """Wait for the servers, and evaluate.

    Raises:
        InferenceFault: a server does not come up, or serves another model.
        EnvironmentFault: the reward functions of an environment mostly failed.
    """
    async with AsyncExitStack() as closing:
        closing.push_async_callback(evaluation.pool.close)
        for each in evaluation.sets:
            closing.push_async_callback(each.environment.close)
        await _evaluate(evaluation, candidates)


async def _evaluate(evaluation: Evaluation, candidates: Sequence[Candidate]) -> None:
    blocked = BlockedLoops()
    environments = [each.environment for each in evaluation.sets]
    for environment in environments:
        await environment.connect(blocked)
    watch = LoopWatch(modules_here(evaluation.config.environments, environments), blocked.add)
    paths, is_ours = RunPaths(evaluation.config.output_dir), evaluation.config.inference is not None
    await evaluation.pool.wait_served(paths.log("inference") if is_ours else None)
    evaluation.judges.say_wait()
    await evaluation.judges.warm()
    try:
        await _unless_lost(evaluation.judges, evaluation.run(candidates), watch)
    finally:
        blocked.conclude()
    for environment in environments:
        environment.failures.conclude()


async def _unless_lost(judges: RunJudges, work: Coroutine[Any, Any, None], watch: LoopWatch) -> None:
    """Await `work`, while `watch` measures. Raises JudgeFault as soon as a judge is lost."""
    tasks = [asyncio.create_task(each) for each in (work, judges.watch(), watch.measure())]
    try:
        ended, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in ended:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    judges.conclude()


def trainer_completion() -> Path | None:
    """The file that the trainer of this launch makes when it is done; None if this launch trains nothing."""
    marker = os.environ.get(TRAINER_VARIABLE)
    return None if marker is None else Path(marker)


def _listed(steps: Sequence[int]) -> str:
    more = f" and {len(steps) - 5} more" if len(steps) > 5 else ""
    return ", ".join(f"step {step}" for step in steps[:5]) + more


def _scores(metrics: Mapping[str, float]) -> str:
    scores = [f"{title}: {metrics[name]:.4f}" for name, title in score_titles(metrics).items()]
    time_s = [f"Time: {metrics['time']:.2f}s"] if "time" in metrics else []
    return " | ".join([*(scores or ["no rollout succeeded"]), *time_s])


def run_evaluation(config: OfflineEvalConfig, candidates: Sequence[Candidate], ending: Ending) -> int:
    """Evaluate every candidate and return the exit code. Call it in the main thread.

    `ending` explains what ends the evaluation once the environments are loaded.

    Raises:
        OrchestratorError: the evaluation cannot start.
    """
    with run_judges(config.judge, RunPaths(config.output_dir)) as judges:
        environments = load_environments(config.environments, config.log, "env", "eval")
        run_in_processes("eval", config.environments, environments.values(), config.log, config.output_dir)
        for name, environment in environments.items():
            # What the candidates were trained on is not known here.
            not_compared = Overlap(len(environment), falls_back=environment.falls_back, is_compared=False)
            tell(f"Evaluation on {name!r}", not_compared)
        return ending.run(lambda runner: _evaluate_all(runner, config, environments, judges, candidates))


def _evaluate_all(
    runner: asyncio.Runner,
    config: OfflineEvalConfig,
    environments: Mapping[str, Environment],
    judges: RunJudges,
    candidates: Sequence[Candidate],
) -> int:
    paths = RunPaths(config.output_dir)
    with ExitStack() as closing:
        results = closing.enter_context(ResultsFile(EvalPaths(config.output_dir).results))
        monitor = _setup_monitor(config, paths)
        closing.push(lambda kind, error, trace: monitor.close(int(kind is not None)))
        exit_code = runner.run(_until_stopped(config, environments, judges, candidates, results, monitor))
    trainer = trainer_completion()
    if trainer is not None and trainer.is_file():
        _send_the_rest(config, paths)
    return exit_code


async def _until_stopped(
    config: OfflineEvalConfig,
    environments: Mapping[str, Environment],
    judges: RunJudges,
    candidates: Sequence[Candidate],
    results: ResultsFile,
    monitor: Monitor,
) -> int:
    evaluation = Evaluation(
        config=config,
        sets=[EvalSet.from_config(each, environments[each.name or each.id]) for each in config.environments],
        pool=inference_pool(config.client, config.model.name, images=ShownImages(ImageLimits(), StoredImages())),
        results=results,
        pictures=PictureWriter(RunPaths(config.output_dir).pictures, StoredImages()),
        monitor=monitor,
        judges=judges,
        reported=MetricLog(RunPaths(config.output_dir).metrics),
    )
    main = asyncio.create_task(evaluate(evaluation, candidates))
    signals = StopSignals()
    signals.watch(main)
    try:
        await main
    except asyncio.CancelledError:
        if signals.received is None:
            raise
        return signals.exit_code
    finally:
        _tell(evaluation, EvalPaths(config.output_dir))
    return 1 if evaluation.failures else 0


def _tell(evaluation: Evaluation, paths: EvalPaths) -> None:
    if evaluation.rows:
        print_table(evaluation.rows)
        write_summary(evaluation.rows, paths.summary)
        get_logger().info(f"{len(evaluation.results)} rollouts in {paths.results}")
    for line in evaluation.zeros:
        get_logger().warning(line)
    for failure in evaluation.failures:
        get_logger().error(f"Not evaluated in full: {failure}")


def _setup_monitor(config: OfflineEvalConfig, paths: RunPaths) -> Monitor:
    # A second start appends to the metrics of the first.
    jsonl = JsonlMonitor(paths.metrics, SOURCE)
    if trainer_completion() is not None:
        return jsonl  # the trainer sends what it finds there
    resumes = paths.metrics.is_file()
    run = SinkRun("eval", paths, config.model_dump(mode="json"), resumes)
    return MultiMonitor([jsonl, open_sinks(config.wandb, config.monitor, run, paths.root)])


def _send_the_rest(config: OfflineEvalConfig, paths: RunPaths) -> None:
    """Send to the sinks what a training that has ended did not send any more."""
    relay = Relay.of(paths, resumes=True)
    rest = []
    while (metrics := relay.take()) is not None:
        rest.append(metrics)
    if not rest or (config.wandb is None and all(sink is None for _, sink in config.monitor)):
        return
    own_beats().say("sending the last evaluations to the monitors", waits_for=ANYONE)
    try:
        sinks = open_sinks(config.wandb, config.monitor, SinkRun("sft", paths, {}, resumes=True), paths.root)
    except RunError as error:
        get_logger().error(f"{len(rest)} evaluations are only in {paths.metrics}: {error}")
        return
    for step, metrics in enumerate(rest, start=relay.last_step() + 1):
        sinks.log(metrics, step)
    sinks.close()
