"""Where metrics go: always `OUT/metrics.jsonl`, and W&B when asked."""

from prime_rl.monitors.base import Metrics, Monitor, MonitorError, MultiMonitor
from prime_rl.monitors.jsonl import JsonlMonitor

__all__ = ["JsonlMonitor", "Metrics", "Monitor", "MonitorError", "MultiMonitor"]
