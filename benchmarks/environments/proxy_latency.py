"""Measures what the recording proxy adds to model calls: direct calls and calls through the proxy, in turn.

    uv run python benchmarks/environments/proxy_latency.py [--sessions 64] [--answer-ms 100 300 1000] [--rounds 3]

Each session makes conversations of three calls, and pauses before each for up to `--answer-ms`, the time in which the
engine answers. 0 answers at once, which shows how many calls the proxy forwards at most. The proxy has one core to
itself, as in an orchestrator that has nothing else to do; this process, which calls, and the engine share the other.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import aiohttp

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "rl"))

from orchestrator_overhead import MODEL, cpu_s, engine, machine

TURNS = 3
MIN_SESSIONS_PER_ROUND = 4
"""Conversations that each of the callers has in a round."""


@dataclass(frozen=True, slots=True)
class Way:
    """Where calls go, and the keys with which they may."""

    base_url: str
    keys: Sequence[str]


async def called(way: Way, callers: int, think_s: float) -> tuple[list[float], float]:
    """Seconds of each call, and calls per second. Each caller has its conversations one after the other."""
    times_s: list[float] = []
    keys = iter(way.keys)
    rng = random.Random(5)

    async def caller(http: aiohttp.ClientSession) -> None:
        for key in keys:
            messages: list[dict[str, Any]] = [{"role": "user", "content": "What comes after 41?"}]
            for _ in range(TURNS):
                # As the proxy asks the engine, so that the engine sends the same bytes either way.
                body = {"model": MODEL, "messages": messages, "logprobs": True, "return_token_ids": True}
                data = json.dumps(body).encode()
                # Callers in step would all call at once, again and again, and wait for each other.
                await asyncio.sleep(rng.random() * think_s)
                headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
                started = time.perf_counter()
                async with http.post(f"{way.base_url}/chat/completions", data=data, headers=headers) as answer:
                    answer.raise_for_status()
                    said = await answer.read()
                times_s.append(time.perf_counter() - started)
                messages += [json.loads(said)["choices"][0]["message"], {"role": "user", "content": "And then?"}]

    started = time.perf_counter()
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:
        await asyncio.gather(*(caller(http) for _ in range(callers)))
    return times_s, len(times_s) / (time.perf_counter() - started)


async def serve(engine_url: str, count: int) -> None:
    """Be the proxy: open so many sessions, print their keys, and forward calls until this process is killed."""
    from prime_rl.configs.shared import ClientConfig
    from prime_rl.orchestrator.proxy.routes import RecordingProxy
    from prime_rl.orchestrator.rollouts.sampling import SamplingConfig, train_sampling_args
    from prime_rl.orchestrator.servers.pool import InferencePool

    pool, proxy = InferencePool(ClientConfig(base_url=[engine_url]), MODEL), RecordingProxy()
    await pool.wait_ready(use_token_client=True)
    await proxy.open()
    sampling = train_sampling_args(SamplingConfig(max_tokens=64), 1.0)
    with proxy.sessions.opened(count, pool.servers[0], sampling) as sessions:
        print(json.dumps({"base_url": proxy.base_url, "keys": [session.key for session in sessions]}), flush=True)
        await asyncio.Event().wait()


@contextmanager
def proxy_of(engine_url: str, count: int, core: int) -> Iterator[tuple[Way, int]]:
    """A proxy in a process of its own, and its process id."""
    argv = [sys.executable, __file__, "--serve", engine_url, str(count)]
    pin = None if core < 0 else lambda: os.sched_setaffinity(0, {core})
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, preexec_fn=pin) as process:
        try:
            assert process.stdout is not None
            yield Way(**json.loads(process.stdout.readline())), process.pid
        finally:
            process.kill()


def report(answer_ms: float, args: argparse.Namespace, core: int) -> None:
    per_round = args.sessions * max(MIN_SESSIONS_PER_ROUND, int(4000 / max(answer_ms, 40) / TURNS))
    direct_s: list[float] = []
    proxied_s: list[float] = []
    rates: list[float] = []
    busy: list[float] = []
    with engine(args.tokens, answer_ms / 1e3) as url:
        for _ in range(args.rounds):
            with proxy_of(url, per_round, core) as (way, pid):
                times_s, _ = asyncio.run(called(Way(url, ["none"] * per_round), args.sessions, answer_ms / 1e3))
                direct_s += times_s
                before, started = cpu_s(pid), time.perf_counter()
                times_s, rate = asyncio.run(called(way, args.sessions, answer_ms / 1e3))
                busy.append((cpu_s(pid) - before) / (time.perf_counter() - started))
                proxied_s += times_s
                rates.append(rate)
    cells = [f"{answer_ms:9.0f}", f"{median(rates):8.0f}", f"{median(busy):6.0%}"]
    for of in (median, lambda times: quantiles(times, n=100)[98]):
        direct, proxied = (1e3 * of(times) for times in (direct_s, proxied_s))
        cells += [f"{direct:9.1f}", f"{proxied:9.1f}", f"{proxied - direct:7.1f}"]
    print(" ".join(cells), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sessions", type=int, default=64, help="at a time")
    parser.add_argument("--answer-ms", type=float, nargs="+", default=[100, 300, 1000], help="of the engine")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=64, help="in each answer")
    parser.add_argument("--serve", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        asyncio.run(serve(args.serve[0], int(args.serve[1])))
        return
    print(f"Machine: {machine()}; {args.sessions} sessions, {args.tokens} tokens an answer")
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[0]})
    print(" answer ms  calls/s   core | median: direct, proxied, added | 99th percentile: direct, proxied, added")
    for answer_ms in args.answer_ms:
        report(answer_ms, args, cores[-1])


if __name__ == "__main__":
    main()
