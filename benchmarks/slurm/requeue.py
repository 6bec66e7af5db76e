"""Disturbs runs on a real Slurm, and compares what they end with to what an undisturbed run ends with.

    uv run benchmarks/slurm/requeue.py DIR                        # SFT: the same weights, byte by byte
    uv run benchmarks/slurm/requeue.py DIR --kind rl --runs 2     # RL: a ledger without gaps

It starts a cluster of its own, as the tests do, and needs root, slurm-wlm and munge. Each run is disturbed twice: up to
`--latest-s` seconds after its trainer has started, and up to as long after the next attempt has saved a checkpoint.
`DIR/results.jsonl` has a line for each run, and the last lines of the output count them by case.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests"))
from conftest import SlurmCluster  # noqa: E402

EXAMPLES = ROOT / "examples" / "reverse_text"
SFT = (
    *("sft", EXAMPLES / "sft_cpu.toml", "--device", "cpu", "--max-steps", 40, "--ckpt.interval", 3, "--gpus", 1),
    *("--ckpt.keep-last", 2, "--scheduler.warmup-steps", 1, "--scheduler.decay-steps", 1),
    *("--data.seq-len", 64, "--data.batch-size", 4, "--data.micro-batch-size", 2),
)
RL = (
    *("rl", EXAMPLES / "rl_cpu.toml", "--device", "cpu", "--max-steps", 40, "--ckpt.interval", 2, "--single-gpu"),
    *("--orchestrator.batch-size", 16, "--orchestrator.rollouts-per-example", 4),
)
DISTURBANCES = 2


@dataclass
class Run:
    """One run, and the job that works on it now."""

    out: Path
    words: tuple[object, ...]
    job: str = ""
    jobs: list[str] = field(default_factory=list)

    @property
    def log(self) -> Path:
        return self.out / "slurm" / f"job_{self.job}.log"

    def said(self, words: str) -> int:
        """How often all jobs of the run have logged some words."""
        logs = [self.out / "slurm" / f"job_{job}.log" for job in self.jobs]
        return sum(log.read_text(errors="replace").count(words) for log in logs if log.is_file())

    def starts(self) -> int:
        return self.said("trainer started")


class Campaign:
    def __init__(self, cluster: SlurmCluster, project: Path, latest_s: float) -> None:
        self.cluster = cluster
        self.project = project
        self.latest_s = latest_s

    def submit(self, run: Run, *more: object) -> None:
        options = ("--no-check", "--requeue", "--signal-before", 60, "--time", 60, "--cpus-per-gpu", 1)
        where = ("--project-dir", self.project, "--output-dir", run.out)
        command = [sys.executable, "-c", "from medarc_rl.medarc_slurm import main; main()"]
        words = map(str, (*run.words, *options, *where, *more))
        done = subprocess.run([*command, *words], env=self.cluster.env, capture_output=True, text=True)
        found = re.search(r"Submitted batch job (\d+)", done.stdout)
        if found is None:
            raise RuntimeError(done.stdout + done.stderr)
        run.job = found[1]
        run.jobs.append(found[1])

    def is_over(self, run: Run) -> bool:
        return self.cluster.job(run.job).get("JobState") not in ("PENDING", "RUNNING", "COMPLETING", "REQUEUED")

    def wait_for(self, words: str, counts: dict[str, int], runs: list[Run]) -> None:
        """Wait until every run has logged some words more often than it had."""
        while any(run.said(words) <= counts[str(run.out)] and not self.is_over(run) for run in runs):
            time.sleep(0.2)

    def wait_for_end(self, runs: list[Run]) -> None:
        while not all(map(self.is_over, runs)):
            time.sleep(0.5)


def time_limit(campaign: Campaign, runs: list[Run]) -> None:
    """Slurm itself sends the warning, because the time limit is near. The next attempt has the old limit again."""
    restarts = {run.job: campaign.cluster.job(run.job).get("Restarts") for run in runs}
    for run in runs:
        campaign.cluster.ask("scontrol", "update", f"JobId={run.job}", "TimeLimit=1")
    for run in runs:
        while not campaign.is_over(run) and campaign.cluster.job(run.job).get("Restarts") == restarts[run.job]:
            time.sleep(0.2)
        campaign.cluster.ask("scontrol", "update", f"JobId={run.job}", "TimeLimit=60")


def requeue(campaign: Campaign, runs: list[Run]) -> None:
    for run in runs:
        campaign.cluster.ask("scontrol", "requeue", run.job)


def terminate(campaign: Campaign, runs: list[Run]) -> None:
    """SIGTERM without a warning."""
    for run in runs:
        campaign.cluster.ask("scancel", "--batch", "--signal=TERM", run.job)


def cancel(campaign: Campaign, runs: list[Run]) -> None:
    """scancel; the user submits again."""
    running = [run for run in runs if not campaign.is_over(run)]
    for run in running:
        campaign.cluster.ask("scancel", run.job)
    campaign.wait_for_end(running)
    for run in running:
        campaign.submit(run, "--resume", "auto")


def preempt(campaign: Campaign, runs: list[Run]) -> None:
    """A job of a partition with a higher priority takes all GPUs."""
    urgent = ("--partition=urgent", "--gres=gpu:8", "--output=/dev/null", "--wrap=true")
    campaign.cluster.ask("sbatch", "--wait", *urgent)


def node_down(campaign: Campaign, runs: list[Run]) -> None:
    """All processes of the jobs die at once, with Slurm's own process that would report their end. The node is lost."""
    marks = {f"SLURM_JOB_ID={run.job}".encode() for run in runs}
    cluster = f"SLURM_CONF={campaign.cluster.conf}".encode()
    processes: list[int] = []
    for environ in Path("/proc").glob("[0-9]*/environ"):
        try:
            variables = set(environ.read_bytes().split(b"\0"))
            parent = int((environ.parent / "stat").read_text().rpartition(")")[2].split()[1])
            is_batch_shell = (environ.parents[1] / str(parent) / "comm").read_text().startswith("slurmstepd")
        except OSError:
            continue
        if marks & variables and cluster in variables:
            processes = [parent, *processes] if is_batch_shell else processes
            processes.append(int(environ.parent.name))
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
    campaign.cluster.ask("scontrol", "update", "NodeName=node0", "State=DOWN", "Reason=test")
    campaign.cluster.ask("scontrol", "update", "NodeName=node0", "State=RESUME")


CASES: dict[str, Callable[[Campaign, list[Run]], None]] = {
    each.__name__: each for each in (time_limit, requeue, terminate, cancel, preempt, node_down)
}


def undisturbed(campaign: Campaign, directory: Path, words: tuple[object, ...]) -> Path:
    run = Run(directory / "undisturbed", words)
    campaign.submit(run)
    campaign.wait_for_end([run])
    return run.out


def fault(run: Run, campaign: Campaign, reference: Path | None) -> str | None:
    """What is wrong with the end of a run; None if it is right."""
    state = campaign.cluster.job(run.job).get("JobState")
    if state != "COMPLETED":
        return f"job {run.job} ended as {state}"
    if reference is None:
        argv = [sys.executable, "-m", "prime_rl.run.ledger", str(run.out)]
        done = subprocess.run(argv, capture_output=True, text=True)
        return None if done.returncode == 0 else (done.stdout + done.stderr).strip()[-300:]
    ours, theirs = (next((out / "weights").glob("step_*/model.safetensors"), None) for out in (run.out, reference))
    if ours is None or theirs is None:
        return "no weights"
    return None if ours.read_bytes() == theirs.read_bytes() else "other weights"


def run_case(campaign: Campaign, case: str, runs: list[Run]) -> None:
    """Start several runs at once, disturb each one, and wait until all have ended."""
    for run in runs:
        campaign.submit(run)
    starts = saves = {str(run.out): 0 for run in runs}
    for number in range(DISTURBANCES):
        campaign.wait_for("trainer started", starts, runs)
        if number + 1 == DISTURBANCES:
            campaign.wait_for("Saved ", saves, runs)
        time.sleep(random.uniform(0, campaign.latest_s))
        starts = {str(run.out): run.said("trainer started") for run in runs}
        saves = {str(run.out): run.said("Saved ") for run in runs}
        CASES[case](campaign, [run for run in runs if not campaign.is_over(run)])
    campaign.wait_for_end(runs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("directory", type=Path)
    parser.add_argument("--kind", choices=["sft", "rl"], default="sft")
    parser.add_argument("--runs", type=int, default=4, help="of each case")
    parser.add_argument("--at-once", type=int, default=2)
    parser.add_argument("--latest-s", type=float, default=15.0)
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES))
    options = parser.parse_args()
    # A background job of a shell ignores Ctrl-C; a terminated campaign must still end its cluster.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(143))
    words = SFT if options.kind == "sft" else RL
    directory = options.directory.absolute()
    project = directory / "project"
    project.mkdir(parents=True)
    (project / ".venv").symlink_to(sys.prefix)
    (project / "examples").symlink_to(ROOT / "examples")
    with tempfile.TemporaryDirectory(prefix="medarc-slurm-") as place:
        Path(place).chmod(0o755)
        cluster = SlurmCluster(Path(place))
        try:
            cluster.start()
            count_results(Campaign(cluster, project, options.latest_s), directory, words, options)
        finally:
            cluster.stop()


def count_results(campaign: Campaign, directory: Path, words: tuple[object, ...], options: argparse.Namespace) -> None:
    reference = undisturbed(campaign, directory, words) if options.kind == "sft" else None
    good: Counter[str] = Counter()
    total: Counter[str] = Counter()
    numbers = list(range(options.runs))
    batches = [numbers[at : at + options.at_once] for at in range(0, options.runs, options.at_once)]
    for batch in batches:
        for case in options.cases:
            runs = [Run(directory / f"{case}_{number}", words) for number in batch]
            run_case(campaign, case, runs)
            for run in runs:
                found = fault(run, campaign, reference)
                starts = run.starts()
                total[case] += 1
                good[case] += found is None
                line = {"case": case, "out": str(run.out), "starts": starts, "jobs": run.jobs, "fault": found}
                with (directory / "results.jsonl").open("a") as results:
                    results.write(json.dumps(line) + "\n")
                sys.stdout.write(f"{line}\n")
                sys.stdout.flush()
    for case in options.cases:
        sys.stdout.write(f"{case}: {good[case]} of {total[case]} runs as undisturbed\n")


if __name__ == "__main__":
    main()
