"""Where metrics go: always `OUT/metrics.jsonl`, and W&B when asked."""

from prime_rl.utils.monitor.base import Metrics, Monitor, MonitorError, MultiMonitor
from prime_rl.utils.monitor.jsonl import JsonlMonitor

__all__ = ["JsonlMonitor", "Metrics", "Monitor", "MonitorError", "MultiMonitor"]
