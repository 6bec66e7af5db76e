"""The embedded engine loads nothing before it is cleared."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from prime_rl.configs.inference import InferenceConfig
from prime_rl.inference.embedded.errors import EngineError
from prime_rl.inference.embedded.startup import start_service
from prime_rl.run.process import CLEARANCE_VARIABLE, give_clearance
from prime_rl.utils.logger import get_logger


class ClearsWhenAsked(logging.Handler):
    """Plays the orchestrator: makes the model's folder unloadable, then clears the engine that says it waits."""

    def __init__(self, file: Path, model: Path) -> None:
        super().__init__()
        self.file = file
        self.model = model

    def emit(self, record: logging.LogRecord) -> None:
        if str(self.file) in record.getMessage():
            (self.model / "config.json").write_text('{"model_type": "seen too late"}')
            give_clearance(self.file)


def test_the_model_is_read_after_the_clearance(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, model = tmp_path / "control" / "cleared", tmp_path / "model"
    model.mkdir()
    monkeypatch.setenv(CLEARANCE_VARIABLE, str(file))
    logger, handler = get_logger(), ClearsWhenAsked(file, model)
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        with pytest.raises(EngineError, match="seen too late"):
            start_service(InferenceConfig(model={"name": str(model)}, device="cpu"))
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
