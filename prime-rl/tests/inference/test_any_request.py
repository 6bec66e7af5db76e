"""Whatever a body says, on every route: no 5xx, no dead engine, and the next request gets the answer it always got."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

PROMPT = [12, 9, 16, 16, 19]
CASES_PER_ROUTE = max(40, settings.default.max_examples // 10)
"""1,000 in a campaign: more than 10,000 for all routes."""

INTEGERS = st.one_of(
    st.integers(-3, 70), st.integers(), st.sampled_from([2**31, 2**63 - 1, 2**63, -(2**63), 10**30, 10**400])
)
NUMBERS = st.one_of(INTEGERS, st.floats(), st.sampled_from([0, 1, -0.0, 1e-320, 1e308, 5e-324, 0.5]))
HOSTILE_TEXTS = ["", "\0", "\ufffd", "\ud7ff", "{{ 7*7 }}", "{% x %}", "a" * 3000]
TEXTS = st.one_of(st.text(max_size=30), st.sampled_from(HOSTILE_TEXTS))
JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), NUMBERS, TEXTS),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(TEXTS, inner, max_size=4)),
    max_leaves=12,
)
PARTS = st.lists(st.fixed_dictionaries({"type": st.just("text"), "text": TEXTS}), max_size=3)
FUNCTIONS = st.fixed_dictionaries({"name": TEXTS, "arguments": st.one_of(TEXTS, JSON, JSON.map(json.dumps))})
CALLS = st.lists(st.one_of(JSON, st.fixed_dictionaries({"function": FUNCTIONS})), max_size=3)
MESSAGES = st.lists(
    st.fixed_dictionaries(
        {"role": st.one_of(st.sampled_from(["system", "user", "assistant", "tool"]), TEXTS)},
        optional={"content": st.one_of(TEXTS, PARTS, JSON), "tool_calls": st.one_of(CALLS, JSON), "name": JSON},
    ),
    max_size=4,
)
TOOLS = st.lists(
    st.one_of(JSON, st.fixed_dictionaries({"type": st.just("function"), "function": FUNCTIONS})), max_size=3
)
TOKENS = st.lists(st.integers(0, 90), min_size=1, max_size=20)
SAMPLING = {
    "temperature": st.one_of(st.floats(0, 3), NUMBERS),
    "top_p": st.one_of(st.floats(0, 1), NUMBERS),
    "top_k": st.one_of(st.integers(-1, 50), INTEGERS),
    "min_p": st.one_of(st.floats(0, 1), NUMBERS),
    "repetition_penalty": st.one_of(st.floats(0, 3), NUMBERS),
    "presence_penalty": st.one_of(st.floats(-2, 2), NUMBERS),
    "frequency_penalty": st.one_of(st.floats(-2, 2), NUMBERS),
    "seed": INTEGERS,
    "n": st.one_of(st.integers(1, 3), INTEGERS),
    "min_tokens": st.one_of(st.integers(0, 4), INTEGERS),
    "stop": st.one_of(TEXTS, st.lists(TEXTS, max_size=3), JSON),
    "stop_token_ids": st.one_of(TOKENS, st.lists(INTEGERS, max_size=3), JSON),
    "logit_bias": st.one_of(
        st.dictionaries(st.integers(0, 90).map(str), st.floats(-100, 100), max_size=4),
        st.dictionaries(st.one_of(INTEGERS.map(str), TEXTS), NUMBERS, max_size=3),
    ),
    "include_stop_str_in_output": st.booleans(),
    "ignore_eos": st.booleans(),
    "skip_special_tokens": st.booleans(),
    "prompt_logprobs": st.one_of(st.integers(0, 20), INTEGERS),
    "return_tokens_as_token_ids": st.booleans(),
    "stream": st.booleans(),
    "stream_options": st.one_of(st.fixed_dictionaries({"include_usage": st.booleans()}), JSON),
    "model": JSON,
    "user": JSON,
    "metadata": JSON,
    "priority": INTEGERS,
}
RENDERING = {
    "tools": st.one_of(TOOLS, JSON),
    "add_generation_prompt": st.booleans(),
    "continue_final_message": st.booleans(),
    "chat_template_kwargs": st.dictionaries(
        st.one_of(st.sampled_from(["chat_template", "messages", "documents", "tools", "self", "tokenize"]), TEXTS),
        JSON,
        max_size=2,
    ),
}
FEW_TOKENS = {"max_tokens": st.integers(1, 4)}
CHAT_OPTIONS = (
    SAMPLING
    | RENDERING
    | {
        "logprobs": st.booleans(),
        "top_logprobs": st.one_of(st.integers(0, 20), INTEGERS),
        "tool_choice": st.one_of(st.sampled_from(["auto", "none"]), JSON),
        "parallel_tool_calls": st.booleans(),
    }
)
FILES = st.one_of(TEXTS, st.just("nowhere/step_1"), JSON)
SOME_MESSAGES = st.one_of(st.just([{"role": "user", "content": "Hi"}]), MESSAGES)
SOME_PROMPTS = st.one_of(
    TEXTS.filter(bool), TOKENS, st.lists(TEXTS, max_size=3), st.lists(TOKENS, min_size=1, max_size=3), JSON
)


def bodies(required: dict[str, Any], options: dict[str, Any]) -> st.SearchStrategy[dict[str, Any]]:
    """Bodies with up to three of the options: with all of them, nearly every body would be refused."""
    names = st.lists(st.sampled_from(sorted(options)), max_size=3, unique=True)
    return names.flatmap(lambda some: st.fixed_dictionaries(required | {name: options[name] for name in some}))


BODIES = {
    "/v1/chat/completions": bodies({"messages": SOME_MESSAGES} | FEW_TOKENS, CHAT_OPTIONS),
    "/v1/chat/completions/tokens": bodies(
        {"messages": SOME_MESSAGES, "tokens": st.one_of(TOKENS, st.lists(INTEGERS, max_size=4))} | FEW_TOKENS,
        CHAT_OPTIONS,
    ),
    "/v1/completions": bodies(
        {"prompt": SOME_PROMPTS} | FEW_TOKENS,
        SAMPLING
        | {
            "logprobs": st.one_of(st.integers(0, 20), INTEGERS),
            "add_special_tokens": st.booleans(),
            "echo": st.booleans(),
            "max_tokens": st.integers(0, 4),
        },
    ),
    "/tokenize": st.one_of(
        bodies({"messages": SOME_MESSAGES}, RENDERING | {"return_token_strs": st.booleans(), "model": JSON}),
        bodies({"prompt": TEXTS}, {"add_special_tokens": JSON, "return_token_strs": st.booleans()}),
    ),
    "/update_weights": bodies({"weight_dir": FILES}, {"other": JSON}),
    "/load_lora_adapter": bodies({}, {"lora_name": FILES, "lora_path": FILES}),
    "/init_broadcaster": bodies(
        {"host": TEXTS, "port": INTEGERS},
        {"server_rank": INTEGERS, "num_inference_server": INTEGERS, "timeout": INTEGERS},
    ),
}


@pytest.fixture
def greedy(server, engine):
    if engine != "embedded":
        pytest.skip("bodies are checked by vLLM itself")

    def ask() -> list[int]:
        return server.complete(PROMPT, max_tokens=8, temperature=0, ignore_eos=True)["choices"][0]["token_ids"]

    return ask


@pytest.mark.parametrize("route", BODIES)
def test_no_body_breaks_the_server(server, greedy, route: str) -> None:
    expected = greedy()

    @settings(
        max_examples=CASES_PER_ROUTE,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.large_base_example],
    )
    @given(st.one_of(BODIES[route], BODIES[route], JSON))
    def answers(body: Any) -> None:
        answer = server.client.post(route, content=json.dumps(body).encode())
        assert answer.status_code < 500, answer.text
        assert b'"code":5' not in answer.content, answer.text
        if answer.status_code >= 400:
            message = answer.json()["error"]["message"]
            assert message
            assert len(message) <= 1000, message

    answers()
    assert server.client.get("/load").json() == {"server_load": 0}
    assert greedy() == expected


def test_no_bytes_break_the_server(server, greedy) -> None:
    expected = greedy()

    @settings(max_examples=CASES_PER_ROUTE, deadline=None, derandomize=True, database=None)
    @given(st.sampled_from(sorted(BODIES)), st.binary(max_size=200))
    def answers(route: str, body: bytes) -> None:
        assert server.client.post(route, content=body).status_code < 500

    answers()
    assert greedy() == expected
