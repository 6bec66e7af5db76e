"""Request bodies and error responses of the HTTP API that both engines serve.

The bodies are OpenAI's, with vLLM's extensions. Unsupported arguments are rejected, never ignored, so that training
samples are always drawn the way the request asked for.
"""

from __future__ import annotations

from http import HTTPStatus
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

MAX_TOP_LOGPROBS = 20
MAX_SAMPLES = 256
CONTEXT_LENGTH_MESSAGE = (
    "This model's maximum context length is {limit} tokens. Your prompt has {length} tokens, which leaves no room for "
    "an answer. Please shorten it."
)


class RequestError(Exception):
    """An error that becomes the HTTP response. `status` is the status code, `param` the argument at fault."""

    def __init__(self, message: str, status: int = HTTPStatus.BAD_REQUEST, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.param = param

    def body(self) -> dict[str, Any]:
        """Build OpenAI's error object. As in vLLM, `type` is derived from the status, such as `BadRequestError`."""
        name = HTTPStatus(self.status).phrase.replace(" ", "").removesuffix("Error") + "Error"
        return {"error": {"message": str(self), "type": name, "param": self.param, "code": int(self.status)}}


class Body(BaseModel):
    """Base of every request body: rejects unknown arguments and treats an explicit null as "not given"."""

    model_config = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, data: Any) -> Any:
        return {key: value for key, value in data.items() if value is not None} if isinstance(data, dict) else data


class StreamOptions(Body):
    """Token counts to include in a stream."""

    include_usage: bool = False
    """Send a final chunk with the total token counts and no choices."""
    continuous_usage_stats: bool = False
    """Also add the token counts of the sample to each of its chunks. Requires `include_usage`."""


class SamplingBody(Body):
    """Arguments shared by chat and text completions."""

    model: str | None = None
    temperature: Annotated[float, Field(ge=0)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = None
    """Number of most likely tokens to sample from. -1 and 0 disable the limit."""
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    seed: int | None = None
    n: Annotated[int, Field(ge=1, le=MAX_SAMPLES)] = 1
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    min_tokens: Annotated[int, Field(ge=0)] = 0
    stop: str | list[str] = []
    stop_token_ids: list[int] = []
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    logit_bias: dict[Annotated[int, Field(strict=False)], Annotated[float, Field(ge=-100, le=100)]] = {}
    """Values to add to the logits of these token ids, before all other processing."""
    skip_special_tokens: bool = True
    prompt_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    return_token_ids: bool = True
    """Accepted for compatibility: the embedded engine returns token ids in every response, even when this is false."""
    return_tokens_as_token_ids: bool = False
    stream: bool = False
    stream_options: StreamOptions | None = None
    # Accepted for compatibility; these do not affect the generated tokens.
    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    priority: int | None = None
    cache_salt: str | None = None
    request_id: str | None = None
    service_tier: str | None = None

    @model_validator(mode="after")
    def _check_stream_options(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise ValueError("`stream_options` requires `stream = true`")
        return self

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """The non-empty stop strings. OpenAI allows one string or a list."""
        given = [self.stop] if isinstance(self.stop, str) else self.stop
        return tuple(text for text in given if text)


class ChatBody(SamplingBody):
    """`POST /v1/chat/completions`."""

    messages: list[dict[str, Any]] = Field(min_length=1)
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] = 0
    tools: list[dict[str, Any]] | None = None
    tool_choice: Literal["auto", "none"] | None = None
    parallel_tool_calls: bool | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] = {}

    @model_validator(mode="after")
    def _check_messages(self) -> ChatBody:
        check_messages(self.messages)
        return self


class TokensBody(ChatBody):
    """`POST /v1/chat/completions/tokens`: a chat body whose prompt the client has tokenized already (`tokens`)."""

    tokens: list[Annotated[int, Field(ge=0)]] = Field(min_length=1)


class CompletionBody(SamplingBody):
    """`POST /v1/completions`. `prompt` is one text, one list of token ids, or a list of either."""

    prompt: str | list[str] | list[int] | list[list[int]]
    logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    add_special_tokens: bool = True
    echo: Literal[False] = False

    @property
    def prompts(self) -> list[str | list[int]]:
        if isinstance(self.prompt, str):
            return [self.prompt]
        ids = [part for part in self.prompt if isinstance(part, int)]
        return [ids] if ids else [part for part in self.prompt if not isinstance(part, int)]


class TokenizeBody(Body):
    """`POST /tokenize`: tokenize a text, or messages rendered with the chat template."""

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    """None means true for a text and false for messages, because chat templates write special tokens themselves."""
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    tools: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] = {}
    return_token_strs: bool = False

    @model_validator(mode="after")
    def _check_source(self) -> TokenizeBody:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("set either `prompt` or `messages`")
        if self.messages is not None:
            check_messages(self.messages)
        return self


class UpdateWeightsBody(BaseModel):
    """`POST /update_weights`. `weight_dir` is required; an explicit null restores the initial weights."""

    model_config = ConfigDict(extra="forbid", strict=True)
    weight_dir: str | None


class LoadAdapterBody(BaseModel):
    """`POST /load_lora_adapter`: serve the adapter in the directory `lora_path` under the model name `lora_name`."""

    model_config = ConfigDict(extra="forbid", strict=True)
    lora_name: str
    lora_path: str


class InitBroadcasterBody(BaseModel):
    """`POST /init_broadcaster`: join the trainer's weight group at `host`:`port` as server `server_rank`."""

    model_config = ConfigDict(extra="forbid", strict=True)
    host: str
    port: Annotated[int, Field(ge=1, le=65535)]
    server_rank: Annotated[int, Field(ge=0)]
    num_inference_server: Annotated[int, Field(ge=1)]
    timeout: Annotated[int, Field(ge=1)]
    """Timeout in seconds for joining and for each transfer."""


def check_messages(messages: list[dict[str, Any]]) -> None:
    """Raise ValueError unless every message has a role and text content."""
    if not messages:
        raise ValueError("`messages` is empty")
    for index, message in enumerate(messages):
        if not isinstance(message.get("role"), str):
            raise ValueError(f"messages[{index}] has no `role`")
        content = message.get("content")
        if not isinstance(content, str | list | None):
            raise ValueError(f"messages[{index}].content must be text or a list of parts")
        if content is None and message["role"] != "assistant":
            raise ValueError(f"messages[{index}] has no `content`")
        for part in content if isinstance(content, list) else []:
            if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
                raise ValueError(f"messages[{index}].content has a part that is not text; this engine is text-only")


Parsed = TypeVar("Parsed", bound=BaseModel)


def parse_body(kind: type[Parsed], raw: bytes) -> Parsed:
    """Parse and validate a JSON request body.

    Raises:
        RequestError: status 400, naming the first invalid argument.
    """
    try:
        return kind.model_validate_json(raw)
    except ValidationError as exc:
        raise _as_request_error(exc.errors(include_url=False)[0]) from exc


def _as_request_error(fault: Any) -> RequestError:
    where = ".".join(str(part) for part in fault["loc"])
    if fault["type"] == "json_invalid":
        return RequestError(f"The body is not valid JSON: {fault['ctx']['error']}")
    if fault["type"] == "extra_forbidden":
        return RequestError(f"Unrecognized request argument: {where}. This engine does not support it.", param=where)
    message = fault["msg"].removeprefix("Value error, ")
    return RequestError(f"{where}: {message}" if where else message, param=where or None)
