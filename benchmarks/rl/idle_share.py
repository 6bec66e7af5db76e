"""Measures how long the trainer waits for batches at async levels 0, 1 and 2, if the engine is slower.

    uv run python benchmarks/rl/idle_share.py [--answer-s 1.5] [--steps 12] [--levels 0 1 2]

The real orchestrator and trainer run with the model that against_trl.py makes. The engine answers every request after
`--answer-s` seconds with the same 64 tokens, at any load, so rollouts overlap with training only as far as the async
level allows. The trainer is fast because equal answers share nearly all of its work.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE)]

import tomli_w  # noqa: E402
from against_trl import our_config, tiny_model  # noqa: E402
from orchestrator_overhead import engine  # noqa: E402

TOKENS, WARMUP_STEPS = 64, 3


def idle_share(level: int, args: argparse.Namespace, model: Path, work: Path) -> tuple[float, float]:
    """Share of time that the trainer waited for a batch, and seconds per step."""
    config = our_config(model, work, args.steps, level)
    config |= {"inference": None, "trainer": config["trainer"] | {"parity": {"on_mismatch": "off"}}}
    config["orchestrator"]["filters"] = []
    with engine(TOKENS, args.answer_s, str(model)) as url:
        config["orchestrator"]["client"] = {"base_url": [url]}
        (work / "rl.toml").write_text(tomli_w.dumps({key: value for key, value in config.items() if value is not None}))
        rl = Path(sys.executable).with_name("rl")
        with (work / "log").open("w") as log:
            environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])}
            subprocess.run([rl, "@", work / "rl.toml"], stdout=log, stderr=log, env=environment, check=True)
    records = [json.loads(line) for line in (work / "metrics.jsonl").read_text().splitlines()]
    steps = [record for record in records if record["source"] == "trainer" and "time/step" in record][WARMUP_STEPS:-1]
    total_s = sum(record["time/step"] for record in steps)
    return sum(record["time/wait_for_batch"] for record in steps) / total_s, total_s / len(steps)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--answer-s", type=float, default=1.5, help="seconds that the engine takes for an answer")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--levels", type=int, nargs="+", default=[0, 1, 2])
    args = parser.parse_args()
    print(f"| async level | trainer waits, with answers after {args.answer_s} s | s/step |\n|---|---|---|")
    with tempfile.TemporaryDirectory() as directory:
        model = tiny_model(Path(directory) / "model")
        for level in args.levels:
            work = Path(directory) / str(level)
            work.mkdir()
            share, step_s = idle_share(level, args, model, work)
            print(f"| {level} | {share:.0%} | {step_s:.2f} |", flush=True)


if __name__ == "__main__":
    main()
