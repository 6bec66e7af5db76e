"""Measures what more inference servers cost the orchestrator: `uv run benchmarks/launch/server_counts.py`.

Instant engines, all in one other process, listen on 1, 8 and 64 ports. Two series: always 512 rollouts in flight, which
shows the cost of servers, and 16 for each server, which shows the cost of rollouts in flight. The cost is the
orchestrator's CPU time per rollout, which other work on the machine changes little. `--out` gets a JSON line for each
measurement; the table is the median over all lines. `--rounds 0` only prints the table.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from types import SimpleNamespace

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "rl"))

from orchestrator_overhead import InstantEngine, answers, machine, measure  # noqa: E402

COUNTS = (1, 8, 64)
IN_FLIGHT, PER_SERVER, TOKENS = 512, 16, 64
MEASURED_ROLLOUTS = 4096


async def serve(count: int) -> None:
    """Listen on `count` ports and print them."""
    replies = answers(TOKENS)
    loop = asyncio.get_running_loop()
    servers = [await loop.create_server(lambda: InstantEngine(replies), "127.0.0.1", 0) for _ in range(count)]
    print(*(server.sockets[0].getsockname()[1] for server in servers), flush=True)
    await asyncio.Event().wait()


@contextmanager
def engines(count: int) -> Iterator[list[str]]:
    """URLs of `count` engines."""
    command = [sys.executable, __file__, "--serve", str(count)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield [f"http://127.0.0.1:{port}/v1" for port in process.stdout.readline().split()]
        finally:
            process.terminate()


def measured(servers: int, in_flight: int) -> dict[str, object]:
    steps = max(6, MEASURED_ROLLOUTS // in_flight)
    options = SimpleNamespace(steps=steps, batch=in_flight, env_servers=False)
    with engines(servers) as urls, tempfile.TemporaryDirectory() as directory:
        speed = measure(options, urls, Path(directory))
    return {
        "servers": servers,
        "in_flight": in_flight,
        "cpu_ms_per_rollout": 1000 / speed.per_cpu_second,
        "rollouts_per_s": speed.by_the_clock,
        "machine": machine(),
    }


def table(lines: Sequence[dict[str, float]]) -> str:
    """Median of each case, and how the cost grows with the count: the exponent between one row and the next."""
    rows = [
        "| in flight | servers | CPU ms/rollout | rollouts/CPU s | rollouts/s | growth |",
        "|---|---|---|---|---|---|",
    ]
    for is_fixed in (True, False):
        before: tuple[int, float] | None = None
        for servers in COUNTS:
            in_flight = IN_FLIGHT if is_fixed else PER_SERVER * servers
            same = [each for each in lines if (each["servers"], each["in_flight"]) == (servers, in_flight)]
            if not same:
                continue
            cost_ms = median(each["cpu_ms_per_rollout"] for each in same)
            speed = median(each["rollouts_per_s"] for each in same)
            growth = (
                "" if before is None else f"n^{1 + math.log(cost_ms / before[1]) / math.log(servers / before[0]):.2f}"
            )
            rows.append(f"| {in_flight} | {servers} | {cost_ms:.2f} | {1000 / cost_ms:.0f} | {speed:.0f} | {growth} |")
            before = (servers, cost_ms)
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("outputs/benchmarks/server_counts.jsonl"))
    parser.add_argument("--serve", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        asyncio.run(serve(args.serve))
        return
    args.out.parent.mkdir(parents=True, exist_ok=True)
    cases = sorted({(servers, flight) for servers in COUNTS for flight in (IN_FLIGHT, PER_SERVER * servers)})
    for _ in range(args.rounds):
        for servers, in_flight in cases:
            line = json.dumps(measured(servers, in_flight))
            print(line, flush=True)
            with args.out.open("a") as file:
                file.write(f"{line}\n")
    print(table([json.loads(line) for line in args.out.read_text().splitlines()]))


if __name__ == "__main__":
    main()
