"""Waits for the inference servers of an evaluation."""

from __future__ import annotations

import asyncio
import time

from prime_rl.configs.shared import ClientConfig
from prime_rl.orchestrator.errors import InferenceFault
from prime_rl.orchestrator.servers.pool import InferencePool
from prime_rl.orchestrator.servers.server import InferenceServer
from prime_rl.utils.logger import get_logger

POLL_S = 0.5
READY_TIMEOUT_S = 1800.0


async def wait_until_served(pool: InferencePool, client: ClientConfig) -> None:
    """Wait until every server is ready, and check that it serves the model.

    Raises:
        InferenceFault: a server does not become ready, or does not serve the model.
    """
    await asyncio.gather(*(_wait_healthy(server) for server in pool.servers))
    if client.skip_model_check:
        return
    for server in pool.servers:
        models = await server.served_models()
        if server.model not in models:
            raise InferenceFault(
                f"{server.base_url} does not serve {server.model!r} but {', '.join(map(repr, models)) or 'no model'}: "
                "correct model.name, or set client.skip_model_check"
            )


async def _wait_healthy(server: InferenceServer) -> None:
    started_s, told = time.monotonic(), False
    while not await server.is_ready():
        if time.monotonic() - started_s > READY_TIMEOUT_S:
            raise InferenceFault(f"the inference server {server.root_url} is not ready after {READY_TIMEOUT_S:.0f} s")
        if not told:
            get_logger().info(f"Waiting for the inference server {server.root_url}")
            told = True
        await asyncio.sleep(POLL_S)
