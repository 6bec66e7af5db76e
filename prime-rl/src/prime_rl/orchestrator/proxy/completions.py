"""Answers of a session: what of a request reaches the engine, and what of the answer reaches the agent.

A request is a conversation, or a prompt of tokens of a workflow that renders and tokenizes by itself.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from prime_rl.orchestrator.errors import MalformedRollout
from prime_rl.orchestrator.proxy.continuation import canonical, continued_prompt
from prime_rl.orchestrator.proxy.recording import MAX_CALLS, Session
from prime_rl.orchestrator.rollouts.replies import ChatReply, Reported, VersionSpan
from prime_rl.orchestrator.rollouts.sampling import seeded_for_call
from prime_rl.orchestrator.rollouts.trace import (
    CallDetails,
    ModelCall,
    Prompt,
    likeliest_of,
    routed_experts_of,
    sampled_logprob,
)
from prime_rl.orchestrator.servers.channel import Answer, ServerAnswered
from prime_rl.transport.messages import ImageReference
from prime_rl.utils.conversations import NO_IMAGES, has_image
from prime_rl.utils.http_server import entries_fault
from prime_rl.utils.images import ImageFault, image_parts, is_data_url, located_url, with_urls

FORWARDED = (
    "messages", "tools", "tool_choice", "parallel_tool_calls", "response_format", "stop", "n",
    "max_tokens", "max_completion_tokens", "chat_template_kwargs",
)  # fmt: skip
"""Arguments of the agent that reach the engine. The session sets how tokens are sampled."""
RENDERED = ("tools", "chat_template_kwargs")
"""Those that the chat template writes into a prompt, apart from the messages."""
MAX_STOPS = 64


class Refused(Exception):
    """The proxy does not forward a request."""

    def __init__(self, status: int, message: str, code: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.code = code


async def complete(session: Session, body: Mapping[str, Any]) -> dict[str, Any]:
    """The chat completion that a request's body asks for, recorded in its session.

    Raises:
        Refused: the body is not a chat request, or the session has asked too often.
    """
    messages = _messages(body)
    for name in ("n", "max_tokens", "max_completion_tokens"):
        typed(body, name, int)
    asked = {name: body[name] for name in FORWARDED if body.get(name) is not None}
    _refuse_untrainable(asked, session)
    count = asked["n"] if isinstance(asked.get("n"), int) and asked["n"] > 0 else 1
    sent = counted(session, {**asked, **session.sampling, **_limits(asked, session.sampling)}, count)
    sent |= {"model": session.model, "logprobs": True, "return_token_ids": True}
    sent.pop("max_tokens", None)
    answer, reply = await exchange(session, sent)
    session.record(messages, rendering(sent), reply, reply.id)
    return _shown(msgspec.json.decode(answer.body), bool(body.get("logprobs"))) | {"id": reply.id}


async def exchange(session: Session, sent: dict[str, Any], continues: bool = True) -> tuple[Answer, ChatReply]:
    """Send a chat request to the session's server: as tokens, if its messages continue a recorded conversation.

    Without `continues` it is sent as text in any case. The caller records the reply, whose id is one that no other
    reply has.
    """
    sent, shown = await _with_images(session, sent)
    prompt_ids = await _continued(session, sent) if continues and session.calls else None
    path = "/chat/completions" if prompt_ids is None else "/chat/completions/tokens"
    answer = await session.server.channel.exchange(path, sent if prompt_ids is None else {**sent, "tokens": prompt_ids})
    reply = session.server.channel.completion_of(path, answer, prompt_ids)
    # Rewards need ids that are unique, whatever an engine does after a restart.
    reply.id = f"chatcmpl-{secrets.token_hex(12)}"
    reply.shown_images = shown
    reply.reported = Reported.of_request(sent)
    reply.rendering = msgspec.to_builtins(rendering(sent), enc_hook=_plain)
    return answer, reply


async def _with_images(session: Session, sent: dict[str, Any]) -> tuple[dict[str, Any], tuple[ImageReference, ...]]:
    """A request with its images as data URLs, which servers read, and where the trainer finds them.

    Raises:
        Refused: an image cannot be used, or there are too many.
    """
    images = session.server.images
    if images is None or not (parts := image_parts(sent["messages"])):
        return sent, ()
    for part in parts:
        if session.files is not None and not is_data_url(part.source) and part.source not in session.files:
            where = f"messages: message {part.message}"
            raise Refused(400, f"{where} names an image that its row does not have: send it as a data URL")
    try:
        shown = await images.of(sent["messages"])
    except ImageFault as fault:
        raise Refused(400, str(fault)) from fault
    references = (
        ImageReference(each.digest, located_url(part.source, Path()), each.height, each.width)
        for each, part in zip(shown, parts, strict=True)
    )
    return {**sent, "messages": with_urls(sent["messages"], [each.url for each in shown])}, tuple(references)


def _plain(value: Any) -> Any:
    """A tool's schema that an environment holds as a Pydantic object."""
    dump = getattr(value, "model_dump", None)
    return str(value) if dump is None else dump(mode="json", exclude_none=True)


def rendering(sent: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a request that its prompt depends on, apart from the messages."""
    return {name: sent[name] for name in RENDERED if sent.get(name)}


async def _continued(session: Session, sent: Mapping[str, Any]) -> list[int] | None:
    if has_image(sent["messages"]):
        return None  # `/tokenize` does not expand an image to its tokens: the server renders the whole conversation
    shown = rendering(sent)

    async def tokenize(messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool) -> list[int]:
        body = {"model": session.server.base_model, "messages": list(messages), **shown}
        return await session.server.channel.tokenize({**body, "add_generation_prompt": add_generation_prompt})

    try:
        return await continued_prompt(session.calls, sent["messages"], shown, tokenize, session.ends)
    except ServerAnswered as error:
        if error.status >= 500:
            raise
        return None  # a template that refuses a conversation without its beginning


def counted(session: Session, body: Mapping[str, Any], count: int = 1) -> dict[str, Any]:
    """The body of a request for the next `count` answers of a session. Raises Refused if it has asked too often."""
    if session.num_asked + count > MAX_CALLS:
        raise Refused(429, f"the session asks the model for more than {MAX_CALLS} answers")
    session.num_asked += count
    return seeded_for_call(body, session.num_asked - count)


_NAMES: Mapping[type, str] = {str: "a text", int: "a whole number", list: "a list", dict: "an object"}
Typed = TypeVar("Typed", str, int, list[Any], dict[str, Any])


def typed(body: Mapping[str, Any], name: str, kind: type[Typed], where: str = "") -> Typed | None:
    """The value of a field, None if it is absent or null. Raises Refused if it has another type."""
    value = body.get(name)
    # JSON's true and false are no numbers.
    if value is None or (isinstance(value, kind) and not isinstance(value, bool)):
        return value
    raise Refused(400, f"{where}{name}: {_NAMES[kind]}")


def _messages(body: Mapping[str, Any]) -> list[dict[str, Any]]:
    messages = body.get("messages")
    if isinstance(messages, list) and (fault := entries_fault(messages, "messages")) is not None:
        raise Refused(400, fault)
    if not isinstance(messages, list) or not messages or not all(isinstance(each, dict) for each in messages):
        raise Refused(400, "messages: a list of messages, and at least one")
    try:
        for message in messages:
            canonical(message)
    except (AttributeError, TypeError) as error:
        raise Refused(400, "messages: tool_calls must be a list of calls with a function") from error
    return messages


def _refuse_untrainable(asked: Mapping[str, Any], session: Session) -> None:
    """Refuse images, unless the trainer sees them too, and what lets only some tokens be sampled: it computes
    log-probabilities over all of them."""
    if not session.sampling.get("return_token_ids"):
        return  # an evaluation
    if session.server.images is None and (images := image_parts(asked["messages"])):
        raise Refused(400, f"messages: message {images[0].message} has an image: {NO_IMAGES}")
    if asked.get("response_format", {"type": "text"}) != {"type": "text"}:
        raise Refused(
            400, "response_format: not in training, where every token can be sampled; check the answer's form"
        )
    if asked.get("tool_choice", "auto") not in ("auto", "none"):
        raise Refused(400, "tool_choice: auto or none in training, where every token can be sampled")


def _limits(asked: Mapping[str, Any], sampling: Mapping[str, Any]) -> dict[str, int]:
    """The smaller limit of tokens, if agent and session both set one."""
    limits = [sampling.get("max_completion_tokens"), asked.get("max_completion_tokens"), asked.get("max_tokens")]
    known = [limit for limit in limits if isinstance(limit, int)]
    return {"max_completion_tokens": min(known)} if known else {}


def _shown(completion: dict[str, Any], with_logprobs: bool) -> dict[str, Any]:
    """The completion without what only training needs."""
    completion.pop("prompt_token_ids", None)
    for choice in completion["choices"]:
        for name in ("token_ids", "weight_versions", "routed_experts"):
            choice.pop(name, None)
        if not with_logprobs:
            choice["logprobs"] = None
    return completion


async def generate(session: Session, body: Mapping[str, Any]) -> dict[str, Any]:
    """Sample one answer to `input_ids`, and record it.

    Raises:
        Refused: the body asks for something else.
    """
    reported = Reported.of_request(session.sampling)
    sent = counted(session, _request(session, body))
    answer = await session.server.channel.exchange("/completions", sent)
    try:
        (choice,) = json.loads(answer.body)["choices"]
        spans = [VersionSpan(**span) for span in choice.get("weight_versions") or ()]
        ids, logprobs = choice["token_ids"], [sampled_logprob(each) for each in choice["logprobs"]["token_logprobs"]]
        reason = choice["finish_reason"]
        details = CallDetails(tuple(spans), reason, answer.started_s, answer.ended_s)
        count = len(ids)
        prompt = sent["prompt"]
        routes = routed_experts_of(choice.get("routed_experts"), len(prompt) + count)
        top = likeliest_of(reported, ids, logprobs, choice["logprobs"].get("top_logprobs") or ())
        tokens = ModelCall(Prompt.of(prompt), ids, logprobs, [True] * count, details, routes, top=top)
    except (KeyError, TypeError, ValueError) as error:
        raise MalformedRollout("a server answered without token ids or log-probabilities") from error
    # A rendering that no chat request has: no conversation continues these tokens.
    session.keep((), {"tokens": True}, tokens, f"gen-{secrets.token_hex(12)}")
    session.is_cut_off |= reason == "length"
    versions = [-1] * count
    for span in spans:
        versions[span.start : span.end] = [span.version] * (span.end - span.start)
    return {
        "id": session.calls[-1].completion_id,
        "output_tokens": ids,
        "output_logprobs": logprobs,
        "output_versions": versions,
        "stop_reason": reason,
    }


def _request(session: Session, body: Mapping[str, Any]) -> dict[str, Any]:
    prompt = body.get("input_ids")
    if not isinstance(prompt, list) or not prompt or not all(type(token) is int and token >= 0 for token in prompt):
        raise Refused(400, "input_ids: a list of token ids, and at least one")
    limits = [session.sampling.get("max_completion_tokens"), typed(body, "max_new_tokens", int)]
    known = [limit for limit in limits if type(limit) is int]
    chat_only = ("max_completion_tokens", "top_logprobs")
    sent = {name: value for name, value in session.sampling.items() if name not in chat_only}
    for name, kind in (("stop", str), ("stop_token_ids", int)):
        if given := body.get(name):
            if not isinstance(given, list) or len(given) > MAX_STOPS or not all(type(each) is kind for each in given):
                raise Refused(400, f"{name}: a list of at most {MAX_STOPS}")
            sent[name] = given
    sent |= {"max_tokens": min(known)} if known else {}
    asked = session.sampling.get("top_logprobs", 1)
    return sent | {"model": session.model, "prompt": prompt, "logprobs": asked, "return_token_ids": True}
