"""What a person sees of a run, from the files that its children write."""

import errno
import io
import json
import threading
from pathlib import Path
from typing import Any

import pytest

from prime_rl.launch import Follower
from prime_rl.watch.progress import RunProgress, clock, sparkline
from prime_rl.watch.screens import PlainDisplay, Watcher, watching


def trainer(step: int, time: float = 0.0, **metrics: float) -> dict[str, Any]:
    return {"time": time, "source": "trainer", "step": step, "loss/mean": 0.25, **metrics}


def orchestrator(step: int, reward: float, **parts: float) -> dict[str, Any]:
    of_reward = {f"reward_parts/{name}": value for name, value in parts.items()}
    return {"time": 0.0, "source": "orchestrator", "step": step, "reward/mean": reward, **of_reward}


def progress_of(*records: dict[str, Any], max_steps: int | None = 60) -> RunProgress:
    progress = RunProgress(max_steps)
    for record in records:
        progress.take(record)
    return progress


def append(path: Path, *lines: str) -> None:
    with path.open("a") as file:
        file.writelines(f"{line}\n" for line in lines)


def test_a_step_is_finished_when_the_trainer_says_so_and_shows_its_own_reward() -> None:
    progress = RunProgress(60)
    assert not progress.take(orchestrator(0, 0.5))
    assert not progress.take(orchestrator(1, 0.9))
    assert progress.take(trainer(0, **{"perf/throughput": 1234.4}))
    assert progress.line() == "step 0 (1/60)  reward 0.500  loss 0.2500  1234 tok/s"


def test_the_time_left_follows_the_pace_of_the_last_steps() -> None:
    slow_start = [trainer(step, time=100.0 * step) for step in range(3)]
    steady = [trainer(step, time=300 + 2.0 * step) for step in range(3, 20)]
    assert progress_of(*slow_start, *steady).remaining_s == pytest.approx(80)
    assert progress_of(trainer(0)).remaining_s is None
    assert progress_of(trainer(0), trainer(1), max_steps=None).remaining_s is None


def test_a_resumed_run_counts_its_own_steps() -> None:
    progress = progress_of(trainer(40, time=1), trainer(41, time=2))
    assert progress.line().startswith("step 41 (42/60)")
    assert progress.summary(elapsed_s=75) == "2 steps in 1:15"


def test_the_summary_compares_the_first_steps_with_the_last() -> None:
    records = [record for step in range(12) for record in (orchestrator(step, step / 10), trainer(step))]
    summary = progress_of(*records).summary(elapsed_s=3700)
    assert summary == "12 steps in 1:01:40, mean reward 0.200 -> 0.900 (first and last 5 steps)"


@pytest.mark.parametrize(
    ("steps", "rewards"),
    [
        (1, "mean reward 0.000"),
        (3, "mean reward 0.000 -> 0.200 (first and last step)"),
        (5, "mean reward 0.050 -> 0.350 (first and last 2 steps)"),
    ],
)
def test_the_summary_of_a_short_run_compares_no_step_with_itself(steps: int, rewards: str) -> None:
    records = [record for step in range(steps) for record in (orchestrator(step, step / 10), trainer(step))]
    assert progress_of(*records).summary(elapsed_s=1).endswith(f" in 0:01, {rewards}")


def test_the_parts_of_the_reward_stand_below_the_step_and_in_the_summary() -> None:
    records = [
        record
        for step in range(10)
        for record in (orchestrator(step, 0.5, layout=1 - step / 10, accuracy=step / 10), trainer(step))
    ]
    progress = progress_of(*records)
    assert progress.part_lines() == ["  layout 0.100  accuracy 0.900"]
    assert progress.summary(3.0) == (
        "10 steps in 0:03, mean reward 0.500 -> 0.500 (first and last 5 steps): layout 0.800 -> 0.300, "
        "accuracy 0.200 -> 0.700"
    )


def test_the_parts_of_an_environment_without_rollouts_in_a_step_are_left_out_there() -> None:
    """Two environments; the second has rollouts in every other step only."""
    records = []
    for step in range(6):
        parts = {"a/right": step / 10} | ({"b/right": 1.0 - step / 10} if step % 2 else {})
        records += [orchestrator(step, 0.5, **parts), trainer(step)]
    assert progress_of(*records[:-2]).part_lines() == ["  a/right 0.400"]
    progress = progress_of(*records)
    assert progress.part_lines() == ["  a/right 0.500  b/right 0.500"]
    assert progress.summary(1.0).endswith("(first and last 3 steps): a/right 0.100 -> 0.400, b/right 0.900 -> 0.600")


def test_a_reward_function_that_is_the_whole_reward_is_not_shown_twice() -> None:
    progress = progress_of(orchestrator(0, 0.5, exact=0.5), trainer(0))
    assert progress.part_lines() == []
    assert "exact" not in progress.summary(1.0)


def test_many_parts_take_several_lines_of_at_most_80_characters_and_no_figure_is_cut_off() -> None:
    parts = {f"a_reward_function_with_a_long_name_{index}": index / 10 for index in range(5)}
    lines = progress_of(orchestrator(0, 0.5, **parts), trainer(0)).part_lines()
    assert max(map(len, lines)) <= 80
    assert [word for line in lines for word in line.strip().split("  ")] == [
        f"{name} {value:.3f}" for name, value in parts.items()
    ]


def test_a_run_that_did_nothing_says_so() -> None:
    assert RunProgress(3).summary(1.2) == "0 steps in 0:01"


@pytest.mark.parametrize(("seconds", "text"), [(0, "0:00"), (59.6, "1:00"), (3599, "59:59"), (7325, "2:02:05")])
def test_a_clock(seconds: float, text: str) -> None:
    assert clock(seconds) == text


def test_a_sparkline_shows_the_course_of_the_newest_values() -> None:
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7]) == "▁▂▃▄▅▆▇█"
    assert sparkline([1.0, 1.0]) == "▁▁"
    assert sparkline([5, 0, 1], width=2) == "▁█"
    assert sparkline([1]) == ""


class Scene:
    """Files of a run, and a watcher that writes plain lines about them."""

    def __init__(self, root: Path) -> None:
        self.metrics, self.logs = (
            root / "metrics.jsonl",
            {name: root / f"{name}.log" for name in ("inference", "orchestrator", "trainer")},
        )
        self.stream = io.StringIO()
        self.display = PlainDisplay(self.stream)
        followers = {name: Follower(log) for name, log in self.logs.items()}
        self.watcher = Watcher(RunProgress(2), self.display, Follower(self.metrics), followers)

    def shown(self) -> list[str]:
        return self.stream.getvalue().splitlines()


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    return Scene(tmp_path)


def test_lines_tell_of_the_start_the_trainer_and_each_step(scene: Scene) -> None:
    scene.watcher.say("inference started")
    append(scene.logs["inference"], "12:00:01    INFO Loading", "12:00:02    INFO Server is ready on 127.0.0.1:1")
    append(scene.logs["trainer"], "==== trainer started now: python", "12:00:03 WARNING a warning")
    scene.watcher.look()
    append(scene.metrics, json.dumps(orchestrator(0, 0.5)), json.dumps(trainer(0)), '{"cut sho')
    append(scene.logs["trainer"], "12:00:04 \x1b[32mSUCCESS\x1b[0m Step 0 | Time: 1.00s | Loss: 0.2500")
    scene.watcher.look()
    assert scene.shown() == [
        "inference started",
        "inference is ready after 0:00",
        "12:00:03 WARNING a warning",
        "step 0 (1/2)  reward 0.500  loss 0.2500",
    ]


def test_warnings_and_evaluations_of_the_orchestrator_are_shown_and_its_other_lines_are_not(scene: Scene) -> None:
    append(
        scene.logs["orchestrator"], "12:00:01    INFO Resumed", "12:00:02 \x1b[33mWARNING\x1b[0m Step 3: all 64 rewards"
    )
    append(scene.logs["inference"], "12:00:03 WARNING of the server")
    score = "12:00:04 SUCCESS Evaluation on 'reverse-text' | Version: 20 | Avg@1: 0.4100 | Time: 1.20s"
    append(scene.logs["orchestrator"], score, "12:00:05 SUCCESS Orchestrator finished.")
    scene.watcher.look()
    # Without colours: no line of a log writes terminal sequences to the terminal.
    assert scene.shown() == ["12:00:02 WARNING Step 3: all 64 rewards", score]


def test_watching_shows_what_came_last(scene: Scene) -> None:
    with watching(scene.watcher, scene.display):
        append(scene.metrics, json.dumps(trainer(0)), json.dumps(trainer(1, time=1)))
    assert [line.split("  ")[0] for line in scene.shown()] == ["step 0 (1/2)", "step 1 (2/2)"]


class GoneTerminal(io.StringIO):
    def write(self, text: str) -> int:
        raise OSError(errno.EIO, "Input/output error")


def test_a_terminal_that_is_gone_does_not_end_the_run(scene: Scene) -> None:
    display = PlainDisplay(GoneTerminal())
    watcher = Watcher(RunProgress(2), display, Follower(scene.metrics), {})
    with watching(watcher, display):
        watcher.say("nobody reads this")
        watching_threads = threading.active_count()
    assert threading.active_count() < watching_threads
