"""The verifiers chat clients, over a lean HTTP channel.

verifiers sends each model call through the `openai` package on `httpx`. Measured on one core with an instant engine,
64 completion tokens and 128 calls in flight, that costs 5 to 7 ms a call, most of it spent on turning messages and
token log-probabilities into objects and on scanning the connection pool. Here the same bodies go out over aiohttp and
the answers are decoded straight into a few fields: about 1.2 ms with all of verifiers' own work. The rest of verifiers'
client (messages, tools, token stitching across turns) is used as it is.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import aiohttp
import msgspec
from verifiers import errors as vf_errors
from verifiers.clients.openai_chat_completions_client import OpenAIChatCompletionsClient
from verifiers.clients.openai_chat_completions_token_client import OpenAIChatCompletionsTokenClient
from verifiers.types import ClientConfig, Response

from prime_rl.orchestrator.errors import InferenceFault
from prime_rl.orchestrator.rollouts.sampling import EXACT_SEED

RETRYABLE_STATUS = frozenset({408, 429, 500, 502, 503, 504})
KEEPALIVE_S = 4.0
"""Below the 5 s after which uvicorn closes an idle connection, so that no request meets a closing one."""


class TokenLogprob(msgspec.Struct):
    logprob: float


class Logprobs(msgspec.Struct):
    content: list[TokenLogprob] | None = None


class ChatMessage(msgspec.Struct):
    content: str | list[Any] | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[dict[str, Any]] | None = None

    def model_dump(self) -> dict[str, Any]:
        """Where verifiers looks for reasoning text."""
        return {"reasoning": self.reasoning, "reasoning_content": self.reasoning_content}


class Choice(msgspec.Struct):
    message: ChatMessage
    finish_reason: str | None = None
    token_ids: list[int] | None = None
    logprobs: Logprobs | None = None
    weight_versions: list[dict[str, Any]] | None = None
    routed_experts: Any = None


class Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    total_tokens: int = 0


class ChatReply(msgspec.Struct):
    """The fields of a chat completion that verifiers and training read."""

    choices: list[Choice]
    id: str = ""
    created: int = 0
    model: str = ""
    prompt_token_ids: list[int] | None = None
    usage: Usage | None = None


class TokenizeReply(msgspec.Struct):
    tokens: list[int]


class ServerAnswered(Exception):
    """A server answered with an error status."""

    def __init__(self, url: str, status: int, message: str) -> None:
        super().__init__(f"{url} answered {status}: {message}")
        self.status = status
        self.message = message


class ChatChannel:
    """Posts JSON to one server, with retries. Stands where verifiers keeps its OpenAI client."""

    def __init__(self, base_url: str, headers: Mapping[str, str], timeout_s: float, max_retries: int) -> None:
        self.base_url = base_url.rstrip("/")
        self.max_retries = max_retries
        self.sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
        self._timeout = aiohttp.ClientTimeout(total=timeout_s)
        self._headers = {"Content-Type": "application/json", **headers}
        self._session: aiohttp.ClientSession | None = None
        self._encoder = msgspec.json.Encoder()
        self._chat_decoder = msgspec.json.Decoder(ChatReply)
        self._tokenize_decoder = msgspec.json.Decoder(TokenizeReply)
        self._requests = itertools.count()

    def with_options(self, base_url: str) -> ChatChannel:
        """The same connections under another base URL; verifiers asks for it to reach `/tokenize`."""
        channel = ChatChannel(base_url, self._headers, self._timeout.total or 0.0, self.max_retries)
        channel._session = self._open()
        return channel

    async def post(
        self, path: str, *, body: dict[str, Any], cast_to: type | None = None, options: Mapping[str, Any] | None = None
    ) -> Any:
        """Post and decode, as `AsyncOpenAI.post` does; what is decoded depends on the path, not on `cast_to`.

        Raises:
            ServerAnswered: an error status, after retries where these may help.
            OverlongPromptError: the prompt does not fit the model's context.
            aiohttp.ClientError: no answer, after retries.
        """
        data = self._encoder.encode(self._prepare(body))
        headers = (options or {}).get("headers")
        answer = await self._post_with_retries(f"{self.base_url}{path}", data, headers)
        decoder = self._tokenize_decoder if path == "/tokenize" else self._chat_decoder
        return decoder.decode(answer)

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            # aiohttp closes its transports at the loop's next turn.
            await asyncio.sleep(0)

    def _open(self) -> aiohttp.ClientSession:
        if self._session is None:
            # No limit: the scheduler already bounds what is in flight.
            connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE_S)
            self._session = aiohttp.ClientSession(connector=connector, timeout=self._timeout, headers=self._headers)
        return self._session

    def _prepare(self, body: dict[str, Any]) -> dict[str, Any]:
        body = {name: value for name, value in body.items() if value is not None}
        if not body.pop(EXACT_SEED, False) and "seed" in body:
            # One seed for all would make the rollouts of a group identical, and a group of equals teaches nothing.
            body["seed"] += next(self._requests)
        if "messages" in body:
            body["messages"] = [
                {name: value for name, value in message.items() if value is not None or name == "content"}
                for message in body["messages"]
            ]
        return body

    async def _post_with_retries(self, url: str, data: bytes, headers: Mapping[str, str] | None) -> bytes:
        for attempt in itertools.count(1):
            try:
                return await self._post_once(url, data, headers)
            except ServerAnswered as answer:
                if answer.status not in RETRYABLE_STATUS or attempt > self.max_retries:
                    raise
            except aiohttp.ClientConnectionError:
                if attempt > self.max_retries:
                    raise
            await self.sleep(min(0.25 * 2**attempt, 8.0))
        raise AssertionError("unreachable: the loop above has no end")

    async def _post_once(self, url: str, data: bytes, headers: Mapping[str, str] | None) -> bytes:
        async with self._open().post(url, data=data, headers=headers) as response:
            answer = await response.read()
            if response.status == 200:
                return answer
            message = error_message(answer)
            if response.status == 400 and _is_overlong(message):
                raise vf_errors.OverlongPromptError(message)
            raise ServerAnswered(url, response.status, message)


class ChatClient(OpenAIChatCompletionsClient):
    """Chat completions: messages go out, token ids and log-probabilities come back."""

    def setup_client(self, config: ClientConfig) -> ChatChannel:
        return ChatChannel(config.api_base_url, config.extra_headers, config.timeout, config.max_retries)

    async def get_native_response(self, prompt, model, sampling_args, tools=None, **kwargs) -> ChatReply:
        args = dict(sampling_args)
        extra_body = args.pop("extra_body", {})
        if "max_tokens" in args:
            args["max_completion_tokens"] = args.pop("max_tokens")
        body = {"model": model, "messages": prompt, "tools": tools, **args, **extra_body}
        headers = kwargs.get("extra_headers")
        return await self.client.post("/chat/completions", body=body, options={"headers": headers} if headers else None)

    async def raise_from_native_response(self, response: ChatReply) -> None:
        """An answer of end-of-text alone is an error to verifiers. To training it is a sampled token like any other."""
        if len(response.choices) == 1 and response.choices[0].token_ids:
            message = response.choices[0].message
            if message.content is None and not message.tool_calls:
                message.content = ""
            return
        await super().raise_from_native_response(response)

    async def from_native_response(self, response: ChatReply) -> Response:
        converted = await super().from_native_response(response)
        converted.weight_versions = response.choices[0].weight_versions
        return converted

    async def close(self) -> None:
        await self.client.close()


class TokenChatClient(OpenAIChatCompletionsTokenClient, ChatClient):
    """From the second turn on, the tokens of earlier turns go out as they were sampled, not as text."""

    async def get_prompt_ids(self, state: Mapping[str, Any], prompt_messages: Any, oai_tools: Any) -> list[int] | None:
        """Token ids of the next prompt: those of an earlier turn, and what the environment has added since.

        A turn that `max_tokens` cut off has no end, and verifiers would render such a conversation anew from its text
        ("TITO fell back to MITO"), whose tokens may not be the sampled ones. Here the template's own end closes the
        turn; like all that the environment adds, it is not trained.
        """
        ids = await super().get_prompt_ids(state, prompt_messages, oai_tools)
        if ids is not None or not any(map(_is_cut_off, state["trajectory"])):
            return ids
        end = await self._end_of_turn(state["model"])
        if not end:
            return None
        steps = [_closed(step, end) if _is_cut_off(step) else step for step in state["trajectory"]]
        return await super().get_prompt_ids({"model": state["model"], "trajectory": steps}, prompt_messages, oai_tools)

    async def _end_of_turn(self, model: str) -> list[int]:
        """What the template writes after an answer: the tokens in which two short answers end alike."""
        turns = [[{"role": "assistant", "content": content}] for content in ("x", "y")]
        options = {"add_generation_prompt": False}
        first, second = [await self.tokenize(turn, None, model, extra_kwargs=options) for turn in turns]
        pairs = zip(reversed(first), reversed(second), strict=False)
        length = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
        return first[len(first) - length :]


def _is_cut_off(step: Mapping[str, Any]) -> bool:
    """Whether a turn ended at `max_tokens`, and its tokens are known to the last one."""
    tokens, response = step["tokens"], step.get("response")
    return tokens is not None and not tokens["is_truncated"] and bool(response and response.message.is_truncated)


def _closed(step: Mapping[str, Any], end: list[int]) -> dict[str, Any]:
    """The turn as if it had ended by itself."""
    tokens = step["tokens"]
    return {**step, "response": None, "tokens": {**tokens, "completion_ids": [*tokens["completion_ids"], *end]}}


def error_message(answer: bytes) -> str:
    """The message in an OpenAI error body, or the start of whatever came back; on one line."""
    try:
        body = msgspec.json.decode(answer)
        error = body.get("error", body) if isinstance(body, dict) else body
        text = str(error.get("message", error)) if isinstance(error, dict) else str(error)
    except msgspec.DecodeError:
        text = answer.decode(errors="replace")
    return " ".join(text.split())[:500]


def check_reply(reply: ChatReply, url: str) -> None:
    """Refuse a server whose answers cannot be trained on.

    Raises:
        InferenceFault: token ids or log-probabilities are missing.
    """
    choice = reply.choices[0]
    parts = {
        "prompt_token_ids": reply.prompt_token_ids,
        "choices[0].token_ids": choice.token_ids,
        "choices[0].logprobs.content": choice.logprobs and choice.logprobs.content,
    }
    missing = [name for name, value in parts.items() if value is None]
    if missing:
        raise InferenceFault(
            f"{url} answers without {' and '.join(missing)}, which training needs: use the `inference` command, "
            "or a vLLM that knows `return_token_ids`"
        )


def _is_overlong(message: str) -> bool:
    text = message.lower()
    return any(
        phrase in text for phrase in ("context length", "maximum model length", "prompt_too_long", "max_model_len")
    )
