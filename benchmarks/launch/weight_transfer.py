"""Measures how long weights take from a trainer to engine processes: `uv run benchmarks/launch/weight_transfer.py`.

- `files`: publish them as the trainer does (safetensors, flushed), and read them into other memory as an engine does.
- `gloo`: broadcast them with the group of `weight_broadcast.type = "nccl"` on a CPU, to 1 and 2 other processes.

The weights are random, in bfloat16, in layers like Qwen3's. `--out` gets a JSON line for each transfer; the table is
the median over all lines. Between two machines: on the second, `weight_transfer.py --receive RANK SIZE HOST PORT ROUNDS
MEGABYTES` with the first one's address, and here `--host ADDRESS --remote`, which starts no receiver.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "rl"))

from orchestrator_overhead import machine  # noqa: E402

from prime_rl.inference.embedded.engine.weights import read_weights  # noqa: E402
from prime_rl.launch import reserved_ports  # noqa: E402
from prime_rl.trainer.checkpoints.weights import save_weights  # noqa: E402
from prime_rl.transport.weights import WeightGroup  # noqa: E402
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


def through_gloo(
    weights: dict[str, torch.Tensor], receivers: int, rounds: int, place: tuple[str, int, bool]
) -> list[dict[str, Any]]:
    """Seconds until all receivers have copied the weights."""
    host, port, is_remote = place
    megabytes = round(sum(each.nbytes for each in weights.values()) / 1e6)
    group = WeightGroup((host, port), 0, receivers + 1, CPU, TIMEOUT_S)
    common = [str(receivers + 1), host, str(port), str(rounds), str(megabytes)]
    started = [
        subprocess.Popen([sys.executable, __file__, "--receive", str(rank), *common], stdout=subprocess.PIPE)
        for rank in ([] if is_remote else range(1, receivers + 1))
    ]
    for process in started:
        process.stdout.readline()
    found = []
    for version in range(rounds):
        began_s = time.perf_counter()
        group.send(weights, version)
        for process in started:
            process.stdout.readline()
        found.append({"total_s": time.perf_counter() - began_s})
    for process in started:
        process.wait()
    return found[1:]


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
        "| MB | files: write | read | total, s | gloo to 1, s | gloo to 2, s |",
        "|---|---|---|---|---|---|",
    ]

    def seconds(megabytes: int, way: str, key: str) -> str:
        same = [each[key] for each in lines if (each["megabytes"], each["way"]) == (megabytes, way)]
        return f"{median(same):.3f} ({len(same)})" if same else ""

    for megabytes in sorted({each["megabytes"] for each in lines}):
        cells = [seconds(megabytes, "files", key) for key in ("write_s", "read_s", "total_s")]
        cells += [seconds(megabytes, f"gloo {receivers}", "total_s") for receivers in (1, 2)]
        rows.append(f"| {megabytes} | {' | '.join(cells)} |")
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, nargs="*", default=[8, 64, 512], help="none: only print the table")
    parser.add_argument("--rounds", type=int, default=5, help="one more, which is not counted, comes first")
    parser.add_argument("--directory", type=Path, help="where the files go: name a shared directory to measure it")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--remote", action="store_true", help="the receivers are started by hand on other machines")
    parser.add_argument("--out", type=Path, default=Path("outputs/benchmarks/weight_transfer.jsonl"))
    parser.add_argument("--receive", nargs=6, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.receive:
        rank, size, host, port, rounds, megabytes = args.receive
        receive(int(rank), int(size), (host, int(port)), int(rounds), int(megabytes))
        return
    args.out.parent.mkdir(parents=True, exist_ok=True)
    for megabytes in args.megabytes:
        weights = weights_of(megabytes)
        with tempfile.TemporaryDirectory(dir=args.directory) as directory:
            found = {"files": through_files(weights, Path(directory), args.rounds + 1)}
        for receivers in (1, 2):
            with reserved_ports(1) as (port,):
                place = (args.host, port, args.remote)
            found[f"gloo {receivers}"] = through_gloo(weights, receivers, args.rounds + 1, place)
        with args.out.open("a") as file:
            for way, transfers in found.items():
                for each in transfers:
                    line = {"megabytes": megabytes, "way": way, **each, "machine": machine()}
                    file.write(f"{json.dumps(line)}\n")
    print(table([json.loads(line) for line in args.out.read_text().splitlines()]))


if __name__ == "__main__":
    main()
