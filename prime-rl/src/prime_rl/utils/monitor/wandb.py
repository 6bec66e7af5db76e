"""Metrics in Weights & Biases."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from prime_rl.configs.shared import WandbConfig
from prime_rl.utils.monitor.base import Metrics


class WandbMonitor:
    """One W&B run. `offline` writes it below `directory` for `wandb sync`; an `id` continues an earlier run."""

    def __init__(self, config: WandbConfig, directory: Path, run_config: dict[str, Any]) -> None:
        import wandb

        directory.mkdir(parents=True, exist_ok=True)
        self._run = wandb.init(
            project=config.project,
            name=config.name,
            id=config.id,
            resume="allow",
            mode="offline" if config.offline else "online",
            dir=directory,
            config=run_config,
        )

    def log(self, metrics: Metrics, step: int) -> None:
        self._run.log(dict(metrics), step=step)

    def close(self, exit_code: int = 0) -> None:
        self._run.finish(exit_code=exit_code)
