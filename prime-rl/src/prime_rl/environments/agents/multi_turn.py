"""An agent that tries again until its answer has a reward.

Its name in a config is `prime_rl.environments.agents.multi_turn:MultiTurn`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from prime_rl.environments.agents.returns import checked_reward
from prime_rl.environments.agents.targets import resolve

if TYPE_CHECKING:
    from openai import AsyncOpenAI

FEEDBACK = "Your answer is either wrong or not parsable. Think again, and give another answer."


class MultiTurn:
    """Answers `row["messages"]`; while the reward is 0, tells the model so and lets it answer again.

    The reward of the last answer, times `turn_discount` for each turn before it, counts for the whole conversation.
    The proxy keeps the conversation's tokens as they were sampled; feedback is not trained on.
    """

    def __init__(
        self,
        reward_fn: str | Callable[..., Any],
        max_turns: int = 4,
        turn_discount: float = 1.0,
        feedback: str = FEEDBACK,
    ) -> None:
        """`reward_fn(text, row)` returns the reward of an answer; it may be named as `module:function`."""
        if max_turns < 1:
            raise ValueError("max_turns: at least 1")
        if not 0 < turn_discount <= 1:
            raise ValueError("turn_discount: above 0, and at most 1")
        self.reward_fn: Callable[..., Any] = resolve(reward_fn) if isinstance(reward_fn, str) else reward_fn
        self.max_turns = max_turns
        self.turn_discount = turn_discount
        self.feedback = feedback

    async def run(self, data: Mapping[str, Any], client: AsyncOpenAI, model: str) -> float:
        """One conversation; returns its reward."""
        messages: list[Any] = [*data["messages"]]
        reward, discount = 0.0, 1.0
        for turn in range(self.max_turns):
            if turn:
                messages.append({"role": "user", "content": self.feedback})
                discount *= self.turn_discount
            completion = await client.chat.completions.create(model=model, messages=messages)
            answer = completion.choices[0].message
            messages.append(answer.model_dump(exclude_none=True))
            given = self.reward_fn(answer.content or "", data)
            reward = checked_reward(await given if inspect.isawaitable(given) else given)
            if reward != 0:
                break
        return reward * discount
