"""Runs verifiers environments in this process. They ask the model through the recording proxy, without a socket."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Mapping, Sequence
from typing import Any

import verifiers as vf
from verifiers.clients.openai_chat_completions_client import OpenAIChatCompletionsClient
from verifiers.errors import OverlongPromptError
from verifiers.types import ClientConfig, Response

from prime_rl.monitors.trace import own_trace
from prime_rl.orchestrator.errors import MalformedRollout
from prime_rl.orchestrator.proxy.completions import exchange, rendering
from prime_rl.orchestrator.proxy.continuation import EndsOfTurns
from prime_rl.orchestrator.proxy.recording import Session, Upstream, flat
from prime_rl.orchestrator.reports.sessions import record_rollouts
from prime_rl.orchestrator.rollouts.replies import ChatReply
from prime_rl.orchestrator.rollouts.rollout import Rollout, read_rollout
from prime_rl.orchestrator.rollouts.sampling import seeded_for_call
from prime_rl.orchestrator.rollouts.trace import CallDetails
from prime_rl.orchestrator.servers.channel import OverlongPrompt
from prime_rl.orchestrator.workers.environment import Described, GroupRequest, Split
from prime_rl.orchestrator.workers.failures import in_time
from prime_rl.orchestrator.workers.inside.reward_records import KEY as REWARD_ERRORS
from prime_rl.orchestrator.workers.inside.reward_records import OVERLONG_PROMPT, functions_with_weights, leaves

STATE_COLUMNS = ["trajectory", "sampling_args", REWARD_ERRORS, OVERLONG_PROMPT]
"""What a rollout's output has besides what verifiers always gives."""


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


class VerifiersWorker:
    """Runs a verifiers environment in this process."""

    def __init__(self, env: vf.Environment) -> None:
        self.env = env
        self._ends = EndsOfTurns()

    def describe(self, split: Split) -> Described:
        return described(self.env, split)

    async def open(self) -> None:
        """Nothing: the proxy needs no socket."""

    async def roll_out(self, group: GroupRequest) -> list[Rollout]:
        """verifiers retries up to `max_retries` times after a server or sandbox error."""
        client = SessionClient(group.server, self._ends, group.server.takes_tokens)
        async with in_time(group.timeout_s, group.example.env, group.example.row):
            outputs = await outputs_of(self.env, group, client)
        return rollouts_of(outputs, group)

    def waits_for(self) -> str:
        return ""

    async def close(self) -> None:
        """Nothing is open."""


def described(env: vf.Environment, split: Split) -> Described:
    rows = env.get_dataset() if split == "train" else env.get_eval_dataset()
    return Described(
        rows,
        reward_functions=reward_functions(env.rubric),
        tools=env.tool_defs or (),
        falls_back=split == "eval" and lacks_eval_rows(env),
    )


def lacks_eval_rows(env: Any) -> bool:
    """Whether verifiers gives training rows as evaluation rows. A group does if one of its environments does."""
    members = getattr(env, "envs", None) or ()
    return any(map(lacks_eval_rows, members)) if members else getattr(env, "eval_dataset", None) is None


def reward_functions(rubric: vf.Rubric | None) -> dict[str, float]:
    """Weight of each reward function in the sum that is the reward, by name; 0 for one that is only measured."""
    return dict(pair for part in leaves(rubric) for pair in functions_with_weights(part))


async def outputs_of(env: vf.Environment, group: GroupRequest, client: vf.Client | vf.ClientConfig) -> list[Any]:
    """What verifiers returns for a group: a dictionary for each rollout."""
    outputs: list[Any] = await env.run_group(
        [group.row] * group.size,
        client,
        group.server.model,
        copy.deepcopy(group.sampling_args),  # the environment may change them, for this group alone
        group.max_retries,
        state_columns=STATE_COLUMNS,
    )
    return outputs


def rollouts_of(outputs: Sequence[Mapping[str, Any]], group: GroupRequest) -> list[Rollout]:
    """Raises MalformedRollout."""
    record_rollouts(own_trace(), outputs, group.example)
    return [
        read_rollout(output, group.example, group.temperature, group.version, group.vocab_size) for output in outputs
    ]
