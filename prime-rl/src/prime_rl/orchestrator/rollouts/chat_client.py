"""The verifiers chat clients over a lean HTTP channel.

verifiers sends each model call through the `openai` package and `httpx`. On one core with an instant engine, 64
completion tokens and 128 calls in flight, a call costs 5 to 7 ms, most of it for turning messages and token
log-probabilities into objects and for scanning the connection pool. Here the same bodies are sent through aiohttp, and
replies are decoded directly into a few fields: about 1.2 ms a call, including the work of verifiers. The rest of the
verifiers client (messages, tools, token stitching across turns) is unchanged.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import aiohttp
import msgspec
from verifiers import errors as vf_errors
from verifiers.clients.openai_chat_completions_client import OpenAIChatCompletionsClient
from verifiers.clients.openai_chat_completions_token_client import OpenAIChatCompletionsTokenClient
from verifiers.types import ClientConfig, Response

from prime_rl.orchestrator.rollouts.connections import Connections
from prime_rl.orchestrator.rollouts.replies import ChatReply, TokenizeReply, decode_chat_reply, error_message
from prime_rl.orchestrator.rollouts.sampling import EXACT_SEED, seeded_for_call
from prime_rl.orchestrator.rollouts.trace import CallDetails
from prime_rl.orchestrator.rollouts.turns import EndsOfTurns, bridge
from prime_rl.run.beats import own_beats, server_name

RETRYABLE_STATUS = frozenset({408, 429, 500, 502, 503, 504})


class ServerAnswered(Exception):
    """A server replied with an error status."""

    def __init__(self, url: str, status: int, message: str) -> None:
        super().__init__(f"{url} answered {status}: {message}")
        self.status = status
        self.message = message


class UnreadableAnswer(ServerAnswered):
    """A server replied with something else than the route returns: a gateway may answer with a page."""

    def __init__(self, url: str, message: str) -> None:
        super().__init__(url, 200, message)
        self.status = 502
        """A fault of the server, for those who decide by the status."""


@dataclass(frozen=True, slots=True)
class Answer:
    """The body of a reply, and the Unix times of request and reply."""

    body: bytes
    started_s: float
    ended_s: float


class ChatChannel:
    """Posts JSON to one server, with retries. Replaces the OpenAI client that verifiers keeps."""

    def __init__(self, base_url: str, headers: Mapping[str, str], timeout_s: float, max_retries: int) -> None:
        self.base_url = base_url.rstrip("/")
        self.max_retries = max_retries
        self.max_connections: int | None = None
        """None: the share of one server in the connections of this process."""
        self.connections: Connections | None = None
        """None: from the first call on, those of the event loop."""
        self._limit: AbstractAsyncContextManager[None] = nullcontext()
        """Each call enters it."""
        self.sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
        self._timeout = aiohttp.ClientTimeout(total=timeout_s)
        self._headers = {"Content-Type": "application/json", **headers}
        self._session: aiohttp.ClientSession | None = None
        self._encoder = msgspec.json.Encoder()
        self._tokenize_decoder = msgspec.json.Decoder(TokenizeReply)
        self._num_samples = 0

    def with_options(self, base_url: str) -> ChatChannel:
        """The same connections with another base URL; verifiers calls this to reach `/tokenize`."""
        channel = ChatChannel(base_url, self._headers, self._timeout.total or 0.0, self.max_retries)
        channel._session, channel._limit, channel.connections = self._open(), self._limit, self.connections
        return channel

    async def post(
        self, path: str, *, body: dict[str, Any], cast_to: type | None = None, options: Mapping[str, Any] | None = None
    ) -> Any:
        """Post a body and decode the reply, like `AsyncOpenAI.post`. The path decides the type, `cast_to` does not.

        Raises:
            ServerAnswered: the reply has an error status, after retries if it is a retryable one, or cannot be read.
            OverlongPromptError: the prompt does not fit into the model's context.
            aiohttp.ClientError: no reply, after retries.
        """
        answer = await self.exchange(path, body, (options or {}).get("headers"))
        if path == "/tokenize":
            with self._named(path, answer):
                return self._tokenize_decoder.decode(answer.body)
        reply = self.completion_of(path, answer)
        if reply.prompt_token_ids == body.get("tokens"):
            # Its numbers are those of the earlier turns. The reply's, of 28 bytes each, would be kept for every turn.
            reply.prompt_token_ids = body.get("tokens")
        return reply

    async def exchange(self, path: str, body: dict[str, Any], headers: Mapping[str, str] | None = None) -> Answer:
        """Post a body and return the reply as it is. Raises what `post` raises."""
        data = self._encoder.encode(self._prepare(body))
        started_s = time.time()
        self._open()
        with own_beats().calling(server_name(self.base_url)):
            async with self._limit:
                answer = await self._post_with_retries(f"{self.base_url}{path}", data, headers)
        return Answer(answer, started_s, ended_s=time.time())

    def completion_of(self, path: str, answer: Answer) -> ChatReply:
        """Decode a reply as a chat completion. Raises UnreadableAnswer if it is not one."""
        with self._named(path, answer):
            return decode_chat_reply(answer.body, answer.started_s, answer.ended_s)

    @contextmanager
    def _named(self, path: str, answer: Answer) -> Iterator[None]:
        """Say which server gave a reply that cannot be read, and what it said."""
        try:
            yield
        except msgspec.DecodeError as error:
            message = f"not what {path} returns ({error}): {error_message(answer.body)}"
            raise UnreadableAnswer(f"{self.base_url}{path}", message) from error

    async def close(self) -> None:
        if self._session is not None and self.connections is not None and not self._session.closed:
            await self._session.close()
            await self.connections.leave()
            # aiohttp closes its transports in the next iteration of the event loop.
            await asyncio.sleep(0)

    def _open(self) -> aiohttp.ClientSession:
        if self._session is None:
            self.connections = self.connections or Connections.of_this_loop()
            self._limit = self.connections.limit_calls(self.max_connections)
            self._session = aiohttp.ClientSession(
                connector=self.connections.enter(),
                connector_owner=False,
                timeout=self._timeout,
                headers=self._headers,
            )
        return self._session

    def _prepare(self, body: dict[str, Any]) -> dict[str, Any]:
        body = {name: value for name, value in body.items() if value is not None}
        if not body.pop(EXACT_SEED, False) and "seed" in body:
            # With one seed for all, the rollouts of a group would be identical and have no advantage.
            body["seed"] += self._num_samples
            # The server samples answer i of a request with seed + i.
            self._num_samples += body.get("n") or 1
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
    """Sends messages; receives token ids and log-probabilities with the reply."""

    def setup_client(self, config: ClientConfig) -> ChatChannel:
        return ChatChannel(config.api_base_url, config.extra_headers, config.timeout, config.max_retries)

    async def get_response(self, prompt: Any, model: str, sampling_args: Any, *args: Any, **kwargs: Any) -> Response:
        # The calls of a game's other seats are in no trajectory, but their answers are in the next prompt.
        number = len((kwargs.get("state") or {}).get("trajectory") or ())
        number += sum(getattr(message, "role", None) == "assistant" for message in prompt)
        return await super().get_response(prompt, model, seeded_for_call(sampling_args, number), *args, **kwargs)

    async def get_native_response(
        self, prompt: Any, model: str, sampling_args: Mapping[str, Any], tools: Any = None, **kwargs: Any
    ) -> ChatReply:
        args = dict(sampling_args)
        extra_body = args.pop("extra_body", {})
        if "max_tokens" in args:
            args["max_completion_tokens"] = args.pop("max_tokens")
        body = {"model": model, "messages": prompt, "tools": tools, **args, **extra_body}
        headers = kwargs.get("extra_headers")
        options = {"headers": headers} if headers else None
        reply: ChatReply = await self.client.post("/chat/completions", body=body, options=options)
        return reply

    async def raise_from_native_response(self, response: ChatReply) -> None:
        """Accept a reply that is only end-of-text. verifiers treats it as an error, but its token can be trained on."""
        if len(response.choices) == 1 and response.choices[0].token_ids:
            message = response.choices[0].message
            if message.content is None and not message.tool_calls:
                message.content = ""
            return
        await super().raise_from_native_response(response)

    async def from_native_response(self, response: ChatReply) -> Response:
        converted = await super().from_native_response(response)
        # verifiers keeps the tokens of a reply and drops the rest of what a trace records.
        converted.call = CallDetails.from_reply(response).to_builtins()
        return converted

    async def close(self) -> None:
        await self.client.close()


class TokenChatClient(OpenAIChatCompletionsTokenClient, ChatClient):
    """Sends the tokens of earlier turns as they were sampled, instead of their text."""

    def __init__(self, client_or_config: Any) -> None:
        super().__init__(client_or_config)
        self._ends = EndsOfTurns()

    async def get_prompt_ids(self, state: Mapping[str, Any], prompt_messages: Any, oai_tools: Any) -> list[int] | None:
        """Token ids of the next prompt: those of an earlier turn, and those that the environment added since.

        verifiers finds the earlier turn and what was added, but takes for granted that a turn ends as the chat template
        ends it. One that ended at `max_tokens`, a stop string or a stop token does not: verifiers would render the
        conversation from its text ("TITO fell back to MITO"), leave out the end of the turn, or write a stand-in of the
        answer into the prompt. Here it gets the template's end, which is not trained, like everything that the
        environment adds.
        """
        steps = state["trajectory"]
        marked = [_marked(step, index) for index, step in enumerate(steps)]
        fitting = [step for step in marked if step["tokens"] and _num_messages(step) <= len(prompt_messages)]
        if not fitting:
            return None
        # verifiers converts the messages of every turn in search of the longest that fits. It is nearly always the
        # longest of all: of several, the last.
        longest = max(reversed(fitting), key=_num_messages)
        found = await super().get_prompt_ids({**state, "trajectory": [longest]}, prompt_messages, oai_tools)
        if found is None and len(fitting) > 1:
            found = await super().get_prompt_ids({**state, "trajectory": fitting}, prompt_messages, oai_tools)
        if found is None:
            return None
        mark, *added = found
        tokens = steps[-1 - mark]["tokens"]
        said = [*tokens["prompt_ids"], *tokens["completion_ids"]]
        turn = await self._ends.after({"model": state["model"]}, partial(self._rendered, state["model"]))
        return said + bridge(said, turn.end, added)

    async def _rendered(self, model: str, messages: Any, add_generation_prompt: bool) -> list[int]:
        return list(
            await self.tokenize(messages, None, model, extra_kwargs={"add_generation_prompt": add_generation_prompt})
        )


def _marked(step: Mapping[str, Any], index: int) -> dict[str, Any]:
    """The turn with a mark, which is no token, in place of its tokens: verifiers joins nothing to it by its last one.

    Whether it ended at `max_tokens` does not count, but one that was cut to the environment's `max_seq_len` lacks
    tokens, and cannot be continued.
    """
    if step["tokens"] is None:
        return dict(step)
    return {**step, "response": None, "tokens": {**step["tokens"], "prompt_ids": [-1 - index], "completion_ids": []}}


def _num_messages(step: Mapping[str, Any]) -> int:
    return len(step["prompt"]) + len(step["completion"])


def _is_overlong(message: str) -> bool:
    text = message.lower()
    return any(
        phrase in text for phrase in ("context length", "maximum model length", "prompt_too_long", "max_model_len")
    )
