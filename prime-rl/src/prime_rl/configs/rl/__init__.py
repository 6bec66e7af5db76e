"""A whole RL run: root of `rl`."""

import warnings
from collections.abc import Iterator
from typing import Any, ClassVar, Self

from pydantic import model_validator
from pydantic_settings import SettingsConfigDict

from prime_rl.configs.areal import LaunchedConfig, with_derived_keys
from prime_rl.configs.ranges import Count
from prime_rl.configs.rl.propagation import propagate
from prime_rl.configs.rl.sections import (
    BaseDeploymentConfig,
    DeploymentConfig,
    MultiNodeDeploymentConfig,
    RunSections,
    SharedCheckpointConfig,
    SharedLogConfig,
    SharedModelConfig,
    SharedSettings,
    SharedWandbConfig,
    SharedWeightBroadcastConfig,
    SingleNodeDeploymentConfig,
    run_faults,
    run_warnings,
)
from prime_rl.configs.shared import FileAccess, SlurmConfig, StallConfig
from prime_rl.configs.storage import placed_output
from prime_rl.utils.pydantic_config import ConfigWarning, raise_faults

__all__ = [
    "BaseDeploymentConfig",
    "DeploymentConfig",
    "MultiNodeDeploymentConfig",
    "RLConfig",
    "RunSections",
    "SharedCheckpointConfig",
    "SharedLogConfig",
    "SharedModelConfig",
    "SharedSettings",
    "SharedWandbConfig",
    "SharedWeightBroadcastConfig",
    "SingleNodeDeploymentConfig",
]


class RLConfig(RunSections, LaunchedConfig):
    """A whole RL run. Read by `rl`, which hands each component its section."""

    # Both parents declare it; repeated so that their types agree.
    model_config = SettingsConfigDict()

    component: ClassVar[str] = "rl"

    max_model_len: Count | None = None
    """Not read: set `inference.model.max_model_len`."""

    clean_output_dir: bool = False
    """Delete the contents of the output directory first."""

    file_access: FileAccess = "owner"
    """Who can read the files of the run. `owner`: only you; `group`: your group too; `umask`: as your umask says."""

    stall: StallConfig = StallConfig()
    """When a process that hangs ends the run."""

    slurm: SlurmConfig | None = None
    """Submit through Slurm. None runs here."""

    dry_run: bool = False
    """Write the resolved configs and stop."""

    @classmethod
    def prepare(cls, data: dict[str, Any]) -> dict[str, Any]:
        # The other parents' methods do not lead there.
        return propagate(placed_output(super().prepare(with_derived_keys(cls.component, data))))

    @model_validator(mode="after")
    def _check_rules(self) -> Self:
        raise_faults(self.faults())
        for text in run_warnings(self):
            warnings.warn(text, ConfigWarning, stacklevel=2)
        return self

    def faults(self) -> Iterator[str]:
        """Which of the keys of different sections do not go together."""
        return run_faults(self, has_slurm=self.slurm is not None or self.launcher == "ray")
