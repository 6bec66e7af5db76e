"""Measures rollouts per second of one environment, in each place where it can run, with an engine that answers at once.

    uv run python benchmarks/environments/places.py [--seconds 8] [--in-flight 64] [--tokens 64] [--place agent]

Single-turn rollouts in groups of 8. The environment's process has one core to itself; this process, which stands for
the orchestrator, and the engine share the other one. The last column divides the rate by the share of a core that the
environment's process got: on a busy machine it varies less.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "rl"))

from orchestrator_overhead import ENVIRONMENT, GROUP, MODEL, ROWS, cpu_s, engine, machine

from prime_rl.configs.rollouts.environments import EnvConfig
from prime_rl.configs.shared import ClientConfig, LogConfig
from prime_rl.orchestrator.rollouts.rollout import ExampleRef
from prime_rl.orchestrator.rollouts.sampling import SamplingConfig, train_sampling_args
from prime_rl.orchestrator.servers.pool import InferencePool
from prime_rl.orchestrator.workers.environment import Environment
from prime_rl.orchestrator.workers.loading import load_environments

NAME = "instant-env"
WARMUP_S = 1.0
AGENTS = f"""
import random


def rows():
    return [{{"question": f"What comes after {{number}}?"}} for number in range({ROWS})]


async def with_client(task, client, model):
    await client.chat.completions.create(model=model, messages=[{{"role": "user", "content": task["question"]}}])
    return random.random()


async def with_httpx(task, base_url, api_key, model, http_client):
    body = {{"model": model, "messages": [{{"role": "user", "content": task["question"]}}]}}
    headers = {{"Authorization": f"Bearer {{api_key}}"}}
    (await http_client.post(f"{{base_url}}/chat/completions", json=body, headers=headers)).raise_for_status()
    return random.random()
"""
PLACES = {
    "in-process": "the orchestrator's process",
    "server": "an environment server of its own",
    "interpreter": "an interpreter of its own, through the proxy",
    "agent": "a workflow with the openai client, through the proxy",
    "agent-httpx": "a workflow with httpx, through the proxy",
}


@dataclass(frozen=True, slots=True)
class Speed:
    """Rollouts per second, and CPU seconds per second of each process."""

    by_the_clock: float
    here: float
    there: float | None


@contextmanager
def config_of(place: str, folder: Path, core: int) -> Iterator[EnvConfig]:
    """What the config of a run says for a place, with an environment server started where it needs one."""
    if place.startswith("agent"):
        kind = "with_httpx" if place.endswith("httpx") else "with_client"
        yield EnvConfig(name=NAME, workflow=f"instant_agents:{kind}", agent_dataset="instant_agents:rows")
    elif place == "interpreter":
        # This interpreter, which finds the environment without an installed package.
        python = folder / "python"
        python.write_text(f'#!/bin/sh\nPYTHONPATH="{folder}" exec "{sys.executable}" "$@"\n')
        python.chmod(0o700)
        yield EnvConfig(id=NAME, python=python)
    elif place == "server":
        address = f"ipc://{folder}/server"
        words = ["--env.id", NAME, "--env.address", address, "--output-dir", str(folder), "--log.level", "warning"]
        argv = [sys.executable, "-m", "prime_rl.orchestrator.env_server", *words]
        pin = None if core < 0 else lambda: os.sched_setaffinity(0, {core})
        with subprocess.Popen(argv, env={**os.environ, "PYTHONPATH": str(folder)}, preexec_fn=pin) as process:
            try:
                yield EnvConfig(id=NAME, address=address)
            finally:
                process.terminate()
    else:
        yield EnvConfig(id=NAME)


def children() -> set[int]:
    """Process ids of the children of this process."""
    return {int(pid) for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()}


async def rolled_out(environment: Environment, pool: InferencePool, in_flight: int, seconds: float) -> float:
    """Rollouts per second by the clock."""
    sampling, rows = train_sampling_args(SamplingConfig(max_tokens=64), 1.0), itertools.cycle(range(ROWS))
    started, count = time.perf_counter(), 0

    async def groups() -> None:
        nonlocal count
        while time.perf_counter() - started < seconds:
            example = ExampleRef(NAME, next(rows))
            rollouts = await environment.run_group(example, GROUP, pool.servers[0], sampling, 0)
            count += len(rollouts)

    await asyncio.gather(*(groups() for _ in range(max(1, in_flight // GROUP))))
    return count / (time.perf_counter() - started)


async def measured(environment: Environment, url: str, process: int | None, args: argparse.Namespace) -> Speed:
    pool = InferencePool(ClientConfig(base_url=[url]), MODEL)
    await pool.wait_ready(use_token_client=True)
    await environment.connect()
    try:
        await rolled_out(environment, pool, args.in_flight, WARMUP_S)
        before = (cpu_s(os.getpid()), cpu_s(process) if process else 0.0)
        started = time.perf_counter()
        speed = await rolled_out(environment, pool, args.in_flight, args.seconds)
        took_s = time.perf_counter() - started
        here = (cpu_s(os.getpid()) - before[0]) / took_s
        there = (cpu_s(process) - before[1]) / took_s if process else None
    finally:
        await environment.close()
        await pool.close()
    return Speed(speed, here, there)


def speed_of(place: str, url: str, engine_process: set[int], cores: Mapping[str, int], args: Any) -> Speed:
    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory)
        (folder / "instant_env.py").write_text(ENVIRONMENT)
        (folder / "instant_agents.py").write_text(AGENTS)
        sys.path.insert(0, directory)
        try:
            with config_of(place, folder, cores["there"]) as config:
                environment = load_environments([config], LogConfig(level="warning", vf_level="error"))[NAME]
                found = children() - engine_process
                for pid in found:
                    os.sched_setaffinity(pid, {cores["there"]})
                return asyncio.run(measured(environment, url, next(iter(found), None), args))
        finally:
            sys.path.remove(directory)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--in-flight", type=int, default=64, help="rollouts at a time")
    parser.add_argument("--tokens", type=int, default=64, help="in each completion")
    parser.add_argument("--place", choices=PLACES, action="append", help="only these places")
    args = parser.parse_args()
    print(f"Machine: {machine()}")
    available = sorted(os.sched_getaffinity(0))
    cores = {"here": available[0], "there": available[-1]}
    os.sched_setaffinity(0, {cores["here"]})
    print(f"{'environment in':52} {'rollouts/s':>10} {'of a CPU: here':>15} {'there':>7} {'per CPU s there':>16}")
    with engine(args.tokens) as url:
        engine_process = children()
        for place in args.place or PLACES:
            speed = speed_of(place, url, engine_process, cores, args)
            there = "" if not speed.there else f"{speed.there:7.0%} {speed.by_the_clock / speed.there:16.0f}"
            print(f"{PLACES[place]:52} {speed.by_the_clock:10.0f} {speed.here:15.0%} {there}", flush=True)


if __name__ == "__main__":
    main()
