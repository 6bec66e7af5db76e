"""Builds response bodies in vLLM's format, extended by the weight version of every token."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from dataclasses import asdict, replace
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from prime_rl.inference.embedded.engine.generation import Completion, Generation, GenerationRequest, Tokens, TopLogprobs
from prime_rl.inference.protocol import ChatBody, CompletionBody, SamplingBody

if TYPE_CHECKING:
    from prime_rl.inference.embedded.engine.text import Text
    from prime_rl.inference.embedded.http.tool_calls import ToolParser

_LOWEST_LOGPROB = -9999.0
"""Replaces minus infinity, which JSON cannot represent."""

_REPLACEMENT = "\ufffd"
"""Stands for the bytes of a character of which some are missing."""

Answered = Sequence[tuple[GenerationRequest, Generation]]


def chat_response(
    model: str, body: ChatBody, text: Text, answered: Answered, parser: ToolParser | None
) -> dict[str, Any]:
    """A `chat.completion` body, with the prompt's token ids at the top level and the completion's in each choice."""
    request, generation = answered[0]
    choices = []
    for index, completion in enumerate(generation.completions):
        message = assistant_message(body, completion_text(body, text, completion), parser)
        content = {"message": message, "logprobs": chat_logprobs(body, text, completion)}
        choices.append(_choice(completion, index) | content | tool_finish_reason(message))
    return envelope("chatcmpl", "chat.completion", model) | {
        "usage": _usage_of(answered),
        "choices": choices,
        "prompt_token_ids": list(request.prompt),
        "prompt_logprobs": _prompt_logprobs(text, generation),
    }


def completion_response(model: str, body: CompletionBody, text: Text, answered: Answered) -> dict[str, Any]:
    """A `text_completion` body; every choice has the token ids of its prompt and of its completion."""
    choices: list[dict[str, Any]] = []
    if body.max_tokens == 0:
        answered = [(request, _without_completions(generation)) for request, generation in answered]
    for prompt, (request, generation) in zip(body.prompts, answered, strict=True):
        asked = None if body.prompt_logprobs is None else _prompt_logprobs(text, generation)
        for completion in generation.completions:
            content = {
                "text": completion_text(body, text, completion),
                "logprobs": completion_logprobs(body, text, completion),
            }
            if body.echo:
                echoed = prompt if isinstance(prompt, str) else text.decode(prompt, skip_special_tokens=False)
                logprobs = _echoed_logprobs(body, text, (request, generation), completion)
                content = {"text": f"{echoed}{content['text']}", "logprobs": logprobs}
            ids = {"prompt_token_ids": list(request.prompt), "prompt_logprobs": asked}
            choices.append(_choice(completion, len(choices)) | content | ids)
    return envelope("cmpl", "text_completion", model) | {"usage": _usage_of(answered), "choices": choices}


def _without_completions(generation: Generation) -> Generation:
    """A generation whose completions have no tokens."""
    empty = Completion([], [], [], finish_reason="length", stop_reason=None, versions=[])
    return replace(generation, completions=[empty for _ in generation.completions])


def _echoed_logprobs(
    body: CompletionBody, text: Text, answered: tuple[GenerationRequest, Generation], completion: Completion
) -> dict[str, Any] | None:
    """`completion_logprobs` of prompt and completion. A prompt's first token has none, so its entries are null."""
    request, generation = answered
    if body.logprobs is None or generation.prompt_logprobs is None:
        return None
    scored = generation.prompt_logprobs
    others = Tokens(
        [token.token_id for token in scored],
        [token.logprob for token in scored],
        [token.top[: body.logprobs] for token in scored],
    )
    first: dict[str, list[Any]] = {
        "text_offset": [0],
        "token_logprobs": [None],
        "tokens": [_token_name(body, text, request.prompt[0])],
        "top_logprobs": [None],
    }
    offset = len(text.token_text(request.prompt[0]))
    of_prompt = completion_logprobs(body, text, others, offset) or {}
    offset += sum(len(text.token_text(token_id)) for token_id in others.token_ids)
    of_completion = completion_logprobs(body, text, completion, offset) or {}
    return {key: [*start, *of_prompt[key], *of_completion[key]] for key, start in first.items()}


def envelope(prefix: str, kind: str, model: str) -> dict[str, Any]:
    """The fields common to every response and every stream chunk."""
    return {"id": f"{prefix}-{uuid.uuid4().hex}", "object": kind, "created": int(time.time()), "model": model}


def usage(num_prompt: int, num_completion: int) -> dict[str, int]:
    """OpenAI's `usage` object: token counts."""
    total = num_prompt + num_completion
    return {"prompt_tokens": num_prompt, "completion_tokens": num_completion, "total_tokens": total}


def assistant_message(body: ChatBody, content: str, parser: ToolParser | None) -> dict[str, Any]:
    """The assistant message. With a parser, tool calls are moved from the text into `tool_calls`."""
    message: dict[str, Any] = {"role": "assistant", "content": content}
    if parser is None:
        return message
    parsed = parser.parse(content)
    calls = parsed.calls[:1] if body.parallel_tool_calls is False else parsed.calls
    message["content"] = parsed.content
    if calls:
        message["tool_calls"] = [
            {
                "id": f"chatcmpl-tool-{uuid.uuid4().hex}",
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for call in calls
        ]
    return message


def tool_finish_reason(message: dict[str, Any]) -> dict[str, str]:
    """Override for the finish reason if the message has tool calls, else empty."""
    return {"finish_reason": "tool_calls"} if "tool_calls" in message else {}


def _usage_of(answered: Answered) -> dict[str, int]:
    num_completion = sum(len(c.token_ids) for _, generation in answered for c in generation.completions)
    return usage(sum(len(request.prompt) for request, _ in answered), num_completion)


def _choice(completion: Completion, index: int) -> dict[str, Any]:
    return {
        "index": index,
        "finish_reason": completion.finish_reason,
        "stop_reason": completion.stop_reason,
        "token_ids": completion.token_ids,
        "weight_versions": [asdict(span) for span in completion.versions],
    }


def completion_text(body: SamplingBody, text: Text, completion: Completion) -> str:
    """The completion's text. The stop token or string that ended it is cut off unless the request includes it."""
    token_ids, reason = completion.token_ids, completion.stop_reason
    if completion.finish_reason == "length" or (body.include_stop_str_in_output and not isinstance(reason, str)):
        return text.decode(token_ids, body.skip_special_tokens)
    before = text.decode(token_ids[:-1], body.skip_special_tokens)
    if not isinstance(reason, str):
        return before
    answer = text.decode(token_ids, body.skip_special_tokens)
    # The last token may complete a character.
    start = answer.find(reason, max(0, len(before.rstrip(_REPLACEMENT)) - len(reason) + 1))
    return answer[: start + len(reason)] if body.include_stop_str_in_output else answer[:start]


def _token_name(body: SamplingBody, text: Text, token_id: int) -> str:
    return f"token_id:{token_id}" if body.return_tokens_as_token_ids else text.token_text(token_id)


def _finite(logprob: float) -> float:
    return max(logprob, _LOWEST_LOGPROB)


def chat_logprobs(body: ChatBody, text: Text, drawn: Tokens) -> dict[str, Any] | None:
    """OpenAI's chat `logprobs`, one entry per token; None unless requested."""
    if not body.logprobs:
        return None
    tops: Sequence[TopLogprobs] = drawn.top_logprobs or [[] for _ in drawn.token_ids]

    def entry(token_id: int, logprob: float) -> dict[str, Any]:
        name = _token_name(body, text, token_id)
        return {"token": name, "logprob": _finite(logprob), "bytes": list(name.encode())}

    rows = zip(drawn.token_ids, drawn.logprobs, tops, strict=True)
    return {
        "content": [
            entry(token_id, logprob) | {"top_logprobs": [entry(*pair) for pair in top]}
            for token_id, logprob, top in rows
        ]
    }


def completion_logprobs(
    body: CompletionBody, text: Text, drawn: Tokens, first_offset: int = 0
) -> dict[str, Any] | None:
    """OpenAI's completion `logprobs` as parallel lists; None unless requested.

    `first_offset` is the character offset of the text of `drawn`.
    """
    if body.logprobs is None:
        return None
    names = [_token_name(body, text, token_id) for token_id in drawn.token_ids]
    lengths = [len(text.token_text(token_id)) for token_id in drawn.token_ids]
    tops: Sequence[TopLogprobs] = drawn.top_logprobs or [[] for _ in names]
    return {
        "text_offset": list(accumulate(lengths, initial=first_offset))[: len(lengths)],
        "token_logprobs": [_finite(logprob) for logprob in drawn.logprobs],
        "tokens": names,
        "top_logprobs": [
            {_token_name(body, text, token): _finite(logprob) for token, logprob in [*top, own]}
            for top, own in zip(tops, zip(drawn.token_ids, drawn.logprobs, strict=True), strict=True)
        ],
    }


def _prompt_logprobs(text: Text, generation: Generation) -> list[dict[str, Any] | None] | None:
    """One object `{token id: {logprob, rank, decoded_token}}` per prompt token, null for the first."""
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
