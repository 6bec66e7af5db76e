"""`medarc_train env try --model`: finds a run's weights as `chat` does."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from medarc_rl.medarc_train import app
from prime_rl.run.paths import RunPaths
from prime_rl.utils.files import STABLE

CHECKPOINT = Path(__file__).parent.parent / "examples" / "reverse_text" / "checkpoint"


@pytest.fixture
def run(tmp_path: Path) -> RunPaths:
    """A run of the shipped checkpoint, without weights."""
    run = RunPaths(tmp_path / "run")
    run.configs.mkdir(parents=True)
    run.config("trainer").write_text(f'[model]\nname = "{CHECKPOINT}"\n')
    return run


def tried(model: Path) -> Result:
    words = ["env", "try", "reverse-text", "--model", str(model), "--max-tokens", "4", "-n", "1", "--device", "cpu"]
    return CliRunner().invoke(app, words)


@pytest.mark.slow
def test_a_run_answers_with_its_newest_weights(run: RunPaths) -> None:
    shutil.copytree(CHECKPOINT, run.weight(7))
    (run.weight(7) / STABLE).touch()
    result = tried(run.root)
    assert result.exit_code == 0, result.output
    assert "1 rollout, mean reward" in result.output


@pytest.mark.slow
def test_a_run_that_has_sent_weights_only_to_its_engines_answers_with_those(run: RunPaths) -> None:
    sent = run.orchestrator.broadcast(3)
    sent.mkdir(parents=True)
    shutil.copy(CHECKPOINT / "model.safetensors", sent)
    (sent / STABLE).touch()
    result = tried(run.root)
    assert result.exit_code == 0, result.output
    assert "evaluation 3: reverse-text" in result.output


def test_a_run_without_weights_and_an_adapter_alone_are_refused(run: RunPaths) -> None:
    result = tried(run.root)
    assert (result.exit_code, result.stdout) == (2, "")
    assert f"--model {run.root}: this run has no weights yet" in result.stderr
    adapter = run.orchestrator.broadcast(4)
    adapter.mkdir(parents=True)
    (adapter / "adapter_config.json").write_text("{}")
    (adapter / STABLE).touch()
    result = tried(run.root)
    assert (result.exit_code, result.stdout) == (2, "")
    assert f"{adapter} is an adapter without its model" in result.stderr
