"""Timelines: what each process did when, for Perfetto and chrome://tracing."""

from prime_rl.monitors.trace import Category, Trace, own_trace

__all__ = ["Category", "Trace", "own_trace"]
