"""Entry point `env-server`: serves one environment to orchestrators whose `env[].address` is its address.

It implements verifiers' wire protocol; `ZMQEnvClient` is the client.
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
from prime_rl.orchestrator.stopping import exit_process, explained_exit_code
from prime_rl.run.paths import OrchestratorPaths
from prime_rl.run.process import end_with_launch, own_beats
from prime_rl.transport.endpoints import TransportError
from prime_rl.utils.imports import import_without_gc
from prime_rl.utils.logger import get_logger, setup_logger
from prime_rl.utils.pydantic_config import parse_argv_or_exit
from prime_rl.utils.signals import start_program, write_stacks_on_signal

if TYPE_CHECKING:
    import verifiers as vf

DEFAULT_ADDRESS = "tcp://127.0.0.1:5000"
PARENT_VARIABLE = "ENV_SERVER_PARENT"
"""Environment variable: process id of the orchestrator that started the server. The server exits when it is gone."""
PARENT_POLL_S = 1.0
STOPPED_EXIT_CODE = 128 + signal.SIGTERM


def main() -> None:
    end_with_launch()
    start_program()
    write_stacks_on_signal()
    config = parse_argv_or_exit(EnvServerConfig)
    refuse_unbuilt(config)
    log = OrchestratorPaths(config.output_dir).env_log("train", config.env.name or config.env.id)
    setup_logger(config.log.level, log if config.log.file else None, config.log.json_logging)
    try:
        serve(config)
    except EnvironmentFault as fault:
        get_logger().error(str(fault))
        sys.exit(1)
    except SystemExit as exit_:
        exit_process(explained_exit_code(exit_))
    exit_process(STOPPED_EXIT_CODE)


def serve(config: EnvServerConfig) -> None:
    """Serve until SIGTERM or SIGINT, or until the orchestrator that started this process is gone.

    Raises:
        EnvironmentFault: the environment cannot be loaded, or its address is in use.
    """
    # verifiers takes seconds to import.
    with import_without_gc():
        from prime_rl.orchestrator.workers.loading import load_environment, setup_verifiers_logging

    setup_verifiers_logging(config.log)
    env = load_environment(config.env, "env")
    asyncio.run(_serve(env, config.env.address or DEFAULT_ADDRESS))


async def _serve(env: vf.Environment, address: str) -> None:
    from prime_rl.orchestrator.workers.service import EnvironmentService

    try:
        service = EnvironmentService(env, address)
    except TransportError as error:
        raise EnvironmentFault(f"env.address: {error}") from error
    get_logger().info(f"Serving at {address}")
    own_beats().say("running rollouts")
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    tasks = [asyncio.create_task(each) for each in (service.serve(), stop.wait(), _parent_exit())]
    ended, waiting = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in waiting:
        task.cancel()
    await service.close()
    for task in ended:
        task.result()


async def _parent_exit() -> None:
    """Wait until the orchestrator that started this process is gone. Never returns if there is none."""
    parent = os.environ.get(PARENT_VARIABLE)
    while parent is None or os.getppid() == int(parent):
        await asyncio.sleep(PARENT_POLL_S)


if __name__ == "__main__":
    main()
