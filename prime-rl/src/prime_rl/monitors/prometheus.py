"""Metrics for Prometheus, and a health check: a small HTTP server beside a trainer."""

from __future__ import annotations

import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from prime_rl.configs.shared import MetricsServerConfig
from prime_rl.monitors.base import Metrics, MonitorError

GAUGES = {
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
"""The gauges, by the metric that each shows."""
RUN_GAUGES = {"trainer_run_tokens": "progress/tokens", "trainer_run_learning_rate": "optim/lr"}
"""Those with a label for the run, of which a trainer has one."""
RUN_LABEL = 'run="run_default"'


class MetricsServer:
    """Serves `GET /health` ("ok") from the start on, and `GET /metrics` to whom `log` has told a step.

    A process whose steps nobody reports, the first one of another machine, serves its health alone.
    """

    def __init__(self, config: MetricsServerConfig, has_metrics: bool = True) -> None:
        """Listen.

        Raises:
            MonitorError: the port is taken, or the host not ours.
        """
        pages = {"/health": b"ok"} | ({"/metrics": b""} if has_metrics else {})

        class Handler(_PageHandler):
            pages_by_path = pages

        try:
            self._server = ThreadingHTTPServer((config.host, config.port), Handler)
        except OSError as error:
            raise MonitorError(
                f"metrics_server: cannot listen on {config.host}:{config.port}: {error.strerror}"
            ) from error
        self._server.daemon_threads = True
        self._pages = pages
        threading.Thread(target=self._server.serve_forever, name="metrics server", daemon=True).start()

    def log(self, metrics: Metrics, step: int) -> None:
        if "/metrics" in self._pages and "time/step" in metrics:
            self._pages["/metrics"] = exposition(metrics, step, time.time()).encode()

    def close(self, exit_code: int = 0) -> None:
        self._server.shutdown()
        self._server.server_close()


def exposition(metrics: Metrics, step: int, now_s: float) -> str:
    """The gauges in Prometheus's text format."""
    values: dict[str, float | str] = {"trainer_step": step, "trainer_last_step_timestamp_seconds": now_s}
    values |= {gauge: metrics[name] for gauge, name in GAUGES.items() if name in metrics}
    values |= {f"trainer_runs_{state}": 1 for state in ("discovered", "active", "ready", "max")}
    labelled: dict[str, float | str] = {"trainer_run_step": step, "trainer_run_ready": 1}
    labelled |= {gauge: metrics[name] for gauge, name in RUN_GAUGES.items() if name in metrics}
    lines = [f"# TYPE {gauge} gauge\n{gauge} {float(value)}\n" for gauge, value in values.items()]
    lines += [f"# TYPE {gauge} gauge\n{gauge}{{{RUN_LABEL}}} {float(value)}\n" for gauge, value in labelled.items()]
    return "".join(lines)


class _PageHandler(BaseHTTPRequestHandler):
    pages_by_path: dict[str, bytes]

    def do_GET(self) -> None:
        page = self.pages_by_path.get(self.path.partition("?")[0])
        if page is None:
            self.send_error(404)
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
        self.send_header("Content-Length", str(len(page)))
        self.end_headers()
        self.wfile.write(page)

    def log_message(self, format: str, *args: object) -> None:
        """Requests come every few seconds; the log is for training."""
