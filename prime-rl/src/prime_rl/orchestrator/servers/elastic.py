"""Elastic pool: the inference servers that a DNS name resolves to, as they come and go."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from prime_rl.configs.shared import ClientConfig, ElasticConfig
from prime_rl.orchestrator.errors import InferenceFault
from prime_rl.orchestrator.servers.channel import ServerAnswered
from prime_rl.orchestrator.servers.discovery import LookupFault, Resolver, SystemResolver, server_url
from prime_rl.orchestrator.servers.pool import InferencePool
from prime_rl.orchestrator.servers.server import InferenceServer
from prime_rl.run.paths import step_of
from prime_rl.run.process import own_beats
from prime_rl.utils.images import ShownImages
from prime_rl.utils.logger import count_of, get_logger
from prime_rl.utils.waiting import Wait

NO_ROUTE = (404, 405)
SHOWN_REASONS = 3


class ElasticPool(InferencePool):
    """The servers at the addresses of `client.elastic.hostname`. It may be empty for `client.elastic.empty_timeout`.

    A new server serves the model, holds the current weights and reports their version before it is in `serving`. A
    server whose address is gone leaves at once; one that fails its health checks, when these notice it.
    """

    def __init__(
        self,
        config: ClientConfig,
        elastic: ElasticConfig,
        model: str,
        adapter: str | None,
        resolver: Resolver,
        images: ShownImages | None = None,
    ) -> None:
        super().__init__(config, model, adapter, images)
        self.elastic = elastic
        self.longest_pause_s = elastic.sync_interval
        self.joined = self.left = 0
        """Number of servers that joined and left since the last report."""
        self.on_joined.append(self._count_joined)
        self.on_lost.append(self._count_left)
        self._resolver = resolver
        self._lookup_fault: str | None = None
        self._discovery: asyncio.Task[None] | None = None
        self._trains = self._wants_tokens = False
        self._has_served = False
        self._wait = self._new_wait()

    async def wait_served(self, server_log: Path | None = None) -> None:
        """Start to look for servers, and wait for the first that can serve.

        Raises:
            InferenceFault: there is none within `client.startup_timeout`.
        """
        own_beats().say(f"waiting for an inference server at {self.elastic.hostname}", waits_for="inference")
        self._discovery = asyncio.create_task(self._discover())
        await self.wait_for_server()

    async def wait_ready(self, use_token_client: bool, server_log: Path | None = None) -> int:
        """Wait for the first server whose replies can be trained on. It holds the base model: the version is 0."""
        self._trains, self._wants_tokens = True, use_token_client
        await self.wait_served(server_log)
        return 0

    async def wait_for_server(self) -> None:
        if self.available.is_set():
            return
        assert self._discovery is not None, "wait_served starts the discovery"
        serves = asyncio.create_task(self.available.wait())
        try:
            await asyncio.wait({serves, self._discovery}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            serves.cancel()
        if self._discovery.done():
            self._discovery.result()

    async def load(self, weight_dir: Path | None) -> None:
        """Like `update_weights`, but raises if no server loaded them, because the weights themselves may be faulty."""
        await self.wait_for_server()
        await self.update_weights(weight_dir)
        if not self.serving and (reasons := self._reasons()):
            raise InferenceFault(reasons[0])

    def missing(self) -> str:
        name = repr(self.elastic.hostname)
        if self._lookup_fault is not None:
            return self._lookup_fault
        if not self.servers:
            return f"{name} resolves to no address"
        reasons = "; ".join(self._reasons()[:SHOWN_REASONS]) or "they are being brought up"
        return f"{name} resolves to {count_of('address', len(self.servers), 'es')}, none is ready: {reasons}"

    def watchers(self) -> list[Coroutine[Any, Any, None]]:
        return [self._supervise()]

    def take_metrics(self) -> dict[str, float]:
        """`elastic/*` of the time since the last call."""
        joined, left, self.joined, self.left = self.joined, self.left, 0, 0
        return {
            "elastic/num_servers": len(self.servers),
            "elastic/num_ready_servers": len(self.serving),
            "elastic/joined": joined,
            "elastic/left": left,
        }

    async def close(self) -> None:
        if self._discovery is not None:
            self._discovery.cancel()
            with suppress(asyncio.CancelledError, InferenceFault):
                await self._discovery
        await super().close()

    async def _supervise(self) -> None:
        assert self._discovery is not None, "wait_served starts the discovery"
        # If the steps end first, `close` ends the discovery.
        await asyncio.shield(self._discovery)

    async def _discover(self) -> None:
        """Keep `servers` equal to the addresses of the name, until cancelled. Raises InferenceFault if none serves."""
        watches: dict[InferenceServer, asyncio.Task[None]] = {}
        try:
            async with asyncio.TaskGroup() as group:
                while True:
                    for gone in await self._look_up():
                        watches.pop(gone).cancel()
                        await gone.close()
                    for server in self.servers:
                        if server not in watches:
                            watches[server] = group.create_task(self._watch(server))
                    self._check_not_empty()
                    await self.sleep(min(self.elastic.sync_interval, self._wait.limit_s))
        except BaseExceptionGroup as failures:
            raise failures.exceptions[0]  # noqa: B904 - keep the error's own cause, not the group

    async def _look_up(self) -> list[InferenceServer]:
        """Add a server for each new address, and return the servers that were removed with theirs."""
        try:
            addresses = await self._resolver.addresses(self.elastic.hostname)
        except LookupFault as fault:
            # A failed lookup removes nothing: health checks still find servers that are gone.
            if self._lookup_fault is None:
                get_logger().warning(f"{fault}; keeping {count_of('inference server', len(self.servers))}")
            self._lookup_fault = str(fault)
            return []
        self._lookup_fault = None
        wanted = {server_url(address, self.elastic.port) for address in addresses}
        gone = [server for server in self.servers if server.base_url not in wanted]
        for server in gone:
            self._leave(server)
        for url in sorted(wanted - {server.base_url for server in self.servers}):
            self.servers.append(InferenceServer(url, self.config, self.model, self.adapter, self.images))
        return gone

    def _leave(self, server: InferenceServer) -> None:
        self.servers.remove(server)
        self.reasons.pop(server, None)
        if server in self.serving:
            fault = InferenceFault(f"{self.elastic.hostname!r} no longer resolves to {server.root_url}")
            self._remove(server, fault)

    def _check_not_empty(self) -> None:
        if self.serving:
            self._has_served, self._wait = True, self._new_wait()
            return
        # The launcher must not see a stall: this wait has its own limit.
        own_beats().tick()
        if self._wait.is_over():
            raise InferenceFault(f"{self._wait.fault}; {self.missing()}")

    def _new_wait(self) -> Wait:
        limits = {
            False: (self.config.startup_timeout, "client.startup_timeout"),
            True: (self.elastic.empty_timeout, "client.elastic.empty_timeout"),
        }
        limit_s, key = limits[self._has_served]
        advice = f"start one with `inference --model.name {self.model} --server.port {self.elastic.port}`"
        return Wait(f"an inference server at {self.elastic.hostname}", advice, limit_s, key)

    async def _bring_up(self, server: InferenceServer, weights: Path | None) -> None:
        """Check the model of a new server, and load `weights`. Without training, only the load tells what it holds."""
        if not self.config.skip_model_check:
            await self._check_model(server)
        if not self._trains:
            await _load_if_possible(server, weights)
            return
        held = await server.probe()
        if weights is not None or held:
            await server.update_weights(weights)
            await self._check_version(server, weights)
        if self._wants_tokens and await server.has_token_route():
            server.takes_tokens = True

    async def _check_version(self, server: InferenceServer, weights: Path | None) -> None:
        held, wanted = await server.probe(), 0 if weights is None else step_of(weights)
        if None not in (held, wanted) and held != wanted:
            raise InferenceFault(f"{server.root_url} holds policy version {held} after it loaded {wanted}")

    def _may_go_on_without(self, server: InferenceServer) -> bool:
        return True

    def _reasons(self) -> Sequence[str]:
        return [self.reasons[server] for server in self.servers if server in self.reasons]

    def _count_joined(self, server: InferenceServer) -> None:
        self.joined += 1

    def _count_left(self, server: InferenceServer) -> None:
        self.left += 1


async def _load_if_possible(server: InferenceServer, weights: Path | None) -> None:
    """Load weights, unless the server has no route for it: then it still holds the base model."""
    try:
        await server.update_weights(weights)
    except InferenceFault as fault:
        cannot = isinstance(fault.__cause__, ServerAnswered) and fault.__cause__.status in NO_ROUTE
        if not cannot or weights is not None:
            raise


def inference_pool(
    config: ClientConfig,
    model: str,
    adapter: str | None = None,
    resolver: Resolver | None = None,
    images: ShownImages | None = None,
) -> InferencePool:
    """The servers of `client.base_url` or, with `client.elastic`, those that its name resolves to."""
    if config.elastic is None:
        return InferencePool(config, model, adapter, images)
    return ElasticPool(config, config.elastic, model, adapter, resolver or SystemResolver(), images)
