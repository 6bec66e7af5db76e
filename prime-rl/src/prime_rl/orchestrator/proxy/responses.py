"""The responses API, as far as agent SDKs use it, on top of chat completions.

Messages, function calls and their outputs are translated in both directions, so that a conversation which an agent
sends back begins with the messages that were recorded.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping
from typing import Any

from prime_rl.orchestrator.proxy.completions import Refused, complete, typed
from prime_rl.orchestrator.proxy.recording import Session
from prime_rl.utils.http_server import entries_fault

_AS_THEY_ARE = ("parallel_tool_calls", "chat_template_kwargs")
_ECHOED = ("instructions", "metadata", "parallel_tool_calls", "previous_response_id", "temperature", "text", "top_p")
_IGNORED_ITEMS = frozenset({"reasoning", "item_reference"})
"""Items that stand for nothing that a chat message could hold."""
_TEXTS = frozenset({"input_text", "output_text", "text", "refusal"})


async def respond(session: Session, body: Mapping[str, Any]) -> dict[str, Any]:
    """The response that a request's body asks for, recorded in its session as a chat completion.

    Raises:
        Refused: the body asks for something that chat completions cannot give.
    """
    messages = [*_earlier(session, body), *_messages(body.get("input"))]
    system = typed(body, "instructions", str)
    shown = [{"role": "system", "content": system}, *messages] if system else messages
    completion = await complete(session, _chat_body(body, shown))
    response = _response(body, completion)
    answer = {"role": "assistant", **completion["choices"][0]["message"]}
    # Instructions belong to one request: the next one brings its own.
    session.dialogues[response["id"]] = [*messages, answer]
    return response


def _earlier(session: Session, body: Mapping[str, Any]) -> list[dict[str, Any]]:
    if body.get("conversation") is not None:
        raise Refused(400, "conversation: not kept here; send the items, or previous_response_id")
    name = typed(body, "previous_response_id", str)
    if name is None:
        return []
    if name not in session.dialogues:
        raise Refused(404, f"previous_response_id: this session has no response {name[:80]!r}")
    return session.dialogues[name]


def _chat_body(body: Mapping[str, Any], messages: list[dict[str, Any]]) -> dict[str, Any]:
    chat: dict[str, Any] = {"messages": messages, **{name: body.get(name) for name in _AS_THEY_ARE}}
    chat["max_completion_tokens"] = typed(body, "max_output_tokens", int)
    if tools := typed(body, "tools", list):
        chat["tools"] = [_tool(tool) for tool in tools]
    choice = body.get("tool_choice")
    if isinstance(choice, Mapping) and "name" in choice:
        choice = {"type": "function", "function": {"name": choice["name"]}}
    chat["tool_choice"] = choice
    form = (typed(body, "text", dict) or {}).get("format")
    if isinstance(form, Mapping) and form.get("type") == "json_schema":
        schema = {name: value for name, value in form.items() if name != "type"}
        form = {"type": "json_schema", "json_schema": schema}
    chat["response_format"] = form
    return chat


def _tool(tool: Any) -> dict[str, Any]:
    if not isinstance(tool, Mapping) or tool.get("type") != "function":
        kind = tool.get("type") if isinstance(tool, Mapping) else tool
        raise Refused(400, f"tools: only functions, not {str(kind)[:80]!r}, which runs at OpenAI")
    # `strict` would hide tokens from sampling; null and false values say nothing.
    given = {name: tool.get(name) for name in ("name", "description", "parameters")}
    return {"type": "function", "function": {name: value for name, value in given.items() if value is not None}}


def _messages(given: Any) -> list[dict[str, Any]]:
    """The chat messages of a text or of input items. The calls of one answer become one message."""
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    messages: list[dict[str, Any]] = []
    if not isinstance(given, list):
        raise Refused(400, "input: a list of items, or a text")
    if (fault := entries_fault(given, "input")) is not None:
        raise Refused(400, fault)
    for number, item in enumerate(given):
        where = f"input[{number}]"
        if not isinstance(item, dict):
            raise Refused(400, f"{where}: an item, which is an object")
        kind = typed(item, "type", str, f"{where}.") or "message"
        if kind == "message":
            messages.append({"role": _text(item, "role", where), "content": _content(item.get("content"))})
        elif kind == "function_call":
            _add_call(messages, item, where)
        elif kind == "function_call_output":
            output = _content(item.get("output"))
            messages.append({"role": "tool", "tool_call_id": _text(item, "call_id", where), "content": output})
        elif kind not in _IGNORED_ITEMS:
            raise Refused(400, f"{where}: items of type {kind[:80]!r} are not supported")
    return messages


def _text(item: Mapping[str, Any], name: str, where: str) -> str:
    text = typed(item, name, str, f"{where}.")
    if text is None:
        raise Refused(400, f"{where}.{name}: missing")
    return text


def _add_call(messages: list[dict[str, Any]], item: Mapping[str, Any], where: str) -> None:
    function = {name: _text(item, name, where) for name in ("name", "arguments")}
    call = {"id": _text(item, "call_id", where), "type": "function", "function": function}
    if messages and messages[-1]["role"] == "assistant":
        messages[-1].setdefault("tool_calls", []).append(call)
    else:
        messages.append({"role": "assistant", "content": None, "tool_calls": [call]})


def _content(content: Any) -> Any:
    """Parts of text as one text; other parts, such as images, as they are."""
    if not isinstance(content, list):
        return content
    texts = [
        part.get("text", part.get("refusal")) if isinstance(part, dict) and str(part.get("type")) in _TEXTS else None
        for part in content
    ]
    known = [text for text in texts if isinstance(text, str)]
    return "".join(known) if len(known) == len(texts) else content


def _response(body: Mapping[str, Any], completion: Mapping[str, Any]) -> dict[str, Any]:
    choice = completion["choices"][0]
    is_cut_off = choice.get("finish_reason") == "length"
    usage = completion.get("usage") or {}
    prompt, answer = int(usage.get("prompt_tokens") or 0), int(usage.get("completion_tokens") or 0)
    return {
        **{name: body.get(name) for name in _ECHOED},
        "id": completion["id"],
        "object": "response",
        "created_at": completion.get("created") or 0,
        "model": completion.get("model"),
        "status": "incomplete" if is_cut_off else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if is_cut_off else None,
        "error": None,
        "output": list(_items(choice["message"])),
        "parallel_tool_calls": body.get("parallel_tool_calls", True),
        "tool_choice": body.get("tool_choice") or "auto",
        "tools": body.get("tools") or [],
        "usage": {
            "input_tokens": prompt,
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": answer,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": prompt + answer,
        },
    }


def _items(message: Mapping[str, Any]) -> Iterable[dict[str, Any]]:
    reasoning = message.get("reasoning_content") or message.get("reasoning")
    if isinstance(reasoning, str) and reasoning:
        content = [{"type": "reasoning_text", "text": reasoning}]
        yield {"id": _new_id("rs"), "type": "reasoning", "summary": [], "content": content}
    calls = message.get("tool_calls") or ()
    if message.get("content") or not calls:
        text: dict[str, Any] = {
            "type": "output_text",
            "text": message.get("content") or "",
            "annotations": [],
            "logprobs": [],
        }
        named = {"id": _new_id("msg"), "type": "message", "role": "assistant"}
        yield {**named, "status": "completed", "content": [text]}
    for call in calls:
        function = {"name": call["function"]["name"], "arguments": call["function"]["arguments"]}
        named = {"id": _new_id("fc"), "type": "function_call", "call_id": call["id"]}
        yield {**named, "status": "completed", **function}


def _new_id(kind: str) -> str:
    return f"{kind}_{secrets.token_hex(12)}"
