"""Finished answers as server-sent events.

An engine's answer is recorded as a whole, so a stream has all of it in one delta.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from aiohttp import web

_CHUNK = "chat.completion.chunk"


def chat_chunks(body: Mapping[str, Any], completion: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The chunks of a chat completion: one with all of each choice, one with its end, and the usage if asked for."""
    head = {name: completion.get(name) for name in ("id", "created", "model")} | {"object": _CHUNK}
    for choice in completion["choices"]:
        said = choice["message"]
        calls = [{"index": at, **call} for at, call in enumerate(said.get("tool_calls") or ())]
        # Reasoning too, which has another name in each version of an engine.
        delta = {name: value for name, value in said.items() if value is not None} | (
            {"tool_calls": calls} if calls else {}
        )
        for part, reason in ((delta, None), ({}, choice.get("finish_reason"))):
            shown = {"index": choice.get("index", 0), "delta": part, "finish_reason": reason}
            yield head | {"choices": [shown | {"logprobs": choice.get("logprobs") if part else None}]}
    options = body.get("stream_options")
    if isinstance(options, dict) and options.get("include_usage"):
        yield head | {"choices": [], "usage": completion.get("usage")}


def response_events(response: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The events of a response of the responses API, as its clients expect them."""
    started = {**response, "status": "in_progress", "output": [], "usage": None, "incomplete_details": None}
    events: list[dict[str, Any]] = [
        {"type": "response.created", "response": started},
        {"type": "response.in_progress", "response": started},
    ]
    for index, item in enumerate(response["output"]):
        place = {"output_index": index}
        kind = item["type"]
        empties: dict[str, dict[str, Any]] = {"message": {"content": []}, "function_call": {"arguments": ""}}
        empty = empties.get(kind, {})
        events.append(
            {"type": "response.output_item.added", **place, "item": {**item, "status": "in_progress"} | empty}
        )
        inside = {"item_id": item["id"], **place}
        if kind == "message":
            for at, part in enumerate(item["content"]):
                events += _text_events(inside | {"content_index": at}, part)
        elif kind == "function_call":
            name = "response.function_call_arguments"
            events.append({"type": f"{name}.delta", **inside, "delta": item["arguments"]})
            events.append({"type": f"{name}.done", **inside, "name": item["name"], "arguments": item["arguments"]})
        events.append({"type": "response.output_item.done", **place, "item": item})
    end = "response.completed" if response["status"] == "completed" else "response.incomplete"
    events.append({"type": end, "response": response})
    for number, event in enumerate(events):
        yield {**event, "sequence_number": number}


def _text_events(place: Mapping[str, Any], part: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    text = part["text"]
    yield {"type": "response.content_part.added", **place, "part": {**part, "text": ""}}
    yield {"type": "response.output_text.delta", **place, "delta": text, "logprobs": []}
    yield {"type": "response.output_text.done", **place, "text": text, "logprobs": []}
    yield {"type": "response.content_part.done", **place, "part": part}


async def streamed(
    request: web.Request, events: Iterable[Mapping[str, Any]], *, named: bool = False, done: bool = False
) -> web.StreamResponse:
    """Send events. `named` events have their type as a name too; `done` ends them as chat completions do."""
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
    await response.prepare(request)
    for event in events:
        name = f"event: {event['type']}\n" if named else ""
        await response.write(f"{name}data: {json.dumps(event)}\n\n".encode())
    if done:
        await response.write(b"data: [DONE]\n\n")
    await response.write_eof()
    return response
