"""Runs verifiers environments in this process. They ask the model through the recording proxy, without a socket."""

from __future__ import annotations

import contextlib
import copy
import secrets
from collections.abc import Iterator, Mapping
from typing import Any

from verifiers.clients.openai_chat_completions_client import OpenAIChatCompletionsClient
from verifiers.errors import OverlongPromptError
from verifiers.types import ClientConfig, Response

from prime_rl.orchestrator.errors import MalformedRollout
from prime_rl.orchestrator.proxy.completions import exchange, rendering
from prime_rl.orchestrator.proxy.continuation import EndsOfTurns
from prime_rl.orchestrator.proxy.recording import Session, Upstream, flat
from prime_rl.orchestrator.rollouts.replies import ChatReply
from prime_rl.orchestrator.rollouts.rollout import Rollout
from prime_rl.orchestrator.rollouts.sampling import seeded_for_call
from prime_rl.orchestrator.servers.channel import OverlongPrompt
from prime_rl.orchestrator.workers.blocked import Report
from prime_rl.orchestrator.workers.environment import Described, GroupRequest, Split
from prime_rl.orchestrator.workers.failures import in_time
from prime_rl.orchestrator.workers.inside.verifiers_api import Served


class SessionClient(OpenAIChatCompletionsClient):  # type: ignore[misc]
    """verifiers' client of one rollout, which records in a session what the model answers.

    The environment may change how tokens are sampled: it runs in this process, and `sampling_args` of its state say
    what it changed.
    """

    def __init__(self, session: Session, takes_tokens: bool) -> None:
        """With `takes_tokens`, later turns are sent as the sampled token ids, instead of text."""
        super().__init__(session)
        self._takes_tokens = takes_tokens

    def setup_client(self, config: ClientConfig) -> Any:
        raise AssertionError("unreachable: it is made with a session")

    async def get_response(self, prompt: Any, model: str, sampling_args: Any, *args: Any, **kwargs: Any) -> Response:
        # The calls of a game's other seats are in no trajectory, but their answers are in the next prompt.
        number = len((kwargs.get("state") or {}).get("trajectory") or ())
        number += sum(getattr(message, "role", None) == "assistant" for message in prompt)
        return await super().get_response(prompt, model, seeded_for_call(sampling_args, number), *args, **kwargs)

    async def get_native_response(
        self, prompt: Any, model: str, sampling_args: Mapping[str, Any], tools: Any = None, **kwargs: Any
    ) -> ChatReply:
        sent = {"model": model, "messages": prompt, "tools": tools, **flat(sampling_args)}
        if self._takes_tokens:
            sent |= {"logprobs": True, "return_token_ids": True}
        try:
            _, reply = await exchange(self.client, sent, self._takes_tokens)
        except OverlongPrompt as error:
            raise OverlongPromptError(error.message) from error
        # An evaluation may ask for no tokens. In training, a group without tokens is refused when it is read.
        with contextlib.suppress(MalformedRollout):
            self.client.record(prompt, rendering(sent), reply, reply.id)
        return reply

    async def raise_from_native_response(self, response: ChatReply) -> None:
        """Accept a reply that is only end-of-text. verifiers treats it as an error, but its token can be trained on."""
        if len(response.choices) == 1 and response.choices[0].token_ids:
            message = response.choices[0].message
            if message.content is None and not message.tool_calls:
                message.content = ""
            return
        await super().raise_from_native_response(response)

    async def close(self) -> None:
        """The connections belong to the server."""


class VerifiersWorker:
    """Runs a verifiers environment in this process."""

    def __init__(self, served: Served) -> None:
        self.served = served
        self._ends = EndsOfTurns()

    def describe(self, split: Split) -> Described:
        found = self.served.describe(split)
        rows = self.served.dataset(split)
        return Described(
            rows, reward_functions=found["functions"], tools=found["tools"], falls_back=found["falls_back"]
        )

    async def open(self) -> None:
        """Nothing: the proxy needs no socket."""

    def report_to(self, report: Report) -> None:
        """Nothing: the event loop is that of the orchestrator."""

    async def roll_out(self, group: GroupRequest) -> list[Rollout]:
        """verifiers retries up to `max_retries` times after a server or sandbox error."""
        async with in_time(group.timeout_s, group.example.env, group.example.row):
            outputs, sessions = await self.run(
                group.row, group.size, group.server, group.server.model, group.server.takes_tokens,
                group.sampling_args, group.max_retries,
            )  # fmt: skip
        return group.read(outputs, lambda key: sessions[key].recorded)

    async def run(
        self,
        row: Mapping[str, Any],
        size: int,
        server: Upstream,
        model: str,
        takes_tokens: bool,
        sampling_args: Mapping[str, Any],
        max_retries: int,
    ) -> tuple[list[dict[str, Any]], dict[str, Session]]:
        """Roll out a row `size` times. Returns the rollouts as the environment describes them, and their sessions."""
        sessions: dict[str, Session] = {}

        def opened() -> Iterator[tuple[SessionClient, str]]:
            while True:  # a retried group has further sessions
                key = secrets.token_hex(8)
                sessions[key] = Session(key, server, model, {}, self._ends)
                yield SessionClient(sessions[key], takes_tokens), key

        outside = SessionClient(Session("", server, model, {}, self._ends), takes_tokens)
        # The environment may change a row and the arguments, for this group alone.
        inputs, sampling = [dict(row) for _ in range(size)], copy.deepcopy(dict(sampling_args))
        outputs = await self.served.run_inputs(inputs, opened(), outside, model, sampling, max_retries)
        return outputs, sessions

    def waits_for(self) -> str:
        return ""

    async def close(self) -> None:
        await self.served.close()
