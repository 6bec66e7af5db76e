"""The reference of HTTP routes is up to date, lists every route, and says what a real server answers."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from prime_rl.inference.embedded.http.api import Api
from prime_rl.inference.reference import ROUTES, RouteResponse, page

PAGE = Path(__file__).resolve().parents[3] / "docs" / "http.md"
MESSAGES = [{"role": "user", "content": "Hello"}]
SCORED = {"max_tokens": 2, "prompt_logprobs": 0}

REQUESTS: dict[str, dict[str, Any] | None] = {
    "/v1/chat/completions": {"messages": MESSAGES, "logprobs": True, "top_logprobs": 1, **SCORED},
    "/v1/chat/completions/tokens": {"messages": MESSAGES, "tokens": [5, 6], "logprobs": True, **SCORED},
    "/v1/completions": {"prompt": "Hello", "logprobs": 1, **SCORED},
    "/tokenize": {"prompt": "Hello", "return_token_strs": True},
    "/update_weights": {"weight_dir": None},
    "/reload_weights": None,
    "/pause": None,
    "/resume": None,
}
"""A request for each route that needs no second process."""


def test_the_reference_is_up_to_date() -> None:
    advice = "run: uv run python -m prime_rl.inference.reference > docs/http.md"
    assert PAGE.read_text(encoding="utf-8") == page(), advice


def test_the_reference_lists_every_route_of_the_server() -> None:
    served = {(method, route.path) for route in Api("model", "key").app().routes for method in route.methods}
    assert {(route.method, route.path) for route in ROUTES} == {each for each in served if each[0] != "HEAD"}


def names_in(value: Any, prefix: str = "") -> Iterator[str]:
    """Names of the fields below a value, as the reference writes them."""
    if isinstance(value, dict) and value:
        for name, inner in value.items():
            yield from names_in(inner, f"{prefix}.{name}" if prefix else name)
    elif isinstance(value, list) and value and isinstance(value[0], dict):
        yield from names_in(value[0], f"{prefix}[]")
    else:
        yield prefix


@pytest.mark.parametrize("engine", ["embedded"], indirect=True)
def test_a_server_answers_with_the_listed_fields(server) -> None:
    for route in ROUTES:
        if route.path in REQUESTS or route.method == "GET":
            request = REQUESTS.get(route.path)
            answer = server.client.request(route.method, route.path, json=request)
            assert answer.status_code == 200, f"{route.path}: {answer.text}"
            is_json = answer.headers.get("content-type") == "application/json"
            found = set(names_in(answer.json())) if is_json else set()
            assert differences(route, found) == [], route.path


def differences(route: RouteResponse, found: set[str]) -> list[str]:
    """Fields that only one side has. The page describes some objects as a whole, and some answers lack some fields."""
    whole = [name for name in route.fields if name.endswith(("top_logprobs[]", "prompt_logprobs"))]
    described = set(route.fields) - set(whole) - {"choices[].message.tool_calls", "choices[].routed_experts"}
    listed = {name for name in found if not any(name.startswith(each.removesuffix("[]")) for each in whole)}
    return sorted(described ^ listed)


def test_the_error_on_the_page_is_the_one_that_a_server_sends() -> None:
    from prime_rl.inference.protocol import CompletionBody, RequestError, parse_body

    shown = json.loads(re.search(r"```json\n(.*?)```", page(), re.DOTALL)[1])
    with pytest.raises(RequestError) as refused:
        parse_body(CompletionBody, b'{"prompt": "aspirin", "n": 0}')
    assert refused.value.body() == shown
