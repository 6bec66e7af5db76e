"""The inference servers of the policy, and which of them serve at the moment."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

import aiohttp

from prime_rl.configs.shared import ClientConfig
from prime_rl.orchestrator.errors import InferenceFault
from prime_rl.orchestrator.rollouts.chat_client import ServerAnswered
from prime_rl.orchestrator.servers.server import InferenceServer
from prime_rl.utils.logger import get_logger

READY_TIMEOUT_S = 1800.0
FIRST_POLL_S, SLOWEST_POLL_S = 0.1, 1.0
WATCH_INTERVAL_S = 2.0
MISSED_WATCHES = 3
LONGEST_PAUSE_S = 60.0


class InferencePool:
    """All servers of the policy. Those that serve hold the same weights.

    A server that is gone or does not load weights is left out, as long as another one serves. It comes back once it is
    healthy and holds the weights that the others hold.
    """

    def __init__(self, config: ClientConfig, model: str, adapter: str | None = None) -> None:
        """`adapter` is the name under which the servers get what is trained; None trains all weights of `model`."""
        self.config = config
        self.model = model
        self.adapter = adapter
        self.servers = [InferenceServer(url, config, model, adapter) for url in config.base_url]
        self.serving = list(self.servers)
        self.is_group = False
        """Whether the servers receive weights together, so that none can be left out."""
        self.weight_dir: Path | None = None
        """What the servers were told to load last; None is the base model."""
        self.before_update: list[Callable[[Path | None], None]] = []
        """Called with what the servers are told to load, just before."""
        self.on_lost: list[Callable[[InferenceServer], None]] = []
        """Called with each server that is left out."""
        self.sleep: Callable[[float], Awaitable[None]] = asyncio.sleep

    def least_loaded(self) -> InferenceServer:
        return min(self.serving, key=lambda server: server.groups_in_flight)

    async def wait_ready(self, use_token_client: bool) -> int:
        """Wait until every server is up, serves the model, and answers with what training needs.

        Returns:
            The newest version of the model that a server holds: above 0 when an earlier run left its weights there.

        Raises:
            InferenceFault: a server does not come up, or cannot be used.
        """
        await asyncio.gather(*(self._wait_healthy(server) for server in self.servers))
        if not self.config.skip_model_check:
            await asyncio.gather(*(self._check_model(server) for server in self.servers))
        versions = await asyncio.gather(*(server.probe() for server in self.servers))
        if use_token_client:
            await self._use_tokens()
        return max(version or 0 for version in versions)

    async def update_weights(self, weight_dir: Path | None) -> None:
        """Load weights into all servers that serve.

        Raises:
            InferenceFault: none of them did.
        """
        self.weight_dir = weight_dir
        for listener in self.before_update:
            listener(weight_dir)
        servers = list(self.serving)
        loads = [server.update_weights(weight_dir) for server in servers]
        for server, result in zip(servers, await asyncio.gather(*loads, return_exceptions=True), strict=True):
            if isinstance(result, InferenceFault):
                self._leave_out(server, result)
            elif result is not None:
                raise result

    async def join_weight_group(self, host: str, port: int, timeout_s: int) -> None:
        """Let all servers join the trainer's weight group. From now on, a server that is lost ends the run.

        Raises:
            InferenceFault: one of them could not.
        """
        self.is_group = True
        count = len(self.servers)
        joins = [
            server.join_weight_group(host, port, (rank, count), timeout_s) for rank, server in enumerate(self.servers)
        ]
        await asyncio.gather(*joins)

    def watchers(self) -> list[Coroutine[Any, Any, None]]:
        """For each server one that looks at it for ever, and raises InferenceFault when the last one is gone."""
        return [self._watch(server) for server in self.servers]

    async def close(self) -> None:
        await asyncio.gather(*(server.close() for server in self.servers))

    async def _watch(self, server: InferenceServer) -> None:
        """Look at a server every few seconds.

        Without this, a dead server shows only once all requests have used up their retries.
        """
        missed = 0
        while True:
            await self.sleep(WATCH_INTERVAL_S)
            if server not in self.serving:
                await self._take_back(server)
                missed = 0
            missed = missed + 1 if await server.is_gone() else 0
            if missed >= MISSED_WATCHES and server in self.serving:
                fault = InferenceFault(f"the inference server {server.root_url} is gone; its log says why")
                self._leave_out(server, fault)

    def _leave_out(self, server: InferenceServer, fault: InferenceFault) -> None:
        """Raises the fault when no other server serves."""
        if server not in self.serving:
            return
        if len(self.serving) == 1 or self.is_group:
            raise fault
        self.serving.remove(server)
        get_logger().warning(f"{fault}; {len(self.serving)} of {len(self.servers)} servers go on")
        for listener in self.on_lost:
            listener(server)

    async def _take_back(self, server: InferenceServer) -> None:
        """Wait until a server that was left out can serve again, looking less and less often."""
        pause_s = WATCH_INTERVAL_S
        while not await self._is_up_to_date(server):
            await self.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
        self.serving.append(server)
        get_logger().info(f"The inference server {server.root_url} serves again")

    async def _is_up_to_date(self, server: InferenceServer) -> bool:
        """Whether it is healthy and has just loaded what the others hold; they may have moved on meanwhile."""
        wanted = self.weight_dir
        if not await server.is_ready():
            return False
        try:
            await server.update_weights(wanted)
        except InferenceFault as fault:
            get_logger().debug(f"Not back yet: {fault}")
            return False
        return wanted == self.weight_dir

    async def _wait_healthy(self, server: InferenceServer) -> None:
        started, poll_s, told = time.monotonic(), FIRST_POLL_S, False
        while not await server.is_ready():
            if time.monotonic() - started > READY_TIMEOUT_S:
                raise InferenceFault(
                    f"the inference server {server.root_url} is not ready after {READY_TIMEOUT_S:.0f} s"
                )
            if not told:
                get_logger().info(f"Waiting for the inference server {server.root_url}")
                told = True
            await asyncio.sleep(poll_s)
            poll_s = min(poll_s * 1.2, SLOWEST_POLL_S)

    async def _check_model(self, server: InferenceServer) -> None:
        try:
            models = await server.served_models()
        except (ServerAnswered, aiohttp.ClientError, KeyError) as error:
            raise InferenceFault(f"{server.base_url} does not list its models: {error}") from error
        if self.model not in models:
            raise InferenceFault(
                f"{server.base_url} does not serve {self.model!r} but {_listed(models)}: "
                "correct orchestrator.model.name, or set orchestrator.client.skip_model_check"
            )

    async def _use_tokens(self) -> None:
        routes = await asyncio.gather(*(server.has_token_route() for server in self.servers))
        if all(routes):
            for server in self.servers:
                server.use_tokens()
            return
        get_logger().warning(
            "An inference server has no /v1/chat/completions/tokens, so later turns travel as text; where that is "
            "tokenized otherwise than it was sampled, they become samples of their own"
        )


def _listed(models: Sequence[Any]) -> str:
    return ", ".join(repr(model) for model in models) or "no model"
