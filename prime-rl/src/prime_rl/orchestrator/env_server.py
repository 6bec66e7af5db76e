"""Entry point `env-server`: one environment, served over ZeroMQ to orchestrators whose `env[].address` names it.

The server is verifiers' own: `run_rollout` and `run_group` requests, as its `ZMQEnvClient` sends them.
"""

from __future__ import annotations

import signal
import sys

from prime_rl.configs.env_server import EnvServerConfig
from prime_rl.configs.not_built import refuse_unbuilt
from prime_rl.orchestrator.errors import EnvironmentFault
from prime_rl.utils.logger import get_logger, setup_logger
from prime_rl.utils.pydantic_config import parse_argv_or_exit

DEFAULT_ADDRESS = "tcp://127.0.0.1:5000"


def main() -> None:
    config = parse_argv_or_exit(EnvServerConfig)
    refuse_unbuilt(config)
    setup_logger(config.log.level, json_logging=config.log.json_logging)
    try:
        serve(config)
        # It returns when it has been told to stop, which every process here answers in the same way.
        sys.exit(128 + signal.SIGTERM)
    except EnvironmentFault as fault:
        get_logger().error(str(fault))
        sys.exit(1)


def serve(config: EnvServerConfig) -> None:
    """Serve until SIGTERM or SIGINT.

    Raises:
        EnvironmentFault: the environment cannot be used.
    """
    # verifiers takes seconds to import.
    from verifiers.serve import ZMQEnvServer

    from prime_rl.orchestrator.envs import environment_arguments, load_environments, module_id

    # The server's worker loads it again. There a fault shows as a worker that starts over and over, here as one line.
    load_environments([config.env], config.log)
    log_dir = config.output_dir / "logs" / "train" / (config.env.name or config.env.id)
    ZMQEnvServer.run_server(
        module_id(config.env.id),
        config.env.args,
        environment_arguments(config.env.extra_env_kwargs),
        log_level=config.log.vf_level,
        log_dir=str(log_dir) if config.log.file else None,
        json_logging=config.log.json_logging,
        address=config.env.address or DEFAULT_ADDRESS,
    )
