"""The prompt of a later turn is what the chat template renders, however the earlier turn ended."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from prime_rl.orchestrator.proxy.continuation import EndsOfTurns, RecordedCall, canonical, continued_prompt
from prime_rl.orchestrator.rollouts.trace import ModelCall, Prompt

USER, ASSISTANT, END = 1, 2, 3
Render = Callable[[Sequence[dict[str, Any]], bool], list[int]]
QUESTION = {"role": "user", "content": "one?"}
ANSWER = {"role": "assistant", "content": "two"}
NEXT = {"role": "user", "content": "three?"}


def letters(text: str) -> list[int]:
    return [ord(letter) for letter in text]


def rendered_with(end: list[int]) -> Render:
    """A template that writes a token and a colon for each role, a text and `end`."""

    def render(messages: Sequence[dict[str, Any]], add_generation_prompt: bool = True) -> list[int]:
        roles = {"user": USER, "assistant": ASSISTANT}
        ids = [token for each in messages for token in [roles[each["role"]], *letters(f":{each['content']}"), *end]]
        return ids + [ASSISTANT, ord(":")] * add_generation_prompt

    return render


def recorded(render: Render, asked: list[dict[str, Any]], answer: str, completion_ids: list[int]) -> RecordedCall:
    """A call whose answer has this text and these tokens."""
    count = len(completion_ids)
    tokens = ModelCall(Prompt.of(render(asked, True)), completion_ids, [0.0] * count, [True] * count)
    return RecordedCall(tuple(map(canonical, [*asked, {**ANSWER, "content": answer}])), {}, tokens)


async def next_prompt(render: Render, calls: list[RecordedCall], asked: list[dict[str, Any]]) -> list[int] | None:
    async def tokenize(messages: Sequence[dict[str, Any]], add_generation_prompt: bool) -> list[int]:
        return render(messages, add_generation_prompt)

    return await continued_prompt(calls, asked, {}, tokenize, EndsOfTurns())


async def after(render: Render, completion_ids: list[int], answer: str = "two") -> list[int] | None:
    """The prompt after a turn whose answer has these tokens."""
    call = recorded(render, [QUESTION], answer, completion_ids)
    return await next_prompt(render, [call], [QUESTION, {**ANSWER, "content": answer}, NEXT])


@pytest.mark.parametrize("end", [[END], [END, ord("\n")], []], ids=["a token", "a token and a line", "nothing"])
async def test_a_turn_that_was_cut_off_gets_the_templates_end(end: list[int]) -> None:
    render = rendered_with(end)
    assert await after(render, letters("two")) == render([QUESTION, ANSWER, NEXT], True)


@pytest.mark.parametrize("end", [[END], [END, ord("\n")]], ids=["a token", "a token and a line"])
async def test_a_turn_that_the_model_ended_gets_what_is_missing_of_its_end(end: list[int]) -> None:
    render = rendered_with(end)
    assert await after(render, [*letters("two"), END]) == render([QUESTION, ANSWER, NEXT], True)


async def test_a_turn_that_ended_with_the_token_of_the_next_role_does_not_get_it_twice() -> None:
    render = rendered_with([])
    assert await after(render, [*letters("two"), USER]) == render([QUESTION, ANSWER, NEXT], True)


async def test_an_answer_that_ends_like_a_header_of_the_template_is_not_mixed_up_with_it() -> None:
    render = rendered_with([END])
    asked = [QUESTION, {**ANSWER, "content": "two:"}, NEXT]
    assert await after(render, letters("two:"), "two:") == render(asked, True)


async def test_a_prompt_continues_its_own_conversation_and_not_the_longest_or_last_one() -> None:
    render = rendered_with([END])
    conversations = [[QUESTION], [{"role": "user", "content": "four?"}, ANSWER, NEXT], [NEXT]]
    calls = [recorded(render, asked, "two", letters("two")) for asked in conversations]
    asked = [QUESTION, ANSWER, NEXT]
    assert await next_prompt(render, calls, asked) == render(asked, True)
