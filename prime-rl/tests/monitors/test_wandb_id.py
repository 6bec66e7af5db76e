"""All attempts of a run log to one W&B run."""

from __future__ import annotations

from pathlib import Path

import pytest

from prime_rl.configs.shared import WandbConfig
from prime_rl.monitors.sinks import Attempt, WandbMonitor


def test_a_resumed_attempt_continues_the_wandb_run_and_a_new_run_starts_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_SILENT", "true")
    kept = tmp_path / "control" / "wandb_trainer.id"

    def run_id(resumes: bool, own: str | None = None) -> str:
        config = WandbConfig(project="tests", offline=True, id=own)
        WandbMonitor(config, tmp_path, {}, Attempt(kept, resumes)).close()
        return kept.read_text(encoding="utf-8").strip()

    first = run_id(resumes=False)
    assert run_id(resumes=True) == first
    assert run_id(resumes=False) != first
    assert run_id(resumes=True, own="mine") == "mine"
