"""Whether the run's directory can be written, and holds what the run will save."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

from medarc_rl.readiness.rows import Row, failed, ok, unknown
from prime_rl.checks.disk import existing_parent, forecast_disk, size_of_folder
from prime_rl.configs.rl import RLConfig
from prime_rl.configs.sft import SFTConfig


def storage_rows(config: SFTConfig | RLConfig, output_dir: Path, model: Path | None) -> Iterator[Row]:
    """`model` is the folder with the model's weights; None if they are not on this machine."""
    place = existing_parent(output_dir)
    try:
        # A file without a name: it is gone when it is closed, whatever happens.
        with tempfile.TemporaryFile(dir=place) as probe:
            probe.write(b"medarc")
            probe.flush()
    except OSError as error:
        yield failed("output folder", f"{output_dir}: {place} cannot be written: {error.strerror}")
        return
    yield ok("output folder", f"{output_dir} can be written from here")
    trainer = config.trainer if isinstance(config, RLConfig) else config
    forecast = forecast_disk(trainer, output_dir, size_of_folder(model))
    if forecast is None:
        yield unknown("disk space", "the model's files are not here, so the size of its checkpoints is unknown")
    else:
        yield (ok if forecast.fits else failed)("disk space", str(forecast))
