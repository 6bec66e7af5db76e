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
from prime_rl.orchestrator.servers.channel import ServerAnswered
from prime_rl.orchestrator.servers.server import InferenceServer, unless
from prime_rl.run.process import own_beats, server_name
from prime_rl.utils.images import ShownImages
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

    def __init__(
        self, config: ClientConfig, model: str, adapter: str | None = None, images: ShownImages | None = None
    ) -> None:
        """`adapter` names the trained LoRA adapter on the servers. None: all weights of `model` are trained. `images`
        shows them images."""
        self.config = config
        self.model = model
        self.adapter = adapter
        self.images = images
        urls = [] if config.is_elastic else config.base_url
        self.servers = [InferenceServer(url, config, model, adapter, images) for url in urls]
        self.serving = list(self.servers)
        self.available = asyncio.Event()
        """Set while a server is in `serving`."""
        self.reasons: dict[InferenceServer, str] = {}
        """Reason why a server outside `serving` could not join it last."""
        self.longest_pause_s = LONGEST_PAUSE_S
        self.is_group = False
        """Whether the servers receive weights as one NCCL group, which cannot lose a member."""
        self.weight_dir: Path | None = None
        """Directory of the weights that the servers loaded last; None is the base model."""
        self.before_update: list[Callable[[Path | None], None]] = []
        """Called with `weight_dir` before each update."""
        self.on_lost: list[Callable[[InferenceServer], None]] = []
        """Called with each server that is removed from `serving`."""
        self.on_joined: list[Callable[[InferenceServer], None]] = []
        """Called with each server that is added to `serving`."""
        self.sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
        self._updating = asyncio.Lock()
        if self.serving:
            self.available.set()

    def least_loaded(self) -> InferenceServer | None:
        """The server with the fewest groups in flight; None while no server can take work."""
        return min(self.serving, key=lambda server: server.groups_in_flight, default=None)

    def missing(self) -> str:
        """Reason why no server can take work."""
        return "no server is ready"

    async def wait_for_server(self) -> None:
        """Wait until a server can take work. Raises InferenceFault if there is none in time."""
        await self.available.wait()

    def take_metrics(self) -> dict[str, float]:
        """Metrics since the last call. A fixed list of servers has none."""
        return {}

    async def wait_served(self, server_log: Path | None = None) -> None:
        """Wait until every server is healthy and serves the model.

        `server_log` is the log of the first server that was started for this run; None if the user starts the servers.

        Raises:
            InferenceFault: a server is not healthy within `client.startup_timeout`, or serves another model.
        """
        own_beats().say("waiting for the inference servers", waits_for=server_name(self.servers[0].base_url))
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
        async with self._updating:
            self.weight_dir = weight_dir
            for listener in self.before_update:
                listener(weight_dir)
            servers = list(self.serving)
            loads = [unless(server.lost, server.update_weights(weight_dir)) for server in servers]
            results = await asyncio.gather(*loads, return_exceptions=True)
        for server, result in zip(servers, results, strict=True):
            if isinstance(result, InferenceFault):
                self._remove(server, result)
            elif result is not None:
                raise result

    async def free_memory(self) -> None:
        """Put all serving servers to sleep until the next update. Raises InferenceFault if one cannot."""
        await asyncio.gather(*(server.free_memory() for server in self.serving))

    async def load(self, weight_dir: Path | None) -> None:
        """Load weights into all servers, and keep those that fail: other weights may work again.

        Raises:
            InferenceFault: a server did not load them.
        """
        await asyncio.gather(*(server.update_weights(weight_dir) for server in self.servers))

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
            if server not in self.serving:
                await self._readmit(server)
                missed = 0
            await self.sleep(WATCH_INTERVAL_S)
            missed = missed + 1 if await server.is_gone() else 0
            if missed >= MISSED_WATCHES and server in self.serving:
                fault = InferenceFault(f"the inference server {server.root_url} does not respond any more; see its log")
                self._remove(server, fault)

    def _remove(self, server: InferenceServer, fault: InferenceFault) -> None:
        """Remove a server from `serving`. Raises `fault` if the run cannot continue without the server."""
        if server not in self.serving:
            return
        if not self._may_go_on_without(server):
            raise fault
        self.serving.remove(server)
        if not self.serving:
            self.available.clear()
        server.lost.set()
        get_logger().warning(f"{fault}; continuing with {len(self.serving)} of {len(self.servers)} servers")
        for listener in self.on_lost:
            listener(server)

    def _may_go_on_without(self, server: InferenceServer) -> bool:
        return len(self.serving) > 1 and not self.is_group

    async def _readmit(self, server: InferenceServer) -> None:
        """Poll a server that is not in `serving`, with exponential backoff, until it can serve and has been added."""
        pause_s = min(WATCH_INTERVAL_S, self.longest_pause_s)
        while not await self._try_join(server):
            await self.sleep(pause_s)
            pause_s = min(2 * pause_s, self.longest_pause_s)

    async def _try_join(self, server: InferenceServer) -> bool:
        """Load the current weights, and add the server to `serving`. False if it is unhealthy, or the load fails."""
        if not await server.is_ready():
            self.reasons[server] = f"{server.root_url} is not healthy"
            return False
        try:
            await server.authenticate()
            wanted = self.weight_dir
            await self._bring_up(server, wanted)
            if wanted == self.weight_dir:
                self._join(server)
                return True
            # Updates come faster than this server loads: hold back the next one.
            async with self._updating:
                await self._bring_up(server, self.weight_dir)
                self._join(server)
                return True
        except InferenceFault as fault:
            if self.reasons.get(server) != str(fault):
                get_logger().warning(f"An inference server cannot join, and is tried again: {fault}")
            self.reasons[server] = str(fault)
            return False

    async def _bring_up(self, server: InferenceServer, weights: Path | None) -> None:
        """Load `weights` into a healthy server. Raises InferenceFault if it cannot serve with them."""
        await server.update_weights(weights)

    def _join(self, server: InferenceServer) -> None:
        self.reasons.pop(server, None)
        server.lost.clear()
        self.serving.append(server)
        self.available.set()
        get_logger().info(f"The inference server {server.root_url} joined: {len(self.serving)} are serving")
        for listener in self.on_joined:
            listener(server)

    async def _wait_healthy(self, server: InferenceServer, server_log: Path | None) -> None:
        advice = self._how_to_start(server)
        if server_log is not None:
            advice = f"its log is {server_log.with_stem(server_name(server.base_url))}"
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
        except (ServerAnswered, aiohttp.ClientError, LookupError, TypeError, ValueError) as error:
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
                server.takes_tokens = True
            return
        get_logger().warning(
            "An inference server has no /v1/chat/completions/tokens route, so later turns are sent as text. If the "
            "tokens of that text differ from the sampled tokens, the turn becomes a separate sample"
        )


def _format_names(models: Sequence[Any]) -> str:
    return ", ".join(repr(model) for model in models) or "no model"
