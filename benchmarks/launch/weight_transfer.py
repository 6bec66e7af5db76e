"""Measures how long weights take from a trainer to engine processes: `uv run benchmarks/launch/weight_transfer.py`.

- `files`: publish them as the trainer does (safetensors, flushed), and read them into other memory as an engine does.
- `gloo`: broadcast them with the group of `weight_broadcast.type = "nccl"` on a CPU, to 1 and 2 other processes.

The weights are random, in bfloat16, in layers like Qwen3's. `--out` gets a JSON line for each transfer; the table is
the median over all lines. `--gigabits 1 10` repeats gloo between network namespaces whose cards have that speed (root
only). Between two machines: on the second, `weight_transfer.py --receive RANK SIZE HOST PORT ROUNDS MEGABYTES` with the
first one's address, and here `--host ADDRESS --remote`, which starts no receiver.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from limited_network import LimitedNetwork, limited_network

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "rl"))

from orchestrator_overhead import machine  # noqa: E402

from prime_rl.inference.embedded.engine.weights import read_weights  # noqa: E402
from prime_rl.launch import reserved_ports  # noqa: E402
from prime_rl.trainer.checkpoints.weights import save_weights  # noqa: E402
from prime_rl.transport.weights import WeightGroup, bundles_of  # noqa: E402
from prime_rl.utils.files import publishing_directory  # noqa: E402

LAYERS, TENSORS_PER_LAYER = 28, 7
TIMEOUT_S = 600.0
CPU = torch.device("cpu")


def weights_of(megabytes: int) -> dict[str, torch.Tensor]:
    elements = megabytes * 1_000_000 // 2 // (LAYERS * TENSORS_PER_LAYER)
    return {
        f"model.layers.{layer}.part_{part}.weight": torch.randn(elements, dtype=torch.bfloat16)
        for layer in range(LAYERS)
        for part in range(TENSORS_PER_LAYER)
    }


def through_files(weights: dict[str, torch.Tensor], directory: Path, rounds: int) -> list[dict[str, Any]]:
    """Seconds to publish and to load. The page cache holds the file, as it does for an engine on the same machine."""
    engine = {name: torch.empty_like(tensor) for name, tensor in weights.items()}
    found = []
    for version in range(rounds):
        started_s = time.perf_counter()
        with publishing_directory(directory / f"step_{version}") as scratch:
            save_weights(weights, scratch, save_sharded=False)
        published_s = time.perf_counter()
        for name, tensor in read_weights(directory / f"step_{version}").items():
            engine[name].copy_(tensor)
        ended_s = time.perf_counter()
        found.append(
            {"write_s": published_s - started_s, "read_s": ended_s - published_s, "total_s": ended_s - started_s}
        )
    return found[1:]


@dataclass(frozen=True, slots=True)
class Place:
    """Where the processes of a broadcast meet."""

    host: str
    is_remote: bool = False
    """The receivers are started by hand."""
    network: LimitedNetwork | None = None


def through_gloo(weights: dict[str, torch.Tensor], receivers: int, rounds: int, place: Place) -> list[dict[str, Any]]:
    """Seconds until all receivers have copied the weights."""
    megabytes = round(sum(each.nbytes for each in weights.values()) / 1e6)
    with reserved_ports(1) as (port,):
        address = (place.host, port)
    group = WeightGroup(address, 0, receivers + 1, CPU, TIMEOUT_S)
    common = [str(receivers + 1), place.host, str(port), str(rounds), str(megabytes)]
    started = []
    for rank in [] if place.is_remote else range(1, receivers + 1):
        argv = [sys.executable, __file__, "--receive", str(rank), *common]
        argv = place.network.command(rank - 1, *argv) if place.network else argv
        started.append(subprocess.Popen(argv, stdout=subprocess.PIPE))
    for process in started:
        process.stdout.readline()
    found = []
    for version in range(rounds):
        began_s = time.perf_counter()
        group.send([{name: weights[name] for name in names} for names in bundles_of(weights)], version)
        for process in started:
            process.stdout.readline()
        found.append({"total_s": time.perf_counter() - began_s})
    for process in started:
        process.wait()
    return found[1:]


def between_namespaces(
    weights: dict[str, torch.Tensor], receivers: int, rounds: int, gigabits: float
) -> list[dict[str, Any]]:
    with limited_network(receivers, gigabits) as network:
        os.environ["GLOO_SOCKET_IFNAME"] = network.interface
        try:
            return through_gloo(weights, receivers, rounds, Place(network.address, network=network))
        finally:
            del os.environ["GLOO_SOCKET_IFNAME"]


def receive(rank: int, size: int, place: tuple[str, int], rounds: int, megabytes: int) -> None:
    engine = {name: torch.empty_like(tensor) for name, tensor in weights_of(megabytes).items()}
    group = WeightGroup(place, rank, size, CPU, TIMEOUT_S)
    print("joined", flush=True)
    for version in range(rounds):
        for name, tensor in group.receive(version):
            engine[name].copy_(tensor)
        print("loaded", flush=True)


def table(lines: Sequence[dict[str, Any]]) -> str:
    rows = [
        "| MB | Gbit/s | files: write | read | total, s | gloo to 1, s | gloo to 2, s |",
        "|---|---|---|---|---|---|---|",
    ]

    def seconds(megabytes: int, gigabits: float, way: str, key: str) -> str:
        wanted = (megabytes, gigabits, way)
        same = [each[key] for each in lines if (each["megabytes"], speed(each), each["way"]) == wanted]
        return f"{median(same):.3f} ({len(same)})" if same else ""

    def speed(line: dict[str, Any]) -> float:
        return float(line.get("gigabits") or 0)

    for megabytes, gigabits in sorted({(each["megabytes"], speed(each)) for each in lines}):
        cells = [seconds(megabytes, gigabits, "files", key) for key in ("write_s", "read_s", "total_s")]
        cells += [seconds(megabytes, gigabits, f"gloo {receivers}", "total_s") for receivers in (1, 2)]
        rows.append(f"| {megabytes} | {f'{gigabits:g}' if gigabits else 'no limit'} | {' | '.join(cells)} |")
    return "\n".join(rows)


def keep(
    out: Path, megabytes: int, way: str, transfers: Sequence[dict[str, Any]], gigabits: float | None = None
) -> None:
    with out.open("a") as file:
        for each in transfers:
            line = {"megabytes": megabytes, "way": way, "gigabits": gigabits, **each, "machine": machine()}
            file.write(f"{json.dumps(line)}\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, nargs="*", default=[8, 64, 512], help="none: only print the table")
    parser.add_argument("--rounds", type=int, default=5, help="one more, which is not counted, comes first")
    parser.add_argument("--directory", type=Path, help="where the files go: name a shared directory to measure it")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--gigabits", type=float, nargs="*", default=[], help="speeds of a network to repeat gloo on")
    parser.add_argument("--remote", action="store_true", help="the receivers are started by hand on other machines")
    parser.add_argument("--out", type=Path, default=Path("outputs/benchmarks/weight_transfer.jsonl"))
    parser.add_argument("--receive", nargs=6, help=argparse.SUPPRESS)
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that no network namespace is left
    if args.receive:
        rank, size, host, port, rounds, megabytes = args.receive
        receive(int(rank), int(size), (host, int(port)), int(rounds), int(megabytes))
        return
    args.out.parent.mkdir(parents=True, exist_ok=True)
    for megabytes in args.megabytes:
        weights = weights_of(megabytes)
        rounds = args.rounds + 1
        with tempfile.TemporaryDirectory(dir=args.directory) as directory:
            keep(args.out, megabytes, "files", through_files(weights, Path(directory), rounds))
        for receivers in (1, 2):
            found = through_gloo(weights, receivers, rounds, Place(args.host, args.remote))
            keep(args.out, megabytes, f"gloo {receivers}", found)
            for gigabits in args.gigabits:
                found = between_namespaces(weights, receivers, rounds, gigabits)
                keep(args.out, megabytes, f"gloo {receivers}", found, gigabits)
    print(table([json.loads(line) for line in args.out.read_text().splitlines()]))


if __name__ == "__main__":
    main()
