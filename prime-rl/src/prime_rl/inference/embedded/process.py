"""The embedded engine's process: an HTTP server that responds at once, and a thread that loads and runs the model."""

from __future__ import annotations

import asyncio
import signal
import socket
import threading
import time
from itertools import islice
from types import FrameType
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from prime_rl.configs.inference import InferenceConfig
from prime_rl.inference.embedded.http.api import Api
from prime_rl.inference.protocol import HEAD_TIMEOUT_S, MAX_CONNECTIONS
from prime_rl.run.process import own_beats
from prime_rl.utils.http_server import quiet_logger
from prime_rl.utils.imports import bound_kernel_caches, import_transformers, import_without_gc
from prime_rl.utils.limits import allow_connections
from prime_rl.utils.logger import SUCCESS, get_logger

_NUM_CANDIDATES = 32
_LOG = quiet_logger("inference")


class BoundedConnection(H11Protocol):
    """uvicorn's HTTP/1.1 connection, which makes way for others while it is idle.

    uvicorn has no timeout for a connection that never sends a request. If `limit_concurrency` connections are open,
    it answers every request with 503, even if all the others are idle.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.logger = _LOG

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        if self.limit_concurrency is not None and len(self.connections) + 1 >= self.limit_concurrency:
            self._close_an_idle_one()
        super().connection_made(transport)
        self._idle_since_s = self.loop.time()
        self._head_timer = self.loop.call_later(HEAD_TIMEOUT_S, self._close_if_unused)

    def connection_lost(self, exc: Exception | None) -> None:
        self._head_timer.cancel()
        super().connection_lost(exc)

    def on_response_complete(self) -> None:
        self._idle_since_s = self.loop.time()
        super().on_response_complete()

    @property
    def is_idle(self) -> bool:
        """Whether no request is being received or answered, so that closing the connection loses none."""
        return self.cycle is None or self.cycle.response_complete

    def _close_if_unused(self) -> None:
        if self.cycle is None:
            self.transport.close()

    def _close_an_idle_one(self) -> None:
        """Close the longest idle among a few connections. Comparing all would take longer than a request."""
        idle = (one for one in self.connections if isinstance(one, BoundedConnection) and one.is_idle)
        if oldest := min(islice(idle, _NUM_CANDIDATES), key=lambda one: one._idle_since_s, default=None):
            self.connections.discard(oldest)
            oldest.transport.close()


_GRACE_S = 3


class EmbeddedServer(uvicorn.Server):
    """A uvicorn server that starts and stops the engine's thread with itself."""

    def __init__(self, config: InferenceConfig, key: str) -> None:
        """`key` is required of every request but health checks."""
        self.api = Api(config.model.name, key, public_metrics=config.server.public_metrics)
        # lifespan="off": this class manages the engine's thread.
        super().__init__(
            uvicorn.Config(
                self.api.app(),
                lifespan="off",
                # uvicorn takes uvloop if it is installed, whose connections have no `asyncio.Transport` to bound.
                loop="asyncio",
                log_level="warning",
                access_log=False,
                timeout_graceful_shutdown=_GRACE_S,
                timeout_keep_alive=75,
                http=BoundedConnection,
                limit_concurrency=allow_connections(MAX_CONNECTIONS),
            )
        )
        self.inference = config
        self.failure: Exception | None = None
        self._engine_thread = threading.Thread(target=self._run_engine, name="engine", daemon=True)

    def serve_until_stopped(self, listener: socket.socket) -> None:
        """Serve on `listener` until SIGTERM, SIGINT or an engine failure.

        Raises:
            EngineError: the model cannot be served; the message is one line for the user.
            Exception: any other error of the engine's thread.
        """
        # uvicorn raises the signal again after its clean-up; a requested stop must not end the process with a failure.
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: None)
        self._engine_thread.start()
        self.run(sockets=[listener])
        if self.api.service is not None:
            self._engine_thread.join(timeout=_GRACE_S)
        if self.failure is not None:
            raise self.failure

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Fail requests in flight with status 503 instead of waiting for them, then stop."""
        if self.api.service is not None:
            self.api.service.engine.stop()
        super().handle_exit(sig, frame)

    def _run_engine(self) -> None:
        started = time.perf_counter()
        try:
            # Imported here because it takes seconds, during which the server already responds with 503.
            bound_kernel_caches()
            with import_without_gc():
                import_transformers()
                from prime_rl.inference.embedded.startup import start_service

            service = start_service(self.inference)
            own_beats().started()
            self.api.service = service
            get_logger().log(
                SUCCESS,
                f"Inference ready in {time.perf_counter() - started:.1f}s: {self.inference.model.name} on "
                f"{self.inference.server.address}:{self.inference.server.port}",
            )
            service.engine.run()
        except Exception as exc:  # noqa: BLE001 - the main thread raises it
            self.failure = exc
        finally:
            self.should_exit = True
