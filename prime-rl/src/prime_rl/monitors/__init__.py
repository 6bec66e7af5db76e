"""Metric sinks: `metrics.jsonl` (always), W&B, Prometheus, and the benchmark table."""

from prime_rl.monitors.base import JsonlMonitor, Metrics, Monitor, MultiMonitor

__all__ = ["JsonlMonitor", "Metrics", "Monitor", "MultiMonitor"]
