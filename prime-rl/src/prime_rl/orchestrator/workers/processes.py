"""Starts, watches and stops environment server processes."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Coroutine, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prime_rl.configs.env_server import EnvServerConfig
from prime_rl.configs.orchestrator import EnvConfig
from prime_rl.configs.shared import LogConfig
from prime_rl.launch import ProcessSpec
from prime_rl.launch.logs import opened_for_attempt, tail
from prime_rl.orchestrator.env_server import PARENT_VARIABLE
from prime_rl.orchestrator.errors import EnvironmentFault
from prime_rl.orchestrator.workers.environment import Environment
from prime_rl.orchestrator.workers.in_memory import VerifiersWorker
from prime_rl.orchestrator.workers.port import PortWorker
from prime_rl.run.paths import OrchestratorPaths
from prime_rl.run.process import helper_heartbeat_env
from prime_rl.utils.logger import get_logger
from prime_rl.utils.pydantic_config import dump_toml
from prime_rl.utils.scratch import scratch_directory

STOP_GRACE_S = 8.0
MAX_ENDS_IN_A_ROW = 5
"""Ends of a server without an answer between them, after which its environment counts as broken."""
TAIL_LINES = 20


@dataclass(slots=True)
class EnvServer:
    """One server. Its process is replaced when it ends."""

    spec: ProcessSpec
    worker: PortWorker
    process: asyncio.subprocess.Process
    log_offset: int
    """Byte offset in the log at which this process's output starts."""
    ends_in_a_row: int = 0
    """Ends without an answer between them."""

    @property
    def name(self) -> str:
        return self.worker.name

    @property
    def log(self) -> Path:
        return self.spec.log

    def fault(self) -> EnvironmentFault:
        """An error that reports the exit code and the last lines of the log."""
        lines = [f"  | {line}" for line in tail(self.log, TAIL_LINES, self.log_offset)]
        headline = (
            f"the server of environment {self.name!r} ended with code {self.process.returncode}; its log is {self.log}"
        )
        return EnvironmentFault("\n".join([headline, *lines]))


class EnvServers:
    """The servers of a run. They listen on sockets in a directory that only this user can read."""

    def __init__(self, paths: OrchestratorPaths) -> None:
        self.paths = paths
        self._servers: list[EnvServer] = []
        self._closing = contextlib.ExitStack()
        self._sockets: Path | None = None

    async def start(
        self, purpose: str, configs: Sequence[EnvConfig], environments: Iterable[Environment], log: LogConfig
    ) -> None:
        """Start a server for each environment that would run in this process, and let it run there.

        `purpose` is `train` or `eval`.
        """
        for config, environment in zip(configs, environments, strict=True):
            if isinstance(environment.worker, VerifiersWorker):
                address = f"ipc://{self._socket_directory()}/{len(self._servers)}"
                worker = PortWorker(environment.name, environment.worker.env, address, is_ours=True)
                environment.worker = worker
                server = self._server_config(config, address, log)
                file = self.paths.control / f"env_{purpose}_{len(self._servers)}.toml"
                dump_toml(server, file)
                argv = (sys.executable, "-m", "prime_rl.orchestrator.env_server", "@", str(file))
                log_file = self.paths.env_log(purpose, environment.name)
                env = helper_heartbeat_env(f"{purpose}-{environment.name}")
                spec = ProcessSpec(environment.name, argv, log_file, env)
                self._servers.append(EnvServer(spec, worker, *await _start(spec)))

    async def guard(self, work: Coroutine[Any, Any, None]) -> None:
        """Await `work`, but fail as soon as a server exits.

        Raises:
            EnvironmentFault: a server has exited.
        """
        tasks = [asyncio.create_task(each) for each in (work, self._ends())]
        try:
            ended, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in ended:
                task.result()
        finally:
            for task in tasks:
                task.cancel()

    async def watch(self) -> None:
        """Start servers that end again, until cancelled. The groups that they had fail.

        Raises:
            EnvironmentFault: a server ends whenever it is started.
        """
        try:
            async with asyncio.TaskGroup() as group:
                for server in self._servers:
                    group.create_task(_keep_running(server))
                await asyncio.Event().wait()
        except BaseExceptionGroup as failures:
            raise failures.exceptions[0]  # noqa: B904 - keep the error's own cause, not the group

    async def _ends(self) -> None:
        """Wait until cancelled, or until a server exits. Raises EnvironmentFault then."""
        ends = [asyncio.create_task(server.process.wait()) for server in self._servers]
        try:
            if not ends:
                await asyncio.Event().wait()
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            raise next(server.fault() for server in self._servers if server.process.returncode is not None)
        finally:
            for task in ends:
                task.cancel()

    async def close(self) -> None:
        """Terminate all servers; kill those that still run after `STOP_GRACE_S`."""
        for server in self._servers:
            _send_group(server.process, signal.SIGTERM)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(STOP_GRACE_S):
                await self._ended()
        for server in self._servers:
            # The whole process group, including processes that the environment started.
            _send_group(server.process, signal.SIGKILL)
        await self._ended()
        self._closing.close()

    def _socket_directory(self) -> Path:
        if self._sockets is None:
            self._sockets = self._closing.enter_context(scratch_directory("env-servers"))
        return self._sockets

    async def _ended(self) -> None:
        await asyncio.gather(*(server.process.wait() for server in self._servers))

    def _server_config(self, config: EnvConfig, address: str, log: LogConfig) -> EnvServerConfig:
        settings = {name: getattr(config, name) for name in EnvConfig.model_fields}
        # The server's stdout is already redirected to its log file.
        to_stdout = log.model_copy(update={"file": False})
        return EnvServerConfig(
            env=EnvConfig(**settings | {"address": address}), log=to_stdout, output_dir=self.paths.root
        )


async def _keep_running(server: EnvServer) -> None:
    while True:
        await server.process.wait()
        fault = server.fault()
        has_answered = server.worker.server_ended(str(fault).splitlines()[0])
        server.ends_in_a_row = 1 if has_answered else server.ends_in_a_row + 1
        if server.ends_in_a_row >= MAX_ENDS_IN_A_ROW:
            raise fault
        get_logger().warning(f"It starts again: {fault}")
        # Its process group, including processes that the environment started.
        _send_group(server.process, signal.SIGKILL)
        server.process, server.log_offset = await _start(server.spec)


async def _start(spec: ProcessSpec) -> tuple[asyncio.subprocess.Process, int]:
    with opened_for_attempt(spec) as (log, offset):
        process = await asyncio.create_subprocess_exec(
            *spec.argv,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env={**os.environ, **spec.env, PARENT_VARIABLE: str(os.getpid())},
            # A process group, so that `close` also reaches processes that the environment starts.
            start_new_session=True,
        )
    get_logger().info(f"Environment {spec.name!r} is served by process {process.pid}; its log is {spec.log}")
    return process, offset


def _send_group(process: asyncio.subprocess.Process, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, number)
