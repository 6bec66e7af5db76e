"""Each sink stores what was logged, as its own reader shows, and a resumed run continues in it."""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

PACKAGES = {"tensorboard": "tensorboard", "trackio": "trackio", "swanlab": "swanlab", "mlflow": "mlflow"}
INSTALLED = [sink for sink, package in PACKAGES.items() if find_spec(package)]

FIRST = {0: 0.0, 1: 1.0, 2: 2.0}
RESUMED = {2: 22.0, 3: 23.0}
"""Loss by step. The second attempt repeats step 2."""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of an RL run: the trainer's two attempts, and an orchestrator that logs at the same time."""
    root = tmp_path_factory.mktemp("sinks") / "my-run"
    root.mkdir()
    home = root.parent / "home"
    home.mkdir()
    # An address in the environment must not make a sink leave the machine.
    env = os.environ | {"HOME": str(home), "TRACKIO_SERVER_URL": "http://127.0.0.1:9", "SWANLAB_MODE": "online"}

    def attempt(component: str, first: int, last: int) -> subprocess.Popen[str]:
        script = Path(__file__).with_name("log_to_sinks.py")
        argv = [sys.executable, str(script), str(root), component, str(first), str(last), *INSTALLED]
        return subprocess.Popen(argv, env=env, cwd=home, stderr=subprocess.PIPE, text=True)

    def check(process: subprocess.Popen[str]) -> None:
        _, errors = process.communicate()
        assert (process.returncode, "WARNING" in errors) == (0, False), errors

    both = [attempt("trainer", 0, 3), attempt("orchestrator", 0, 3)]
    for process in both:
        check(process)
    check(attempt("trainer", 2, 4))
    return root


def needs(sink: str) -> None:
    if sink not in INSTALLED:
        pytest.skip(f"the package {PACKAGES[sink]} is missing: uv sync --inexact --extra monitors")


def test_tensorboard_shows_each_part_and_repeated_steps_once(run: Path) -> None:
    needs("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    curves = {}
    for part in ("trainer", "orchestrator"):
        events = EventAccumulator(str(run / "tensorboard" / part))
        events.Reload()
        curves[part] = {event.step: event.value for event in events.Scalars("loss/mean")}
    assert curves == {"trainer": {0: 0.0, 1: 1.0, **RESUMED}, "orchestrator": FIRST}


def test_trackio_continues_one_run_of_the_part(run: Path) -> None:
    needs("trackio")
    with sqlite3.connect(run / "trackio" / "prime-rl.db") as database:
        rows = database.execute("select run_name, run_id, step, metrics from metrics order by id").fetchall()
    trainer = [(step, metrics) for name, _, step, metrics in rows if name == "my-run-trainer"]
    assert [step for step, _ in trainer] == [0, 1, 2, 2, 3]
    assert len({run_id for name, run_id, _, _ in rows if name == "my-run-trainer"}) == 1
    assert {name for name, *_ in rows} == {"my-run-trainer", "my-run-orchestrator"}


def test_swanlab_keeps_files_for_a_later_sync_with_one_id(run: Path) -> None:
    needs("swanlab")
    from swanlab.sdk.internal.core_python.store import DataStoreReader

    folders = [folder for folder in (run / "swanlab").iterdir() if folder.is_dir()]
    ids = [folder.name.rpartition("-")[2] for folder in folders]
    assert sorted(ids.count(each) for each in set(ids)) == [1, 2]
    kept = (run / "control" / "swanlab_trainer.id").read_text().strip()
    assert ids.count(kept) == 2
    records = b""
    for folder in folders:
        reader = DataStoreReader()
        reader.open(folder / f"run-{folder.name.rpartition('-')[2]}.swanlab")
        records += b"".join(reader)
    assert b"loss/mean" in records
    assert not [file for folder in folders for file in folder.glob("console/*")]


def test_mlflow_continues_one_run_of_the_part(run: Path) -> None:
    needs("mlflow")
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{run}/mlflow.db")
    (experiment,) = [each for each in client.search_experiments() if each.name == "prime-rl"]
    runs = {each.info.run_name: each for each in client.search_runs([experiment.experiment_id])}
    assert set(runs) == {"my-run-trainer", "my-run-orchestrator"}
    trainer = runs["my-run-trainer"]
    assert trainer.info.status == "FINISHED"
    assert trainer.data.params["model.name"] == "tiny"
    history = client.get_metric_history(trainer.info.run_id, "loss/mean")
    assert [(each.step, each.value) for each in history] == [*FIRST.items(), *RESUMED.items()]


def test_the_sinks_write_only_into_the_run(run: Path) -> None:
    home = run.parent / "home"
    assert [str(file.relative_to(home)) for file in home.rglob("*") if file.is_file()] == []
