"""Weights & Biases monitor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from prime_rl.configs.shared import WandbConfig
from prime_rl.monitors.base import Metrics
from prime_rl.monitors.sinks.attempts import Attempt
from prime_rl.utils.errors import RunError


class WandbMonitor:
    """Logs to one W&B run.

    `offline`, or `WANDB_MODE=offline`, writes the run to `directory` for a later `wandb sync`. `id` continues an
    earlier run.
    """

    def __init__(
        self, config: WandbConfig, directory: Path, run_config: dict[str, Any], attempt: Attempt | None = None
    ) -> None:
        """Start the run, or continue that of an earlier attempt.

        Raises:
            RunError: W&B cannot be reached, or the user is not logged in.
        """
        import wandb

        directory.mkdir(parents=True, exist_ok=True)
        run_id = config.id or (None if attempt is None else attempt.run_id())
        try:
            self._run = wandb.init(
                project=config.project,
                name=config.name,
                id=run_id,
                resume="allow",
                mode="offline" if config.offline else None,
                dir=directory,
                config=run_config,
                # The log shows samples of rollouts.
                settings=wandb.Settings(console="off"),
            )
        except wandb.Error as error:
            reason = str(error).strip().splitlines()[0]
            raise RunError(
                f"wandb: {reason}: log in with `wandb login`, or log offline with --wandb.offline"
            ) from error
        if attempt is not None:
            attempt.keep(self._run.id)

    def log(self, metrics: Metrics, step: int) -> None:
        self._run.log(dict(metrics), step=step)

    def log_table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], step: int) -> None:
        """Log a table."""
        import wandb

        self._run.log({name: wandb.Table(columns=list(columns), data=[list(row) for row in rows])}, step=step)

    def log_distributions(self, values: Mapping[str, Sequence[float]], step: int) -> None:
        """Log one histogram per name."""
        import wandb

        self._run.log({name: wandb.Histogram(list(of_name)) for name, of_name in values.items()}, step=step)

    def close(self, exit_code: int = 0) -> None:
        self._run.finish(exit_code=exit_code)
