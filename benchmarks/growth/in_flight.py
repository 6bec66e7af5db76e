"""The orchestrator's CPU time for a step of single-turn rollouts that are all in flight at once.

The engine, another process, answers at once; `benchmarks/rl/orchestrator_overhead.py` describes it.

    uv run benchmarks/growth/in_flight.py
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

from measure import HERE, Action, Cost, measure_from_command_line

sys.path.insert(0, str(HERE.parent / "rl"))

from orchestrator_overhead import engine, measure

TOKENS = 64
MEASURED_ROLLOUTS = 4096
SIZES = (16, 64, 256, 1024, 4096, 16384)


def begin(size: int, folder: Path) -> Action:
    def work() -> dict[str, float]:
        steps = max(2, MEASURED_ROLLOUTS // size)
        with engine(TOKENS) as url:
            speed = measure(SimpleNamespace(steps=steps, batch=size, env_servers=False), [url], folder)
        return {
            "wall_s": size / speed.by_the_clock,
            "cpu_s": size / speed.per_cpu_second,
            "memory_mib": speed.peak_mib,
        }

    return work


COSTS = [Cost("in-flight", "rollouts in flight", SIZES, begin, repeats=False)]

if __name__ == "__main__":
    measure_from_command_line(__doc__, COSTS)
