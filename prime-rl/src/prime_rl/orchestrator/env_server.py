"""Entry point `env-server`: one environment in a process of its own, for orchestrators whose `env[].address` names it.

It speaks verifiers' protocol, as its `ZMQEnvClient` does.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from typing import TYPE_CHECKING

from prime_rl.configs.env_server import EnvServerConfig
from prime_rl.configs.surface.not_built import refuse_unbuilt
from prime_rl.orchestrator.errors import EnvironmentFault
from prime_rl.orchestrator.stopping import leave
from prime_rl.run.paths import OrchestratorPaths
from prime_rl.utils.imports import import_without_gc
from prime_rl.utils.logger import get_logger, setup_logger
from prime_rl.utils.pydantic_config import parse_argv_or_exit

if TYPE_CHECKING:
    import verifiers as vf

DEFAULT_ADDRESS = "tcp://127.0.0.1:5000"
PARENT_VARIABLE = "ENV_SERVER_PARENT"
"""Environment variable with the process id of an orchestrator, without which the server does not stay."""
LOOK_FOR_PARENT_S = 1.0
STOPPED = 128 + signal.SIGTERM


def main() -> None:
    config = parse_argv_or_exit(EnvServerConfig)
    refuse_unbuilt(config)
    log = OrchestratorPaths(config.output_dir).env_log("train", config.env.name or config.env.id)
    setup_logger(config.log.level, log if config.log.file else None, config.log.json_logging)
    try:
        serve(config)
    except EnvironmentFault as fault:
        get_logger().error(str(fault))
        sys.exit(1)
    # It returns when it has been told to stop, which every process here answers in the same way.
    leave(STOPPED)


def serve(config: EnvServerConfig) -> None:
    """Serve until SIGTERM, SIGINT, or the end of the orchestrator that started this process.

    Raises:
        EnvironmentFault: the environment cannot be used, or its address is taken.
    """
    # verifiers takes seconds to import.
    with import_without_gc():
        from prime_rl.orchestrator.env_servers.environments import load_environment, setup_verifiers_logging

    setup_verifiers_logging(config.log)
    env = load_environment(config.env, "env")
    asyncio.run(_serve(env, config.env.address or DEFAULT_ADDRESS))


async def _serve(env: vf.Environment, address: str) -> None:
    import zmq

    from prime_rl.orchestrator.env_servers.service import EnvironmentService

    try:
        service = EnvironmentService(env, address)
    except zmq.ZMQError as error:
        raise EnvironmentFault(f"env.address: cannot serve at {address}: {error}") from error
    get_logger().info(f"Serving at {address}")
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    tasks = [asyncio.create_task(each) for each in (service.serve(), stop.wait(), _orphaned())]
    ended, waiting = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in waiting:
        task.cancel()
    await service.close()
    for task in ended:
        task.result()


async def _orphaned() -> None:
    """Return once the orchestrator that started this process is gone; never, if none did."""
    parent = os.environ.get(PARENT_VARIABLE)
    while parent is None or os.getppid() == int(parent):
        await asyncio.sleep(LOOK_FOR_PARENT_S)


if __name__ == "__main__":
    main()
