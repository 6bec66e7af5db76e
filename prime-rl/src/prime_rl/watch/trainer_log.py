"""Shows the trainer's log during training, and on a terminal a progress bar below it."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from prime_rl.launch.logs import Follower, polled, shown
from prime_rl.run.paths import RunPaths
from prime_rl.watch.progress_bar import ProgressBar, figures, progress_bar

if TYPE_CHECKING:
    from prime_rl.configs.sft import SFTConfig
    from prime_rl.configs.trainer import TrainerConfig


@contextlib.contextmanager
def followed(config: SFTConfig | TrainerConfig, paths: RunPaths) -> Iterator[None]:
    """Show the trainer of `config` during the block, from its log and metrics files."""
    log = paths.log("trainer")
    if not sys.stdout.isatty():
        with shown(log):
            yield
        return
    with progress_bar(config.component, config.max_steps) as bar:
        view = _View(Follower.at_end(log), Follower.at_end(paths.metrics), config.component, bar)
        with polled(view.look, name="progress"):
            yield


class _View:
    def __init__(self, log: Follower, metrics: Follower, source: str, bar: ProgressBar) -> None:
        self.log = log
        self.metrics = metrics
        self.source = source
        self.bar = bar

    def look(self) -> None:
        # The bar redirects stdout to the lines above it.
        for line in self.log.new_lines():
            sys.stdout.write(f"{line}\n")
        sys.stdout.flush()
        for line in self.metrics.lines():
            # A full disk leaves an incomplete line.
            with contextlib.suppress(ValueError):
                self._take(json.loads(line))

    def _take(self, record: dict[str, Any]) -> None:
        if record.get("source") == self.source and "loss/mean" in record:
            self.bar.update(record["step"] + 1, figures(record))
