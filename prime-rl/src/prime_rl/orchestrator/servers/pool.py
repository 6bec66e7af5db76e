"""Pool of inference servers: health checks, failover and weight updates."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp

from prime_rl.configs.shared import ClientConfig
from prime_rl.orchestrator.errors import InferenceFault
from prime_rl.orchestrator.rollouts.chat_client import ServerAnswered
from prime_rl.orchestrator.servers.server import InferenceServer
from prime_rl.run.beats import own_beats
from prime_rl.utils.logger import get_logger
from prime_rl.utils.waiting import Wait

FIRST_POLL_S, SLOWEST_POLL_S = 0.1, 1.0
WATCH_INTERVAL_S = 2.0
MISSED_WATCHES = 3
LONGEST_PAUSE_S = 60.0


class InferencePool:
    """All inference servers. Those in `serving` hold the same weights.

    A server that fails its health checks or a weight update is removed from `serving` if another server is left. It
    rejoins when it is healthy and holds the same weights as the others.
    """

    def __init__(self, config: ClientConfig, model: str, adapter: str | None = None) -> None:
        """`adapter` names the trained LoRA adapter on the servers. None: all weights of `model` are trained."""
        self.config = config
        self.model = model
        self.adapter = adapter
        self.servers = [InferenceServer(url, config, model, adapter) for url in config.base_url]
        self.serving = list(self.servers)
        self.is_group = False
        """Whether the servers receive weights as one NCCL group, which cannot lose a member."""
        self.weight_dir: Path | None = None
        """Directory of the weights that the servers loaded last; None is the base model."""
        self.before_update: list[Callable[[Path | None], None]] = []
        """Called with `weight_dir` before each update."""
        self.on_lost: list[Callable[[InferenceServer], None]] = []
        """Called with each server that is removed from `serving`."""
        self.sleep: Callable[[float], Awaitable[None]] = asyncio.sleep

    def least_loaded(self) -> InferenceServer:
        return min(self.serving, key=lambda server: server.groups_in_flight)

    async def wait_served(self, server_log: Path | None = None) -> None:
        """Wait until every server is healthy and serves the model.

        `server_log` is the log of a server that was started for this run; None if the user starts the servers.

        Raises:
            InferenceFault: a server is not healthy within `client.startup_timeout`, or serves another model.
        """
        own_beats().say("waiting for the inference servers", waits_for="inference")
        await asyncio.gather(*(self._wait_healthy(server, server_log) for server in self.servers))
        if not self.config.skip_model_check:
            await asyncio.gather(*(self._check_model(server) for server in self.servers))

    async def wait_ready(self, use_token_client: bool, server_log: Path | None = None) -> int:
        """Wait until every server is healthy, serves the model, and returns token ids and log-probabilities.

        Returns:
            The newest policy version that a server holds. Above 0 if an earlier run left its weights there.

        Raises:
            InferenceFault: as in `wait_served`, or a server's replies cannot be trained on.
        """
        await self.wait_served(server_log)
        versions = await asyncio.gather(*(server.probe() for server in self.servers))
        if use_token_client:
            await self._use_tokens()
        return max(version or 0 for version in versions)

    async def update_weights(self, weight_dir: Path | None) -> None:
        """Load weights into all serving servers. None loads the base model.

        Raises:
            InferenceFault: no server loaded them, or a member of an NCCL group did not.
        """
        self.weight_dir = weight_dir
        for listener in self.before_update:
            listener(weight_dir)
        servers = list(self.serving)
        loads = [server.update_weights(weight_dir) for server in servers]
        for server, result in zip(servers, await asyncio.gather(*loads, return_exceptions=True), strict=True):
            if isinstance(result, InferenceFault):
                self._remove(server, result)
            elif result is not None:
                raise result

    async def join_weight_group(self, host: str, port: int, timeout_s: int) -> None:
        """Have all servers join the trainer's NCCL weight group. From now on, losing a server ends the run.

        Raises:
            InferenceFault: a server could not join.
        """
        self.is_group = True
        count = len(self.servers)
        joins = [
            server.join_weight_group(host, port, (rank, count), timeout_s) for rank, server in enumerate(self.servers)
        ]
        await asyncio.gather(*joins)

    def watchers(self) -> list[Coroutine[Any, Any, None]]:
        """One coroutine per server that checks its health until cancelled. InferenceFault if no server is left."""
        return [self._watch(server) for server in self.servers]

    async def close(self) -> None:
        await asyncio.gather(*(server.close() for server in self.servers))

    async def _watch(self, server: InferenceServer) -> None:
        """Check a server's health every few seconds.

        Without this, a dead server is noticed only after its requests have exhausted their retries.
        """
        missed = 0
        while True:
            await self.sleep(WATCH_INTERVAL_S)
            if server not in self.serving:
                await self._readmit(server)
                missed = 0
            missed = missed + 1 if await server.is_gone() else 0
            if missed >= MISSED_WATCHES and server in self.serving:
                fault = InferenceFault(f"the inference server {server.root_url} is gone; its log says why")
                self._remove(server, fault)

    def _remove(self, server: InferenceServer, fault: InferenceFault) -> None:
        """Remove a server from `serving`. Raises `fault` if the run cannot continue without the server."""
        if server not in self.serving:
            return
        if len(self.serving) == 1 or self.is_group:
            raise fault
        self.serving.remove(server)
        get_logger().warning(f"{fault}; continuing with {len(self.serving)} of {len(self.servers)} servers")
        for listener in self.on_lost:
            listener(server)

    async def _readmit(self, server: InferenceServer) -> None:
        """Poll a removed server with exponential backoff until it can serve again, and add it to `serving`."""
        pause_s = WATCH_INTERVAL_S
        while not await self._try_reload(server):
            await self.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
        self.serving.append(server)
        get_logger().info(f"The inference server {server.root_url} is serving again")

    async def _try_reload(self, server: InferenceServer) -> bool:
        """Load the current weights; False if the server is unhealthy, the load fails, or an update came in between."""
        wanted = self.weight_dir
        if not await server.is_ready():
            return False
        await server.authenticate()
        try:
            await server.update_weights(wanted)
        except InferenceFault as fault:
            get_logger().debug(f"The inference server {server.root_url} cannot rejoin yet: {fault}")
            return False
        return wanted == self.weight_dir

    async def _wait_healthy(self, server: InferenceServer, server_log: Path | None) -> None:
        advice = f"its log is {server_log}" if server_log is not None else self._how_to_start(server)
        what = f"the inference server {server.root_url}"
        wait, poll_s = Wait(what, advice, self.config.startup_timeout, "client.startup_timeout"), FIRST_POLL_S
        while not await server.is_ready():
            if wait.is_over():
                raise InferenceFault(wait.fault)
            await asyncio.sleep(poll_s)
            poll_s = min(poll_s * 1.2, SLOWEST_POLL_S)
        await server.authenticate()

    async def _check_model(self, server: InferenceServer) -> None:
        try:
            models = await server.served_models()
        except (ServerAnswered, aiohttp.ClientError, KeyError) as error:
            raise InferenceFault(f"{server.base_url} does not list its models: {error}") from error
        if self.model not in models:
            raise InferenceFault(
                f"{server.base_url} does not serve {self.model!r} but {_format_names(models)}: "
                "correct model.name, or set client.skip_model_check"
            )

    def _how_to_start(self, server: InferenceServer) -> str:
        port = urlsplit(server.root_url).port
        flag = "" if port is None else f" --server.port {port}"
        return f"start it with `inference --model.name {self.model}{flag}`, or name a running one in client.base_url"

    async def _use_tokens(self) -> None:
        routes = await asyncio.gather(*(server.has_token_route() for server in self.servers))
        if all(routes):
            for server in self.servers:
                server.use_tokens()
            return
        get_logger().warning(
            "An inference server has no /v1/chat/completions/tokens route, so later turns are sent as text. If the "
            "tokens of that text differ from the sampled tokens, the turn becomes a separate sample"
        )


def _format_names(models: Sequence[Any]) -> str:
    return ", ".join(repr(model) for model in models) or "no model"
