"""Measures event loop lag. Slow synchronous reward functions block the loop and leave the inference servers idle."""

from __future__ import annotations

import asyncio
import statistics
import time

INTERVAL_S = 0.25


class LoopLag:
    """Sleeps repeatedly and records how much longer than `INTERVAL_S` each sleep takes."""

    def __init__(self) -> None:
        self._lags_s: list[float] = []

    async def measure(self) -> None:
        """Measure until cancelled."""
        while True:
            started = time.perf_counter()
            await asyncio.sleep(INTERVAL_S)
            self._lags_s.append(time.perf_counter() - started - INTERVAL_S)

    def take_metrics(self) -> dict[str, float]:
        """`event_loop_lag/*` since the last call, in seconds; empty if there was no measurement."""
        lags_s, self._lags_s = sorted(self._lags_s), []
        if not lags_s:
            return {}
        return {
            "event_loop_lag/min": lags_s[0],
            "event_loop_lag/mean": statistics.fmean(lags_s),
            "event_loop_lag/med": statistics.median(lags_s),
            "event_loop_lag/p90": lags_s[int(0.9 * (len(lags_s) - 1))],
            "event_loop_lag/max": lags_s[-1],
        }
