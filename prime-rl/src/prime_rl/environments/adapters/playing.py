"""The verifiers environment of games: one conversation per game. The reward is the sum over its turns."""

from __future__ import annotations

import copy
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import verifiers as vf
from datasets import Dataset
from verifiers.utils.message_utils import normalize_messages

from prime_rl.environments.adapters.turns import START_COLUMN, Game, GameError, Turn
from prime_rl.environments.rewards.text import text_of
from prime_rl.utils.logger import get_logger

MOST_STARTS = 10
_PLAY = "game_play"


@dataclass(frozen=True, slots=True)
class Rules:
    """Settings of a game's environment."""

    title: str
    system_prompt: str
    max_turns: int
    unfinished_reward: float
    open_game: Callable[[], Awaitable[Game]]
    close: Callable[[], None]
    """Called once, after the last game."""


@dataclass(slots=True)
class Play:
    """A running game, and what the trained player has achieved."""

    game: Game
    seat: int
    reward: float = 0.0
    turns: int = 0
    invalid_actions: int = 0
    opponent_invalid_actions: int = 0
    is_over: bool = False
    is_truncated: bool = False
    conversations: dict[int, list[dict[str, str]]] = field(default_factory=dict)
    """Conversations of the seats that the model plays without being trained on them."""


class PlayedEnvironment(vf.MultiTurnEnv):  # type: ignore[misc]
    """An environment with one row per start of the game."""

    def __init__(self, rules: Rules, train: Sequence[Mapping[str, Any]], held_out: Sequence[Mapping[str, Any]]) -> None:
        """Rows have `seed`, `seat`, the first `text` that the player sees, and whether the player `begins`."""
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
        """Start the game, again if it ends in other seats before the trained player acts. Raises GameError."""
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
        """Give the model's answer to the game. Raises GameError."""
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
        """Let the model play the other seats until it is the trained player's turn, or the game is over."""
        while True:
            play.reward += turn.reward
            play.opponent_invalid_actions += turn.invalid_by_others
            play.is_over, play.is_truncated = turn.is_over, turn.is_truncated
            if turn.is_over or turn.player == play.seat:
                return turn
            turn = await play.game.act(await self._other_answer(state, play, turn))

    async def _other_answer(self, state: vf.State, play: Play, turn: Turn) -> str:
        """Ask the model for the answer of another seat, in a separate conversation that is not trained on."""
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
        """End the game's process or session."""
        if (play := state.get(_PLAY)) is not None:
            await play.game.close()

    @vf.teardown  # type: ignore[untyped-decorator]
    async def end_host(self) -> None:
        """End the host that all games share."""
        self._rules.close()


def game_reward(state: vf.State) -> float:
    """Sum of the rewards of all turns."""
    play: Play | None = state.get(_PLAY)
    return 0.0 if play is None else play.reward


def invalid_actions(state: vf.State) -> float:
    """Number of answers without an action that the game allows."""
    play: Play | None = state.get(_PLAY)
    return 0.0 if play is None else float(play.invalid_actions)


def opponent_invalid_actions(state: vf.State) -> float:
    """Number of such answers of other seats."""
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
