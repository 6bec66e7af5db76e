"""Tokens per second of the embedded engine, and the share of the memory bandwidth that its decoding uses.

Every decoded token of a batch needs the weights once: bytes per step = weights + keys and values read. The bound is
the bandwidth of a copy on this GPU, measured in this run. The time includes the prefill of 128 tokens per sample, so
that the share of the decoding alone is larger.
"""

from __future__ import annotations

import tempfile
import threading
import time
from pathlib import Path

import torch
from findings import Findings, findings_of_command_line
from machine import speeds
from profile_summary import shares_of_step
from shapes import SHAPES, model_dir

from prime_rl.inference.embedded.engine.engine import Engine
from prime_rl.inference.embedded.engine.generation import GenerationRequest, SamplingParams
from prime_rl.inference.embedded.engine.model import ModelRunner, load_model
from prime_rl.inference.embedded.engine.scheduler import Limits

PROMPT_TOKENS = 128


def main(findings: Findings) -> None:
    bandwidth = speeds(findings.device, findings.is_tiny)["copy_tb_per_s"] * 1e12
    findings.fact(copy_tb_per_s=float(f"{bandwidth / 1e12:.4g}"))
    shapes, batches, new_tokens = (("135M", "0.6B"), (16, 64, 256), 256)
    if findings.is_tiny:
        shapes, batches, new_tokens = (("tiny",), (4,), 8)
    with tempfile.TemporaryDirectory() as scratch:
        for shape in shapes:
            findings.attempt(
                shape,
                lambda shape=shape: measured(shape, Path(scratch), batches, new_tokens, bandwidth, findings),
            )


def measured(
    shape: str, scratch: Path, batches: tuple[int, ...], new_tokens: int, bandwidth: float, findings: Findings
) -> tuple[bool, str]:
    directory = model_dir(shape, scratch, findings.device)
    model, source = load_model(str(directory), "bfloat16", torch.device(findings.device))
    engine = Engine(ModelRunner(model, (1 if findings.is_tiny else 16) << 30, source), Limits(max_running=max(batches)))
    thread = threading.Thread(target=engine.run)
    thread.start()
    try:
        weight_bytes = sum(parameter.nbytes for parameter in model.parameters())
        for batch in batches:
            generate(engine, shape, batch, 4)
            elapsed_s = generate(engine, shape, batch, new_tokens)
            kv_bytes = batch * (PROMPT_TOKENS + new_tokens / 2) * kv_bytes_per_token(shape)
            used = new_tokens * (weight_bytes + kv_bytes) / elapsed_s
            findings.row(
                shape=shape,
                batch=batch,
                tokens_per_s=round(batch * new_tokens / elapsed_s, 1),
                bandwidth_share=round(used / bandwidth, 3),
                shares=shares_of_step(lambda batch=batch: generate(engine, shape, batch, 8), findings.device),
            )
    finally:
        engine.stop()
        thread.join()
    return True, f"{len(batches)} batch sizes"


def generate(engine: Engine, shape: str, batch: int, new_tokens: int) -> float:
    """Seconds for `batch` samples, prefill included."""
    generator = torch.Generator().manual_seed(batch)
    prompts = torch.randint(0, SHAPES[shape]["vocab_size"], (batch, PROMPT_TOKENS), generator=generator).tolist()
    params = SamplingParams(max_tokens=new_tokens, min_tokens=new_tokens)
    engine.pause().result()
    futures = [
        engine.submit(GenerationRequest(prompt=tuple(prompt), params=params, seed=index))
        for index, prompt in enumerate(prompts)
    ]
    started_s = time.perf_counter()
    engine.resume().result()
    count = sum(len(future.result().completions[0].token_ids) for future in futures)
    if count != batch * new_tokens:
        raise RuntimeError(f"{count} tokens instead of {batch * new_tokens}")
    return time.perf_counter() - started_s


def kv_bytes_per_token(shape: str) -> int:
    config = SHAPES[shape]
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    return 2 * 2 * config["num_hidden_layers"] * config["num_key_value_heads"] * head_dim


if __name__ == "__main__":
    main(findings_of_command_line(__doc__))
