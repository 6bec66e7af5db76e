"""Request bodies and error responses of the HTTP API that both engines serve.

The bodies are OpenAI's, with vLLM's extensions. Unsupported arguments are rejected, never ignored, so that training
samples are always drawn the way the request asked for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from http import HTTPStatus
from types import MappingProxyType
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from prime_rl.utils.http_server import MAX_MESSAGES
from prime_rl.utils.images import source_of
from prime_rl.utils.terminal import cut_inside

# Limits on what one request may ask for. Requests beyond them are refused with status 4xx.


MAX_BODY_BYTES = 64 << 20
"""Images in base64 are a third longer than their files."""
MAX_BODIES_BYTES = 1 << 30
"""Of all bodies that arrive at once. Further ones wait, so that slow senders of images cannot fill the memory."""
BODY_TIMEOUT_S = 60.0
"""Time for a body to arrive after its headers."""

HEAD_TIMEOUT_S = 10.0
"""Time for the first request of a new connection to begin."""
MAX_CONNECTIONS = 8192
"""Open connections. Beyond it, a new connection replaces one that waits for its next request."""

MAX_SAMPLES = 256
"""Samples of one prompt, `n`."""
MAX_TOTAL_SAMPLES = 4096
"""Samples of one request: number of prompts times `n`."""
MAX_TOP_LOGPROBS = 1024
"""Likeliest tokens at each place, for distillation and for the tokens that a sampler keeps."""
MAX_STOP_CHARS = 1000
MAX_CHARS_PER_TOKEN = 64
"""A text with more characters than this per token of the model's context is refused without tokenizing it."""
MAX_NAME_CHARS = 1000
MAX_PATH_CHARS = 4095

MAX_ARGUMENTS = 100
MAX_ENTRIES: Mapping[str, int] = MappingProxyType(
    {
        "prompt": 1024,
        "messages": MAX_MESSAGES,
        "tools": 1024,
        "stop": 64,
        "stop_token_ids": 1024,
        "logit_bias": 1024,
        "chat_template_kwargs": 64,
    }
)
"""Entries of each list or object in a body. For `prompt`: the prompts, not the tokens of a single one."""

MAX_INT32 = (1 << 31) - 1
MAX_INT64 = (1 << 63) - 1
MIN_INT64 = -(1 << 63)
MIN_TEMPERATURE = 0.0001
"""The smallest temperature besides 0. Logits divided by a much smaller one overflow float32."""
MAX_TEMPERATURE = 100.0
MIN_REPETITION_PENALTY = 0.01
MAX_REPETITION_PENALTY = 100.0
MAX_TIMEOUT_S = 7 * 24 * 3600

_MAX_MESSAGE_CHARS = 1000
_MAX_ARGUMENT_CHARS = 200
"""Characters of an argument's name in an error message."""
_NOT_FROM_REQUESTS = frozenset(
    {"chat_template", "conversation", "max_length", "padding", "return_assistant_tokens_mask", "return_dict"}
    | {"return_tensors", "tokenize", "tokenizer_kwargs", "truncation"}
)
"""Arguments of Transformers' `apply_chat_template` that replace the template or change what is returned."""

ASLEEP = "the server sleeps until the next weights"
PAUSED = "the server is paused: running requests would never end; POST /resume first"
NO_SLEEP_MODE = "the server was not started with enable_sleep_mode = true"
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
        message = cut_inside(str(self), _MAX_MESSAGE_CHARS)
        return {"error": {"message": message, "type": name, "param": self.param, "code": int(self.status)}}


def _without_nul(text: str) -> str:
    if "\0" in text:
        raise ValueError("the text has a NUL character")
    return text


Name = Annotated[str, Field(max_length=MAX_NAME_CHARS)]
FilePath = Annotated[str, Field(min_length=1, max_length=MAX_PATH_CHARS), AfterValidator(_without_nul)]
Host = Annotated[str, Field(min_length=1, max_length=253), AfterValidator(_without_nul)]
Tokens = Annotated[list[int], Field(fail_fast=True)]
Objects = Annotated[list[dict[str, Any]], Field(fail_fast=True)]


class StrictBody(BaseModel):
    """Base of every request body: rejects unknown arguments, conversions between types, and too many entries."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _check_counts(cls, data: Any) -> Any:
        # Before the content is checked: a list of a million faults would make a million error messages.
        if isinstance(data, dict):
            check_counts(data)
        return data


class Body(StrictBody):
    """Base of OpenAI's bodies: treats an explicit null as "not given"."""

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

    model: Name | None = None
    """Model or adapter that answers; None is the server's model."""
    temperature: Annotated[float, Field(ge=0, le=MAX_TEMPERATURE)] | None = None
    """0 always takes the likeliest token. None is the model's own value, also for the next four."""
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    """Sample from the likeliest tokens that have this probability together."""
    top_k: Annotated[int, Field(ge=-1, le=MAX_INT32)] | None = None
    """Number of most likely tokens to sample from. -1 and 0 disable the limit."""
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    """Sample from tokens with at least this share of the likeliest token's probability."""
    repetition_penalty: Annotated[float, Field(ge=MIN_REPETITION_PENALTY, le=MAX_REPETITION_PENALTY)] | None = None
    """Divides positive logits of tokens of prompt and completion, and multiplies negative ones."""
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    """Subtracted from the logits of tokens that have been generated."""
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    """The same, times how often."""
    seed: Annotated[int, Field(ge=MIN_INT64, le=MAX_INT64)] | None = None
    """The same seed gives the same samples, whatever else the server generates."""
    n: Annotated[int, Field(ge=1, le=MAX_SAMPLES)] = 1
    """Samples of each prompt."""
    max_tokens: Annotated[int, Field(ge=1, le=MAX_INT64)] | None = None
    min_tokens: Annotated[int, Field(ge=0, le=MAX_INT64)] = 0
    """The sample does not end before this many tokens."""
    stop: str | list[str] = []
    """Texts that end a sample."""
    stop_token_ids: Tokens = []
    """Tokens that end a sample, in addition to the model's own."""
    include_stop_str_in_output: bool = False
    """Keep the text that ended the sample."""
    ignore_eos: bool = False
    """Do not end at the model's own end tokens."""
    logit_bias: dict[Annotated[int, Field(strict=False)], Annotated[float, Field(ge=-100, le=100)]] = {}
    """Values to add to the logits of these token ids, before all other processing."""
    skip_special_tokens: bool = True
    """Leave special tokens out of the text."""
    prompt_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    """Log-probabilities of the prompt's tokens, with this many of the likeliest ones at each place."""
    return_token_ids: bool = True
    """The embedded engine returns token ids in every response, even when this is false."""
    return_tokens_as_token_ids: bool = False
    """Name tokens `token_id:<id>` in log-probabilities."""
    stream: bool = False
    """Answer with server-sent events."""
    stream_options: StreamOptions | None = None
    # Accepted for compatibility; these do not affect the generated tokens.
    user: str | None = None
    """Has no effect."""
    metadata: dict[str, Any] | None = None
    """Has no effect."""
    store: bool | None = None
    """Has no effect."""
    priority: int | None = None
    """Has no effect."""
    cache_salt: str | None = None
    """Has no effect."""
    request_id: str | None = None
    """Has no effect."""
    service_tier: str | None = None
    """Has no effect."""

    @model_validator(mode="after")
    def _check_sampling(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise ValueError("`stream_options` requires `stream = true`")
        if self.temperature is not None and 0 < self.temperature < MIN_TEMPERATURE:
            raise ValueError(
                f"`temperature` is {self.temperature}; set 0 for greedy decoding, or at least {MIN_TEMPERATURE}"
            )
        if any(len(text) > MAX_STOP_CHARS for text in self.stop_strings):
            raise ValueError(f"`stop` has a string of more than {MAX_STOP_CHARS} characters")
        if isinstance(self.stop, list) and "" in self.stop:
            raise ValueError("`stop` has an empty string")
        return self

    @property
    def num_prompt_logprobs(self) -> int | None:
        """Likeliest tokens to compute for each prompt token; None computes no log-probabilities of prompts."""
        return self.prompt_logprobs

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """The non-empty stop strings. OpenAI allows one string or a list."""
        given = [self.stop] if isinstance(self.stop, str) else self.stop
        return tuple(text for text in given if text)


class ChatBody(SamplingBody):
    """`POST /v1/chat/completions`."""

    messages: Objects = Field(min_length=1)
    max_completion_tokens: Annotated[int, Field(ge=1, le=MAX_INT64)] | None = None
    logprobs: bool = False
    """Log-probabilities of the generated tokens."""
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] = 0
    """The same for this many of the likeliest tokens at each place."""
    tools: Objects | None = None
    """Functions that the model may call, for the chat template and the parser."""
    tool_choice: Literal["auto", "none"] | None = None
    """`none` leaves calls in the text."""
    parallel_tool_calls: bool | None = None
    """False keeps only the first call."""
    add_generation_prompt: bool = True
    """End the prompt with the beginning of an assistant message."""
    continue_final_message: bool = False
    """Continue the last message instead."""
    chat_template_kwargs: dict[str, Any] = {}
    """Variables for the chat template."""

    @model_validator(mode="after")
    def _check_messages(self) -> ChatBody:
        if self.top_logprobs and not self.logprobs:
            raise ValueError("`top_logprobs` requires `logprobs = true`")
        check_messages(self.messages)
        check_template_kwargs(self.chat_template_kwargs)
        return self


class TokensBody(ChatBody):
    """`POST /v1/chat/completions/tokens`: a chat body whose prompt the client has tokenized already (`tokens`)."""

    tokens: Annotated[list[Annotated[int, Field(ge=0)]], Field(fail_fast=True)] = Field(min_length=1)


class CompletionBody(SamplingBody):
    """`POST /v1/completions`. `prompt` is one text, one list of token ids, or a list of either."""

    prompt: str | Annotated[list[str], Field(fail_fast=True)] | Tokens | Annotated[list[Tokens], Field(fail_fast=True)]
    logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    add_special_tokens: bool = True
    echo: bool = False
    """Answer with the prompt before the completion; with `logprobs`, its log-probabilities too, at temperature 1."""
    max_tokens: Annotated[int, Field(ge=0, le=MAX_INT64)] | None = None
    """0, with `echo`, answers with the prompt alone."""

    @model_validator(mode="after")
    def _check_echo(self) -> Self:
        if self.echo and self.stream:
            raise ValueError("`echo` does not work with `stream`")
        if self.max_tokens == 0 and not self.echo:
            raise ValueError("`max_tokens` of 0 requires `echo`")
        return self

    @model_validator(mode="after")
    def _check_samples(self) -> Self:
        count = len(self.prompts) * self.n
        if count > MAX_TOTAL_SAMPLES:
            raise ValueError(f"the prompts times `n` are {count} samples; at most {MAX_TOTAL_SAMPLES} are allowed")
        return self

    @property
    def num_prompt_logprobs(self) -> int | None:
        if not self.echo or self.logprobs is None:
            return self.prompt_logprobs
        return max(self.logprobs, self.prompt_logprobs or 0)

    @property
    def prompts(self) -> list[str | list[int]]:
        if isinstance(self.prompt, str):
            return [self.prompt]
        ids = [part for part in self.prompt if isinstance(part, int)]
        return [ids] if ids else [part for part in self.prompt if not isinstance(part, int)]


class TokenizeBody(Body):
    """`POST /tokenize`: tokenize a text, or messages rendered with the chat template."""

    model: Name | None = None
    prompt: str | None = None
    messages: Objects | None = None
    add_special_tokens: bool | None = None
    """None means true for a text and false for messages, because chat templates write special tokens themselves."""
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    tools: Objects | None = None
    chat_template_kwargs: dict[str, Any] = {}
    return_token_strs: bool = False

    @model_validator(mode="after")
    def _check_source(self) -> TokenizeBody:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("set either `prompt` or `messages`")
        if self.messages is not None:
            check_messages(self.messages)
        check_template_kwargs(self.chat_template_kwargs)
        return self


class UpdateWeightsBody(StrictBody):
    """`POST /update_weights`. `weight_dir` is required; an explicit null restores the initial weights."""

    weight_dir: FilePath | None


class LoadAdapterBody(StrictBody):
    """`POST /load_lora_adapter`: serve the adapter in the directory `lora_path` under the model name `lora_name`."""

    lora_name: Name
    lora_path: FilePath


class InitBroadcasterBody(StrictBody):
    """`POST /init_broadcaster`: join the trainer's weight group at `host`:`port` as server `server_rank`."""

    host: Host
    port: Annotated[int, Field(ge=1, le=65535)]
    server_rank: Annotated[int, Field(ge=0, le=MAX_INT32)]
    num_inference_server: Annotated[int, Field(ge=1, le=MAX_INT32)]
    timeout: Annotated[int, Field(ge=1, le=MAX_TIMEOUT_S)]
    """Timeout in seconds for joining and for each transfer."""


def check_counts(data: dict[str, Any]) -> None:
    """Raise ValueError if a body has more arguments, or one of them more entries, than `MAX_ENTRIES` allows."""
    if len(data) > MAX_ARGUMENTS:
        raise ValueError(f"the body has {len(data)} arguments; at most {MAX_ARGUMENTS} are allowed")
    for name, limit in MAX_ENTRIES.items():
        value = data.get(name)
        is_one_prompt = name == "prompt" and isinstance(value, list) and isinstance(next(iter(value), None), int)
        if isinstance(value, list | dict) and len(value) > limit and not is_one_prompt:
            raise ValueError(f"`{name}` has {len(value)} entries; at most {limit} are allowed")


def check_token_ids(tokens: Sequence[int], vocab_size: int) -> None:
    """Raise RequestError if a prompt is empty or has a token that the model does not have: it could end the engine."""
    if not tokens:
        raise RequestError("The prompt has no tokens", param="prompt")
    if max(tokens) >= vocab_size or min(tokens) < 0:
        raise RequestError(f"The prompt has token ids outside 0..{vocab_size - 1}", param="prompt")


def check_template_kwargs(template_kwargs: dict[str, Any]) -> None:
    """Raise ValueError if a request would replace the model's chat template, or change what rendering returns."""
    for name in template_kwargs:
        if name in _NOT_FROM_REQUESTS:
            raise ValueError(f"`chat_template_kwargs` sets `{name}`, which requests to this server may not set")


def check_messages(messages: list[dict[str, Any]]) -> None:
    """Raise ValueError unless every message has a role, and text or parts of text and images."""
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
            if not _is_part(part):
                raise ValueError(f"messages[{index}].content has a part that is neither `text` nor `image_url`")


def _is_part(part: Any) -> bool:
    if not isinstance(part, dict) or part.get("type") != "image_url":
        return isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)
    return isinstance(source_of(part), str)


Parsed = TypeVar("Parsed", bound=BaseModel)


def parse_body(kind: type[Parsed], raw: bytes) -> Parsed:
    """Parse and validate a JSON request body.

    Raises:
        RequestError: status 400, naming the first invalid argument.
    """
    try:
        return kind.model_validate_json(raw)
    except ValidationError as exc:
        raise _as_request_error(exc.errors(include_url=False, include_input=False)[0]) from exc


def _as_request_error(fault: Any) -> RequestError:
    where = ".".join(str(part) for part in fault["loc"])[:_MAX_ARGUMENT_CHARS]
    if fault["type"] == "json_invalid":
        return RequestError(f"The body is not valid JSON: {fault['ctx']['error']}")
    if fault["type"] == "extra_forbidden":
        return RequestError(f"Unrecognized request argument: {where}. This engine does not support it.", param=where)
    message = fault["msg"].removeprefix("Value error, ")
    return RequestError(f"{where}: {message}" if where else message, param=where or None)
