"""Which process the watchdog blames, and when."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from pathlib import Path

import pytest

from prime_rl.launch import Exited, FakeHost, ProcessSpec, Supervisor
from prime_rl.launch.stalling import LONGEST_GAP_S, LOOK_EVERY_S, Observed, Stalled, StallLimits, Watchdog
from prime_rl.run.process import ANYONE, Heartbeat

LIMITS = StallLimits(timeout_s=100, startup_timeout_s=1000, stopped_timeout_s=10)


def says(doing: str, waits_for: str | None = None, count: int = 1, is_started: bool = True) -> Observed:
    return Observed([Heartbeat(count, 1e9, doing, waits_for, is_started)])


def watched(look: Mapping[str, Observed], seconds: float, limits: StallLimits = LIMITS) -> Stalled | None:
    """What the watchdog says after it has seen the same for so long."""
    clock_s = [0.0]
    watchdog = Watchdog(limits, lambda: clock_s[0])
    stalled = watchdog.look(look)
    while stalled is None and clock_s[0] < seconds:
        clock_s[0] += LOOK_EVERY_S
        stalled = watchdog.look(look)
    return stalled


def test_a_process_that_works_without_progress_is_blamed_after_its_limit_with_its_last_words() -> None:
    look = {"trainer": says("step 3: forward and backward"), "orchestrator": says("step 4: waiting", "trainer")}
    assert watched(look, 98) is None
    stalled = watched(look, 100)
    assert stalled is not None
    assert stalled.roots == ("trainer",)
    headline, _, trainer, orchestrator = stalled.lines
    assert headline.startswith("trainer made no progress since ")
    assert "(limit: stall.timeout_s = 100 s); it was: step 3: forward and backward" in headline
    assert trainer.startswith("  trainer: step 3: forward and backward, since ")
    assert orchestrator.endswith("; waits for trainer")


@pytest.mark.parametrize(
    ("orchestrator", "inference", "root"),
    [
        (says("groups", "inference"), says("generating"), "inference"),
        (says("groups", "inference"), says("paused"), "inference"),
        (says("groups", "inference"), says("waiting for requests", ANYONE), "orchestrator"),
        (says("groups"), says("waiting for requests", ANYONE), "orchestrator"),
    ],
    ids=["hung engine", "paused engine", "idle engine", "hung environment"],
)
def test_the_blame_follows_the_waits_to_their_end(orchestrator: Observed, inference: Observed, root: str) -> None:
    look = {"inference": inference, "orchestrator": orchestrator, "trainer": says("batch", "orchestrator")}
    stalled = watched(look, 200)
    assert stalled is not None
    assert stalled.roots == (root,)


@pytest.mark.parametrize(
    ("waits_for", "second", "root"),
    [
        ("inference", says("generating"), "inference_1"),
        ("inference_1", says("generating"), "inference_1"),
        ("inference", says("waiting for requests", ANYONE), "orchestrator"),
        ("inference_1", says("waiting for requests", ANYONE), "orchestrator"),
    ],
    ids=["any server", "its server", "idle servers", "idle server"],
)
def test_a_server_that_hangs_does_not_hide_behind_one_that_is_idle(waits_for: str, second: Observed, root: str) -> None:
    idle = says("waiting for requests", ANYONE)
    look = {"inference": idle, "inference_1": second, "orchestrator": says("groups", waits_for)}
    stalled = watched(look, 200)
    assert stalled is not None
    assert stalled.roots == (root,)


def test_waiting_is_no_stall_while_the_process_at_the_end_of_the_chain_works() -> None:
    clock_s = [0.0]
    watchdog = Watchdog(LIMITS, lambda: clock_s[0])
    for count in range(1000):
        clock_s[0] += LOOK_EVERY_S
        look = {
            "trainer": says("batch", "orchestrator"),
            "orchestrator": says("groups", "inference"),
            "inference": says("generating", count=count),
        }
        assert watchdog.look(look) is None


def test_progress_of_a_helper_is_progress_of_its_process() -> None:
    clock_s = [0.0]
    watchdog = Watchdog(LIMITS, lambda: clock_s[0])
    for count in range(1000):
        clock_s[0] += LOOK_EVERY_S
        own, helper = Heartbeat(1, 1e9, "groups"), Heartbeat(count, 1e9, "running rollouts")
        assert watchdog.look({"orchestrator": Observed([own, helper])}) is None


def test_an_idle_server_alone_is_no_stall() -> None:
    assert watched({"inference": says("waiting for requests", ANYONE)}, 10_000) is None


def test_a_wait_for_a_server_of_somebody_else_is_left_to_the_limits_of_that_wait() -> None:
    look = {"evaluator": says("evaluating", "inference"), "trainer": says("batch", "evaluator")}
    assert watched(look, 10_000) is None


def test_a_wait_for_a_process_that_has_ended_is_a_stall() -> None:
    clock_s = [0.0]
    watchdog = Watchdog(LIMITS, lambda: clock_s[0])
    trainer = says("batch", "orchestrator")
    assert watchdog.look({"trainer": trainer, "orchestrator": says("sending")}) is None
    stalled = None
    while stalled is None and clock_s[0] < 200:
        clock_s[0] += LOOK_EVERY_S
        stalled = watchdog.look({"trainer": trainer})
    assert stalled is not None
    assert stalled.roots == ("trainer",)


def test_processes_that_wait_for_each_other_are_named_together() -> None:
    look = {"orchestrator": says("version 3", "trainer"), "trainer": says("batch 3", "orchestrator")}
    stalled = watched(look, 200)
    assert stalled is not None
    assert stalled.roots == ("orchestrator", "trainer")
    assert stalled.lines[0].startswith("orchestrator and trainer wait for each other since ")


def test_of_ranks_that_all_fall_silent_the_first_is_named_first_and_all_are_shown() -> None:
    first = Observed([Heartbeat(7, 1e9, "step 3: forward and backward")])
    later = Observed([Heartbeat(9, 1e9 + 5, "step 3: publishing")])
    stalled = watched({"trainer": later, "trainer_rank_1": first}, 200)
    assert stalled is not None
    assert stalled.roots == ("trainer_rank_1", "trainer")
    assert ", and neither did trainer; it was: step 3: forward and backward" in stalled.lines[0]
    assert len(stalled.lines) == 4


def test_a_process_that_starts_has_the_longer_limit_even_before_its_first_words() -> None:
    for look in ({"trainer": says("loading the model", is_started=False)}, {"trainer": Observed()}):
        assert watched(look, 998) is None
        stalled = watched(look, 1000)
        assert stalled is not None
        assert "stall.startup_timeout_s = 1000 s" in stalled.lines[0]


def test_a_stopped_process_has_a_limit_of_its_own() -> None:
    stopped = Observed([Heartbeat(1, 1e9, "batch", "orchestrator")], stopped=(7,))
    look = {"trainer": stopped, "orchestrator": says("groups")}
    assert watched(look, 8) is None
    stalled = watched(look, 10)
    assert stalled is not None
    assert stalled.roots == ("trainer",)
    assert stalled.lines[0].startswith("trainer was stopped by a signal (process 7) at ")


def test_a_stopped_process_that_is_continued_in_time_starts_again_from_zero() -> None:
    clock_s = [0.0]
    watchdog = Watchdog(StallLimits(stopped_timeout_s=10), lambda: clock_s[0])
    for look in range(100):
        clock_s[0] += LOOK_EVERY_S
        assert watchdog.look({"trainer": Observed((), stopped=(7,) if look % 4 else ())}) is None


@pytest.mark.parametrize("limits", [StallLimits(), StallLimits(startup_timeout_s=5)])
def test_none_disables_a_limit(limits: StallLimits) -> None:
    look = {"trainer": Observed([Heartbeat(1, 1e9, "step 3")], stopped=(7,))}
    assert watched(look, 100_000, limits) is None


def test_time_during_which_the_launcher_itself_was_stopped_does_not_count() -> None:
    clock_s = [0.0]
    watchdog = Watchdog(LIMITS, lambda: clock_s[0])
    look = {"trainer": says("step 3")}
    for _ in range(int(LIMITS.timeout_s / LONGEST_GAP_S)):  # as many suspensions of the whole job
        assert watchdog.look(look) is None
        clock_s[0] += 86_400
    assert watchdog.look(look) is not None, "the little that counts of each adds up"


def test_the_supervisor_ends_a_stalled_run_with_code_1_and_the_stack_of_the_process_at_fault() -> None:
    specs = [ProcessSpec(name, (name,), Path(f"{name}.log")) for name in ("inference", "orchestrator")]
    look = {"inference": says("generating"), "orchestrator": says("groups", "inference")}
    clock_s = iter(range(0, 10_000, 2))
    looks = [None] * (1 + int(LIMITS.timeout_s or 0) // 2)
    host = FakeHost([*looks, Exited("orchestrator", -signal.SIGTERM), Exited("inference", 0)], observed=look)
    specs[1] = ProcessSpec("orchestrator", ("orchestrator",), Path("orchestrator.log"), completes_run=True)
    said: list[str] = []
    outcome = Supervisor(specs, host, said.append, watchdog=Watchdog(LIMITS, lambda: next(clock_s))).run()
    assert (outcome.exit_code, outcome.failed) == (1, "inference")
    assert outcome.message.startswith("inference made no progress since ")
    assert outcome.log_tail == ("stack of inference",)
    assert host.stopped == ["orchestrator", "inference"]


def test_a_rank_that_fails_because_another_hangs_names_that_one() -> None:
    names = ("orchestrator", "trainer", "trainer_rank_1")
    specs = [ProcessSpec(name, (name,), Path(f"{name}.log"), completes_run=True) for name in names]
    look = {
        "orchestrator": says("version 3", "trainer"),
        "trainer": says("step 3: publishing"),
        "trainer_rank_1": says("step 3: forward and backward"),
    }
    clock_s = iter(range(0, 10_000, 2))
    ends = [Exited("trainer", 1), Exited("orchestrator", 143), Exited("trainer_rank_1", -9)]
    host = FakeHost([*[None] * 40, *ends], observed=look)
    outcome = Supervisor(specs, host, lambda line: None, watchdog=Watchdog(LIMITS, lambda: next(clock_s))).run()
    first, second = outcome.message.splitlines()
    assert first.startswith("trainer exited with code 1")
    assert second.startswith("trainer_rank_1 made no progress since ")
    assert second.endswith("it was: step 3: forward and backward")


def test_a_run_without_a_stall_ends_as_it_did() -> None:
    spec = ProcessSpec("trainer", ("trainer",), Path("trainer.log"), completes_run=True)
    host = FakeHost([None, None, Exited("trainer", 0)])
    assert Supervisor([spec], host, lambda line: None, watchdog=Watchdog(LIMITS)).run().succeeded
