"""The inference servers of an evaluation: one of its own, or running ones."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from prime_rl.configs.inference import InferenceConfig
from prime_rl.configs.shared import ClientConfig
from prime_rl.eval.errors import ServerLost
from prime_rl.launch import LocalHost, reserved_ports
from prime_rl.launch.devices import DeviceError, choose_device, mask, thread_env, usable_cores, usable_gpus
from prime_rl.launch.programs import Programs, inference_spec
from prime_rl.launch.spec import Exited
from prime_rl.orchestrator.errors import InferenceFault
from prime_rl.orchestrator.servers.pool import InferencePool
from prime_rl.orchestrator.servers.server import InferenceServer
from prime_rl.run.paths import RunPaths
from prime_rl.utils.logger import get_logger

POLL_S = 0.5
READY_TIMEOUT_S = 1800.0


@dataclass(frozen=True, slots=True)
class OwnServer:
    """A server that lives as long as the evaluation."""

    base_url: str
    host: LocalHost

    async def watch(self) -> None:
        """Look after the server, for ever.

        Raises:
            ServerLost: it has ended.
        """
        while True:
            event = self.host.next_event(0.0)
            if isinstance(event, Exited):
                tail = "".join(f"\n  | {line}" for line in self.host.tail(event.name))
                raise ServerLost(f"the inference server {event}; its last lines:{tail}")
            await asyncio.sleep(POLL_S)


@contextmanager
def own_server(config: InferenceConfig, paths: RunPaths, host: LocalHost) -> Iterator[OwnServer]:
    """Start the server that `paths.config("inference")` describes, on a free port of this machine.

    Raises:
        DeviceError: there are fewer GPUs than it takes.
        CannotStart: its program is not there.
    """
    env = place(config, os.environ)
    with reserved_ports(1) as (port,):
        address = ("--server.host", "127.0.0.1", "--server.port", str(port))
        spec = inference_spec(paths, Programs.find(), env, *address)
        host.start(spec)
        get_logger().info(f"Inference server started, log {spec.log}")
        yield OwnServer(f"http://127.0.0.1:{port}/v1", host)


def place(config: InferenceConfig, env: Mapping[str, str]) -> dict[str, str]:
    """What the server's environment gets: its GPUs, or all cores. Raises DeviceError."""
    usable, count = usable_gpus(env), config.parallel.tp * config.parallel.dp
    if choose_device(config.device, usable) == "cpu":
        return {**thread_env(usable_cores(), 1, env), **mask(())}
    if len(usable) < count:
        raise DeviceError(f"inference takes {count} GPUs, but {len(usable)} can be used: {','.join(usable)}")
    return mask(usable[:count])


async def wait_until_served(pool: InferencePool, client: ClientConfig) -> None:
    """Wait until every server is up, and see that it serves the model.

    Raises:
        InferenceFault: one does not come up, or does not serve the model.
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
