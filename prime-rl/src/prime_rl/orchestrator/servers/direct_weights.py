"""Weight updates over NCCL: the trainer sends weights directly to the inference servers, without files."""

from __future__ import annotations

from pathlib import Path

from prime_rl.configs.orchestrator import NCCLWeightBroadcastConfig
from prime_rl.orchestrator.errors import InferenceFault
from prime_rl.orchestrator.servers.pool import InferencePool
from prime_rl.run.paths import OrchestratorPaths, step_of
from prime_rl.utils.logger import get_logger


class DirectWeights:
    """Asks the trainer to send a version when the servers are ready to receive it.

    The trainer announces a version in `broadcasts/step_<v>`, waits until our ready marker appears there, and then
    sends the weights to all servers at the same time.
    """

    def __init__(self, run: OrchestratorPaths) -> None:
        self.run = run

    @classmethod
    async def connect(
        cls, config: NCCLWeightBroadcastConfig, pool: InferencePool, run: OrchestratorPaths
    ) -> DirectWeights:
        """Have every server join the trainer's weight group, and request each later version from the trainer.

        Raises:
            InferenceFault: a server could not join.
        """
        get_logger().info(f"The inference servers are joining the trainer at {config.host}:{config.port}")
        await pool.join_weight_group(config.host, config.port, config.timeout)
        direct = cls(run)
        pool.before_update.append(direct.request)
        return direct

    def request(self, weight_dir: Path | None) -> None:
        """Ask the trainer to send the version named by `weight_dir`. None is the base model, which servers read alone.

        Raises:
            InferenceFault: the ready marker cannot be written.
        """
        version = step_of(weight_dir) if weight_dir is not None else None
        if version is None:
            return
        try:
            self.run.broadcast_ready(version).touch()
        except OSError as error:
            raise InferenceFault(f"cannot ask the trainer to send version {version}: {error}") from error

    def close(self) -> None:
        """Tell the trainer that no more versions are needed."""
        self.run.broadcasts.mkdir(parents=True, exist_ok=True)
        self.run.broadcasts_closed.touch()
