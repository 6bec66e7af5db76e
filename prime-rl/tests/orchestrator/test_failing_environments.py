"""Environments that fail: each way costs its groups, is counted by name, and ends the run above a stated share."""

from __future__ import annotations

import asyncio
import json
import sys
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import zmq
import zmq.asyncio

from prime_rl.configs.rollouts.environments import EnvConfig
from prime_rl.orchestrator.errors import EnvironmentFault, GroupFailed
from prime_rl.orchestrator.workers.failures import MIN_GROUPS, WINDOW, Failures, GroupTimeout, in_time
from prime_rl.orchestrator.workers.inside.blocking import LoopWatch
from prime_rl.orchestrator.workers.loading import load_environment
from prime_rl.orchestrator.workers.port import listening, serve_port
from prime_rl.orchestrator.workers.remote import Service
from prime_rl.run.ledger import check_ledger
from prime_rl.run.paths import OrchestratorPaths

FAILING = """
import asyncio
import os
import sys
import verifiers as vf
from datasets import Dataset


class Broken(vf.Error):
    pass


def way(state):
    return state["answer"]


def said(state):
    return {"a reward raises": lambda: {}["no such key"], "a reward is none": lambda: None,
            "a reward is NaN": lambda: float("nan"), "a reward is infinite": lambda: float("inf"),
            "a reward is a text": lambda: "good", "a reward leaves": lambda: sys.exit(0)}.get(way(state), lambda: 1.0)()


async def judged(state):
    if way(state) == "a reward raises later":
        raise RuntimeError("the judge is down")
    return 0.0


def compared(states):
    if way(states[0]) == "a group reward raises":
        raise ValueError("no group score")
    return [0.5] * (1 if way(states[0]) == "a group reward is too short" else len(states))


class Failing(vf.SingleTurnEnv):
    async def setup_state(self, state, **rest):
        if way(state) == "the environment raises":
            raise OSError("the database is down")
        if way(state) == "a rollout ends with an error":
            raise Broken("no such file")
        if way(state) == "the environment leaves":
            sys.exit(7)
        if way(state) == "the environment cancels itself":
            raise asyncio.CancelledError
        if way(state) == "the process ends":
            os._exit(9)
        if way(state) == "it hangs":
            await asyncio.Event().wait()
        return state


def load_environment(answers):
    rows = [{"question": f"row {number}", "answer": answer} for number, answer in enumerate(answers)]
    return Failing(dataset=Dataset.from_list(rows), rubric=vf.Rubric(funcs=[said, judged, compared]))


async def agent(task, client):
    await client.chat.completions.create(model="any", messages=[{"role": "user", "content": "hello"}])
    if task["way"] == "the agent raises":
        raise OSError("the tool is down")
    return {"the agent returns NaN": float("nan"), "the agent returns a text": "good",
            "the agent rejects": None}.get(task["way"], 1.0)


def scored(completion, answer, **rest):
    ways = {"raises": lambda: {}["no such key"], "NaN": lambda: float("nan"), "text": lambda: "good"}
    return ways.get(answer, lambda: 1.0)()
"""

REWARDS = {
    "a reward raises": "reward.said",
    "a reward is none": "reward.said",
    "a reward is NaN": "reward.said",
    "a reward is infinite": "reward.said",
    "a reward is a text": "reward.said",
    "a reward leaves": "reward.said",
    "a reward raises later": "reward.judged",
    "a group reward raises": "reward.compared",
}
ROLLOUTS = {
    "the environment raises": "OSError",
    "a rollout ends with an error": "Broken",
    "the environment leaves": "CalledExit",
    "the environment cancels itself": "CancelledError",
}
IN_A_SERVER = {**REWARDS, "a group reward is too short": "reward.compared", **ROLLOUTS}
IN_A_GUEST = {**REWARDS, **ROLLOUTS}
ENDS = {"the process ends": "EnvironmentEnded"}
AGENT = {
    "the agent raises": "OSError",
    "the agent returns NaN": "InvalidReward",
    "the agent returns a text": "InvalidReward",
    "the agent rejects": "Rejected",
}
ROWS = {"raises": "reward.scored", "NaN": "reward.scored", "text": "reward.scored"}
ATTEMPTS = 3


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the module, which is importable, and with an interpreter that has it."""
    (tmp_path / "failing_env.py").write_text(FAILING)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    sys.modules.pop("failing_env", None)
    program = tmp_path / "python"
    program.write_text(f'#!/bin/sh\nPYTHONPATH="{tmp_path}" exec "{sys.executable}" "$@"\n')
    program.chmod(0o755)
    return tmp_path


def environment(place: str, answers: list[str], folder: Path) -> dict[str, Any]:
    """The config of an environment with a row for each way to fail."""
    if place in ("workflow", "rows"):
        file = folder / "tasks.jsonl"
        rows = [{"way": each, "question": f"row {at}", "answer": each} for at, each in enumerate(answers)]
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        if place == "workflow":
            return {"name": "failing-env", "workflow": "failing_env:agent", "agent_dataset": str(file)}
        rewards = [{"fn": "failing_env:scored", "name": "scored"}]
        dataset = {"path": str(file), "shuffle": False, "id": "row", "rewards": rewards}
        return {"id": "rows", "name": "failing-env", "args": {"datasets": [dataset]}}
    python = {"python": str(folder / "python")} if place == "its own interpreter" else {}
    return {"id": "failing-env", "args": {"answers": answers}, **python}


@pytest.mark.parametrize(
    ("place", "reasons"),
    [
        ("the orchestrator", IN_A_SERVER),
        ("a server", {**IN_A_SERVER, **ENDS}),
        ("its own interpreter", {**IN_A_GUEST, **ENDS}),
        ("workflow", AGENT),
        ("rows", ROWS),
    ],
)
def test_a_way_to_fail_costs_its_group_and_is_counted_by_name(
    orchestrate, folder: Path, place: str, reasons: dict[str, str]
) -> None:
    answers = [each for way in reasons for each in (way, "good")]
    env = {**environment(place, answers, folder), "max_failed_groups": 0.8}
    code, log = orchestrate(
        env=[env],
        env_servers=place == "a server",
        batch_size=2 * len(reasons),
        max_concurrent=2,  # one group at a time: each row in its turn
        buffer={"order": "sequential"},
    )
    assert code == 0, log
    (record,) = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    prefix = "failed_groups/failing-env/"
    counted = {name.removeprefix(prefix): value for name, value in record.items() if name.startswith(prefix)}
    expected = Counter(reason for reason in reasons.values() for _ in range(ATTEMPTS))
    assert counted == expected
    assert record["failed_groups/share"] == ATTEMPTS / (ATTEMPTS + 1)
    # Only good rows train, and the ledger knows why the others do not.
    account, faults = check_ledger(OrchestratorPaths(folder / "run_default"))
    assert faults == []
    assert {draw.row % 2 for draw in account.draws.values() if draw.steps} == {1}
    assert account.dropped == Counter(f"{reason}, {ATTEMPTS} times" for reason in reasons.values())


SAID = (
    "This model's maximum context length is 128 tokens. Your prompt has 200 tokens, which leaves no room for an answer."
)


@pytest.mark.parametrize(
    ("said", "shown"),
    [(SAID, "prompt too long (200 tokens, limit 128)"), ("no: max_model_len", "prompt too long: no: max_model_len")],
)
def test_a_prompt_that_is_too_long_is_named_and_its_rewards_do_not_run(
    orchestrate, policy_server, folder: Path, said: str, shown: str
) -> None:
    def reply(messages: list[dict[str, Any]], version: int) -> str:
        policy_server.refusal = (400, said)  # after the probe
        return "probed"

    policy_server.reply = reply
    code, log = orchestrate(env=[{"id": "failing-env", "args": {"answers": ["a reward raises"]}}])
    assert code == 1
    assert f"every rollout of the group failed: {shown}" in log
    assert "no such key" not in log


@pytest.mark.parametrize("place", ["the orchestrator", "a server", "its own interpreter"])
def test_a_run_in_which_every_group_hangs_ends_by_name(orchestrate, folder: Path, place: str) -> None:
    env = {**environment(place, ["it hangs"], folder), "timeout_s": 1}
    code, log = orchestrate(env=[env], env_servers=place == "a server", max_inflight_rollouts=16)
    assert code == 1
    assert "groups failed (limit: max_failed_groups = 0.5 of the environment)" in log
    assert "the first GroupTimeout: environment 'failing-env', row 0: the group takes longer than timeout_s = 1" in log


def share_of(failed: int, good: int, limit: float) -> Failures:
    """`good` groups, and then `failed` ones."""
    failures = Failures("letters", limit)
    for _ in range(good):
        with failures.group(asyncio.Event()):
            pass
    for number in range(failed):
        with pytest.raises(OSError, match="down"), failures.group(asyncio.Event()):
            raise OSError(f"down {number}")
    return failures


@pytest.mark.parametrize(
    ("failed", "good", "limit"),
    [(MIN_GROUPS - 1, 0, 0.5), (WINDOW // 2, WINDOW // 2, 0.5), (2 * WINDOW, 0, 1.0), (MIN_GROUPS, 1, 0.0)],
)
def test_a_run_goes_on_up_to_the_share(failed: int, good: int, limit: float) -> None:
    assert share_of(failed, good, limit).take_counts() == (failed + good, Counter({"OSError": failed}))


@pytest.mark.parametrize(("failed", "good", "limit"), [(MIN_GROUPS, 0, 0.5), (WINDOW // 2 + 1, WINDOW // 2, 0.5)])
def test_one_more_ends_it_with_the_first_traceback(failed: int, good: int, limit: float) -> None:
    failures = share_of(failed - 1, good, limit)
    with pytest.raises(EnvironmentFault) as caught, failures.group(asyncio.Event()):
        raise OSError("down at last")
    line, *shown = str(caught.value).splitlines()
    count = min(WINDOW, failed + good)
    assert line == (
        f"environment 'letters': {failed} of the last {count} groups failed (limit: max_failed_groups = 0.5 of the "
        f"environment): {failed} OSError; the first OSError: OSError:"
    )
    assert shown[-1] == "OSError: down 0"


def test_groups_that_fail_at_once_do_not_speak_for_those_that_still_run() -> None:
    failures = Failures("letters", 0.5)
    with ExitStack() as running:
        for _ in range(500):
            running.enter_context(failures.group(asyncio.Event()))
        for _ in range(500):
            with pytest.raises(OSError, match="down"), failures.group(asyncio.Event()):
                raise OSError("down")
        with (
            pytest.raises(EnvironmentFault, match="501 of the last 501 groups failed"),
            failures.group(asyncio.Event()),
        ):
            raise OSError("down")


def test_what_the_engine_fails_or_loses_is_counted_but_does_not_end_the_run() -> None:
    failures, lost = Failures("letters", 0.5), asyncio.Event()
    for _ in range(2 * WINDOW):
        with pytest.raises(GroupFailed), failures.group(lost):
            raise GroupFailed("every rollout failed", "ModelError", is_of_environment=False)
    lost.set()
    with pytest.raises(OSError, match="gone"), failures.group(lost):
        raise OSError("gone")
    assert failures.take_counts() == (2 * WINDOW, Counter({"ModelError": 2 * WINDOW}))
    assert failures.take_counts() == (0, Counter())


def test_reasons_of_any_text_are_names_and_their_number_is_bounded() -> None:
    failures = Failures("letters", 1.0)
    for number in range(100):
        with pytest.raises(GroupFailed), failures.group(asyncio.Event()):
            raise GroupFailed("no", f"a/b\x1b[31m {number}" + "x" * 500)
    _, reasons = failures.take_counts()
    assert len(reasons) == 33
    assert reasons["other"] == 68
    assert all(len(reason) <= 64 and "/" not in reason and reason.isprintable() for reason in reasons)


def test_an_evaluation_whose_reward_functions_fail_ends_the_run(orchestrate, folder: Path) -> None:
    env = environment("the orchestrator", ["a reward raises"], folder)
    good = environment("the orchestrator", ["good"], folder)
    code, log = orchestrate(env=[good], eval={"env": [{**env, "rollouts_per_example": 8}]})
    assert code == 1
    assert "8 of the last 8 groups failed (limit: max_failed_groups = 0.5 of the environment): 8 reward.said" in log
    assert "KeyError: 'no such key'" in log.rstrip().splitlines()[-1]


async def answer_of(service: Service, address: str, *requests: dict[str, Any]) -> dict[str, Any]:
    """Sends requests, and waits for an answer."""
    async with listening(address) as socket:
        serving = asyncio.create_task(serve_port(service, socket, LoopWatch({})))
        with zmq.asyncio.Context() as context, context.socket(zmq.DEALER) as client:
            client.connect(address)
            answers: dict[int, dict[str, Any]] = {}
            for request in requests:
                # A ping that is answered shows that the requests before it have begun.
                for each in (request, {"id": 0, "do": "ping", "with": {}}):
                    await client.send(json.dumps(each).encode())
                while 0 not in answers:
                    answer = json.loads(await client.recv())
                    answers[answer["id"]] = answer
                del answers[0]
            while not answers:
                answer = json.loads(await client.recv())
                answers[answer["id"]] = answer
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)
    await service.close()
    return answers[1]


@pytest.mark.parametrize("way", ["it hangs", "the environment cancels itself", "the environment leaves"])
async def test_a_server_answers_a_request_that_is_cancelled_or_leaves(folder: Path, policy_server, way: str) -> None:
    served = load_environment(EnvConfig(id="failing-env", args={"answers": [way]}), "env[0]")
    engine = {"base_url": policy_server.url, "headers": {}, "timeout_s": 60, "base_model": "letters"}
    group = {
        "row": served.dataset("train")[0],
        "size": 1,
        "engine": {**engine, "takes_tokens": False},
        "model": "letters",
        "sampling_args": {},
        "max_retries": 0,
    }
    requests = [{"id": 1, "do": "run_group", "with": group}, {"do": "cancel", "of": 1}]
    address = f"ipc://{folder}/socket"
    answer = await answer_of(Service(served), address, *requests[: 1 + (way == "it hangs")])
    if way == "the environment leaves":  # an error of the rollout
        assert answer["value"][0]["error"]["error"] == "CalledExit"
    else:
        assert answer["kind"] == "CancelledError"


async def test_only_the_limit_itself_is_named() -> None:
    async def wait() -> None:
        async with in_time(0.001, "letters", 3):
            await asyncio.Event().wait()

    async def own() -> None:
        async with in_time(None, "letters", 3):
            raise TimeoutError("the database")

    with pytest.raises(GroupTimeout, match="environment 'letters', row 3"):
        await wait()
    with pytest.raises(TimeoutError, match="the database"):
        await own()
