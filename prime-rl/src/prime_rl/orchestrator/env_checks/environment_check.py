"""The process of `medarc_train env check`: `python -m prime_rl.orchestrator.env_checks.environment_check FD REQUEST`.

It writes rows to the descriptor FD. REQUEST is a JSON object with the environment's config and what to look at.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from typing import Any

from prime_rl.configs.rollouts.environments import EnvConfig
from prime_rl.configs.shared import ClientConfig, LogConfig
from prime_rl.orchestrator.env_checks.findings import Reporter
from prime_rl.orchestrator.errors import EnvironmentFault
from prime_rl.run.process import end_with_launch
from prime_rl.storage.staging import StoredImages
from prime_rl.utils.images import ImageLimits, ShownImages
from prime_rl.utils.imports import import_verifiers, import_without_gc
from prime_rl.utils.logger import setup_logger
from prime_rl.utils.signals import start_program


def main() -> None:
    """Check one environment. Ends with 0 once everything is reported."""
    start_program()
    descriptor, request = int(sys.argv[1]), json.loads(sys.argv[2])
    os.set_inheritable(descriptor, False)
    end_with_launch()
    setup_logger("error")
    report = Reporter(descriptor)
    with import_without_gc():
        import_verifiers()
        from prime_rl.orchestrator.workers.loading import load_environments

    config = EnvConfig.model_validate({**request["env"], "max_failed_groups": 1.0})
    report.tries("loading the environment")
    started_s = time.perf_counter()
    with asyncio.Runner() as runner:
        try:
            (environment,) = load_environments([config], LogConfig(vf_level="critical"), "env").values()
            report.found("ok", "import", f"{config.id} loads in {time.perf_counter() - started_s:.1f} s")
            runner.run(_check(environment, request, report))
        except EnvironmentFault as fault:
            report.found("fail", "import" if report.trying == "loading the environment" else "process", _plain(fault))
        report.done()
        # Closing the event loop would wait for the environment's threads, which may never end.
        os._exit(0)


def _plain(fault: EnvironmentFault) -> str:
    return " ".join(str(fault).removeprefix("env[0]: ").split())


async def _check(environment: Any, request: dict[str, Any], report: Reporter) -> None:
    from prime_rl.orchestrator.env_checks.dataset_check import check_leaks, check_rows, read_rows
    from prime_rl.orchestrator.env_checks.prompts import token_counter
    from prime_rl.orchestrator.env_checks.reward_check import Trials, check_rewards
    from prime_rl.orchestrator.env_checks.scripted_engine import MODEL, ScriptedEngine
    from prime_rl.orchestrator.servers.server import InferenceServer

    count = token_counter(request["model"]) if request["model"] else None
    environment.image_limits = ImageLimits()  # whether the model reads images is for a config to say
    report.tries("reading the images of the rows")
    environment.check_images()
    report.tries("reading the training rows")
    train = read_rows(environment, "train")
    check_rows(train, report, count)
    report.tries("reading the evaluation rows")
    evaluation = read_rows(environment.held_out(), "eval")
    if evaluation.prompts != train.prompts:
        check_rows(evaluation, report, count)
    check_leaks(train, evaluation, report)
    weights = environment.reward_functions
    functions = ", ".join(f"{name} ({weight:g})" for name, weight in weights.items())
    tools = [str(tool["function"]["name"]) for tool in environment.tools(0)]
    report.found("ok" if weights else "warn", "reward functions", functions or "none: rollouts have no reward")
    if tools:
        report.found("ok", "tools", ", ".join(tools))
    engine = ScriptedEngine()
    try:
        async with engine.serving():
            await environment.connect()
            shown = ShownImages(environment.image_limits, StoredImages())
            server = InferenceServer(engine.base_url, ClientConfig(base_url=[engine.base_url]), MODEL, images=shown)
            trials = Trials(environment, engine, server, report, request["limit_s"])
            await check_rewards(trials, train, request["rows"], request["form"], request["turns"])
            await server.close()
    finally:
        await environment.close()


if __name__ == "__main__":
    main()
