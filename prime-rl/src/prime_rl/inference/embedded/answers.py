"""Response bodies in vLLM's shapes, with the policy version of every token."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from dataclasses import asdict
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from prime_rl.inference.embedded.generation import Completion, Generation, GenerationRequest, TopLogprobs
from prime_rl.inference.protocol import ChatBody, CompletionBody, SamplingBody

if TYPE_CHECKING:
    from prime_rl.inference.embedded.text import Text

_LOWEST_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON lacks."""

Answered = Sequence[tuple[GenerationRequest, Generation]]


def chat_answer(model: str, body: ChatBody, text: Text, answered: Answered) -> dict[str, Any]:
    """`chat.completion`: ids of the prompt on the top level, those of the completion in each choice."""
    request, generation = answered[0]
    choices = [
        _choice(completion, index)
        | {
            "message": {"role": "assistant", "content": _completion_text(body, text, completion)},
            "logprobs": _chat_logprobs(body, text, completion),
        }
        for index, completion in enumerate(generation.completions)
    ]
    return _envelope("chatcmpl", "chat.completion", model, answered) | {
        "choices": choices,
        "prompt_token_ids": list(request.prompt),
        "prompt_logprobs": _prompt_logprobs(text, generation),
    }


def completion_answer(model: str, body: CompletionBody, text: Text, answered: Answered) -> dict[str, Any]:
    """`text_completion`: every choice has the ids of its prompt and of its completion."""
    choices: list[dict[str, Any]] = []
    for request, generation in answered:
        for completion in generation.completions:
            choices.append(
                _choice(completion, len(choices))
                | {
                    "text": _completion_text(body, text, completion),
                    "logprobs": _completion_logprobs(body, text, completion),
                    "prompt_token_ids": list(request.prompt),
                    "prompt_logprobs": _prompt_logprobs(text, generation),
                }
            )
    return _envelope("cmpl", "text_completion", model, answered) | {"choices": choices}


def _envelope(prefix: str, kind: str, model: str, answered: Answered) -> dict[str, Any]:
    num_prompt = sum(len(request.prompt) for request, _ in answered)
    num_completion = sum(len(c.token_ids) for _, generation in answered for c in generation.completions)
    return {
        "id": f"{prefix}-{uuid.uuid4().hex}",
        "object": kind,
        "created": int(time.time()),
        "model": model,
        "usage": {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_completion,
            "total_tokens": num_prompt + num_completion,
        },
    }


def _choice(completion: Completion, index: int) -> dict[str, Any]:
    return {
        "index": index,
        "finish_reason": completion.finish_reason,
        "stop_reason": completion.stop_reason,
        "token_ids": completion.token_ids,
        "weight_versions": [asdict(span) for span in completion.versions],
    }


def _completion_text(body: SamplingBody, text: Text, completion: Completion) -> str:
    """The text, without the stop token or string that ended it unless the request wants it."""
    token_ids, reason = completion.token_ids, completion.stop_reason
    if completion.finish_reason == "length" or (body.include_stop_str_in_output and not isinstance(reason, str)):
        return text.decode(token_ids, body.skip_special_tokens)
    before = text.decode(token_ids[:-1], body.skip_special_tokens)
    if not isinstance(reason, str):
        return before
    answer = text.decode(token_ids, body.skip_special_tokens)
    start = answer.find(reason, max(0, len(before) - len(reason) + 1))
    return answer[: start + len(reason)] if body.include_stop_str_in_output else answer[:start]


def _token_name(body: SamplingBody, text: Text, token_id: int) -> str:
    return f"token_id:{token_id}" if body.return_tokens_as_token_ids else text.token_text(token_id)


def _finite(logprob: float) -> float:
    return max(logprob, _LOWEST_LOGPROB)


def _chat_logprobs(body: ChatBody, text: Text, completion: Completion) -> dict[str, Any] | None:
    if not body.logprobs:
        return None
    tops: Sequence[TopLogprobs] = completion.top_logprobs or [[] for _ in completion.token_ids]

    def entry(token_id: int, logprob: float) -> dict[str, Any]:
        name = _token_name(body, text, token_id)
        return {"token": name, "logprob": _finite(logprob), "bytes": list(name.encode())}

    rows = zip(completion.token_ids, completion.logprobs, tops, strict=True)
    return {
        "content": [
            entry(token_id, logprob) | {"top_logprobs": [entry(*pair) for pair in top]}
            for token_id, logprob, top in rows
        ]
    }


def _completion_logprobs(body: CompletionBody, text: Text, completion: Completion) -> dict[str, Any] | None:
    if body.logprobs is None:
        return None
    names = [_token_name(body, text, token_id) for token_id in completion.token_ids]
    lengths = [len(text.token_text(token_id)) for token_id in completion.token_ids]
    tops: Sequence[TopLogprobs] = completion.top_logprobs or [[] for _ in names]
    return {
        "text_offset": list(accumulate(lengths[:-1], initial=0)),
        "token_logprobs": [_finite(logprob) for logprob in completion.logprobs],
        "tokens": names,
        "top_logprobs": [
            {_token_name(body, text, token): _finite(logprob) for token, logprob in [*top, own]}
            for top, own in zip(tops, zip(completion.token_ids, completion.logprobs, strict=True), strict=True)
        ],
    }


def _prompt_logprobs(text: Text, generation: Generation) -> list[dict[str, Any] | None] | None:
    """One object a prompt token, null for the first: `{token id: {logprob, rank, decoded_token}}`."""
    if generation.prompt_logprobs is None:
        return None
    rows: list[dict[str, Any] | None] = [None]
    for token in generation.prompt_logprobs:
        ranked = [(top_id, logprob, rank) for rank, (top_id, logprob) in enumerate(token.top, start=1)]
        rows.append(
            {
                str(token_id): {"logprob": _finite(logprob), "rank": rank, "decoded_token": text.token_text(token_id)}
                for token_id, logprob, rank in [*ranked, (token.token_id, token.logprob, token.rank)]
            }
        )
    return rows
