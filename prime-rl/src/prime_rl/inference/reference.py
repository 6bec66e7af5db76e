"""Describes the routes of the inference server, and generates their reference from the request bodies.

`python -m prime_rl.inference.reference > docs/http.md`
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from prime_rl.inference.guards import HEALTH, METRICS
from prime_rl.inference.protocol import (
    ChatBody,
    CompletionBody,
    InitBroadcasterBody,
    LoadAdapterBody,
    SamplingBody,
    StreamOptions,
    TokenizeBody,
    TokensBody,
    UpdateWeightsBody,
)
from prime_rl.utils.pydantic_config.describe import bounds_text, default_text, field_doc, type_text


@dataclass(frozen=True, slots=True)
class RouteResponse:
    """One route, with the fields of its answer: `a.b` is a field of an object, `a[].b` of each object of a list."""

    method: str
    path: str
    does: str
    body: type[BaseModel] | None = None
    fields: Mapping[str, str] = field(default_factory=dict)


_ENVELOPE = {
    "id": "of the request",
    "created": "seconds since 1970",
    "model": "the model or adapter that answered",
    "usage.prompt_tokens": "tokens of all prompts",
    "usage.completion_tokens": "generated tokens",
    "usage.total_tokens": "their sum",
    "choices[].index": "number of the sample, from 0",
    "choices[].finish_reason": "`stop`, `length` or `tool_calls`",
    "choices[].stop_reason": "the stop string or stop token id; null for the model's own end token",
    "choices[].token_ids": "generated token ids, with the one that ended the sample",
    "choices[].weight_versions[].version": "policy version of a part of the sample",
    "choices[].weight_versions[].start": "its first token",
    "choices[].weight_versions[].end": "the token after its last",
    "choices[].routed_experts": "with `inference.enable_return_routed_experts`: a NumPy file in base64, the expert ids "
    "`[tokens - 1, layers, k]` of prompt and completion, whose last token was not routed",
}
_POWERS = {"9_223_372_036_854_775_807": "2^63 - 1", "9_223_372_036_854_775_808": "2^63", "2_147_483_647": "2^31 - 1"}
_PROMPT_LOGPROBS = "with `prompt_logprobs`: null, then `{token id: {logprob, rank, decoded_token}}` per token"

CHAT_FIELDS = {
    **_ENVELOPE,
    "object": "`chat.completion`",
    "choices[].message.role": "`assistant`",
    "choices[].message.content": "the text",
    "choices[].message.tool_calls": "calls that the parser found in the text, if any",
    "choices[].logprobs.content[].token": "with `logprobs`: text of the token",
    "choices[].logprobs.content[].logprob": "its log-probability, after all sampling arguments",
    "choices[].logprobs.content[].bytes": "its text as UTF-8",
    "choices[].logprobs.content[].top_logprobs[]": "the `top_logprobs` likeliest tokens: `token`, `logprob`, `bytes`",
    "prompt_token_ids": "token ids of the rendered prompt",
    "prompt_logprobs": _PROMPT_LOGPROBS,
}
COMPLETION_FIELDS = {
    **_ENVELOPE,
    "object": "`text_completion`",
    "choices[].text": "the text",
    "choices[].logprobs.tokens": "with `logprobs`: text of each token",
    "choices[].logprobs.token_logprobs": "log-probability of each token",
    "choices[].logprobs.top_logprobs[]": "the `logprobs` likeliest tokens at each place, by text",
    "choices[].logprobs.text_offset": "character at which each token starts",
    "choices[].prompt_token_ids": "token ids of the choice's prompt",
    "choices[].prompt_logprobs": _PROMPT_LOGPROBS,
}
_STATUS = {"status": "`ok`", "version": "n of a directory `step_<n>`, else one more than before"}
_RELOADED = {"status": "`ok`", "version": "0"}

ROUTES = (
    RouteResponse("POST", "/v1/chat/completions", "generates an answer to messages", ChatBody, CHAT_FIELDS),
    RouteResponse(
        "POST",
        "/v1/chat/completions/tokens",
        "the same, from a prompt that the client has tokenized",
        TokensBody,
        CHAT_FIELDS,
    ),
    RouteResponse("POST", "/v1/completions", "continues texts or token ids", CompletionBody, COMPLETION_FIELDS),
    RouteResponse(
        "POST",
        "/tokenize",
        "tokenizes a text or messages",
        TokenizeBody,
        {
            "count": "number of tokens",
            "max_model_len": "tokens of the model's context",
            "tokens": "token ids",
            "token_strs": "text of each token, with `return_token_strs`; else null",
        },
    ),
    RouteResponse(
        "POST", "/update_weights", "loads weights, between two tokens of running requests", UpdateWeightsBody, _STATUS
    ),
    RouteResponse(
        "POST", "/reload_weights", "loads the weights that the server started with; no body", None, _RELOADED
    ),
    RouteResponse("POST", "/load_lora_adapter", "serves an adapter under a name", LoadAdapterBody, _STATUS),
    RouteResponse(
        "POST",
        "/init_broadcaster",
        "joins the trainer's group that sends weights directly",
        InitBroadcasterBody,
        {"status": "`ok`"},
    ),
    RouteResponse(
        "POST",
        "/pause",
        "pauses generation; running requests stay. Query: `mode=keep`, the only mode",
        None,
        {"status": "`paused`"},
    ),
    RouteResponse("POST", "/resume", "continues generation", None, {"status": "`resumed`"}),
    RouteResponse("GET", "/is_paused", "whether generation is paused", None, {"is_paused": "true or false"}),
    RouteResponse(
        "POST",
        "/sleep",
        "frees the GPU's memory once all requests have ended, until the next weights; with `enable_sleep_mode`",
        None,
        {"status": "`sleeping`"},
    ),
    RouteResponse("GET", "/is_sleeping", "whether the server sleeps", None, {"is_sleeping": "true or false"}),
    RouteResponse("GET", HEALTH, "status 200 when the model is loaded, else 503; no body"),
    RouteResponse(
        "GET", METRICS, "counts and gauges as Prometheus's text; without the key if `server.public_metrics = true`"
    ),
    RouteResponse("GET", "/load", "work of the server", None, {"server_load": "samples that run or wait"}),
    RouteResponse(
        "GET",
        "/v1/models",
        "the model and its adapters",
        None,
        {
            "object": "`list`",
            "data[].id": "name for `model` in requests",
            "data[].object": "`model`",
            "data[].created": "seconds since 1970",
            "data[].owned_by": "`prime-rl`",
            "data[].root": "where it was loaded from",
            "data[].parent": "an adapter's model; null for the model",
            "data[].max_model_len": "tokens of the context; null for an adapter",
        },
    ),
)
"""The embedded engine's routes. vLLM's server has the same ones, and vLLM's own."""

INTRODUCTION = """\
# HTTP routes

Generated with `uv run python -m prime_rl.inference.reference > docs/http.md`; tests check that it is up to date, and
that a server answers with these fields.

```bash
curl -s localhost:8000/v1/completions -H "Authorization: Bearer $VLLM_API_KEY" -H 'Content-Type: application/json' \\
    -d '{"prompt": "aspirin", "max_tokens": 8, "logprobs": 0}'
```

Both engines have these routes; [inference.md](inference.md) shows how to start a server. vLLM's has
further routes and fields. An argument that is not listed, and a request beyond a [limit](inference.md#limits), is
refused. With `key`, a request needs the header `Authorization: Bearer KEY`.
"""

ERRORS = """\
## Errors

```json
{"error": {"message": "n: Input should be greater than or equal to 1", "type": "BadRequestError", "param": "n",
  "code": 400}}
```

| status | when |
|---|---|
| 400 | an argument is unknown, has a wrong type, or is beyond a limit; `param` names it |
| 401 | the key is missing or wrong |
| 404 | no such route, model or adapter |
| 405 | wrong method |
| 408, 413 | the body arrives too slowly, or is too large |
| 429 | the queue is full |
| 500 | the request failed in the server; the message has an id that is also in the log |
| 503 | the model is loading, or the server is stopping |
"""


def page() -> str:
    """Return the whole page."""
    rows = ["| method | path | key | does |", "|---|---|---|---|"]
    for route in ROUTES:
        key = "no" if route.path == HEALTH else "yes"
        rows.append(f"| {route.method} | `{route.path}` | {key} | {route.does} |")
    parts = [INTRODUCTION, "\n".join(rows) + "\n", ERRORS]
    parts.append(f"## Sampling arguments\n\nOf all routes that generate.\n\n{_fields(SamplingBody, None)}")
    parts.append(f"`stream_options`:\n\n{_fields(StreamOptions, None)}")
    parts += [_section(route) for route in ROUTES if route.body is not None or route.fields]
    return "\n".join(parts)


def _section(route: RouteResponse) -> str:
    parts = [f"## {route.method} {route.path}", ""]
    if route.body is not None:
        shared = ChatBody if route.body is TokensBody else SamplingBody
        names = {ChatBody: "those of `/v1/chat/completions`", SamplingBody: "the sampling arguments"}
        is_child = issubclass(route.body, shared)
        parts += [f"Request{f': {names[shared]}, and' if is_child else ''}", ""]
        parts += [_fields(route.body, shared if is_child else None)]
    if route.body is TokensBody:
        return "\n".join([*parts, "Answer: as `/v1/chat/completions`.", ""])
    rows = [f"| `{name}` | {meaning} |" for name, meaning in route.fields.items()]
    return "\n".join([*parts, "Answer", "", "| field | holds |", "|---|---|", *rows, ""])


def _fields(body: type[BaseModel], without: type[BaseModel] | None) -> str:
    known = without.model_fields if without is not None else {}
    rows = [_row(body, name, value) for name, value in body.model_fields.items() if name not in known]
    return "\n".join(["| argument | type | default | bounds | meaning |", "|---|---|---|---|---|", *rows, ""])


def _row(body: type[BaseModel], name: str, argument: FieldInfo) -> str:
    kind, default = type_text(argument.annotation), default_text(argument)
    bounds = bounds_text(argument)
    for number, power in _POWERS.items():
        bounds = bounds.replace(number, power)
    cells = (f"`{name}`", f"`{kind}`", f"`{default}`", bounds, field_doc(body, name))
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


if __name__ == "__main__":
    sys.stdout.write(page())
