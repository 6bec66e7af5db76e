"""A sink that fails or hangs neither stops nor delays the run, and one warning says so."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator

import pytest

from prime_rl.monitors import Metrics
from prime_rl.monitors.sinks import Guarded, Limits, close_all
from prime_rl.utils.errors import RunError


class Sink:
    """Keeps steps; `on_log` may raise or wait."""

    def __init__(self, on_log: Callable[[int], object] = lambda step: None) -> None:
        self.steps: list[int] = []
        self.exit_code: int | None = None
        self._on_log = on_log

    def log(self, metrics: Metrics, step: int) -> None:
        self._on_log(step)
        self.steps.append(step)

    def close(self, exit_code: int = 0) -> None:
        self.exit_code = exit_code


@pytest.fixture
def release() -> Iterator[threading.Event]:
    """Lets a hanging sink go on, at the latest at the end of the test."""
    event = threading.Event()
    yield event
    event.set()


def raising(error: BaseException) -> Callable[[], Sink]:
    def start() -> Sink:
        raise error

    return start


def test_every_record_arrives_in_order_with_the_exit_code() -> None:
    sink = Sink()
    guarded = Guarded("sink", lambda: sink)
    for step in range(50):
        guarded.log({"loss/mean": 1.0}, step)
    guarded.close(3)
    assert (sink.steps, sink.exit_code) == (list(range(50)), 3)


def test_a_failure_is_one_warning_and_later_records_arrive(caplog: pytest.LogCaptureFixture) -> None:
    def fail_at_first(step: int) -> None:
        if step < 3:
            raise OSError(28, "No space left on device")

    sink = Sink(fail_at_first)
    guarded = Guarded("TensorBoard", lambda: sink)
    for step in range(5):
        guarded.log({}, step)
    guarded.close()
    assert sink.steps == [3, 4]
    assert [record.message for record in caplog.records] == [
        "TensorBoard cannot log: OSError: [Errno 28] No space left on device. The run continues; metrics.jsonl has "
        "every value",
        "TensorBoard is missing 3 records",
    ]


def test_a_sink_that_hangs_drops_records_and_is_left_behind(
    release: threading.Event, caplog: pytest.LogCaptureFixture
) -> None:
    began = threading.Event()

    def hang(step: int) -> None:
        began.set()
        release.wait()

    guarded = Guarded("MLflow", lambda: Sink(hang), Limits(close_s=0.01, waiting=10))
    guarded.log({}, 0)
    began.wait()
    for step in range(1, 100):
        guarded.log({}, step)
    guarded.close()
    first, last = [record.message for record in caplog.records]
    assert first.startswith("MLflow does not answer: 10 records wait for it, and more are dropped.")
    assert last == "MLflow did not finish in time and was abandoned; 99 records may be missing in it"


def test_a_sink_that_hangs_does_not_keep_others_from_closing(release: threading.Event) -> None:
    closed = threading.Event()

    class Last(Sink):
        def close(self, exit_code: int = 0) -> None:
            closed.set()

    hanging = Guarded("hanging", lambda: Sink(lambda step: release.wait()))
    hanging.log({}, 0)
    close_all([hanging, Guarded("last", Last)], exit_code=0, limit_s=0.01)
    assert closed.wait()


def test_a_sink_that_hangs_at_its_start_delays_the_run_by_the_limit_only(
    release: threading.Event, caplog: pytest.LogCaptureFixture
) -> None:
    sink = Sink()

    def start() -> Sink:
        release.wait()
        return sink

    guarded = Guarded("Trackio", start, Limits(start_s=0.01))
    guarded.log({}, 7)
    assert "Trackio has not started within 0.01 s" in caplog.text
    release.set()
    guarded.close()
    assert sink.steps == [7]


@pytest.mark.parametrize("error", [RuntimeError("no server\nat all"), SystemExit(1)])
def test_a_sink_that_cannot_start_is_a_warning(error: BaseException, caplog: pytest.LogCaptureFixture) -> None:
    guarded = Guarded("SwanLab", raising(error), Limits(start_s=3600))  # the run does not wait for it, either
    guarded.log({}, 0)
    guarded.close()
    words = [record.message for record in caplog.records]
    assert words[0].startswith(f"SwanLab cannot start: {type(error).__name__}")
    assert words[1] == "SwanLab is missing 1 record"
    assert all(record.levelno == logging.WARNING and "\n" not in record.message for record in caplog.records)


def test_what_the_user_must_change_stops_the_start() -> None:
    with pytest.raises(RunError, match="log in"):
        Guarded("W&B", raising(RunError("wandb: log in")))
