"""The door to the model for verifiers environments of this process: the recording proxy without a socket."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

from verifiers.clients.openai_chat_completions_client import OpenAIChatCompletionsClient
from verifiers.errors import OverlongPromptError
from verifiers.types import ClientConfig, Response

from prime_rl.orchestrator.errors import MalformedRollout
from prime_rl.orchestrator.proxy.completions import exchange, rendering
from prime_rl.orchestrator.proxy.continuation import EndsOfTurns
from prime_rl.orchestrator.proxy.recording import Session, Upstream, flat
from prime_rl.orchestrator.rollouts.replies import ChatReply
from prime_rl.orchestrator.rollouts.sampling import seeded_for_call
from prime_rl.orchestrator.rollouts.trace import CallDetails
from prime_rl.orchestrator.servers.channel import OverlongPrompt


class SessionClient(OpenAIChatCompletionsClient):  # type: ignore[misc]
    """verifiers' client of one group of rollouts. Each rollout has a session of its own.

    Sessions are known by the id that verifiers gives to a rollout's trajectory; a retried rollout gets a new one. The
    environment may change how tokens are sampled: it runs in this process, and `sampling_args` of its state say what it
    changed.
    """

    def __init__(self, server: Upstream, ends: EndsOfTurns, takes_tokens: bool) -> None:
        """With `takes_tokens`, later turns are sent as the sampled token ids, instead of text."""
        super().__init__(server)
        self._ends = ends
        self._takes_tokens = takes_tokens
        self._sessions: dict[str, Session] = {}

    def setup_client(self, config: ClientConfig) -> Any:
        raise AssertionError("unreachable: it is made with a server")

    async def get_response(self, prompt: Any, model: str, sampling_args: Any, *args: Any, **kwargs: Any) -> Response:
        # The calls of a game's other seats are in no trajectory, but their answers are in the next prompt.
        number = len((kwargs.get("state") or {}).get("trajectory") or ())
        number += sum(getattr(message, "role", None) == "assistant" for message in prompt)
        return await super().get_response(prompt, model, seeded_for_call(sampling_args, number), *args, **kwargs)

    async def get_native_response(
        self, prompt: Any, model: str, sampling_args: Mapping[str, Any], tools: Any = None, **kwargs: Any
    ) -> ChatReply:
        name = str((kwargs.get("state") or {}).get("trajectory_id"))
        session = self._sessions.setdefault(name, Session("", self.client, model, {}, self._ends))
        sent = {"model": model, "messages": prompt, "tools": tools, **flat(sampling_args)}
        if self._takes_tokens:
            sent |= {"logprobs": True, "return_token_ids": True}
        try:
            _, reply = await exchange(session, sent, self._takes_tokens)
        except OverlongPrompt as error:
            raise OverlongPromptError(error.message) from error
        # An evaluation may ask for no tokens. In training, reading the rollout refuses what is missing here.
        with contextlib.suppress(MalformedRollout):
            session.record(prompt, rendering(sent), reply, reply.id)
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
        converted.call = CallDetails.from_reply(response, response.choices[0]).to_builtins()
        return converted

    async def close(self) -> None:
        """The connections belong to the server."""
