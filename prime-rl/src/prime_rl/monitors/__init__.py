"""Metric sinks: `metrics.jsonl` (always), W&B, Prometheus, and the benchmark table."""

from prime_rl.monitors.base import Metrics, Monitor, MultiMonitor
from prime_rl.monitors.jsonl import JsonlMonitor

__all__ = ["JsonlMonitor", "Metrics", "Monitor", "MultiMonitor"]
