"""Extends vLLM's chat and completion handlers with per-token weight versions and pre-tokenized prompts."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any, TypeVar

from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest, ChatCompletionResponse
from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
from vllm.entrypoints.openai.completion.protocol import CompletionResponse
from vllm.entrypoints.openai.completion.serving import OpenAIServingCompletion
from vllm.entrypoints.serve.engine.protocol import ErrorResponse
from vllm.outputs import CompletionOutput, RequestOutput

from prime_rl.inference.protocol import CONTEXT_LENGTH_MESSAGE, RequestError, check_token_ids
from prime_rl.inference.vllm.versions import UpdateCount, version_of

Handler = TypeVar("Handler")


class TokensChatRequest(ChatCompletionRequest):
    """A chat request whose prompt the client has tokenized already (`tokens`)."""

    tokens: list[int]


class ChatServing(OpenAIServingChat):
    """vLLM's chat handler with weight versions and pre-tokenized prompts."""

    update_count: UpdateCount

    async def render_chat_request(self, request: ChatCompletionRequest) -> Any:
        """Render the messages, which vLLM's parsers need, then replace the prompt ids by the request's tokens."""
        rendered = await super().render_chat_request(request)
        if isinstance(rendered, ErrorResponse):
            return rendered
        conversation, (prompt,) = rendered
        if isinstance(request, TokensChatRequest):
            prompt["prompt_token_ids"] = request.tokens
        check_context_length(len(prompt["prompt_token_ids"]), self.model_config.max_model_len)
        check_token_ids(prompt["prompt_token_ids"], self.model_config.get_vocab_size())
        self.update_count.salt(prompt)
        return conversation, [prompt]

    async def chat_completion_full_generator(
        self, request: ChatCompletionRequest, result_generator: AsyncIterator[RequestOutput], *rest: Any, **options: Any
    ) -> ErrorResponse | ChatCompletionResponse:
        last: list[RequestOutput] = []

        async def keep_last() -> AsyncIterator[RequestOutput]:
            async for output in result_generator:
                last[:] = [output]
                yield output

        response = await super().chat_completion_full_generator(request, keep_last(), *rest, **options)
        if isinstance(response, ChatCompletionResponse) and last:
            _add_versions(response, last[0].outputs)
        return response


class CompletionServing(OpenAIServingCompletion):
    """vLLM's completion handler with weight versions."""

    update_count: UpdateCount

    async def render_completion_request(self, request: Any) -> Any:
        rendered = await super().render_completion_request(request)
        for prompt in [] if isinstance(rendered, ErrorResponse) else rendered:
            check_context_length(len(prompt["prompt_token_ids"]), self.model_config.max_model_len)
            check_token_ids(prompt["prompt_token_ids"], self.model_config.get_vocab_size())
            self.update_count.salt(prompt)
        return rendered

    def request_output_to_completion_response(
        self, final_res_batch: list[RequestOutput], *rest: Any, **options: Any
    ) -> CompletionResponse:
        response = super().request_output_to_completion_response(final_res_batch, *rest, **options)
        _add_versions(response, [output for result in final_res_batch for output in result.outputs])
        return response


def as_subclass(kind: type[Handler], handler: Any, update_count: UpdateCount) -> Handler:
    """Create a `kind` with the state of vLLM's handler, to avoid repeating vLLM's many constructor arguments."""
    converted = kind.__new__(kind)
    converted.__dict__.update(handler.__dict__, update_count=update_count)
    return converted


def check_context_length(length: int, limit: int) -> None:
    """Raise RequestError if a prompt fills the context. Clients match on the wording of the message."""
    if length >= limit:
        raise RequestError(CONTEXT_LENGTH_MESSAGE.format(limit=limit, length=length))


def _add_versions(response: ChatCompletionResponse | CompletionResponse, outputs: Sequence[CompletionOutput]) -> None:
    """Add `weight_versions` to every choice: spans with the version number of the response's model.

    vLLM itself reports versions as text labels, and only on its own routes.
    """
    for choice, output in zip(response.choices, outputs, strict=True):
        spans: list[dict[str, int]] = []
        for span in output.weight_versions or []:
            version = version_of(span.version, response.model)
            if spans and spans[-1]["version"] == version:
                spans[-1]["end"] = span.end
            else:
                spans.append({"version": version, "start": span.start, "end": span.end})
        choice.weight_versions = spans
