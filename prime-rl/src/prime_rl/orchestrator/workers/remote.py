"""Runs verifiers environments outside of the orchestrator's process: in one that it starts, or at an address.

There, a `VerifiersWorker` runs groups as it would here, with a recording proxy of its own. `Service` puts it behind the
messages of `inside/frames`, and `RemoteWorker` asks it.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import msgspec

from prime_rl.configs.env_server import EnvServerConfig
from prime_rl.configs.orchestrator import EnvConfig
from prime_rl.configs.shared import LogConfig
from prime_rl.orchestrator.rollouts.rollout import Recorded, Rollout
from prime_rl.orchestrator.rollouts.trace import CallDetails, ModelCall, Prompt, TokenTrace
from prime_rl.orchestrator.servers.channel import ChatChannel
from prime_rl.orchestrator.servers.server import MAX_RETRIES
from prime_rl.orchestrator.workers.blocked import Report
from prime_rl.orchestrator.workers.environment import Described, Environment, GroupRequest, Split
from prime_rl.orchestrator.workers.failures import GroupTimeout, in_time
from prime_rl.orchestrator.workers.in_memory import VerifiersWorker
from prime_rl.orchestrator.workers.inside.verifiers_api import Served
from prime_rl.orchestrator.workers.port import PortClient
from prime_rl.orchestrator.workers.process import RestartingProcess, WorkerSpec, pool_of
from prime_rl.run.paths import OrchestratorPaths
from prime_rl.run.process import helper_heartbeat_env, own_beats, server_name
from prime_rl.storage.staging import StoredImages
from prime_rl.transport.messages import ImageReference, LikeliestTokens, RoutedExperts
from prime_rl.utils.images import ImageLimits, ShownImages


class Connection(Protocol):
    """The way to a worker: `RestartingProcess`, `ProcessPool` or `PortClient`."""

    report: Report

    async def open(self) -> None: ...

    def chosen(self) -> AbstractContextManager[RestartingProcess | PortClient]:
        """The process that runs a group while the block runs."""

    async def close(self) -> None: ...


class RemoteWorker:
    """Sends the groups of a verifiers environment to a `Service`. The rows are read in this process."""

    def __init__(self, name: str, served: Served, connection: Connection) -> None:
        self.name = name
        self.served = served
        self.connection = connection

    def describe(self, split: Split) -> Described:
        return VerifiersWorker(self.served).describe(split)

    async def open(self) -> None:
        """Raises EnvironmentFault if the environment does not load there, or nothing answers."""
        await self.connection.open()

    def report_to(self, report: Report) -> None:
        self.connection.report = report

    async def roll_out(self, group: GroupRequest) -> list[Rollout]:
        """
        Raises:
            WorkerError: the environment's code failed.
            WorkerEnded: its process ended.
            GroupTimeout: it took longer than `timeout_s` of the environment.
            EnvironmentFault: its process ends whenever it is started, or cannot be reached.
        """
        with self.connection.chosen() as process:
            outputs = await self._asked(group, process)
        recorded = {output["session"]: unpacked(output.pop("calls")) for output in outputs}
        return group.read(outputs, recorded.__getitem__)

    async def _asked(self, group: GroupRequest, process: RestartingProcess | PortClient) -> list[dict[str, Any]]:
        server = group.server
        # A process that this run has started reports its model calls itself.
        is_ours = isinstance(process, RestartingProcess)
        calling = contextlib.nullcontext() if is_ours else own_beats().calling(server_name(server.base_url))
        limits = None if server.images is None else server.images.limits
        engine = Engine(
            server.base_url, server.headers, server.timeout_s, server.base_model, server.takes_tokens, limits
        )
        try:
            async with in_time(group.timeout_s, group.example.env, group.example.row):
                with calling:
                    outputs: list[dict[str, Any]] = await process.ask(
                        "run_group",
                        row=group.row,
                        size=group.size,
                        engine=asdict(engine),
                        model=server.model,
                        sampling_args=group.sampling_args,
                        max_retries=group.max_retries,
                    )
        except GroupTimeout:
            # A process that code without `await` blocks answers nothing, and is replaced.
            if process.blocked_s is not None:
                await process.ask("ping", process.blocked_s)
            raise
        return outputs

    def waits_for(self) -> str:
        return ""

    async def close(self) -> None:
        await self.connection.close()


@dataclass(frozen=True, slots=True)
class Engine:
    """The inference server that a group asks, as a request names it."""

    base_url: str
    headers: dict[str, str]
    timeout_s: float
    base_model: str
    takes_tokens: bool
    image_limits: ImageLimits | None = None
    """Of images that it is shown; None: of none."""


@dataclass(frozen=True, slots=True)
class _Upstream:
    channel: ChatChannel
    base_model: str
    images: ShownImages | None


class Service:
    """What a `RemoteWorker` may ask."""

    def __init__(self, served: Served) -> None:
        self.served = served
        self._worker = VerifiersWorker(served)
        self._servers: dict[str, _Upstream] = {}
        self._images: dict[ImageLimits | None, ShownImages | None] = {None: None}

    async def run_group(
        self,
        row: dict[str, Any],
        size: int,
        engine: dict[str, Any],
        model: str,
        sampling_args: dict[str, Any],
        max_retries: int,
    ) -> list[dict[str, Any]]:
        """The rollouts of a row, each with the model calls that its session recorded."""
        asked = msgspec.convert(engine, Engine)
        if (key := repr(engine)) not in self._servers:
            channel = ChatChannel(asked.base_url, asked.headers, asked.timeout_s, MAX_RETRIES)
            if (limits := asked.image_limits) is not None and limits not in self._images:
                self._images[limits] = ShownImages(limits, StoredImages())  # one for all servers: it holds files
            self._servers[key] = _Upstream(channel, asked.base_model, self._images[limits])
        outputs, sessions = await self._worker.run(
            row, size, self._servers[key], model, asked.takes_tokens, sampling_args, max_retries
        )
        return [{**output, "calls": packed(sessions[output["session"]].recorded)} for output in outputs]

    def ping(self) -> None:
        """Answers while the environment's code does not block the process."""

    def after_answer(self) -> None:
        """Nothing ends the process."""

    async def close(self) -> None:
        """Tear down the environment, and close the connections to the engines."""
        for server in self._servers.values():
            await server.channel.close()
        await self.served.env._teardown()


def packed(recorded: Recorded) -> list[dict[str, Any]]:
    """Model calls as plain values. A prompt that continues an earlier call has only its own tokens."""
    calls = [call for _, call in recorded]
    places = {id(call): at for at, call in enumerate(calls)}
    return [
        {
            "id": name,
            "prompt": call.prompt.added,
            "earlier": None if call.prompt.earlier is None else places[id(call.prompt.earlier)],
            "completion": call.completion_ids,
            "logprobs": call.inference_logprobs,
            "details": call.details.to_builtins(),
            "routed_experts": msgspec.to_builtins(call.routed_experts),
            "images": msgspec.to_builtins(call.images),
            "top": msgspec.to_builtins(call.top),
        }
        for name, call in recorded
    ]


class _Call(msgspec.Struct):
    id: str
    prompt: list[int]
    completion: list[int]
    logprobs: list[float]
    details: CallDetails
    earlier: int | None = None
    routed_experts: RoutedExperts | None = None
    images: tuple[ImageReference, ...] = ()
    top: LikeliestTokens | None = None


def unpacked(values: Any) -> list[tuple[str, ModelCall]]:
    """The calls that `packed` gave. Raises msgspec.ValidationError."""
    trace = TokenTrace()
    recorded = []
    for each in msgspec.convert(values, list[_Call]):
        prompt = Prompt.of(each.prompt)
        if each.earlier is not None:
            earlier = trace.calls[each.earlier]
            prompt = Prompt(each.prompt, None, earlier, earlier.total_tokens)
        mask = [True] * len(each.completion)
        parts = (each.details, each.routed_experts, each.images, each.top)
        call = ModelCall(prompt, each.completion, each.logprobs, mask, *parts)
        trace.calls.append(call)
        recorded.append((each.id, call))
    return recorded


def run_in_processes(
    purpose: str,
    configs: Sequence[EnvConfig],
    environments: Iterable[Environment],
    log: LogConfig,
    root: Path,
    also_single: bool = False,
) -> None:
    """Let environments with `num_workers` run in that many processes of their own, which `connect` starts.

    `also_single` lets the others that would run in this process run in one. `purpose` is `train` or `eval`, and `root`
    the directory of the logs.
    """
    for config, environment in zip(configs, environments, strict=True):
        worker = environment.worker
        if not isinstance(worker, VerifiersWorker) or (config.num_workers is None and not also_single):
            continue
        name = environment.name
        specs = []
        env = EnvConfig.model_validate(config.model_dump(include=set(EnvConfig.model_fields)))
        # The process's output is its log file.
        served_there = EnvServerConfig(env=env, log=log.model_copy(update={"file": False}), output_dir=root)
        for number in range(1, (config.num_workers or 1) + 1):
            own_name = name if number == 1 else f"{name}-{number}"
            specs.append(
                WorkerSpec(
                    place=f"environment {name!r}",
                    python=Path(sys.executable),
                    module=config.id,
                    args=served_there.model_dump(mode="json"),
                    attributes={},
                    program=("-m", "prime_rl.orchestrator.env_server", "--socket"),
                    added=helper_heartbeat_env(f"{purpose}-{own_name}"),
                    is_ours=True,
                    log=OrchestratorPaths(root).env_log(purpose, own_name),
                    server_of=name,
                )
            )
        environment.worker = RemoteWorker(name, worker.served, pool_of(specs))
