"""Weights that the trainer sends to the inference servers itself, without files."""

from __future__ import annotations

from pathlib import Path

from prime_rl.configs.orchestrator import NCCLWeightBroadcastConfig
from prime_rl.orchestrator.errors import InferenceFault
from prime_rl.orchestrator.servers.pool import InferencePool
from prime_rl.run.paths import OrchestratorPaths, step_of
from prime_rl.utils.logger import get_logger


class DirectWeights:
    """Tells the trainer when to send.

    It offers a version in `broadcasts/step_<v>`, waits there for our marker, and then sends to all servers at once.
    """

    def __init__(self, run: OrchestratorPaths) -> None:
        self.run = run

    @classmethod
    async def of(cls, config: NCCLWeightBroadcastConfig, pool: InferencePool, run: OrchestratorPaths) -> DirectWeights:
        """Let every server meet the trainer.

        Raises:
            InferenceFault: one could not.
        """
        get_logger().info(f"The inference servers join the trainer at {config.host}:{config.port}")
        await pool.join_weight_group(config.host, config.port, config.timeout)
        direct = cls(run)
        pool.before_update.append(direct.ask_for)
        return direct

    def ask_for(self, weight_dir: Path | None) -> None:
        """The servers are about to take the version that `weight_dir` names. The base model's they read themselves.

        Raises:
            InferenceFault: the trainer cannot be told.
        """
        version = step_of(weight_dir) if weight_dir is not None else None
        if version is None:
            return
        try:
            self.run.broadcast_ready(version).touch()
        except OSError as error:
            raise InferenceFault(f"the trainer cannot be told to send version {version}: {error}") from error

    def close(self) -> None:
        """Tell the trainer that no further version is needed."""
        self.run.broadcasts.mkdir(parents=True, exist_ok=True)
        self.run.broadcasts_closed.touch()
