"""Measures the orchestrator's own cost: rollouts per second with an engine that answers at once.

    uv run python benchmarks/rl/orchestrator_overhead.py [--steps 20] [--batch 128] [--tokens 64] [--env-servers]

The `orchestrator` command runs on one core, with real environments, scheduling, scoring, samples and batches on disk.
The engine, a separate process, sends the same answer to every chat request: `--tokens` token ids with
log-probabilities. There is no trainer. "per CPU second" counts only the orchestrator's CPU time, so other work on the
machine changes it little; with `--env-servers` it does not include the environment's process.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import tomli_w

GROUP, ROWS, WARMUP_STEPS = 8, 1000, 2
MODEL = "instant"
LIMIT_S = 600.0
ENVIRONMENT = f"""
import random
import verifiers as vf
from datasets import Dataset


def chance(completion):
    return random.random()


def load_environment():
    rows = [{{"question": f"What comes after {{number}}?", "answer": str(number + 1)}} for number in range({ROWS})]
    return vf.SingleTurnEnv(dataset=Dataset.from_list(rows), rubric=vf.Rubric(funcs=[chance]))
"""


@dataclass(frozen=True, slots=True)
class Speed:
    """Rollouts per second."""

    by_the_clock: float
    per_cpu_second: float
    peak_mib: float
    """Largest resident set of the orchestrator at the end of a measured step."""


def answers(tokens: int, model: str = MODEL) -> dict[str, bytes]:
    """Bodies by path."""
    logprobs = [{"token": "a", "logprob": -0.5, "bytes": [97], "top_logprobs": []} for _ in range(tokens)]
    choice = {
        "index": 0,
        "message": {"role": "assistant", "content": "a" * tokens},
        "finish_reason": "stop",
        "token_ids": list(range(tokens)),
        "logprobs": {"content": logprobs},
        "weight_versions": [{"version": 0, "start": 0, "end": tokens}],
    }
    usage = {"prompt_tokens": 20, "completion_tokens": tokens, "total_tokens": 20 + tokens}
    chat = {"id": "x", "created": 1, "model": model, "prompt_token_ids": list(range(20)), "choices": [choice]}
    bodies = {"/v1/chat/completions": chat | {"usage": usage}, "/v1/models": {"data": [{"id": model}]}}
    bodies["/v1/chat/completions/tokens"] = bodies["/v1/chat/completions"]
    bodies["/tokenize"] = {"tokens": list(range(8)), "count": 8, "max_model_len": 1024}
    return {path: json.dumps(body).encode() for path, body in bodies.items()}


class InstantEngine(asyncio.Protocol):
    """HTTP/1.1 with keep-alive: only what the orchestrator's requests need."""

    def __init__(self, replies: dict[str, bytes], chat_s: float = 0.0) -> None:
        self.replies = replies
        self.chat_s = chat_s
        """How long a chat request takes."""
        self.received = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.received += data
        while (end := self.received.find(b"\r\n\r\n")) >= 0:
            head = self.received[:end].decode("latin-1")
            length = next(
                (int(line.split(":")[1]) for line in head.split("\r\n") if line.lower().startswith("content-length:")),
                0,
            )
            if len(self.received) < end + 4 + length:
                return
            self.received = self.received[end + 4 + length :]
            path = head.split(" ", 2)[1]
            body = self.replies.get(path, b"{}")
            reply = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%b" % (
                len(body),
                body,
            )
            if self.chat_s and path.startswith("/v1/chat/completions"):
                asyncio.get_running_loop().call_later(self.chat_s, self.transport.write, reply)
            else:
                self.transport.write(reply)


async def serve(tokens: int, chat_s: float, model: str) -> None:
    replies = answers(tokens, model)
    server = await asyncio.get_running_loop().create_server(lambda: InstantEngine(replies, chat_s), "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


@contextmanager
def engine(tokens: int, chat_s: float = 0.0, model: str = MODEL) -> Iterator[str]:
    """Run an engine in a separate process; yields its URL."""
    command = [sys.executable, __file__, "--tokens", str(tokens), "--serve", str(chat_s), model]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield f"http://127.0.0.1:{process.stdout.readline().strip()}/v1"
        finally:
            process.terminate()


def measure(args: argparse.Namespace, urls: Sequence[str], directory: Path) -> Speed:
    """Run the orchestrator for some steps."""
    (directory / "instant_env.py").write_text(ENVIRONMENT)
    config = {
        "output_dir": str(directory / "run_default"),
        "max_steps": args.steps + WARMUP_STEPS,
        "max_async_level": 1_000_000_000,
        "batch_size": args.batch,
        "rollouts_per_example": GROUP,
        "model": {"name": MODEL},
        "client": {"base_url": list(urls)},
        "env": [{"id": "instant-env"}],
        "env_servers": args.env_servers,
        "filters": [{"type": "repetition"}],
        "log": {"level": "warning", "vf_level": "error"},
    }
    file = directory / "orchestrator.toml"
    file.write_text(tomli_w.dumps(config))
    core = min(os.sched_getaffinity(0))
    process = subprocess.Popen(
        [str(Path(sys.executable).with_name("orchestrator")), "@", str(file)],
        env={**os.environ, "PYTHONPATH": str(directory), "OMP_NUM_THREADS": "1"},
        # Environment servers inherit the core mask and would share the one core.
        preexec_fn=None if args.env_servers else lambda: os.sched_setaffinity(0, {core}),
    )
    return watch(process, directory / "metrics.jsonl", args)


def watch(process: subprocess.Popen[bytes], metrics: Path, args: argparse.Namespace) -> Speed:
    """Follow the metrics to the end, and read the CPU time when the first and the last measured step end."""
    marks: list[tuple[int, float]] = []
    peak_mib = 0.0
    started = time.monotonic()
    while process.poll() is None:
        if time.monotonic() - started > LIMIT_S:
            process.kill()
            raise SystemExit(f"no end after {LIMIT_S:.0f} s")
        steps = len(metrics.read_text().splitlines()) if metrics.exists() else 0
        if steps >= WARMUP_STEPS and (not marks or marks[-1][0] != steps):
            marks.append((steps, cpu_s(process.pid)))
            peak_mib = max(peak_mib, resident_mib(process.pid))
        time.sleep(0.005)
    if process.returncode:
        raise SystemExit(f"the orchestrator ended with code {process.returncode}")
    times_s = [json.loads(line)["time/step"] for line in metrics.read_text().splitlines()][WARMUP_STEPS:]
    (first, cpu_before), (last, cpu_after) = marks[0], marks[-1]
    rollouts = (last - first) * args.batch
    return Speed(args.batch * len(times_s) / sum(times_s), rollouts / (cpu_after - cpu_before), peak_mib)


def cpu_s(pid: int) -> float:
    """User and system time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def resident_mib(pid: int) -> float:
    """Resident set of a process now."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def machine() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line.partition(":")[2].strip() for line in lines if "model name" in line), platform.machine())
    return f"{model}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, Python {platform.python_version()}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=64, help="in each completion")
    parser.add_argument("--env-servers", action="store_true", help="run the environment in a process of its own")
    parser.add_argument("--serve", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        asyncio.run(serve(args.tokens, float(args.serve[0]), args.serve[1]))
        return
    print(f"Machine: {machine()}")
    with engine(args.tokens) as url, tempfile.TemporaryDirectory() as directory:
        speed = measure(args, [url], Path(directory))
    place = "a process of its own" if args.env_servers else "the orchestrator's process"
    print(f"{args.batch} single-turn rollouts a step, {args.tokens} tokens each, environment in {place}")
    print(f"  rollouts a second by the clock: {speed.by_the_clock:8.0f}")
    print(f"  rollouts per CPU second:        {speed.per_cpu_second:8.0f}")


if __name__ == "__main__":
    main()
