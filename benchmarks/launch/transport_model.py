"""Says which transport of weights is fastest, from measured speeds: `uv run benchmarks/launch/transport_model.py`.

It reads the results of `weight_transfer.py`, of which it takes the best measurement of the largest size, because other
work on the machine only slows, and of `delta_share.py`, of which it takes the median. For weights of W bytes, N nodes
with engines and a network of B bytes/s:

    files = W/write + W/read + N W/B                    all nodes read through the file server's link
    gloo  = W/gloo + ceil(log2(N + 1)) W/B              a tree of broadcasts
    delta = W/make + W/apply + share * files            the changed elements alone, through files

`share` is the size of the delta divided by W. A delta beats whole files below
B = N (1 - share) / (1/make + 1/apply - (1 - share) (1/write + 1/read)), or always if that is not positive.

B is a parameter. Where `weight_transfer.py --gigabits` has measured gloo on a network of a known speed, a second table
compares those times with the model's.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

NODES = (1, 2, 8)
GIGABITS = (1, 10, 100)
Lines = Sequence[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Speeds:
    """Bytes per second, without the network."""

    write: float
    read: float
    gloo: float
    make: float
    apply: float

    @classmethod
    def measured(cls, transfers: Lines, changes: Lines) -> Speeds:
        """`changes` are those of one learning rate: the more changes, the slower a delta is made and applied."""
        unlimited = [each for each in transfers if not each.get("gigabits")]
        largest = max(each["megabytes"] for each in unlimited)
        same = [each for each in unlimited if each["megabytes"] == largest]

        def best(way: str, key: str) -> float:
            return largest * 1e6 / min(each[key] for each in same if each["way"] == way)

        make, apply = (median(each["total_bytes"] / each[key] for each in changes) for key in ("encode_s", "decode_s"))
        return cls(best("files", "write_s"), best("files", "read_s"), best("gloo 1", "total_s"), make, apply)


def seconds(speeds: Speeds, share: float, weights: float, nodes: int, network: float) -> dict[str, float]:
    files = weights / speeds.write + weights / speeds.read + nodes * weights / network
    return {
        "files": files,
        "gloo": weights / speeds.gloo + math.ceil(math.log2(nodes + 1)) * weights / network,
        "delta": weights / speeds.make + weights / speeds.apply + share * files,
    }


def crossing(speeds: Speeds, share: float, nodes: int) -> float:
    """Network speed in bytes/s below which a delta beats whole files; infinite if it always does."""
    cost = 1 / speeds.make + 1 / speeds.apply - (1 - share) * (1 / speeds.write + 1 / speeds.read)
    return nodes * (1 - share) / cost if cost > 0 else math.inf


def share_of(changes: Lines, lr: float) -> float:
    """Median size of the better delta."""
    return median(min(each["gaps"], each["bitmap"]) for each in changes if each["lr"] == lr)


def report(transfers: Lines, changes: Lines, weights: float) -> str:
    speeds_at = {
        lr: Speeds.measured(transfers, [each for each in changes if each["lr"] == lr])
        for lr in sorted({each["lr"] for each in changes})
    }
    lines = []
    for lr, speeds in speeds_at.items():
        named = {name: getattr(speeds, name) / 1e6 for name in Speeds.__slots__}
        lines.append(f"MB/s at lr {lr:g}: " + ", ".join(f"{name} {speed:.0f}" for name, speed in named.items()))
    lines += [
        "",
        f"Seconds for {weights / 1e9:g} GB.",
        "",
        "| lr | share | nodes | Gbit/s | files | gloo | delta | fastest | delta beats files below |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for lr, speeds in speeds_at.items():
        share = share_of(changes, lr)
        for nodes in NODES:
            below = crossing(speeds, share, nodes) * 8 / 1e9
            limit = "any speed" if math.isinf(below) else f"{below:.2f} Gbit/s"
            for gigabits in GIGABITS:
                times = seconds(speeds, share, weights, nodes, gigabits * 1e9 / 8)
                cells = [
                    f"{lr:g}",
                    f"{share:.1%}",
                    str(nodes),
                    str(gigabits),
                    *(f"{each:.1f}" for each in times.values()),
                ]
                lines.append(f"| {' | '.join(cells)} | {min(times, key=times.__getitem__)} | {limit} |")
    return "\n".join(lines)


def check(transfers: Lines) -> str:
    """The best time of gloo on each measured network, and what the model says of it."""
    lines = ["| MB | nodes | Gbit/s | measured, s | model, s |", "|---|---|---|---|---|"]
    best: dict[tuple[int, int, float], float] = {}
    for each in transfers:
        if each["way"].startswith("gloo"):
            key = (each["megabytes"], int(each["way"].split()[1]), each.get("gigabits") or math.inf)
            best[key] = min(best.get(key, math.inf), each["total_s"])
    for (megabytes, nodes, gigabits), measured_s in sorted(best.items()):
        if not math.isinf(gigabits):
            network_s = math.ceil(math.log2(nodes + 1)) * megabytes * 8e-3 / gigabits
            model_s = best[megabytes, 1, math.inf] + network_s
            lines.append(f"| {megabytes} | {nodes} | {gigabits:g} | {measured_s:.2f} | {model_s:.2f} |")
    return "\n".join(lines) if len(lines) > 2 else ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--transfers", type=Path, default=Path("outputs/benchmarks/weight_transfer.jsonl"))
    parser.add_argument("--changes", type=Path, default=Path("outputs/benchmarks/delta_share.jsonl"))
    parser.add_argument(
        "--gigabytes", type=float, default=1.2, help="of the weights; 1.2 is 0.6B parameters in bfloat16"
    )
    args = parser.parse_args()
    transfers, changes = (
        [json.loads(line) for line in file.read_text().splitlines()] for file in (args.transfers, args.changes)
    )
    print(report(transfers, changes, args.gigabytes * 1e9))
    print(f"\n{check(transfers)}")


if __name__ == "__main__":
    main()
