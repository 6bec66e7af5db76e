"""Reward functions run in worker processes, by name or path, with AReaL's or verifiers' signature, in limited time."""

from __future__ import annotations

import asyncio
import fcntl
import os
import resource
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from prime_rl.environments.rewards import pool as pool_module
from prime_rl.environments.rewards.building import Rewards, build
from prime_rl.environments.rewards.pool import RewardError, RewardPool, RewardTimeout, release, shared_pool
from prime_rl.environments.rewards.registry import RewardFault
from prime_rl.environments.rewards.wire import encode, receive, send

FUNCTIONS = """
import asyncio, os, re, sys, time

def areal(prompt, completions, prompt_ids, completion_ids, **row):
    assert prompt == "two plus two?" and completions == "it is 4" and completion_ids == [7, 8], (prompt, completions)
    return 1.0 if completions.endswith(row["answer"]) and row["level"] == 3 else 0.0

def ours(completion, answer, bonus=0.0):
    return 0.5 * completion[-1]["content"].endswith(answer) + bonus

async def elsewhere(completion_text, **kwargs):
    return len(completion_text)

async def no_server(client=None, **kwargs):
    raise TimeoutError("connecting took 1 s")

async def waits(**kwargs):
    await asyncio.Event().wait()

def hangs(**kwargs):
    if os.fork() == 0:
        time.sleep(1000)
    re.match(r"(a+)+$", "a" * 60 + "b")  # does not let go of the interpreter

def raises(**kwargs):
    raise ValueError("no such\\x1b[31m unit")

def leaves(**kwargs):
    sys.exit(3)

def dies(**kwargs):
    os._exit(9)

def nan(**kwargs):
    return float("nan")

def nothing(**kwargs):
    pass

def loud(**kwargs):
    for _ in range(2000):
        print("x" * 1000)
    return 1

def needy(missing):
    return 1

def pid(**kwargs):
    return os.getpid()
"""
ROW = {"answer": "4", "level": 3}
PROMPT = [{"role": "user", "content": "two plus two?"}]
COMPLETION = [{"role": "assistant", "content": "it is 4"}]


@pytest.fixture(scope="module")
def functions(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("functions")
    (folder / "reward_functions.py").write_text(FUNCTIONS, encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        yield "reward_functions"


@pytest.fixture(scope="module")
def pool() -> Iterator[RewardPool]:
    pool = RewardPool(1)
    yield pool
    pool.close()


def score(rewards: Rewards) -> dict[str, float]:
    more = {"prompt_ids": [1], "completion_ids": [7, 8]}
    return asyncio.run(rewards.score(PROMPT, COMPLETION, ROW, **more))


def test_signatures_of_areal_and_verifiers_make_one_weighted_reward(functions: str, pool: RewardPool) -> None:
    specs = [
        f"{functions}:areal",
        {"fn": f"{functions}.ours", "weight": 2, "args": {"bonus": 0.25}},
        {"fn": f"{functions}:elsewhere", "weight": 0, "name": "length"},
    ]
    assert score(build(specs, pool=pool)) == {"areal": 1, "ours": 0.75, "length": 7, "reward": 2.5}


def test_a_time_limit_ends_the_function_and_what_it_started(functions: str, pool: RewardPool) -> None:
    hangs = {"fn": f"{functions}:hangs", "timeout_s": 0.5, "on_timeout": "zero"}
    rewards = build([hangs, f"{functions}:pid"], pool=pool)
    (before,) = pool.processes()
    values = score(rewards)
    assert values["hangs"] == 0
    assert pool.timeouts == {f"{functions}:hangs": 1}
    assert values["pid"] != before
    while any(
        _group(pid) == before for pid in [int(each.name) for each in Path("/proc").iterdir() if each.name.isdigit()]
    ):
        pass  # killed, and about to be gone


def _group(pid: int) -> int | None:
    try:
        return os.getpgid(pid) if Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z" else None
    except (OSError, ProcessLookupError):
        return None


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("raises", "ValueError: no such"),
        ("leaves", r"it called sys.exit\(3\)"),
        ("dies", "its worker process ended .exit code 9."),
        ("nan", "it returned nan"),
        ("nothing", "it returned 'None' .NoneType. instead of a number"),
        ("needy", "it needs 'missing', but the row has only 'answer', 'level'"),
    ],
)
def test_a_function_that_fails_is_named_and_the_pool_goes_on(
    functions: str, pool: RewardPool, name: str, text: str
) -> None:
    rewards = build([f"{functions}:{name}"], pool=pool)
    with pytest.raises(RewardError, match=text):
        score(rewards)
    assert score(build([f"{functions}:loud"], pool=pool))["reward"] == 1


def test_an_async_function_has_its_limit_and_a_timeout_of_its_own_is_an_error(functions: str, pool: RewardPool) -> None:
    waits = {"fn": f"{functions}:waits", "timeout_s": 0.01}
    assert score(build([{**waits, "on_timeout": "zero"}], pool=pool))["waits"] == 0
    with pytest.raises(
        RewardTimeout, match=r"it ran for 0.01 s and was ended; on_timeout = .zero. would count it as 0"
    ):
        score(build([waits], pool=pool))
    with pytest.raises(TimeoutError, match="connecting took 1 s"):
        score(build([f"{functions}:no_server"], pool=pool))


def test_an_import_has_a_limit_of_its_own_and_its_late_answer_is_nobody_elses(functions: str, pool: RewardPool) -> None:
    rewards = build([f"{functions}:ours"], pool=pool)
    os.kill(pool.processes()[0], signal.SIGKILL)
    while pool.processes():
        pass
    allowed_s, pool.start_limit_s = pool.start_limit_s, 0.0
    with pytest.raises(RewardError, match=r"its worker process ended .signal SIGKILL."):
        score(rewards)
    pool.start_limit_s = allowed_s
    assert score(rewards)["ours"] == 0.5


def test_a_frame_arrives_where_a_process_has_thousands_of_connections() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 2048:
        pytest.skip("this user may not open 2048 files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2048), hard))
    reader, writer = os.pipe()
    high = fcntl.fcntl(reader, fcntl.F_DUPFD, 1024)
    send(writer, encode({"value": 1}))
    assert receive(high, time.monotonic() + pool_module.START_LIMIT_S) == {"value": 1}
    for descriptor in (reader, writer, high):
        os.close(descriptor)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize(
    ("specs", "text"),
    [
        (["maths"], "there is no reward 'maths': did you mean 'math'?"),
        (["no_such_module:f"], "reward 'no_such_module:f': 'no_such_module' does not import: ModuleNotFoundError"),
        (["reward_functions:f"], "module 'reward_functions' has no 'f'"),
        ([{"fn": "math", "weight": float("nan")}], r"rewards\[0\].weight"),
        ([{"fn": "math", "timeout": 3}], r"rewards\[0\].timeout: Extra inputs"),
        (["os.system; rm"], "is neither a registered name nor"),
        ([], "name at least one"),
        (["reward_functions:pid", "reward_functions:pid"], "two parts of the reward have the name 'pid'"),
    ],
)
def test_a_wrong_spec_is_one_line(functions: str, pool: RewardPool, specs: list[object], text: str) -> None:
    with pytest.raises(RewardFault, match=text) as caught:
        build(specs, pool=pool)
    assert "\n" not in str(caught.value)


def test_shared_pools_end_with_their_last_user() -> None:
    workers = 3  # environments of other tests may hold the pool of the usual size
    one, other = shared_pool(workers), shared_pool(workers)
    assert one is other
    one.describe("json:loads").result()
    running = set(one.processes())
    assert running
    release(one)
    assert running <= set(one.processes())
    mine = RewardPool(1)
    rewards = build(["json:loads"], pool=mine)
    rewards.close()
    assert mine.processes(), "a pool of the caller's own is the caller's to close"
    mine.close()
    assert shared_pool(workers) is one
    release(one)
    release(other)
    assert one.processes() == []


def test_a_worker_finds_modules_of_a_folder_that_was_added_after_its_start(
    tmp_path: Path, pool: RewardPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool.describe("json:loads").result()
    (tmp_path / "added_later.py").write_text("def one(): return 1.0\n", encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    pool.describe("added_later:one").result()
    assert pool.call("added_later:one", {}, 60.0).result() == 1.0


def test_at_its_limit_a_function_of_ones_own_fails_and_a_known_one_is_worth_0(functions: str, pool: RewardPool) -> None:
    areal = {"fn": f"{functions}:areal"}
    specs = ["math", areal, f"{functions}:ours", {**areal, "on_timeout": "fail", "name": "strict"}]
    on_timeout = {part.name: part.on_timeout for part in build(specs, pool=pool).parts}
    assert on_timeout == {"math": "zero", "areal": "zero", "ours": "fail", "strict": "fail"}


def test_a_rubric_has_each_part_as_a_metric_and_counts_timeouts(functions: str, pool: RewardPool) -> None:
    hangs = {"fn": f"{functions}:hangs", "timeout_s": 0.5}
    specs = [{"fn": f"{functions}:ours", "weight": 2}, {**hangs, "on_timeout": "zero"}]
    rubric = build(specs, pool=pool).rubric()
    state = {
        "prompt": PROMPT,
        "completion": COMPLETION,
        "answer": "4",
        "info": {"level": 3},
        "input": {},
        "trajectory": [],
    }
    asyncio.run(rubric.score_rollout(state))
    assert state["metrics"] == {"ours": 0.5, "hangs": 0, "hangs_timeouts": 1}
    assert state["reward"] == 1
