"""Counts what a judge is asked: metrics of a step, and a line at the end of the run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

MILLION = 1_000_000


@dataclass(slots=True)
class Counters:
    """Numbers since the start, or since a step."""

    calls: int = 0
    """Answered ones, also from the cache."""
    cached: int = 0
    """Of these, answered from the cache or with the answer to an equal request that was under way."""
    retries: int = 0
    failed: int = 0
    prompt_tokens: int = 0
    """Of calls to the server."""
    completion_tokens: int = 0
    asked_s: float = 0.0
    """Seconds of all answered calls to the server, with their retries, without the wait for their turn."""

    def add_usage(self, usage: Any) -> None:
        """Add the tokens of an answer. A server that does not count them adds none."""
        if isinstance(usage, Mapping):
            self.prompt_tokens += _whole(usage.get("prompt_tokens"))
            self.completion_tokens += _whole(usage.get("completion_tokens"))

    def add(self, other: Counters) -> None:
        for each in fields(self):
            setattr(self, each.name, getattr(self, each.name) + getattr(other, each.name))

    def cost(self, prompt_price: float, completion_price: float) -> float:
        """In the currency of the prices, which are those of a million tokens."""
        return (self.prompt_tokens * prompt_price + self.completion_tokens * completion_price) / MILLION

    def metrics(self, prefix: str, prompt_price: float, completion_price: float) -> dict[str, float]:
        asked = self.calls - self.cached
        shares = {"cache_hit_rate": self.cached / self.calls} if self.calls else {}
        latency = {"latency_s": self.asked_s / asked} if asked else {}
        values = {
            "calls": self.calls,
            **shares,
            **latency,
            "retries": self.retries,
            "failed_calls": self.failed,
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "cost": self.cost(prompt_price, completion_price),
        }
        return {f"{prefix}/{name}": float(value) for name, value in values.items()}

    def describe(self, prompt_price: float, completion_price: float) -> str:
        share = f", {self.cached / self.calls:.0%} of them from the cache" if self.calls else ""
        cost = self.cost(prompt_price, completion_price)
        return (
            f"{self.calls:,} calls{share}, {self.retries:,} retries, {self.failed:,} failed; "
            f"{self.prompt_tokens:,} prompt tokens, {self.completion_tokens:,} completion tokens"
            + (f", cost {cost:.4g}" if cost else "")
        )


def _whole(value: Any) -> int:
    return value if isinstance(value, int) and value > 0 else 0
