"""The environment that plays games: one conversation a game, whose reward is the sum over its turns."""

from __future__ import annotations

import copy
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import verifiers as vf
from datasets import Dataset
from verifiers.utils.message_utils import normalize_messages

from prime_rl.environments.adapters.games.turns import START_COLUMN, Game, GameError, Turn
from prime_rl.environments.rewards.text import text_of
from prime_rl.utils.logger import get_logger

MOST_STARTS = 10
_PLAY = "game_play"


@dataclass(frozen=True, slots=True)
class Rules:
    """What a game's environment is made of."""

    title: str
    system_prompt: str
    max_turns: int
    unfinished_reward: float
    open_game: Callable[[], Awaitable[Game]]
    close: Callable[[], None]
    """Called once, after the last game."""


@dataclass(slots=True)
class Play:
    """A game that is being played."""

    game: Game
    seat: int
    reward: float = 0.0
    turns: int = 0
    invalid_actions: int = 0
    opponent_invalid_actions: int = 0
    is_over: bool = False
    is_truncated: bool = False
    conversations: dict[int, list[dict[str, str]]] = field(default_factory=dict)
    """Those of the seats that the model plays without being trained."""


class PlayedEnvironment(vf.MultiTurnEnv):  # type: ignore[misc]
    """One row is one start of the game."""

    def __init__(self, rules: Rules, train: Sequence[Mapping[str, Any]], held_out: Sequence[Mapping[str, Any]]) -> None:
        """Rows have `seed`, `seat`, the `text` that the player sees first, and whether it `begins`."""
        self._rules = rules
        self._has_warned = False
        super().__init__(
            dataset=_table(rules, train),
            eval_dataset=_table(rules, held_out) if held_out else None,
            rubric=vf.Rubric(
                funcs=[game_reward, invalid_actions, opponent_invalid_actions, unfinished_games, truncated_games],
                weights=[1.0, 0.0, 0.0, 0.0, 0.0],
            ),
        )

    async def setup_state(self, state: vf.State) -> None:
        """Start the game; again if the model ends it in another seat before the trained one acts. Raises GameError."""
        info = state["info"]
        play = state[_PLAY] = Play(await self._rules.open_game(), info["seat"])
        for _ in range(MOST_STARTS):
            turn = await self._own_turn(state, play, await play.game.reset(info["seed"], play.seat))
            if not turn.is_over:
                break
            play.reward, play.opponent_invalid_actions, play.conversations = 0.0, 0, {}
        else:
            raise GameError(f"{self._rules.title} was over before seat {play.seat} acted, {MOST_STARTS} times")
        if turn.text != info["text"]:
            if info["begins"]:
                self._warn_once(info["seed"])
            state["prompt"] = normalize_messages(_prompt(self._rules, turn.text), field_name="prompt")

    async def env_response(self, messages: vf.Messages, state: vf.State, **_: Any) -> vf.Messages:
        """Play the model's answer. Raises GameError."""
        play: Play = state[_PLAY]
        turn = await play.game.act(text_of(messages[-1:], role="assistant"))
        play.turns += 1
        play.invalid_actions += turn.is_invalid
        turn = await self._own_turn(state, play, turn)
        said = normalize_messages([{"role": "user", "content": turn.text}], field_name="env_response")
        if play.is_over or play.turns >= self._rules.max_turns:
            if not play.is_over:
                play.reward += self._rules.unfinished_reward
            state["final_env_response"] = said
        return said

    async def _own_turn(self, state: vf.State, play: Play, turn: Turn) -> Turn:
        """Let the model play the other seats until it is the trained one's turn, or the game is over."""
        while True:
            play.reward += turn.reward
            play.opponent_invalid_actions += turn.invalid_by_others
            play.is_over, play.is_truncated = turn.is_over, turn.is_truncated
            if turn.is_over or turn.player == play.seat:
                return turn
            turn = await play.game.act(await self._other_answer(state, play, turn))

    async def _other_answer(self, state: vf.State, play: Play, turn: Turn) -> str:
        """What the model says in another seat, whose conversation is kept apart from the one that is trained on."""
        conversation = play.conversations.setdefault(turn.player, _prompt(self._rules, "")[:-1])
        conversation.append({"role": "user", "content": turn.text})
        other = copy.copy(state)
        other["trajectory"] = []
        prompt = normalize_messages([dict(message) for message in conversation], field_name="prompt")
        response = await self.get_model_response(other, prompt)
        answer = response.message.content or ""
        conversation.append({"role": "assistant", "content": answer})
        return str(answer)

    def _warn_once(self, seed: int) -> None:
        if not self._has_warned:
            self._has_warned = True
            get_logger().warning(
                f"{self._rules.title} started differently with the same seed ({seed}): "
                "the rollouts of a group do not start alike"
            )

    @vf.cleanup  # type: ignore[untyped-decorator]
    async def end_game(self, state: vf.State) -> None:
        """Let go of the game's process or session."""
        if (play := state.get(_PLAY)) is not None:
            await play.game.close()

    @vf.teardown  # type: ignore[untyped-decorator]
    async def end_host(self) -> None:
        """Let go of what all games share."""
        self._rules.close()


def game_reward(state: vf.State) -> float:
    """The sum of the rewards of all turns."""
    play: Play | None = state.get(_PLAY)
    return 0.0 if play is None else play.reward


def invalid_actions(state: vf.State) -> float:
    """Answers without an action that the game allows."""
    play: Play | None = state.get(_PLAY)
    return 0.0 if play is None else float(play.invalid_actions)


def opponent_invalid_actions(state: vf.State) -> float:
    """The same for the answers of the other seats."""
    play: Play | None = state.get(_PLAY)
    return 0.0 if play is None else float(play.opponent_invalid_actions)


def unfinished_games(state: vf.State) -> float:
    """1 if the game was not over when the rollout ended."""
    play: Play | None = state.get(_PLAY)
    return float(play is not None and not play.is_over)


def truncated_games(state: vf.State) -> float:
    """1 if the game's own limit on its length ended it."""
    play: Play | None = state.get(_PLAY)
    return float(play is not None and play.is_truncated)


def _prompt(rules: Rules, text: str) -> list[dict[str, str]]:
    system = [{"role": "system", "content": rules.system_prompt}] if rules.system_prompt else []
    return [*system, {"role": "user", "content": text}]


def _table(rules: Rules, rows: Sequence[Mapping[str, Any]]) -> Dataset:
    return Dataset.from_dict(
        {
            "prompt": [_prompt(rules, row["text"]) for row in rows],
            "prompt_id": [f"seed-{row['seed']}-seat-{row['seat']}" for row in rows],
            START_COLUMN: [f"seed {row['seed']}, seat {row['seat']}" for row in rows],
            "info": [json.dumps(dict(row), ensure_ascii=False) for row in rows],
        }
    )
