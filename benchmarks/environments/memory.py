"""Measures the orchestrator's memory over finished rollouts, with many rollouts in flight.

    uv run python benchmarks/environments/memory.py [--in-flight 10000] [--rollouts 60000] [--tokens 64]

The `orchestrator` command runs with real environments, scheduling and batches on disk. The engine answers each request
after a second, so that all rollouts are in flight at once. There is no trainer. Memory is the resident set (RSS).
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import tomli_w

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "rl"))

from orchestrator_overhead import ENVIRONMENT, GROUP, MODEL, engine, machine

PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
LIMIT_S = 220.0


def resident_mib(pid: int) -> float:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * PAGE_BYTES / 2**20


def config_of(folder: Path, url: str, args: argparse.Namespace) -> Path:
    """The orchestrator's config: `--in-flight` rollouts at once, in batches of a quarter of that number."""
    (folder / "instant_env.py").write_text(ENVIRONMENT)
    batch = max(GROUP, args.in_flight // 4 // GROUP * GROUP)
    config = {
        "output_dir": str(folder / "run_default"),
        "max_steps": max(2, args.rollouts // batch),
        "max_async_level": 1_000_000_000,
        "batch_size": batch,
        "oversampling_factor": args.in_flight / batch,
        "rollouts_per_example": GROUP,
        "model": {"name": MODEL},
        "client": {"base_url": [url]},
        "env": [{"id": "instant-env"}],
        "filters": [{"type": "repetition"}],
        "log": {"level": "warning", "vf_level": "error"},
    }
    file = folder / "orchestrator.toml"
    file.write_text(tomli_w.dumps(config))
    return file


def fitted_bytes(points: list[tuple[int, float]]) -> float:
    """Bytes per finished rollout: the slope of a straight line through (rollouts, MiB)."""
    n = len(points)
    x = sum(count for count, _ in points) / n
    y = sum(mib for _, mib in points) / n
    slope = sum((count - x) * (mib - y) for count, mib in points) / sum((count - x) ** 2 for count, _ in points)
    return slope * 2**20


def follow(process: subprocess.Popen[bytes], metrics: Path, batch: int) -> list[tuple[int, float]]:
    """Memory after each batch, as (finished rollouts, MiB)."""
    points: list[tuple[int, float]] = []
    started_s = time.monotonic()
    while process.poll() is None and time.monotonic() - started_s < LIMIT_S:
        finished = batch * (len(metrics.read_text().splitlines()) if metrics.exists() else 0)
        if finished and (not points or points[-1][0] != finished):
            points.append((finished, resident_mib(process.pid)))
            print(f"{finished:10,} rollouts finished: {points[-1][1]:8.0f} MiB", flush=True)
        time.sleep(0.05)
    process.kill()
    return points


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--in-flight", type=int, default=10_000)
    parser.add_argument("--rollouts", type=int, default=60_000, help="in all")
    parser.add_argument("--tokens", type=int, default=64, help="in each completion")
    args = parser.parse_args()
    print(f"Machine: {machine()}")
    with engine(args.tokens, chat_s=1.0) as url, tempfile.TemporaryDirectory() as directory:
        folder = Path(directory)
        file = config_of(folder, url, args)
        batch = max(GROUP, args.in_flight // 4 // GROUP * GROUP)
        command = [str(Path(sys.executable).with_name("orchestrator")), "@", str(file)]
        with subprocess.Popen(command, env={**os.environ, "PYTHONPATH": directory}) as process:
            points = follow(process, folder / "metrics.jsonl", batch)
    # The first ones fill caches and buffers.
    settled = points[len(points) // 3 :]
    if len(settled) > 1:
        print(f"growth after a third: {fitted_bytes(settled):.0f} bytes per finished rollout")


if __name__ == "__main__":
    main()
