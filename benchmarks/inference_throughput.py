"""Generation speed of the embedded engine against Transformers' `generate`, in one run.

    OMP_NUM_THREADS=2 uv run python benchmarks/inference_throughput.py [--batch 16 64] [--rounds 3]
        [--model DIR] [--dtype float32]

Prompts of 32 tokens, 64 new tokens each, sampled at temperature 1. Rounds alternate, so a busy machine slows both; the
ratio compares medians. "over HTTP" is the engine behind its server in this process, with one chat request per sample
and log-probabilities in the answers.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import socket
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import httpx
import torch
import uvicorn
from transformers import AutoModelForCausalLM, GenerationConfig, Qwen3Config

from prime_rl.inference.embedded.engine.engine import Engine
from prime_rl.inference.embedded.engine.generation import GenerationRequest, SamplingParams
from prime_rl.inference.embedded.engine.model import ModelRunner, load_model
from prime_rl.inference.embedded.engine.scheduler import EngineLimits
from prime_rl.inference.embedded.http.api import Api
from prime_rl.inference.embedded.http.service import ServedModel, Service

PROMPT_TOKENS, NEW_TOKENS, TURN_TOKENS = 32, 64, 64
KEY = "benchmark"
Prompts = Sequence[tuple[int, ...]]


def tiny_model(directory: Path) -> Path:
    """Qwen3 with 2.39 M parameters, the size that the examples train."""
    config = Qwen3Config(
        vocab_size=128,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=32,
        max_position_embeddings=512,
        tie_word_embeddings=True,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(directory)
    return directory


def prompts_of(batch: int, vocab_size: int) -> Prompts:
    numbers = random.Random(0)
    return [tuple(numbers.randrange(vocab_size) for _ in range(PROMPT_TOKENS)) for _ in range(batch)]


def generate_tokens_per_s(model: torch.nn.Module, prompts: Prompts) -> float:
    started = time.perf_counter()
    with torch.inference_mode():
        output = model.generate(
            torch.tensor(prompts), do_sample=True, top_k=0, min_new_tokens=NEW_TOKENS, max_new_tokens=NEW_TOKENS
        )
    assert output.shape == (len(prompts), PROMPT_TOKENS + NEW_TOKENS)
    return len(prompts) * NEW_TOKENS / (time.perf_counter() - started)


def engine_tokens_per_s(engine: Engine, prompts: Prompts) -> float:
    started = time.perf_counter()
    params = SamplingParams(max_tokens=NEW_TOKENS)
    futures = [engine.submit(GenerationRequest(prompt=p, params=params, seed=i)) for i, p in enumerate(prompts)]
    count = sum(len(future.result().completions[0].token_ids) for future in futures)
    return count / (time.perf_counter() - started)


async def http_tokens_per_s(url: str, prompts: Prompts) -> float:
    headers, limits = {"Authorization": f"Bearer {KEY}"}, httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=600, headers=headers, limits=limits) as client:

        async def one(prompt: tuple[int, ...]) -> int:
            body = {"tokens": prompt, "messages": [{"role": "user", "content": ""}], "max_tokens": NEW_TOKENS}
            answer = await client.post("/v1/chat/completions/tokens", json=body | {"logprobs": True})
            return len(answer.json()["choices"][0]["logprobs"]["content"])

        started = time.perf_counter()
        count = sum(await asyncio.gather(*map(one, prompts)))
        return count / (time.perf_counter() - started)


class NoText:
    """Replaces the tokenizer: this benchmark only uses token ids."""

    eos_token_ids: frozenset[int] = frozenset()

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool) -> str:
        return ""

    def token_text(self, token_id: int) -> str:
        return str(token_id)


def serve(engine: Engine, vocab_size: int) -> tuple[str, uvicorn.Server]:
    api = Api("model", KEY)
    api.service = Service(engine, NoText(), ServedModel("model", 512, vocab_size, GenerationConfig()))
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(api.app(), log_level="error", lifespan="off"))
    threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True).start()
    return f"http://127.0.0.1:{listener.getsockname()[1]}", server


def compare(directory: Path, dtype: str, batches: Sequence[int], rounds: int) -> None:
    reference = AutoModelForCausalLM.from_pretrained(directory, dtype=getattr(torch, dtype))
    reference.generation_config.eos_token_id = None
    reference.generation_config.pad_token_id = 0
    model, _ = load_model(str(directory), dtype, torch.device("cpu"))
    with Engine(ModelRunner(model, 4 << 30)).in_thread() as engine:
        compare_batches(engine, reference, batches, dtype, rounds)


def compare_batches(
    engine: Engine, reference: torch.nn.Module, batches: Sequence[int], dtype: str, rounds: int
) -> None:
    vocab_size = reference.config.vocab_size
    url, server = serve(engine, vocab_size)
    for batch in batches:
        prompts = prompts_of(batch, vocab_size)
        contestants: dict[str, Callable[[], float]] = {
            "Transformers generate": lambda prompts=prompts: generate_tokens_per_s(reference, prompts),
            "embedded engine": lambda prompts=prompts: engine_tokens_per_s(engine, prompts),
            "embedded over HTTP": lambda prompts=prompts: asyncio.run(http_tokens_per_s(url, prompts)),
        }
        speeds: dict[str, list[float]] = {name: [] for name in contestants}
        for number in range(rounds + 1):
            for name, run in contestants.items():
                speed = run()
                if number:  # the first round warms up
                    speeds[name].append(speed)
        base = statistics.median(speeds["Transformers generate"])
        print(f"batch {batch}, {dtype}, {torch.get_num_threads()} threads")
        for name, values in speeds.items():
            median = statistics.median(values)
            print(f"  {name:22} {median:8.0f} tokens/s  {median / base:5.2f}x")
    server.should_exit = True


def converse_s(engine: Engine, conversations: int, turns: int) -> float:
    """Seconds for concurrent conversations. Each turn adds `TURN_TOKENS` to the prompt and samples half as many."""
    numbers = random.Random(1)
    histories = [(number,) for number in range(conversations)]
    started = time.perf_counter()
    for _ in range(turns):
        for index, history in enumerate(histories):
            histories[index] = (*history, *(numbers.randrange(100) for _ in range(TURN_TOKENS)))
        params = SamplingParams(max_tokens=TURN_TOKENS // 2)
        futures = [engine.submit(GenerationRequest(prompt=history, params=params, seed=0)) for history in histories]
        drawn = [future.result().completions[0].token_ids for future in futures]
        histories = [(*history, *tokens) for history, tokens in zip(histories, drawn, strict=True)]
    return time.perf_counter() - started


def compare_conversations(directory: Path, conversations: int, turns: int, rounds: int) -> None:
    """Measure the gain from caching the prefixes of earlier turns."""
    model, _ = load_model(str(directory), "float32", torch.device("cpu"))
    seconds: dict[str, list[float]] = {"not cached": [], "cached": []}
    for _ in range(rounds):
        for name, kept_bytes in (("not cached", 0), ("cached", 1 << 30)):
            with Engine(ModelRunner(model, 4 << 30), EngineLimits(max_prefix_bytes=kept_bytes)).in_thread() as engine:
                seconds[name].append(converse_s(engine, conversations, turns))
    uncached = statistics.median(seconds["not cached"])
    print(f"{conversations} conversations of {turns} turns, {TURN_TOKENS} new and {TURN_TOKENS // 2} drawn tokens each")
    for name, values in seconds.items():
        print(f"  {name:22} {statistics.median(values):8.2f} s  {uncached / statistics.median(values):5.2f}x")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, nargs="+", default=[16, 64])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--turns", type=int, default=4, help="of the conversations; 0 leaves them out")
    parser.add_argument("--model", type=Path, help="a Transformers directory instead of a tiny random Qwen3")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32", help="not of the conversations")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        directory = args.model or tiny_model(Path(scratch))
        compare(directory, args.dtype, args.batch, args.rounds)
        if args.turns:
            compare_conversations(directory, conversations=8, turns=args.turns, rounds=args.rounds)


if __name__ == "__main__":
    main()
