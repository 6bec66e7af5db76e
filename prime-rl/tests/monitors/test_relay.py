"""Evaluations next to a training reach the trainer's sinks: each once, in the order of steps."""

from __future__ import annotations

from pathlib import Path

from prime_rl.monitors import JsonlMonitor, Metrics
from prime_rl.monitors.base import Relay, WithEvaluations
from prime_rl.run.paths import RunPaths


class Sink:
    def __init__(self) -> None:
        self.logged: list[tuple[int, Metrics]] = []

    def log(self, metrics: Metrics, step: int) -> None:
        self.logged.append((step, metrics))

    def close(self, exit_code: int = 0) -> None:
        pass


def test_an_evaluation_goes_with_the_trainer_s_next_step_and_the_rest_to_the_next_reader(tmp_path: Path) -> None:
    paths, sink = RunPaths(tmp_path), Sink()
    trainer, evaluator = JsonlMonitor(paths.metrics, "sft"), JsonlMonitor(paths.metrics, "eval")
    sinks = WithEvaluations(sink, Relay.of(paths, resumes=False))
    trainer.log({"loss/mean": 3.0}, 0)
    sinks.log({"loss/mean": 3.0}, 0)
    evaluator.log({"progress/ckpt_step": 0, "eval/a/avg@1": 0.25, "eval/a/time": float("nan")}, 0)
    evaluator.log({"progress/ckpt_step": 1, "eval/a/avg@1": 0.5}, 1)
    with paths.metrics.open("a") as file:
        file.write("half a line of a full disk\n")
    trainer.log({"loss/mean": 2.0}, 7)
    sinks.log({"loss/mean": 2.0}, 7)
    sinks.close()
    assert sink.logged == [
        (0, {"loss/mean": 3.0}),
        (7, {"loss/mean": 2.0, "progress/ckpt_step": 0, "eval/a/avg@1": 0.25}),
    ]
    rest = Relay.of(paths, resumes=True)
    assert rest.take() == {"progress/ckpt_step": 1, "eval/a/avg@1": 0.5}
    assert rest.take() is None
    assert rest.last_step() == 7
    assert Relay.of(paths, resumes=True).take() is None


def test_a_run_without_metrics_has_no_evaluations(tmp_path: Path) -> None:
    relay = Relay.of(RunPaths(tmp_path), resumes=True)
    assert (relay.take(), relay.last_step()) == (None, -1)
