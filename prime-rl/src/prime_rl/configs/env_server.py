"""One environment behind an address: root of `env-server`. Its path is part of PRIME-RL's surface."""

from pathlib import Path
from typing import ClassVar

from prime_rl.configs.orchestrator import EnvConfig
from prime_rl.configs.shared import LogConfig
from prime_rl.configs.surface.root import RootConfig


class EnvServerConfig(RootConfig):
    """One environment. Read by `env-server`."""

    component: ClassVar[str] = "env_server"

    env: EnvConfig = EnvConfig()
    """The environment. Set its `extra_env_kwargs` to what the orchestrator would set; they are not filled in here."""

    log: LogConfig = LogConfig()
    """Logs."""

    output_dir: Path = Path("outputs/run_default")
    """Directory of the logs."""
