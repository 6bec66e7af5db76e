"""Entry point `env-server`: serves one environment to orchestrators whose `env[].address` is its address.

An orchestrator with `env_servers` starts it with `--socket FD` instead, and asks it over a socket pair.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from typing import TYPE_CHECKING, Any

from prime_rl.configs.env_server import EnvServerConfig
from prime_rl.configs.surface.not_built import refuse_unbuilt
from prime_rl.orchestrator.errors import EnvironmentFault
from prime_rl.orchestrator.stopping import exit_process, explained_exit_code
from prime_rl.run.paths import OrchestratorPaths
from prime_rl.run.process import end_with_launch, own_beats
from prime_rl.transport.endpoints import TransportError
from prime_rl.utils.imports import import_verifiers, import_without_gc
from prime_rl.utils.logger import get_logger, setup_logger
from prime_rl.utils.pydantic_config import parse_argv_or_exit
from prime_rl.utils.signals import start_program, write_stacks_on_signal

if TYPE_CHECKING:
    from prime_rl.orchestrator.workers.remote import Service

DEFAULT_ADDRESS = "tcp://127.0.0.1:5000"
STOPPED_EXIT_CODE = 128 + signal.SIGTERM


def main() -> None:
    end_with_launch()
    start_program()
    write_stacks_on_signal()
    if sys.argv[1:2] == ["--socket"]:
        from prime_rl.orchestrator.workers.inside.serving import serve_parent

        serve_parent(load_for_parent)
        return
    config = parse_argv_or_exit(EnvServerConfig)
    refuse_unbuilt(config)
    log = OrchestratorPaths(config.output_dir).env_log("train", config.env.name or config.env.id)
    setup_logger(config.log.level, log if config.log.file else None, config.log.json_logging)
    try:
        asyncio.run(serve_address(load(config), config.env.address or DEFAULT_ADDRESS, config.env.id))
    except EnvironmentFault as fault:
        get_logger().error(str(fault))
        sys.exit(1)
    except SystemExit as exit_:
        exit_process(explained_exit_code(exit_))
    exit_process(STOPPED_EXIT_CODE)


def load(config: EnvServerConfig) -> Service:
    """Raises EnvironmentFault if the environment cannot be loaded."""
    # verifiers takes seconds to import.
    with import_without_gc():
        import_verifiers()
        from prime_rl.orchestrator.workers.loading import load_environment, setup_verifiers_logging
        from prime_rl.orchestrator.workers.remote import Service

    setup_verifiers_logging(config.log)
    return Service(load_environment(config.env, "env"))


def load_for_parent(start: dict[str, Any]) -> Service:
    """Load the environment of the orchestrator's first message. An error ends the process, whose log shows it."""
    config = EnvServerConfig.model_validate(start["args"])
    setup_logger(config.log.level, None, config.log.json_logging)
    try:
        service = load(config)
    except EnvironmentFault as fault:
        get_logger().error(str(fault))
        sys.stdout.flush()
        os._exit(1)
    get_logger().info("Serving the orchestrator that started this process")
    own_beats().say("running rollouts")
    return service


async def serve_address(service: Service, address: str, module: str) -> None:
    """Serve until SIGTERM or SIGINT. `module` is that of the environment.

    Raises:
        EnvironmentFault: the address is in use, or needs a key that is not set.
    """
    from prime_rl.orchestrator.workers.inside.blocking import LoopWatch
    from prime_rl.orchestrator.workers.port import listening, serve_port

    try:
        async with listening(address) as socket:
            get_logger().info(f"Serving at {address}")
            own_beats().say("running rollouts")
            serving = asyncio.create_task(serve_port(service, socket, LoopWatch({"": module})))
            for number in (signal.SIGTERM, signal.SIGINT):
                asyncio.get_running_loop().add_signal_handler(number, serving.cancel)
            await asyncio.wait([serving])
            await service.close()
            if not serving.cancelled():
                serving.result()
    except TransportError as error:
        raise EnvironmentFault(f"env.address: {error}") from error


if __name__ == "__main__":
    main()
