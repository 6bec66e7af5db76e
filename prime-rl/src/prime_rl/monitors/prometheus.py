"""Serves metrics for Prometheus and a health check over HTTP, from the trainer's and the orchestrator's process."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from prime_rl.configs.shared import MetricsServerConfig
from prime_rl.monitors.base import Metrics
from prime_rl.utils.engine_keys import is_bearer, named_key, new_engine_key, published_key
from prime_rl.utils.errors import NotPrivate, RunError
from prime_rl.utils.logger import get_logger


@dataclass(frozen=True, slots=True)
class Gauges:
    """Metrics that a process exports. Others are not exported."""

    metrics: Mapping[str, str]
    """Gauge names and the metric that each one reports."""
    steps: tuple[str, str]
    """Gauges of the step and of the time of its end."""
    ones: tuple[str, ...] = ()
    """Gauges that are 1 once there was a step."""
    of_run: Mapping[str, str] = field(default_factory=dict)
    """Gauges with a `run` label and their metrics."""
    states_of_run: tuple[str, ...] = ()
    """Gauges with a `run` label: the step, and whether there was one."""


_TRAINER_METRICS: Mapping[str, str] = {
    "trainer_loss": "loss/mean",
    "trainer_throughput_tokens_per_sec": "perf/throughput",
    "trainer_grad_norm": "optim/grad_norm",
    "trainer_peak_memory_gib": "perf/peak_memory",
    "trainer_learning_rate": "optim/lr",
    "trainer_mfu_percent": "perf/mfu",
    "trainer_entropy": "entropy/mean",
    "trainer_mismatch_kl": "mismatch_kl/mean",
    "trainer_kl_ent_ratio": "kl_ent_ratio/mean",
}
TRAINER = Gauges(
    _TRAINER_METRICS,
    steps=("trainer_step", "trainer_last_step_timestamp_seconds"),
    ones=tuple(f"trainer_runs_{state}" for state in ("discovered", "active", "ready", "max")),
    of_run={"trainer_run_tokens": "progress/tokens", "trainer_run_learning_rate": "optim/lr"},
    states_of_run=("trainer_run_step", "trainer_run_ready"),
)
ORCHESTRATOR = Gauges(
    {
        "orchestrator_reward": "reward/mean",
        "orchestrator_failed_groups": "failed_groups/share",
        "orchestrator_rollout_error_rate": "error/mean",
        "orchestrator_solve_none": "batch/solve_none",
        "orchestrator_solve_all": "batch/solve_all",
        "orchestrator_async_level": "batch/async_level",
        "orchestrator_groups_lag_max": "batch/lag/max",
        "orchestrator_inflight_rollouts": "batch/inflight_samples",
        "orchestrator_cancelled_rollouts": "batch/cancelled_rollouts",
        "orchestrator_policy_version": "progress/ckpt_step",
        "orchestrator_total_tokens": "progress/total_tokens",
        "orchestrator_total_samples": "progress/total_samples",
        "orchestrator_throughput_tokens_per_sec": "perf/throughput",
        "orchestrator_step_seconds": "time/step",
        "orchestrator_generate_seconds": "time/generate_completions",
    },
    steps=("orchestrator_step", "orchestrator_last_step_timestamp_seconds"),
)
RUN_LABEL = 'run="run_default"'
METRICS_KEY_VARIABLE = "PRIME_RL_METRICS_KEY"


class MetricsServer:
    """Serves `GET /health` ("ok") and `GET /metrics`, both from the start.

    Before the first step, gauges are 0, and gauges with a `run` label have no value. With `has_metrics=False` it serves
    only `/health`. The first process of every other machine does this, because only the main process logs metrics.

    Unless the config says `public`, `/metrics` needs `Authorization: Bearer KEY`: the value of `PRIME_RL_METRICS_KEY`,
    or else a random key in a file that only this user can read.
    """

    def __init__(self, config: MetricsServerConfig, has_metrics: bool = True, gauges: Gauges = TRAINER) -> None:
        """Start listening.

        Raises:
            RunError: the port is in use, the host is not an address of this machine, or other users can enter the
                directory of keys.
        """
        self._gauges = gauges
        names = (*gauges.steps, *gauges.metrics, *gauges.ones)
        self._values: dict[str, float | str] = dict.fromkeys(names, 0.0)
        self._run_values: dict[str, float | str] = {}
        pages = {"/health": b"ok\n"}
        if has_metrics:
            pages["/metrics"] = self._page()

        self._held = ExitStack()

        class Handler(_PageHandler):
            pages_by_path = pages
            key = None if config.public else named_key(METRICS_KEY_VARIABLE, os.environ) or new_engine_key()

        try:
            self._server = _PageServer((config.host, config.port), Handler)
        except OSError as error:
            raise RunError(f"metrics_server: cannot listen on {config.host}:{config.port}: {error.strerror}") from error
        if Handler.key is not None and has_metrics:
            self._publish(config.port, Handler.key)
        self._server.daemon_threads = True
        self._pages = pages
        threading.Thread(target=self._server.serve_forever, name="metrics server", daemon=True).start()

    def _publish(self, port: int, key: str) -> None:
        try:
            file = self._held.enter_context(published_key(port, key, "metrics"))
        except NotPrivate as error:
            self._server.server_close()
            raise RunError(f"metrics_server: {error}") from error
        get_logger().info(f"Metrics on port {port} need the key in {file}")

    def log(self, metrics: Metrics, step: int) -> None:
        if "/metrics" not in self._pages or "time/step" not in metrics:
            return
        gauges = self._gauges
        self._values |= dict(zip(gauges.steps, (step, time.time()), strict=True)) | dict.fromkeys(gauges.ones, 1)
        self._values |= {gauge: metrics[name] for gauge, name in gauges.metrics.items() if name in metrics}
        self._run_values |= dict(zip(gauges.states_of_run, (step, 1), strict=False))
        self._run_values |= {gauge: metrics[name] for gauge, name in gauges.of_run.items() if name in metrics}
        self._pages["/metrics"] = self._page()

    def _page(self) -> bytes:
        labelled = (*self._gauges.states_of_run, *self._gauges.of_run)
        return exposition(self._values, {gauge: self._run_values.get(gauge) for gauge in labelled}).encode()

    def close(self, exit_code: int = 0) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._held.close()


def exposition(values: Mapping[str, float | str], run_values: Mapping[str, float | str | None]) -> str:
    """Format gauges in Prometheus's text format. `run_values` get the `run` label; None is not known yet."""
    lines = [f"# TYPE {gauge} gauge\n{gauge} {float(value)}\n" for gauge, value in values.items()]
    for gauge, value in run_values.items():
        lines.append(f"# TYPE {gauge} gauge\n")
        if value is not None:
            lines.append(f"{gauge}{{{RUN_LABEL}}} {float(value)}\n")
    return "".join(lines)


class _PageServer(ThreadingHTTPServer):
    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log our own faults. A scraper that is gone before its answer is none."""
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            get_logger().error("metrics_server: a request failed", exc_info=error)


class _PageHandler(BaseHTTPRequestHandler):
    pages_by_path: dict[str, bytes]
    key: str | None
    timeout = 10.0
    """Seconds for a request to arrive. A connection without one would keep a thread."""

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if (
            self.key is not None
            and path != "/health"
            and not is_bearer(self.headers.get("Authorization", ""), self.key)
        ):
            self.send_error(401)
            return
        page = self.pages_by_path.get(path)
        if page is None:
            self.send_error(404)
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
        self.send_header("Content-Length", str(len(page)))
        self.end_headers()
        self.wfile.write(page)

    def log_message(self, format: str, *args: object) -> None:
        """Log no requests: a scraper sends one every few seconds."""
