"""The environments `gymnasium` and `textarena`: real packages, a process for each game, faults in one line."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from prime_rl.checks.packages import built_in_faults
from prime_rl.checks.start_dir import StartDir
from prime_rl.configs.orchestrator import EnvConfig
from prime_rl.configs.shared import ClientConfig, LogConfig
from prime_rl.orchestrator.env_checks.scripted_engine import MODEL, ScriptedEngine
from prime_rl.orchestrator.errors import EnvironmentFault
from prime_rl.orchestrator.rollouts.rollout import ExampleRef, Rollout
from prime_rl.orchestrator.servers.server import InferenceServer
from prime_rl.orchestrator.workers.environment import Environment
from prime_rl.orchestrator.workers.loading import load_environments

pytest.importorskip("gymnasium", reason="gymnasium is not installed: `uv sync --inexact --extra environments`")
pytest.importorskip("textarena", reason="textarena is not installed: `uv sync --inexact --extra environments`")

from prime_rl.environments.adapters.local_games import GameProcesses
from prime_rl.environments.adapters.options import read_gymnasium_config, read_textarena_config
from prime_rl.environments.adapters.turns import GameError, clean

LAKE = {
    "game": "FrozenLake-v1",
    "config": {"is_slippery": False},
    "actions": ["left", "down", "right", "up"],
    "show_render": True,
    "size": 2,
    "eval_size": 1,
}
FEW = {"size": 3, "eval_size": 1}


@pytest.fixture(autouse=True)
def own_games(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))


def load(env_id: str, args: dict[str, Any]) -> Environment:
    (environment,) = load_environments([EnvConfig(id=env_id, args=args)], LogConfig(vf_level="critical")).values()
    return environment


def play(environment: Environment, answers: Sequence[str], row: int = 0) -> Rollout:
    """One rollout of a model that gives these answers."""

    async def run() -> Rollout:
        engine = ScriptedEngine()
        engine.play([{"content": answer} for answer in answers])
        async with engine.serving():
            server = InferenceServer(engine.base_url, ClientConfig(base_url=[engine.base_url]), MODEL)
            try:
                (rollout,) = await environment.evaluate(
                    ExampleRef(environment.name, row), 1, server, {"temperature": 1.0, "extra_body": {}}, 0
                )
            finally:
                await server.close()
                await environment.worker.served.env.end_host()
        return rollout

    return asyncio.run(run())


def said(rollout: Rollout) -> list[str]:
    """What the game said after each answer."""
    return [str(message["content"]) for message in rollout.completion if message["role"] == "user"]


def test_a_walk_over_the_frozen_lake_earns_its_reward_and_counts_what_was_no_action() -> None:
    environment = load("gymnasium", LAKE)
    assert environment.prompt(0)[0]["content"].endswith("Answer with one action: left, down, right, up.")
    assert "[S]FFF" in environment.prompt(0)[1]["content"]
    answers = ["<think>up, or</think> I go DOWN", "swim", "down", "right", "right", "right or rather down", "right"]
    rollout = play(environment, answers)
    assert rollout.reward == 1.0
    assert rollout.metrics == {
        "game_reward": 1.0,
        "invalid_actions": 1.0,
        "opponent_invalid_actions": 0.0,
        "unfinished_games": 0.0,
        "truncated_games": 0.0,
        "num_turns": 7.0,
    }
    assert said(rollout)[1] == "No action found. Answer with one of: left, down, right, up"
    assert "[G]" in said(rollout)[-1]


def test_a_game_ends_at_its_own_limit_or_at_ours() -> None:
    cut = play(load("gymnasium", {"game": "played_games:Echo-v0", **FEW}), ["a", "cut"])
    assert (cut.reward, (cut.metrics or {})["truncated_games"]) == (0.5, 1.0)
    stopped = play(load("gymnasium", {"game": "played_games:Echo-v0", "max_turns": 3, **FEW}), ["a"])
    assert (stopped.reward, stopped.num_turns, (stopped.metrics or {})["unfinished_games"]) == (0.75, 3, 1.0)


def test_what_a_game_says_reaches_no_terminal_and_is_cut() -> None:
    rollout = play(load("gymnasium", {"game": "played_games:Echo-v0", **FEW}), ["shout", "UPPER", "end"])
    loud, refused, _ = said(rollout)
    assert loud.startswith("loud xxx")
    assert loud.endswith("[The rest is left out: 1,028,596 characters]")
    assert len(loud) < 21_000
    assert refused.startswith("This action is not allowed: 1 to 20 characters of abc")
    assert clean("a\r\n\x9bb\ud800\tc", 100) == "a\nb?\tc"


@pytest.mark.parametrize(
    ("answer", "fault"),
    [
        ("raise", "played_games:Echo-v0 raised ValueError: two lines"),
        ("exit", r"played_games:Echo-v0 called sys.exit\(3\)"),
        ("die", "the process of played_games:Echo-v0 ended"),
        ("nan", "played_games:Echo-v0 gave the reward nan"),
    ],
)
def test_a_game_that_fails_costs_its_group_by_name_and_no_other_game(answer: str, fault: str) -> None:
    settings = settings_of("gymnasium", game="played_games:Echo-v0", step_timeout_s=3600.0)

    async def run() -> None:
        async with games(settings, 2) as (bad, good):
            await bad.reset(0, 0)
            await good.reset(0, 0)
            with pytest.raises(GameError, match=f"^{fault}"):
                await bad.act(answer)
            assert (await good.act("a")).text.startswith("a 0.")

    asyncio.run(run())


def test_a_game_that_hangs_is_ended_by_name_and_no_other_game() -> None:
    hurried, patient = (
        settings_of("gymnasium", game="played_games:Echo-v0", step_timeout_s=limit_s) for limit_s in (1.0, 3600.0)
    )

    async def hang(game: Any) -> None:
        await game.reset(0, 0)
        await game.act("hang")

    async def run() -> None:
        async with games(hurried, 1) as (bad,), games(patient, 1) as (good,):
            await good.reset(0, 0)
            with pytest.raises(GameError, match="Echo-v0 took longer than step_timeout_s = 1 s and was ended"):
                await hang(bad)
            assert (await good.act("a")).text.startswith("a 0.")

    asyncio.run(run())


@pytest.mark.parametrize(
    ("kind", "args", "answers"),
    [
        ("gymnasium", {"game": "played_games:Echo-v0"}, ["a", "b", "c"]),
        ("textarena", {"game": "KuhnPoker-v0", "opponent": "random"}, ["[check]", "[bet]", "[call]"]),
    ],
)
def test_games_at_the_same_time_have_the_random_numbers_that_they_have_alone(
    kind: str, args: dict[str, Any], answers: Sequence[str]
) -> None:
    settings = settings_of(kind, **args)

    async def played(game: Any, seed: int) -> list[str]:
        turns = [await game.reset(seed, 0)]
        for answer in answers:
            if not turns[-1].is_over:
                turns.append(await game.act(answer))
        return [turn.text for turn in turns]

    async def run() -> None:
        async with games(settings, 6) as (first, second, *others):
            alone = [await played(first, 0), await played(second, 1)]
            together = await asyncio.gather(*(played(game, index % 2) for index, game in enumerate(others)))
            assert together == alone * 2
            assert alone[0] != alone[1]

    asyncio.run(run())


def test_a_host_that_has_ended_is_started_again() -> None:
    async def run() -> None:
        processes = GameProcesses(settings_of("gymnasium", game="played_games:Echo-v0"))
        for _ in range(2):
            game = await processes.open()
            assert (await game.reset(0, 0)).text.startswith("start 0.")
            await game.close()
            processes.close()

    asyncio.run(run())


def test_the_model_takes_a_seat_against_a_function_and_then_the_other_one() -> None:
    environment = load(
        "textarena", {"game": "TicTacToe-v0", "opponent": "played_games:highest_cell", "size": 2, "eval_size": 1}
    )
    assert "You are Player 0" in environment.prompt(0)[0]["content"]
    assert "[Player 0] [8]" in environment.prompt(1)[0]["content"]
    won = play(environment, ["[0]", "1", "<think>[5]</think>[2]"])
    assert (won.reward, won.stop_condition) == (1.0, "has_final_env_response")
    assert "[Player 0] [0]" not in said(won)[0], "the model's own answer is in its conversation"
    assert "[Player 1] [8]" in said(won)[0]
    lost = play(environment, ["[8]"], row=1)
    assert (lost.reward, (lost.metrics or {})["invalid_actions"]) == (-1.0, 2.0)


def test_the_model_plays_against_itself_and_trains_on_one_seat() -> None:
    environment = load("textarena", {"game": "TicTacToe-v0", "opponent": "self", "size": 2, "eval_size": 0})
    first = play(environment, ["[0]", "[3]", "[1]", "[4]", "[2]"])
    assert (first.reward, first.num_turns) == (1.0, 3)
    trained = [message["content"] for message in first.completion if message["role"] == "assistant"]
    assert trained == ["[0]", "[1]", "[2]"]
    assert environment.prompt(1)[0]["content"].startswith("[GAME] You are Player 1")
    # Seat 0 loses at once, and the game begins again.
    second = play(environment, ["[9]", "[9]", "[4]", "[0]", "[5]", "[1]", "[7]", "[2]"], row=1)
    assert "[Player 0] [4]" in second.prompt[0]["content"]
    assert (second.reward, second.num_turns) == (1.0, 3)


@pytest.mark.parametrize(
    ("opponent", "answers"), [("played_games:leaves_the_board", ["[0]"]), ("self", ["[0]", "[9]", "[9]"])]
)
def test_a_win_by_the_opponents_invalid_moves_is_visible(opponent: str, answers: list[str]) -> None:
    won = play(load("textarena", {"game": "TicTacToe-v0", "opponent": opponent, "size": 2, "eval_size": 0}), answers)
    metrics = won.metrics or {}
    assert (won.reward, metrics["opponent_invalid_actions"], metrics["invalid_actions"]) == (1.0, 2.0, 0.0)


def test_a_game_for_one_player_has_one() -> None:
    async def run() -> None:
        async with games(settings_of("textarena", game="GuessTheNumber-v0"), 1) as (game,):
            turn = await game.reset(0, 0)
            for number in range(20, 0, -1):
                if not turn.is_over:
                    turn = await game.act(f"[{number}]")
            assert turn.is_over
            assert 0 <= turn.reward <= 1

    asyncio.run(run())


@pytest.mark.parametrize(
    ("env_id", "args", "fault"),
    [
        ("gymnasium", {"game": "FrozenLak-v1"}, "no environment with this id; did you mean 'FrozenLake-v1'?"),
        ("gymnasium", {"game": "nowhere:Echo-v0"}, "the module 'nowhere' does not import"),
        ("gymnasium", {"game": "CartPole-v1"}, "are Box, not text: set `show_render = true`"),
        ("gymnasium", {**LAKE, "actions": ["left"]}, "1 names for the 4 actions of FrozenLake-v1"),
        ("gymnasium", {**LAKE, "config": {"nope": 1}}, "FrozenLake-v1 cannot be made: TypeError"),
        ("textarena", {"game": "TicTacTo-v0"}, "TextArena has no game with this id; did you mean 'TicTacToe-v0'?"),
        ("textarena", {"game": "Nim-v0", "seat": 1}, "opponent = 'random' cannot play it"),
        ("textarena", {"game": "TicTacToe-v0", "players": 3}, "does not start with 3 players"),
        ("textarena", {"game": "TicTacToe-v0", "opponent": "played_games:nope"}, "has no 'nope'"),
        ("textarena", {"game": "TicTacToe-v0", "seat": 1, "opponent": "played_games:says_nothing"}, "returned no text"),
    ],
)
def test_a_game_that_cannot_be_used_is_one_line(env_id: str, args: dict[str, Any], fault: str) -> None:
    with pytest.raises(EnvironmentFault) as caught:
        load(env_id, {**args, **FEW})
    assert fault in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("env_id", "args", "fault"),
    [
        ("gymnasium", {}, "game"),
        ("gymnasium", {"game": "a", "eval_seed": 1}, "start the same games"),
        ("gymnasium", {"game": "a", "actions": ["up", "UP"]}, "two have the same name"),
        ("gymnasium", {"game": "a", "config": {"render_mode": "human"}}, "leave out render_mode"),
        ("textarena", {"game": "a", "opponent": "nobody"}, "choose random, self, or a function"),
        ("textarena", {"game": "a", "players": 2, "seat": 2}, "seats are 0 to 1"),
        ("textarena", {"game": "a", "oponent": "self"}, "opponent"),
        ("openenv", {"url": "localhost:8000"}, "give a base URL"),
        ("openenv", {"url": "http://me:secret@host"}, "leave out user, password"),
        ("openenv", {"url": "http://host", "reset": {"seed": 1}}, "leave out seed"),
    ],
)
def test_arguments_are_checked_before_anything_is_loaded(env_id: str, args: dict[str, Any], fault: str) -> None:
    lines = list(built_in_faults("orchestrator.env[0]", EnvConfig(id=env_id, args=args), StartDir()))
    assert any(fault in line for line in lines)
    assert not any("secret" in line for line in lines)


def settings_of(kind: str, **args: Any) -> dict[str, Any]:
    read: Callable[[dict[str, Any]], Any] = read_gymnasium_config if kind == "gymnasium" else read_textarena_config
    return {"kind": kind, **read(args).model_dump(mode="json")}


@asynccontextmanager
async def games(settings: dict[str, Any], count: int) -> AsyncIterator[list[Any]]:
    """So many games, each in its process."""
    processes = GameProcesses(settings)
    opened = [await processes.open() for _ in range(count)]
    try:
        yield opened
    finally:
        for game in opened:
            await game.close()
        processes.close()
