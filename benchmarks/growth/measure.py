"""Measures how a cost grows: the same work at several sizes, each in a process of its own.

The slope is that of a straight line through log(cost) over log(size), by least squares, over the last two decades of
sizes: 1 is linear. It is that of CPU time, which other work on the machine changes little; wall time is recorded too.
Memory is the peak of the resident set during the work, above what the process held before.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from this_machine import this_machine, versions  # noqa: E402

RESULTS = HERE / "results"
DECADES = 2.0
LIMIT_S = 240.0
"""No size is measured that is expected to take more CPU time. By the clock, other work on the machine would decide."""
LIMIT_MIB = 8 * 1024
SHORT_S = 2.0
"""Shorter work is measured three times."""

Action = Callable[[], "dict[str, float] | None"]


@dataclass(frozen=True)
class Cost:
    """One cost, and the sizes to measure it at."""

    name: str
    """Of its file of results."""
    of: str
    """What is counted, such as `rows`."""
    sizes: tuple[int, ...]
    begin: Callable[[int, Path], Action]
    """Import and open what the work needs, and return the work. What it returns replaces what was measured."""
    prepare: Callable[[int, Path], None] = lambda size, folder: None
    """Make files in a folder, in an earlier process."""
    repeats: bool = True
    """Whether short work may be done three times in one process."""


def tens(first: int, last: int) -> tuple[int, ...]:
    """Powers of ten, as exponents: `tens(3, 5)` is 1,000, 10,000 and 100,000."""
    return tuple(10**exponent for exponent in range(first, last + 1))


def measure_from_command_line(description: str | None, costs: Sequence[Cost]) -> None:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [cost.name for cost in costs]
    parser.add_argument("costs", nargs="*", metavar="COST", help=f"default: {' '.join(names)}")
    parser.add_argument("--largest", type=float, default=math.inf, help="measure no larger size")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the results, one JSON file for each cost")
    parser.add_argument("--child", nargs=4, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        name, phase, size, folder = args.child
        _work_in_child(next(cost for cost in costs if cost.name == name), phase, int(size), Path(folder))
        return
    for unknown in set(args.costs) - set(names):
        parser.error(f"there is no cost {unknown!r}: {', '.join(names)}")
    for cost in costs:
        if not args.costs or cost.name in args.costs:
            sizes = [size for size in cost.sizes if size <= args.largest]
            write(args.out, measured(cost, sizes))


def measured(cost: Cost, sizes: Sequence[int]) -> dict[str, Any]:
    """The result of a cost, as it goes to its file."""
    points: list[dict[str, Any]] = []
    stopped = ""
    load = os.getloadavg()[0]
    for size in sizes:
        stopped = _too_much(points, size)
        if stopped:
            print(f"{cost.name}: stopped before {size:,} {cost.of}: {stopped}", flush=True)
            break
        points.append(_point(cost, size))
        print(f"{cost.name}: {json.dumps(points[-1])}", flush=True)
    return {
        "cost": cost.name,
        "of": cost.of,
        "slope": slope([(point["size"], point["cpu_s"]) for point in points]),
        "slope_of": "CPU time",
        "memory_slope": slope([(point["size"], point["memory_mib"]) for point in points]),
        "stopped": stopped,
        "points": points,
        "machine": this_machine(),
        "versions": versions(),
        "load": round(load, 1),
        "date": date.today().isoformat(),
        "command": f"uv run benchmarks/growth/{Path(sys.argv[0]).name} {cost.name}",
    }


def slope(points: Sequence[tuple[float, float]], decades: float = DECADES) -> float | None:
    """Exponent of the growth over the last decades. None for fewer than two sizes, or a cost of 0."""
    last = [
        (math.log(size), math.log(cost)) for size, cost in points if size * 10**decades >= points[-1][0] and cost > 0
    ]
    if len(last) < 2:
        return None
    return round(statistics.linear_regression(*zip(*last, strict=True)).slope, 2)


def write(out: Path, result: dict[str, Any]) -> None:
    out.mkdir(parents=True, exist_ok=True)
    (out / f"{result['cost']}.json").write_text(json.dumps(result, indent=1) + "\n")


def _too_much(points: Sequence[dict[str, Any]], size: int) -> str:
    """Why a size is not measured, judged by the largest before it; empty if it is."""
    if not points:
        return ""
    last = points[-1]
    factor = size / last["size"]
    if last["cpu_s"] * factor > LIMIT_S:
        return f"would take about {last['cpu_s'] * factor:.0f} s of a core"
    if last["memory_mib"] * factor > LIMIT_MIB:
        return f"would need about {last['memory_mib'] * factor / 1024:.0f} GiB"
    return ""


def _point(cost: Cost, size: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        _child(cost, "prepare", size, folder)
        runs = _child(cost, "run", size, folder)
    middle = {name: float(f"{statistics.median(run[name] for run in runs):.4g}") for name in runs[0]}
    # Later runs find memory that the first one has got and given back.
    return {"size": size, **middle, "memory_mib": float(f"{runs[0]['memory_mib']:.4g}"), "runs": len(runs)}


def _child(cost: Cost, phase: str, size: int, folder: str) -> list[dict[str, float]]:
    command = [sys.executable, sys.argv[0], "--child", cost.name, phase, str(size), folder]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    # Libraries may print lines of their own before it.
    return json.loads(done.stdout.splitlines()[-1])


def _work_in_child(cost: Cost, phase: str, size: int, folder: Path) -> None:
    if phase == "prepare":
        cost.prepare(size, folder)
        print("[]")
        return
    runs = [_measured_once(cost, size, folder)]
    while cost.repeats and len(runs) < 3 and runs[0]["wall_s"] < SHORT_S:
        runs.append(_measured_once(cost, size, folder))
    print(json.dumps(runs))


def _measured_once(cost: Cost, size: int, folder: Path) -> dict[str, float]:
    action = cost.begin(size, folder)
    before_mib = _forget_peak_mib()
    cpu_s, wall_s = _cpu_s(), time.perf_counter()
    own = action()
    found = {"wall_s": time.perf_counter() - wall_s, "cpu_s": _cpu_s() - cpu_s}
    found["memory_mib"] = max(0.0, _status_mib("VmHWM") - before_mib)
    return found | (own or {})


def _cpu_s() -> float:
    """CPU time of this process and of the children that have ended."""
    usages = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def _forget_peak_mib() -> float:
    """What the process holds now, from where its peak is counted."""
    Path("/proc/self/clear_refs").write_text("5")
    return _status_mib("VmRSS")


def _status_mib(name: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:")) / 1024
