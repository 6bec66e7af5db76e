"""Stops a real run at random moments in every way, resumes it each time, and checks that nothing was lost or repeated.

    uv run benchmarks/chaos/stops.py rl --stops 50 --out /tmp/chaos-rl
    uv run benchmarks/chaos/stops.py sft --stops 50 --out /tmp/chaos-sft

`rl` trains the reverse-text example with trainer, engine and orchestrator; after each stop it checks the ledger, and at
the end it compares the ledger with the rollouts of every step. `sft` compares the final weights with those of an
undisturbed run. Every stop is a line of `OUT/stops.jsonl`. Run it again to continue; `--stops 0` prints the table.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil

from prime_rl.history.rollouts import KeptRollouts
from prime_rl.run.ledger import check_ledger
from prime_rl.run.paths import RunPaths, stable_steps

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "reverse_text"
POLL_S = 0.01
START_S, END_S = 300.0, 120.0
"""Longest start of a run until its first step, and longest time from a stop until every process is gone."""
STEPS_AFTER_LAST_STOP = 6
MOST_STEPS = {"rl": 100_000, "sft": 400}
"""The SFT example's learning rate depends on the number of steps, so every launch has the same."""

OPTIONS = {
    "rl": [
        *("--ckpt.interval", "2", "--orchestrator.save-rollouts", "true"),
        *("--orchestrator.batch-size", "16", "--orchestrator.rollouts-per-example", "4"),
        *("--orchestrator.sampling.max-tokens", "12"),
    ],
    "sft": ["--ckpt.interval", "5"],
}
PARTS = {
    "orchestrator": "bin/orchestrator",
    "engine": "bin/inference",
    "trainer": "prime_rl.trainer",
}
"""What the command line of each part contains."""


class Job:
    """A launch of the run in a session of its own, as a shell or Slurm would start it."""

    def __init__(self, command: str, paths: RunPaths, max_steps: int, *options: str) -> None:
        config = EXAMPLE / ("rl_cpu.toml" if command == "rl" else "sft_cpu.toml")
        argv = [Path(sys.executable).with_name("medarc_train"), command, "@", config, "--output-dir", paths.root]
        self.log = paths.root.with_name("launcher.log")
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [*map(str, argv), "--max-steps", str(max_steps), *OPTIONS[command], *options],
                cwd=ROOT,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.launcher = psutil.Process(self.process.pid)
        self.seen: dict[int, psutil.Process] = {}

    @property
    def running(self) -> list[psutil.Process]:
        """The launcher and everything that it has started."""
        try:
            found = [self.launcher, *self.launcher.children(recursive=True)]
        except psutil.NoSuchProcess:
            found = []
        self.seen.update((each.pid, each) for each in found)
        return [each for each in self.seen.values() if is_alive(each)]

    def part(self, name: str) -> psutil.Process | None:
        for each in self.running:
            try:
                if each.pid != self.process.pid and PARTS[name] in " ".join(each.cmdline()):
                    return each
            except psutil.NoSuchProcess:
                continue
        return None

    def send(self, signum: int, *processes: psutil.Process) -> None:
        for process in processes:
            try:
                process.send_signal(signum)
            except psutil.NoSuchProcess:
                continue

    def wait_until_gone(self, limit_s: float) -> bool:
        deadline = time.monotonic() + limit_s
        while self.running or self.process.poll() is None:
            if time.monotonic() > deadline:
                return False
            time.sleep(POLL_S)
        return True


def is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def of_launcher(signum: signal.Signals) -> Callable[[Job], None]:
    return lambda job: job.send(signum, job.launcher)


def of_part(name: str, signum: signal.Signals) -> Callable[[Job], None]:
    def stop(job: Job) -> None:
        job.send(signum, job.part(name) or job.launcher)

    return stop


def ctrl_c(job: Job) -> None:
    """As a terminal sends it: to every process of the group."""
    os.killpg(job.process.pid, signal.SIGINT)


def end_of_job(grace_s: float) -> Callable[[Job], None]:
    """As Slurm ends a job: SIGTERM to every process, then SIGKILL."""

    def stop(job: Job) -> None:
        job.send(signal.SIGTERM, *job.running)
        if not job.wait_until_gone(grace_s):
            job.send(signal.SIGKILL, *job.running)

    return stop


STOPS: dict[str, Callable[[Job], None]] = {
    "kill launcher": of_launcher(signal.SIGKILL),
    "kill trainer": of_part("trainer", signal.SIGKILL),
    "kill orchestrator": of_part("orchestrator", signal.SIGKILL),
    "kill engine": of_part("engine", signal.SIGKILL),
    "kill everything": lambda job: job.send(signal.SIGKILL, *job.running),
    "SIGTERM": of_launcher(signal.SIGTERM),
    "Ctrl-C": ctrl_c,
    "SIGHUP": of_launcher(signal.SIGHUP),
    "walltime": end_of_job(2.0),
    "requeue": end_of_job(30.0),
    "crash of trainer": of_part("trainer", signal.SIGSEGV),
    "crash of orchestrator": of_part("orchestrator", signal.SIGABRT),
    "crash of engine": of_part("engine", signal.SIGSEGV),
}


def await_moment(job: Job, paths: RunPaths, draw: random.Random) -> str | None:
    """Wait for a random moment. Returns its name; None if the run ended before."""
    moment = draw.choices(["start", "step", "save"], [1, 6, 3])[0]
    deadline, delay_s = time.monotonic() + START_S, draw.uniform(0, 1.5)
    first_size = size_of(paths.metrics)
    if moment == "start":
        deadline, delay_s = time.monotonic() + draw.uniform(0, 25), 0.0
    while time.monotonic() < deadline and job.process.poll() is None:
        if moment == "step" and size_of(paths.metrics) > first_size:
            break
        if moment == "save" and size_of(paths.metrics) > first_size and any(paths.checkpoints.glob("*.partial")):
            delay_s = draw.uniform(0, 0.02)
            break
        time.sleep(POLL_S / 5)
    time.sleep(delay_s)
    return moment if job.process.poll() is None else None


def size_of(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def launch_options(paths: RunPaths) -> list[str]:
    """Options that continue the run: from its newest checkpoint, or from the start if it has none."""
    if stable_steps(paths.checkpoints):
        return ["--ckpt.resume-step", "-1"]
    return ["--clean-output-dir"] if paths.root.exists() else []


def stop_once(command: str, paths: RunPaths, kind: str, draw: random.Random) -> dict[str, Any]:
    """Launch, stop, wait, check."""
    started = time.time()
    record: dict[str, Any] = {"kind": kind, "resumed": max(stable_steps(paths.checkpoints), default=None)}
    job = Job(command, paths, MOST_STEPS[command], *launch_options(paths))
    moment = await_moment(job, paths, draw)
    stopped = time.monotonic()
    if moment is None:
        record["died"] = f"ended by itself with {job.process.returncode}"
    else:
        STOPS[kind](job)
        if not job.wait_until_gone(END_S):
            record["died"] = f"still there after {END_S:.0f} s: {[each.cmdline()[:2] for each in job.running]}"
            job.send(signal.SIGKILL, *job.running)
    record |= {"moment": moment, "ended_in_s": round(time.monotonic() - stopped, 2), "exit": job.process.poll()}
    record["seconds"] = round(time.time() - started, 1)
    log = job.log.read_text(errors="replace")
    record["last_line"] = next(iter(log.splitlines()[-1:]), "")
    if "died" in record or "Traceback" in log:
        paths.root.with_name(f"failed-{int(started)}.log").write_text(log)
    record["tracebacks"] = log.count("Traceback")
    return record | ledger_of(command, paths)


def ledger_of(command: str, paths: RunPaths) -> dict[str, Any]:
    if command != "rl" or not paths.orchestrator.ledger.exists():
        return {}
    account, faults = check_ledger(paths.orchestrator)
    return {"drawn": account.num_drawn, "skipped": len(account.skipped), "twice": len(account.twice), "faults": faults}


def finish(command: str, paths: RunPaths) -> Iterator[str]:
    """Run to an end without a stop. Yields what is wrong then."""
    last = max(stable_steps(paths.checkpoints), default=0) + STEPS_AFTER_LAST_STOP
    last = MOST_STEPS[command] if command == "sft" else last
    job = Job(command, paths, last, *launch_options(paths))
    if job.process.wait() != 0:
        yield f"the last launch ended with {job.process.returncode}: {job.log.read_text()[-2000:]}"
        return
    if command == "rl":
        yield from rl_faults(paths, last)
    else:
        yield from sft_faults(paths, last)


def rl_faults(paths: RunPaths, steps: int) -> Iterator[str]:
    account, faults = check_ledger(paths.orchestrator)
    yield from faults
    trained: dict[int, Counter[tuple[str, int]]] = defaultdict(Counter)
    for draw in account.draws.values():
        for step in draw.steps:
            trained[step][draw.env, draw.row] += 1
    if sorted(trained) != list(range(steps)):
        yield f"the ledger has {len(trained)} steps, not {steps}"
    for step in trained:
        kept = KeptRollouts(paths).of_step(step)
        groups = {each.fields["group"]: (each.env, each.fields["row"]) for each in kept}
        if Counter(groups.values()) != trained[step]:
            yield f"step {step}: the ledger has {trained[step]}, the rollouts are of {Counter(groups.values())}"
    print(f"{account.num_drawn} draws, {account.num_trained} trained on in {steps} steps, {account.starts} starts")


def sft_faults(paths: RunPaths, steps: int) -> Iterator[str]:
    straight = RunPaths(paths.root.with_name("straight"))
    Job("sft", straight, steps, "--clean-output-dir").process.wait()
    files = [each.weight(steps) / "model.safetensors" for each in (paths, straight)]
    if files[0].read_bytes() != files[1].read_bytes():
        yield f"{files[0]} differs from {files[1]}"
    print(f"{steps} steps, weights compared with an undisturbed run")


def table(records: list[dict[str, Any]]) -> str:
    lines = [
        "| kind of stop | runs | skipped | twice | faults | died | median s to end |",
        "|---|---|---|---|---|---|---|",
    ]
    kinds = defaultdict(list)
    for record in records:
        kinds[record["kind"]].append(record)
        kinds["all"].append(record)
    for kind in [*sorted(set(kinds) - {"all"}), *(["all"] if records else [])]:
        of_kind = kinds[kind]
        sums = [sum(record.get(key, 0) for record in of_kind) for key in ("skipped", "twice")]
        faults = sum(len(record.get("faults", [])) for record in of_kind)
        died = sum("died" in record for record in of_kind)
        seconds = sorted(record["ended_in_s"] for record in of_kind)[len(of_kind) // 2]
        lines.append(f"| {kind} | {len(of_kind)} | {sums[0]} | {sums[1]} | {faults} | {died} | {seconds} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=OPTIONS)
    parser.add_argument("--stops", type=int, default=50)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=None)
    options = parser.parse_args()
    for signum in (signal.SIGHUP, signal.SIGINT):
        if signal.getsignal(signum) is signal.SIG_IGN:
            # Under nohup, or in a script's background, every child would ignore it. A handler is not inherited.
            signal.signal(signum, lambda number, frame: None)
    options.out.mkdir(parents=True, exist_ok=True)
    paths, notes = RunPaths(options.out / "run"), options.out / "stops.jsonl"
    draw = random.Random(options.seed)
    kinds = [kind for kind in STOPS if options.command == "rl" or not kind.endswith(("orchestrator", "engine"))]
    order: list[str] = []
    for number in range(options.stops):
        order = order or draw.sample(kinds, len(kinds))
        record = stop_once(options.command, paths, order.pop(), draw)
        with notes.open("a") as file:
            file.write(json.dumps(record) + "\n")
        print(f"{number + 1}/{options.stops}", record, flush=True)
    faults = list(finish(options.command, paths)) if options.stops else []
    records = [json.loads(line) for line in notes.read_text().splitlines()] if notes.exists() else []
    print(table(records))
    for fault in faults:
        print(f"fault: {fault}")
    sys.exit(bool(faults) or any(record.get("faults") or "died" in record for record in records))


if __name__ == "__main__":
    main()
