"""Answers to prompts of tokens, for workflows that render and tokenize by themselves."""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping
from typing import Any

from prime_rl.orchestrator.errors import MalformedRollout
from prime_rl.orchestrator.proxy.completions import Refused, counted
from prime_rl.orchestrator.proxy.recording import Session
from prime_rl.orchestrator.rollouts.replies import VersionSpan
from prime_rl.orchestrator.rollouts.trace import CallDetails, ModelCall, Prompt

MAX_STOPS = 64


async def generate(session: Session, body: Mapping[str, Any]) -> dict[str, Any]:
    """Sample one answer to `input_ids`, and record it.

    Raises:
        Refused: the body asks for something else.
    """
    sent = counted(session, _request(session, body))
    answer = await session.server.channel.exchange("/completions", sent)
    try:
        (choice,) = json.loads(answer.body)["choices"]
        spans = [VersionSpan(**span) for span in choice.get("weight_versions") or ()]
        ids, logprobs = choice["token_ids"], choice["logprobs"]["token_logprobs"]
        reason = choice["finish_reason"]
        details = CallDetails(tuple(spans), reason, answer.started_s, answer.ended_s)
        count = len(ids)
        prompt = sent["prompt"]
        tokens = ModelCall(Prompt.of(prompt), ids, logprobs, [True] * count, details)
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
    limits = [session.sampling.get("max_completion_tokens"), body.get("max_new_tokens")]
    known = [limit for limit in limits if type(limit) is int]
    sent = {name: value for name, value in session.sampling.items() if name != "max_completion_tokens"}
    for name, kind in (("stop", str), ("stop_token_ids", int)):
        if given := body.get(name):
            if not isinstance(given, list) or len(given) > MAX_STOPS or not all(type(each) is kind for each in given):
                raise Refused(400, f"{name}: a list of at most {MAX_STOPS}")
            sent[name] = given
    sent |= {"max_tokens": min(known)} if known else {}
    return sent | {"model": session.model, "prompt": prompt, "logprobs": 1, "return_token_ids": True}
