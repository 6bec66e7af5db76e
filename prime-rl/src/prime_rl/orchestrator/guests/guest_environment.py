"""An environment in an interpreter of its own, as the rest of the orchestrator sees any environment."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from prime_rl.configs.orchestrator import EnvConfig
from prime_rl.monitors.tracing import own_trace
from prime_rl.orchestrator.env_servers.environments import (
    PROMPT_ID_LENGTH,
    Environment,
    GroupRequest,
    Split,
    environment_arguments,
    module_id,
)
from prime_rl.orchestrator.env_servers.failures import Failures
from prime_rl.orchestrator.env_servers.group_limits import GroupTimeout, in_time
from prime_rl.orchestrator.errors import EnvironmentFault
from prime_rl.orchestrator.guests.guest_process import Guest, GuestError, GuestProcess
from prime_rl.orchestrator.guests.inside.frames import BadFrame
from prime_rl.orchestrator.guests.restarting import RestartingGuest
from prime_rl.orchestrator.proxy.recording import Session
from prime_rl.orchestrator.proxy.routes import RecordingProxy
from prime_rl.orchestrator.reports.sessions import record_rollouts
from prime_rl.orchestrator.rollouts.images import ADVICE, has_image
from prime_rl.orchestrator.rollouts.rollout import Rollout, read_rollout
from prime_rl.orchestrator.scheduling.buffer import fingerprint
from prime_rl.utils.logger import get_logger

ROWS_AT_ONCE = 256
SHOWN_ROWS = 16
"""Rows of an endless environment that are read at the start, to look at their prompts."""


class GuestEnvironment(Environment):
    """Rollouts run in the guest, which asks the model through a proxy of this process. The proxy records the tokens."""

    def __init__(
        self,
        name: str,
        process: GuestProcess,
        proxy: RecordingProxy,
        split: Split = "train",
        max_failed_groups: float = 0.5,
        guest: RestartingGuest | None = None,
    ) -> None:
        """Raises EnvironmentFault if the guest cannot make its dataset."""
        self.name = name
        self.address = "its own interpreter"
        self.vocab_size = None
        self.timeout_s = None
        self._process = process
        self._guest = RestartingGuest(process) if guest is None else guest
        self._proxy = proxy
        self._split = split
        try:
            described = process.ask_now("describe", split=split)
            self._num_rows: int | None = described["rows"]
            count = SHOWN_ROWS if self._num_rows is None else self._num_rows
            self._rows = list(_all_rows(process, split, count))
        except GuestError as error:
            raise EnvironmentFault(f"{process.guest.place}: cannot build the dataset of {name!r}: {error}") from error
        self._tools = described["tools"]
        self.failures = Failures(name, max_failed_groups)
        self.reward_functions = described["functions"]

    @property
    def num_rows(self) -> int | None:
        return self._num_rows

    def held_out(self) -> Self:
        other = type(self)(self.name, self._process, self._proxy, "eval", self.failures.max_share, self._guest)
        other.timeout_s = self.timeout_s
        return other

    def content(self, row: int) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self._rows[row])
        return found

    def tools(self, row: int) -> list[dict[str, Any]]:
        info = self.content(row).get("info") or {}
        info = json.loads(info) if isinstance(info, str) else info
        tools = info.get("tool_defs") or info.get("oai_tools") or self._tools
        return [dict(tool) if "function" in tool else {"type": "function", "function": dict(tool)} for tool in tools]

    def refuse_images(self) -> None:
        for row in range(len(self)):
            if has_image(self.prompt(row)):
                raise EnvironmentFault(f"environment {self.name!r}: the prompt of row {row} has an image, and {ADVICE}")

    def fingerprint(self, row: int, keys: Sequence[str]) -> str:
        if self._num_rows is None:
            return fingerprint(self.name, {"row": row}, ["task", "row"])
        return fingerprint(self.name, self.content(row), keys)

    def prompt_id(self, row: int) -> str:
        # Rows of an endless environment are not known here, only their numbers.
        return super().prompt_id(row) if self._num_rows is not None else self.fingerprint(row, ())[:PROMPT_ID_LENGTH]

    async def connect(self) -> None:
        """Open the proxy."""
        await self._proxy.open()

    async def _roll_out(self, request: GroupRequest) -> list[Rollout]:
        """A group that raises, or in which a rollout ends with an error, is attempted again up to `max_retries` times.

        Raises:
            GuestError: the environment's code failed.
            GuestEnded: its process ended; the next group gets a new one.
            EnvironmentFault: its process ends whenever it is started.
            GroupTimeout: it took longer than `timeout_s` of the environment.
        """
        await self._proxy.open()
        row = request.example.row
        for retries_left in range(request.max_retries, -1, -1):
            try:
                rollouts = await self._attempt(request)
                fault = next((each.error_detail or each.error for each in rollouts if each.error), None)
            except GuestError as error:
                if not retries_left:
                    raise
                fault = str(error)
            if fault is None or not retries_left:
                break
            get_logger().warning(f"Environment {self.name!r}, row {row}: {fault}; once more")
        for rollout in rollouts:
            rollout.prompt_id = self.prompt_id(row)
        return rollouts

    async def _attempt(self, request: GroupRequest) -> list[Rollout]:
        example = request.example
        sessions_of_group = self._proxy.sessions.opened(request.size, request.server, request.sampling_args)
        try:
            async with in_time(self.timeout_s, self.name, example.row):
                with sessions_of_group as sessions:
                    outputs = await self._guest.ask(
                        "run_group",
                        split=self._split,
                        row=example.row,
                        base_url=self._proxy.base_url,
                        model=request.server.model,
                        sampling_args=_asked_for(request.sampling_args),
                        sessions=[session.key for session in sessions],
                        proxy_key=self._proxy.key,
                    )
        except GroupTimeout:
            # A process that code without `await` blocks answers nothing, and is replaced.
            await self._guest.ask("describe", self._guest.blocked_s, split=self._split)
            raise
        record_rollouts(own_trace(), outputs, example)
        by_key = {session.key: session for session in sessions}
        return [self._rollout(output, by_key[output["session"]], request) for output in outputs]

    def _rollout(self, output: dict[str, Any], session: Session, request: GroupRequest) -> Rollout:
        # The proxy samples as the run says, whatever the environment makes of its arguments.
        given = {**output, "trajectory": _steps(session), "sampling_args": None}
        rollout = read_rollout(given, request.example, request.temperature, request.version, self.vocab_size)
        rollout.is_truncated |= session.is_cut_off
        return rollout

    async def close(self) -> None:
        # First the agents: the proxy waits for their open requests.
        await self._guest.close()
        await self._proxy.close()


def start_guest(config: EnvConfig, place: str, split: Split, python: Path) -> GuestEnvironment:
    """Load the environment that `config` names in the interpreter `python`.

    Raises:
        EnvironmentFault: it does not load there, or its dataset cannot be made.
    """
    name = config.name or config.id
    attributes = environment_arguments(config.extra_env_kwargs)
    tables = (config.taskset, config.agent)
    guest = Guest(place, python, module_id(config.id), config.args, attributes, config.judge, *tables)
    process = GuestProcess.start(guest)
    get_logger().info(f"Environment {name!r} runs in {python} ({process.versions})")
    try:
        return GuestEnvironment(name, process, RecordingProxy(), split, config.max_failed_groups)
    except BaseException:
        process.kill()
        raise


def _asked_for(sampling_args: Mapping[str, Any]) -> dict[str, Any]:
    """Sampling arguments without what the proxy asks for by itself, so that answers do not carry log-probabilities to
    an environment that drops them."""
    return {name: value for name, value in sampling_args.items() if name not in ("logprobs", "extra_body")}


def _all_rows(process: GuestProcess, split: str, count: int) -> Any:
    """The rows of the dataset as JSON texts, which need less memory than dictionaries."""
    start, at_once = 0, ROWS_AT_ONCE
    while start < count:
        try:
            rows = process.ask_now("rows", split=split, start=start, stop=min(start + at_once, count))
        except GuestError as error:
            if error.kind != BadFrame.__name__ or at_once == 1:
                raise
            at_once //= 2  # more than one message can hold
            continue
        yield from (json.dumps(row) for row in rows)
        start += at_once


def _steps(session: Session) -> list[dict[str, Any]]:
    """The session's calls in the form of a verifiers trajectory."""
    return [
        {
            "tokens": {
                "prompt_ids": call.prompt_ids,
                "completion_ids": call.completion_ids,
                "completion_logprobs": call.completion_logprobs,
                "completion_mask": call.completion_mask,
                "prompt_mask": call.prompt_mask,
            },
            "response": {"call": call.details.to_builtins()},
        }
        for call in session.trace.calls
    ]
