"""Put an evaluation's parts together, run it, and tell what came of it."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import ExitStack

from prime_rl.configs.eval import OfflineEvalConfig
from prime_rl.eval.candidates import Candidate
from prime_rl.eval.report import print_table, write_summary
from prime_rl.eval.results import ResultsFile
from prime_rl.eval.run import EvalSet, Evaluation, evaluate
from prime_rl.eval.server import OwnServer, own_server
from prime_rl.orchestrator.client import InferencePool
from prime_rl.orchestrator.envs import Environment, load_environments
from prime_rl.orchestrator.stopping import StopSignals
from prime_rl.utils.logger import get_logger
from prime_rl.utils.monitor import JsonlMonitor, Monitor, MultiMonitor
from prime_rl.utils.paths import EvalPaths, RunPaths
from prime_rl.utils.process import LocalHost


def start(config: OfflineEvalConfig, candidates: Sequence[Candidate], host: LocalHost) -> int:
    """Evaluate every candidate; the exit code. Call it in the main thread.

    Raises:
        EvalError, OrchestratorError, DeviceError, CannotStart: nothing (more) can be evaluated.
    """
    paths = RunPaths(config.output_dir)
    with ExitStack() as closing:
        # The server loads its model while the environments load their data.
        server = None
        if config.inference is not None:
            server = closing.enter_context(own_server(config.inference, paths, host))
        environments = load_environments(config.environments, config.log, "env", "eval")
        results = closing.enter_context(ResultsFile(EvalPaths(config.output_dir).results))
        monitor = _setup_monitor(config, paths)
        closing.push(lambda kind, error, trace: monitor.close(int(kind is not None)))
        return asyncio.run(_until_stopped(config, environments, candidates, results, monitor, server))


async def _until_stopped(
    config: OfflineEvalConfig,
    environments: Mapping[str, Environment],
    candidates: Sequence[Candidate],
    results: ResultsFile,
    monitor: Monitor,
    server: OwnServer | None,
) -> int:
    client = config.client if server is None else config.client.model_copy(update={"base_url": [server.base_url]})
    evaluation = Evaluation(
        config=config,
        sets=[EvalSet.of(each, environments[each.name or each.id]) for each in config.environments],
        pool=InferencePool(client, config.model.name),
        results=results,
        monitor=monitor,
    )
    main = asyncio.create_task(evaluate(evaluation, candidates, server))
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
    for failure in evaluation.failures:
        get_logger().error(f"Not evaluated in full: {failure}")


def _setup_monitor(config: OfflineEvalConfig, paths: RunPaths) -> Monitor:
    monitors: list[Monitor] = [JsonlMonitor(paths.metrics, "eval")]
    if config.wandb is not None:
        from prime_rl.utils.monitor.wandb import WandbMonitor

        monitors.append(WandbMonitor(config.wandb, paths.root, config.model_dump(mode="json")))
    return MultiMonitor(monitors)
