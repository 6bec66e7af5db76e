"""The prompt of a later turn is what the chat template renders, however the earlier turn ended."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from verifiers.types import AssistantMessage, ClientConfig, UserMessage

from prime_rl.orchestrator.rollouts.chat_client import TokenChatClient

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


class Client(TokenChatClient):
    """Tokenizes with a template of this test instead of a server's."""

    def __init__(self, render: Render) -> None:
        super().__init__(ClientConfig(api_base_url="http://127.0.0.1:1/v1"))
        self.render = render

    async def tokenize(self, messages: Any, *rest: Any, extra_kwargs: Any = None, **more: Any) -> list[int]:
        return self.render([dict(each) for each in messages], **(extra_kwargs or {}))


async def next_prompt(render: Render, completion_ids: list[int], is_truncated: bool = False) -> list[int] | None:
    """The prompt after a turn whose answer has these tokens."""
    step = {
        "prompt": [UserMessage(**QUESTION)],
        "completion": [AssistantMessage(**ANSWER)],
        "tokens": {
            "prompt_ids": render([QUESTION], True),
            "completion_ids": completion_ids,
            "is_truncated": False,
        },
        "response": SimpleNamespace(message=SimpleNamespace(is_truncated=is_truncated)),
    }
    state = {"trajectory": [step], "model": "letters"}
    client = Client(render)
    messages, _ = await client.to_native_prompt([*step["prompt"], *step["completion"], UserMessage(**NEXT)])
    return await client.get_prompt_ids(state, messages, None)


@pytest.mark.parametrize("end", [[END], [END, ord("\n")], []], ids=["a token", "a token and a line", "nothing"])
@pytest.mark.parametrize("is_truncated", [False, True], ids=["stop string", "max_tokens"])
async def test_a_turn_that_was_cut_off_gets_the_templates_end(end: list[int], is_truncated: bool) -> None:
    render = rendered_with(end)
    prompt = await next_prompt(render, letters("two"), is_truncated)
    assert prompt == render([QUESTION, ANSWER, NEXT], True)


@pytest.mark.parametrize("end", [[END], [END, ord("\n")]], ids=["a token", "a token and a line"])
async def test_a_turn_that_the_model_ended_gets_what_is_missing_of_its_end(end: list[int]) -> None:
    render = rendered_with(end)
    assert await next_prompt(render, [*letters("two"), END]) == render([QUESTION, ANSWER, NEXT], True)


async def test_a_turn_that_ended_with_the_token_of_the_next_role_does_not_get_it_twice() -> None:
    render = rendered_with([])
    assert await next_prompt(render, [*letters("two"), USER]) == render([QUESTION, ANSWER, NEXT], True)


async def test_an_answer_that_ends_like_a_header_of_the_template_is_not_mixed_up_with_it() -> None:
    render = rendered_with([END])
    asked = [QUESTION, {**ANSWER, "content": "two:"}, NEXT]
    assert await next_prompt(render, letters("two:")) == render(asked, True)


async def test_a_prompt_continues_its_own_conversation_and_not_the_longest_or_last_one() -> None:
    render, client = rendered_with([END]), Client(rendered_with([END]))
    conversations = [[QUESTION], [{"role": "user", "content": "four?"}, ANSWER, NEXT], [NEXT]]
    steps = [
        {
            "prompt": [UserMessage(**each) if each["role"] == "user" else AssistantMessage(**each) for each in asked],
            "completion": [AssistantMessage(**ANSWER)],
            "tokens": {"prompt_ids": render(asked, True), "completion_ids": letters("two"), "is_truncated": False},
            "response": None,
        }
        for asked in conversations
    ]
    asked = [UserMessage(**QUESTION), AssistantMessage(**ANSWER), UserMessage(**NEXT)]
    messages, _ = await client.to_native_prompt(asked)
    prompt = await client.get_prompt_ids({"trajectory": steps, "model": "letters"}, messages, None)
    assert prompt == render([QUESTION, ANSWER, NEXT], True)
