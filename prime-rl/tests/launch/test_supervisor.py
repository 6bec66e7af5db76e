"""What the supervisor decides, on a host that plays a script."""

import signal
from dataclasses import replace
from pathlib import Path

import pytest

from prime_rl.launch import Exited, FakeHost, Outcome, ProcessSpec, Signalled, Supervisor
from prime_rl.launch.spec import NodeLost
from prime_rl.launch.stalling import Observed, StallLimits, Watchdog
from prime_rl.run.process import ANYONE, Heartbeat

SIGUSR1 = signal.SIGUSR1


def spec(name: str, completes_run: bool = False, relays: frozenset[signal.Signals] = frozenset()) -> ProcessSpec:
    return ProcessSpec(name, (name,), Path(f"logs/{name}.log"), completes_run=completes_run, relays=relays)


RL_SPECS = (
    spec("inference"),
    spec("orchestrator", completes_run=True),
    spec("trainer", completes_run=True, relays=frozenset({SIGUSR1})),
)


def run(host: FakeHost) -> tuple[Outcome, list[str]]:
    said: list[str] = []
    return Supervisor(RL_SPECS, host, said.append).run(), said


def test_the_run_succeeds_when_all_that_complete_it_have_exited_with_zero() -> None:
    host = FakeHost([Exited("orchestrator", 0), Exited("trainer", 0), Exited("inference", -15)])
    outcome, _ = run(host)
    assert outcome.succeeded
    assert host.started == ["inference", "orchestrator", "trainer"]
    assert host.stopped == ["inference"]


def test_one_finished_child_of_two_does_not_end_the_run() -> None:
    host = FakeHost([Exited("orchestrator", 0), Exited("trainer", 3), Exited("inference", 0)])
    assert run(host)[0].exit_code == 1


def test_a_failure_stops_the_others_in_reverse_order_and_shows_the_log() -> None:
    host = FakeHost([Exited("inference", 3), Exited("trainer", 143), Exited("orchestrator", 143)])
    outcome, _ = run(host)
    assert host.stopped == ["trainer", "orchestrator"]
    assert outcome.exit_code == 1
    assert outcome.report().splitlines() == [
        "inference exited with code 3; its log is logs/inference.log",
        "its last lines:",
        "  | last words of inference",
    ]


def test_a_child_that_refuses_the_run_makes_the_launch_one_that_is_not_tried_again() -> None:
    outcome, _ = run(FakeHost([Exited("trainer", 2), Exited("orchestrator", 143), Exited("inference", 143)]))
    assert (outcome.exit_code, outcome.was_refused, outcome.failed) == (2, True, "trainer")


@pytest.mark.parametrize("name", ["orchestrator", "trainer"])
def test_code_zero_before_the_work_was_done_is_a_failure_that_names_the_child(name: str) -> None:
    others = [other for other in ("trainer", "orchestrator", "inference") if other != name]
    host = FakeHost([Exited(name, 0), *(Exited(other, 143) for other in others)], incomplete=[name])
    outcome, _ = run(host)
    assert (outcome.exit_code, outcome.failed) == (1, name)
    assert outcome.message == f"{name} exited with code 0 before its work was done; its log is logs/{name}.log"
    assert host.stopped == others


def test_inference_that_ends_early_is_a_failure_even_with_code_zero() -> None:
    outcome, _ = run(FakeHost([Exited("inference", 0), Exited("trainer", 0), Exited("orchestrator", 0)]))
    assert outcome.exit_code == 1
    assert outcome.message.startswith("inference exited with code 0, although the run was not complete")


@pytest.mark.parametrize("code", [-9, 137])
def test_a_child_killed_by_somebody_else_hints_at_memory(code: int) -> None:
    outcome, _ = run(FakeHost([Exited("trainer", code), Exited("orchestrator", 0), Exited("inference", 0)]))
    assert "SIGKILL" in outcome.message
    assert "out of memory" in outcome.message


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_stops_everything_and_becomes_the_exit_code(signum: signal.Signals) -> None:
    host = FakeHost([Signalled(signum), *(Exited(name, 143) for name in ("trainer", "orchestrator", "inference"))])
    outcome, _ = run(host)
    by = "Ctrl-C" if signum is signal.SIGINT else signum.name
    assert outcome == Outcome(128 + signum, f"stopped by {by}", was_stopped=True)
    assert host.stopped == ["trainer", "orchestrator", "inference"]


def test_children_that_got_slurms_sigterm_first_do_not_look_like_a_failure() -> None:
    ends = [Exited("trainer", 143), Signalled(signal.SIGTERM), Exited("orchestrator", -15), Exited("inference", -15)]
    assert run(FakeHost(ends))[0].exit_code == 143
    ends = [Exited("inference", 0), Signalled(signal.SIGTERM), Exited("orchestrator", 0), Exited("trainer", 143)]
    assert run(FakeHost(ends))[0].exit_code == 143, "a server that is told to stop exits with 0"


def test_a_child_that_fails_before_the_run_is_stopped_is_still_the_cause() -> None:
    ends = [Exited("inference", 3), Signalled(signal.SIGTERM), Exited("orchestrator", 0), Exited("trainer", 143)]
    assert run(FakeHost(ends))[0].failed == "inference"


def test_children_that_do_not_stop_in_time_are_killed() -> None:
    host = FakeHost([Exited("trainer", 1), Exited("orchestrator", 0), None])
    _, said = run(host)
    assert host.grace_of_end_s == 0
    assert "inference did not stop in time and will be killed" in said


def test_ctrl_c_is_answered_before_any_child_has_stopped() -> None:
    ends = [Exited(name, 143) for name in ("trainer", "orchestrator", "inference")]
    _, said = run(FakeHost([Signalled(signal.SIGINT), *ends]))
    answer = said.index("stopping; press Ctrl-C again to stop now")
    assert said[answer + 1 :] == ["trainer stopped", "orchestrator stopped", "inference stopped"]
    _, said = run(FakeHost([Signalled(signal.SIGTERM), *ends]))
    assert "SIGTERM: stopping, within 60 s" in said


def test_a_second_ctrl_c_stops_now() -> None:
    host = FakeHost([Signalled(signal.SIGINT), Signalled(signal.SIGINT)])
    outcome, said = run(host)
    assert said[-1] == "stopping now"
    assert host.grace_of_end_s == 0
    assert outcome.exit_code == 130


def test_ctrl_c_while_a_failed_run_stops_ends_it_now() -> None:
    host = FakeHost([Exited("trainer", 1), Signalled(signal.SIGINT)])
    outcome, said = run(host)
    assert said[-1] == "stopping now"
    assert (outcome.exit_code, outcome.failed, host.grace_of_end_s) == (1, "trainer", 0)


def test_a_lost_node_that_comes_back_while_the_others_stop_is_not_heard() -> None:
    specs = (replace(spec("trainer", True), node=0), replace(spec("trainer_rank_1", True), node=1))
    lost = NodeLost(1, "node n1 is gone: no message from its agent for 20 s")
    host = FakeHost([lost, Exited("trainer_rank_1", 1), Exited("trainer", 143)])
    said: list[str] = []
    outcome = Supervisor(specs, host, said.append).run()
    assert outcome.message.startswith(lost.fault)
    assert said[-1] == "trainer stopped"


def test_a_process_that_fails_because_its_peers_node_is_lost_is_not_the_cause() -> None:
    specs = (replace(spec("trainer", True), node=0), replace(spec("trainer_rank_1", True), node=1))
    lost = NodeLost(1, "node n1 is gone: no message from its agent for 20 s")
    outcome = Supervisor(specs, FakeHost([Exited("trainer", 1, "n0"), None], lost_node=lost), print).run()
    assert outcome.message == f"{lost.fault}\nit ran trainer_rank_1"


def test_a_signal_while_the_last_child_saves_leaves_the_run_complete() -> None:
    host = FakeHost(
        [Exited("orchestrator", 0), Signalled(signal.SIGTERM), Exited("trainer", 0), Exited("inference", 0)]
    )
    assert run(host)[0] == Outcome(0, "all done")


def test_a_signal_during_the_last_evaluation_says_what_is_left() -> None:
    ends = [Exited("trainer", 0), Signalled(signal.SIGTERM), Exited("orchestrator", 143), Exited("inference", 0)]
    outcome, _ = run(FakeHost(ends))
    assert (outcome.exit_code, outcome.was_stopped) == (143, True)
    assert outcome.message == "stopped by SIGTERM after trainer had finished; orchestrator had not"


def test_a_second_sigterm_changes_nothing() -> None:
    ends = [Exited(name, 143) for name in ("trainer", "orchestrator", "inference")]
    host = FakeHost([Signalled(signal.SIGTERM), Signalled(signal.SIGTERM), *ends])
    run(host)
    assert host.grace_of_end_s > 50


def test_what_outlives_a_finished_run_gets_a_short_grace() -> None:
    host = FakeHost([Exited("orchestrator", 0), Exited("trainer", 0), Exited("inference", 0)])
    run(host)
    assert host.grace_of_end_s == 5


def test_a_worker_that_outlives_its_torchrun_may_still_save() -> None:
    children_end = [Exited("trainer", 1), Exited("orchestrator", 143), Exited("inference", 0)]
    host = FakeHost([Signalled(signal.SIGTERM), *children_end])
    run(host)
    assert host.grace_of_end_s > 50


def test_sigusr1_goes_to_the_trainer_and_the_run_goes_on() -> None:
    host = FakeHost([Signalled(SIGUSR1), Exited("orchestrator", 0), Exited("trainer", 0), Exited("inference", 0)])
    outcome, said = run(host)
    assert outcome.succeeded
    assert host.relayed == [("trainer", SIGUSR1)]
    assert "SIGUSR1 passed on to trainer" in said


def test_sigusr1_before_the_trainer_listens_is_said_and_lost() -> None:
    events = [Signalled(SIGUSR1), Exited("orchestrator", 0), Exited("trainer", 0), Exited("inference", 0)]
    assert "trainer does not handle SIGUSR1 yet" in run(FakeHost(events, listening=False))[1]


def test_a_program_that_cannot_be_started_stops_those_that_were() -> None:
    host = FakeHost([Exited("inference", -15)], cannot_start=["orchestrator"])
    outcome, _ = run(host)
    assert outcome == Outcome(1, "orchestrator cannot be started: orchestrator: No such file or directory")
    assert host.started == host.stopped == ["inference"]


STOPPED = [Exited("trainer", 143), Exited("orchestrator", 143), Exited("inference", 143)]


def test_the_warning_before_a_time_limit_gives_children_until_the_limit() -> None:
    host = FakeHost([Signalled(signal.SIGUSR2), STOPPED[0], *STOPPED[1:]])
    outcome, said = run(host)
    assert (outcome.exit_code, outcome.was_stopped) == (128 + signal.SIGUSR2, True)
    assert "SIGUSR2, the time limit is near: stopping" in said
    assert all(wait_s > 600 for wait_s in host.waits_s[1:] if wait_s is not None)


def test_sigterm_after_that_warning_is_the_limit_and_leaves_seconds() -> None:
    host = FakeHost([Signalled(signal.SIGUSR2), Signalled(signal.SIGTERM), STOPPED[0], None])
    outcome, said = run(host)
    assert outcome.exit_code == 128 + signal.SIGUSR2
    assert host.waits_s[-1] is not None
    assert host.waits_s[-1] <= 15
    assert said[-1] == "inference, orchestrator did not stop in time and will be killed"


SFT_SPECS = (
    spec("trainer", completes_run=True),
    replace(spec("inference"), if_lost=Path("lost")),
    replace(spec("evaluator", completes_run=True), if_lost=Path("lost")),
)


def train(host: FakeHost, watchdog: Watchdog | None = None) -> tuple[Outcome, list[str]]:
    said: list[str] = []
    return Supervisor(SFT_SPECS, host, said.append, watchdog=watchdog).run(), said


@pytest.mark.parametrize(
    ("end", "others", "words"),
    [
        (Exited("evaluator", 1), ["inference"], "evaluator exited with code 1"),
        (Exited("evaluator", 0), ["inference"], "evaluator exited with code 0 before its work was done"),
        (Exited("inference", -9), ["evaluator"], "inference was ended by SIGKILL"),
        (Exited("inference", 0), ["evaluator"], "inference exited with code 0"),
    ],
)
def test_the_run_goes_on_without_children_that_it_does_not_need(end: Exited, others: list[str], words: str) -> None:
    incomplete = ["evaluator"] if end == Exited("evaluator", 0) else []
    host = FakeHost([end, *(Exited(name, 143) for name in others), Exited("trainer", 0)], incomplete=incomplete)
    outcome, said = train(host)
    assert outcome.succeeded
    assert host.stopped == others
    assert sorted(host.given_up) == ["evaluator", "inference"]
    (line,) = outcome.lost
    why = "" if end.code < 0 else f": last words of {end.name}"
    assert line.startswith(f"{words}{why} (log: logs/{end.name}.log); the run goes on without")
    assert f"warning: {line}" in said
    assert said.index(f"warning: {line}") < said.index("trainer finished")


def test_a_training_that_fails_ends_the_run_whatever_evaluates_it() -> None:
    outcome, _ = train(FakeHost([Exited("trainer", 1), Exited("evaluator", 143), Exited("inference", 0)]))
    assert (outcome.exit_code, outcome.failed, outcome.lost) == (1, "trainer", ())


def test_children_that_a_scheduler_signals_together_with_the_launcher_are_not_lost() -> None:
    ends = [Exited("evaluator", 143), Exited("inference", 0), Signalled(signal.SIGTERM), Exited("trainer", 143)]
    outcome, _ = train(FakeHost(ends))
    assert (outcome.exit_code, outcome.was_stopped, outcome.lost) == (143, True, ())


@pytest.mark.parametrize("signalled", [True, False], ids=["with the launcher", "alone"])
def test_an_evaluator_that_is_signalled_after_the_training_is_stopped_only_if_the_launcher_is(signalled: bool) -> None:
    ends = [Exited("trainer", 0), Exited("evaluator", 143), Exited("inference", 0)]
    outcome, _ = train(FakeHost([*ends, Signalled(signal.SIGTERM)] if signalled else ends))
    if signalled:
        assert outcome.message == "stopped by SIGTERM after trainer had finished; evaluator had not"
    assert (outcome.exit_code, len(outcome.lost)) == ((143, 0) if signalled else (0, 1))


def test_the_run_ends_after_the_last_evaluation_and_says_what_it_waits_for() -> None:
    doing = {"evaluator": Observed([Heartbeat(1, 0.0, "evaluating version 4: 1 of 8 rollouts are done")])}
    host = FakeHost([Exited("trainer", 0), Exited("evaluator", 0), Exited("inference", 0)], observed=doing)
    outcome, said = train(host)
    assert (outcome.succeeded, outcome.lost) == (True, ())
    assert (
        "waiting for evaluator: evaluating version 4: 1 of 8 rollouts are done; its log is logs/evaluator.log" in said
    )


def test_a_stalled_child_that_is_not_needed_is_stopped_alone() -> None:
    seconds = iter(range(0, 1000, 3))
    host = FakeHost(
        [None] * 6 + [Exited("evaluator", 143), Exited("inference", 143), Exited("trainer", 0)],
        observed={
            "trainer": Observed([Heartbeat(1, 0.0, "step 1", waits_for=ANYONE)]),
            "evaluator": Observed([Heartbeat(1, 0.0, "evaluating")]),
            "inference": Observed([Heartbeat(1, 0.0, "idle", waits_for=ANYONE)]),
        },
    )
    outcome, _ = train(host, Watchdog(StallLimits(timeout_s=10), lambda: float(next(seconds))))
    assert outcome.succeeded
    assert host.stopped == ["evaluator", "inference"]
    (line,) = outcome.lost
    assert line.startswith("evaluator made no progress since ")
