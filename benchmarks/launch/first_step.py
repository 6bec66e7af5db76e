"""Measures the time from a command to the end of the first training step: `uv run benchmarks/launch/first_step.py`.

The jobs are the CPU examples. `local` is `medarc_train`; `slurm` is `medarc_slurm` on a cluster of its own, as in
`benchmarks/slurm` (needs root, slurm-wlm and munge), so the difference is what submission, queue and batch script add.
`ray` is `medarc_submit --to ray` (needs the extra `ray`), which starts a cluster of this machine alone for the job.
`--out` gets a JSON line for each start; the table is the median over all lines. To add a way to launch, add a
function to `WAYS`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "benchmarks" / "rl"), str(ROOT / "tests")]

from orchestrator_overhead import machine  # noqa: E402

EXAMPLES = ROOT / "examples" / "reverse_text"
NO_SCHEDULE = ("--scheduler.warmup-steps", 0, "--scheduler.decay-steps", 1)
JOBS = {
    "sft": ("sft", EXAMPLES / "sft_cpu.toml", "--device", "cpu", "--max-steps", 2, *NO_SCHEDULE),
    "rl": ("rl", EXAMPLES / "rl_cpu.toml", "--device", "cpu", "--max-steps", 2, "--orchestrator.batch-size", 16),
}
LIMIT_S = 600.0
LOOK_EVERY_S = 0.02


def step_time(out: Path) -> float | None:
    """When the trainer ended its first step, by the clock; None if it has not."""
    metrics = out / "metrics.jsonl"
    lines = [json.loads(line) for line in metrics.read_text().splitlines()] if metrics.exists() else []
    return next((line["time"] for line in lines if line["source"] in ("trainer", "sft")), None)


def await_step(out: Path, is_alive: Callable[[], bool]) -> float:
    """Raises SystemExit if the job ends, or takes more than `LIMIT_S`, without a step."""
    started_s = time.monotonic()
    while (found := step_time(out)) is None:
        if not is_alive() or time.monotonic() - started_s > LIMIT_S:
            raise SystemExit(f"no step; its logs are in {out / 'logs'}")
        time.sleep(LOOK_EVERY_S)
    return found


def local(words: Sequence[str], out: Path) -> float:
    command = [str(Path(sys.executable).with_name("medarc_train")), *words, "--output-dir", str(out)]
    started = time.time()
    run = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    ended = await_step(out, lambda: run.poll() is None)
    run.wait()
    return ended - started


def slurm(words: Sequence[str], out: Path) -> float:
    from conftest import SlurmCluster

    with tempfile.TemporaryDirectory(prefix="medarc-slurm-") as place:
        Path(place).chmod(0o755)
        cluster = SlurmCluster(Path(place))
        try:
            cluster.start()
            return _through_slurm(cluster.env, [*words, *_of_slurm(words[0], out)], out)
        finally:
            cluster.stop()


def _of_slurm(kind: str, out: Path) -> list[str]:
    project = out.parent / "project"
    project.mkdir(exist_ok=True)
    for name, target in ((".venv", Path(sys.prefix)), ("examples", ROOT / "examples")):
        if not (project / name).is_symlink():
            (project / name).symlink_to(target)
    gpus = ["--gpus", "1"] if kind == "sft" else ["--single-gpu"]
    common = ["--no-check", "--time", "30", "--cpus-per-gpu", "1"]
    return [*gpus, *common, "--project-dir", str(project), "--output-dir", str(out)]


def _through_slurm(env: dict[str, str], words: Sequence[str], out: Path) -> float:
    command = [sys.executable, "-c", "from medarc_rl.medarc_slurm import main; main()", *words]
    started = time.time()
    submitted = subprocess.run(command, env={**os.environ, **env}, capture_output=True, text=True, check=False)
    if submitted.returncode:
        raise SystemExit(submitted.stderr)
    return await_step(out, lambda: True) - started


def ray(words: Sequence[str], out: Path) -> float:
    command = [str(Path(sys.executable).with_name("medarc_submit")), *words, "--to", "ray", "--output-dir", str(out)]
    # The job log of the user stays as it is.
    env = {**os.environ, "XDG_STATE_HOME": str(out.parent / "state")}
    started = time.time()
    submitted = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    if submitted.returncode:
        raise SystemExit(submitted.stderr)
    ended = await_step(out, lambda: not list((out / "ray").glob("*.end")))
    while not list((out / "ray").glob("*.end")):
        time.sleep(LOOK_EVERY_S)
    return ended - started


WAYS: dict[str, Callable[[Sequence[str], Path], float]] = {"local": local, "slurm": slurm, "ray": ray}


def table(lines: Sequence[dict[str, Any]]) -> str:
    rows = ["| job | way | starts | to the first step, s: median | least |", "|---|---|---|---|---|"]
    for job in JOBS:
        for way in WAYS:
            same = [each["first_step_s"] for each in lines if (each["job"], each["way"]) == (job, way)]
            if same:
                rows.append(f"| {job} | {way} | {len(same)} | {median(same):.1f} | {min(same):.1f} |")
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ways", nargs="*", choices=list(WAYS), default=list(WAYS))
    parser.add_argument("--jobs", nargs="*", choices=list(JOBS), default=list(JOBS))
    parser.add_argument("--rounds", type=int, default=3, help="0 only prints the table")
    parser.add_argument("--out", type=Path, default=Path("outputs/benchmarks/first_step.jsonl"))
    args = parser.parse_args()
    args.out.parent.mkdir(parents=True, exist_ok=True)
    for _ in range(args.rounds):
        for job in args.jobs:
            for way in args.ways:
                with tempfile.TemporaryDirectory() as directory:
                    seconds = WAYS[way](list(map(str, JOBS[job])), Path(directory) / "run")
                line = json.dumps({"job": job, "way": way, "first_step_s": seconds, "machine": machine()})
                with args.out.open("a") as file:
                    file.write(f"{line}\n")
    print(table([json.loads(line) for line in args.out.read_text().splitlines()]))


if __name__ == "__main__":
    main()
