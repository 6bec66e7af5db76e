"""Measures how much of the weights changes from one version to the next: `uv run benchmarks/launch/delta_share.py`.

Runs RL on the reverse-text environment for each learning rate, keeps every broadcast version, and compares consecutive
versions in bfloat16, as an engine holds them. `--out` gets a JSON line for each pair of versions:

- share of tensors, elements and bytes that differ;
- size of three lossless deltas, as a share of the full weights: `gaps` (for each changed element, the distance from the
  one before in 1, 2 or 4 bytes, whichever is smallest for the tensor, and its new 2 bytes), `bitmap` (one bit for each
  element, and the new 2 bytes of those that changed), and `zlib` (the XOR of both versions, deflated at level 1);
- the CPU time to make and to apply the smaller of the first two, with one thread, checked byte by byte.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
import zlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks" / "rl"))

from orchestrator_overhead import machine  # noqa: E402

GAP_TYPES = (np.uint8, np.uint16, np.uint32)
LOOK_EVERY_S = 0.05
Words = np.ndarray[Any, np.dtype[np.uint16]]


@dataclass(frozen=True, slots=True)
class Change:
    """From one version to the next."""

    model: str
    lr: float
    version: int
    total_bytes: int
    tensors: float
    """Share of tensors that differ; so the others below."""
    elements: float
    bytes: float
    gaps: float
    bitmap: float
    zlib: float
    encode_s: float
    decode_s: float
    machine: str


def encoded(before: Words, after: Words) -> tuple[str, np.ndarray[Any, Any], Words]:
    """The smaller of both deltas of a tensor: its kind, where it changed, and the new values."""
    places = np.flatnonzero(before != after)
    if len(places) == 0:
        return "gaps", np.zeros(0, np.uint8), after[:0]
    gaps = np.diff(places, prepend=0)
    kind = next(kind for kind in GAP_TYPES if gaps.max() <= np.iinfo(kind).max)
    if len(places) * kind().itemsize <= len(before) / 8:
        return "gaps", gaps.astype(kind), after[places]
    return "bitmap", np.packbits(before != after), after[places]


def apply(before: Words, delta: tuple[str, np.ndarray[Any, Any], Words]) -> Words:
    kind, where, values = delta
    after = before.copy()
    if kind == "gaps":
        after[np.cumsum(where.astype(np.int64))] = values
    else:
        after[np.unpackbits(where, count=len(before)).astype(bool)] = values
    return after


def gap_bytes(before: Words, after: Words) -> int:
    places = np.flatnonzero(before != after)
    if len(places) == 0:
        return 0
    largest = np.diff(places, prepend=0).max()
    return len(places) * (2 + next(kind().itemsize for kind in GAP_TYPES if largest <= np.iinfo(kind).max))


def words_of(directory: Path) -> dict[str, Words]:
    """Each tensor in bfloat16, as 16-bit words."""
    tensors = load_file(directory / "model.safetensors")
    return {name: each.to(torch.bfloat16).flatten().view(torch.uint16).numpy() for name, each in tensors.items()}


def change(model: str, lr: float, version: int, old: dict[str, Words], new: dict[str, Words]) -> Change:
    total = sum(each.nbytes for each in new.values())
    differs = {name: old[name] != new[name] for name in new}
    changed = sum(int(each.sum()) for each in differs.values())
    differing_bytes = sum(int((old[name].view(np.uint8) != new[name].view(np.uint8)).sum()) for name in new)
    started_s = time.process_time()
    deltas = {name: encoded(old[name], new[name]) for name in new}
    encoded_s = time.process_time()
    rebuilt = {name: apply(old[name], deltas[name]) for name in new}
    ended_s = time.process_time()
    assert all(np.array_equal(rebuilt[name], new[name]) for name in new), "a delta is not lossless"
    return Change(
        model=model,
        lr=lr,
        version=version,
        total_bytes=total,
        tensors=sum(bool(each.any()) for each in differs.values()) / len(new),
        elements=changed / (total / 2),
        bytes=differing_bytes / total,
        gaps=sum(gap_bytes(old[name], new[name]) for name in new) / total,
        bitmap=(total / 2 / 8 + 2 * changed) / total,
        zlib=sum(len(zlib.compress(np.bitwise_xor(old[name], new[name]).tobytes(), 1)) for name in new) / total,
        encode_s=encoded_s - started_s,
        decode_s=ended_s - encoded_s,
        machine=machine(),
    )


def keep_versions(model: Path, lr: float, steps: int, work: Path) -> list[Path]:
    """Run RL and return the directories of its versions. The trainer removes them; hard links keep their files."""
    shutil.rmtree(work, ignore_errors=True)
    kept = work / "kept"
    kept.mkdir(parents=True)
    words = [Path(sys.executable).with_name("medarc_train"), "rl", ROOT / "examples/reverse_text/rl_cpu.toml"]
    words += ["--output-dir", work / "run", "--model.name", model, "--max-steps", steps, "--trainer.optim.lr", lr]
    words += ["--orchestrator.batch-size", 8, "--orchestrator.rollouts-per-example", 4, "--seq-len", 96]
    words += ["--orchestrator.sampling.max-tokens", 24, "--inference.model.max-model-len", 96]
    with (work / "log").open("w") as log:
        run = subprocess.Popen(list(map(str, words)), cwd=ROOT, stdout=log, stderr=subprocess.STDOUT)
        while run.poll() is None:
            for stable in (work / "run" / "run_default" / "broadcasts").glob("step_*[0-9]/STABLE"):
                target = kept / stable.parent.name
                if not target.exists():
                    target.mkdir()
                    os.link(stable.parent / "model.safetensors", target / "model.safetensors")
            time.sleep(LOOK_EVERY_S)
    if run.returncode:
        raise SystemExit(f"the run failed:\n{(work / 'log').read_text()[-2000:]}")
    return sorted(kept.iterdir(), key=lambda path: int(path.name.removeprefix("step_")))


def table(lines: Sequence[dict[str, Any]]) -> str:
    rows = [
        "| model | lr | pairs | tensors | elements | bytes | gaps | bitmap | zlib | make, MB/s | apply, MB/s |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for model, lr in sorted({(each["model"], each["lr"]) for each in lines}):
        same = [each for each in lines if (each["model"], each["lr"]) == (model, lr)]
        shares = [
            median(each[key] for each in same) for key in ("tensors", "elements", "bytes", "gaps", "bitmap", "zlib")
        ]
        speeds = [median(each["total_bytes"] / 1e6 / each[key] for each in same) for key in ("encode_s", "decode_s")]
        cells = [
            model,
            f"{lr:g}",
            str(len(same)),
            *(f"{share:.2%}" for share in shares),
            *(f"{one:.0f}" for one in speeds),
        ]
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=ROOT / "examples" / "reverse_text" / "checkpoint")
    parser.add_argument("--lr", type=float, nargs="*", default=[1e-6, 1e-5, 2e-4], help="none: only print the table")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--work", type=Path, default=Path("outputs/benchmarks/delta_share"))
    parser.add_argument("--out", type=Path, default=Path("outputs/benchmarks/delta_share.jsonl"))
    args = parser.parse_args()
    args.out.parent.mkdir(parents=True, exist_ok=True)
    for lr in args.lr:
        versions = keep_versions(args.model.resolve(), lr, args.steps, args.work)
        before = words_of(versions[0])
        for directory in versions[1:]:
            after = words_of(directory)
            found = change(args.model.name, lr, int(directory.name.removeprefix("step_")), before, after)
            with args.out.open("a") as file:
                file.write(f"{json.dumps(asdict(found))}\n")
            before = after
        shutil.rmtree(args.work)
    print(table([json.loads(line) for line in args.out.read_text().splitlines()]))


if __name__ == "__main__":
    main()
