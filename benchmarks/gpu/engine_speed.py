"""Tokens per second of the embedded engine with CUDA graphs and without, and the share of the memory bandwidth that its
decoding uses.

Every decoded token of a batch needs the weights once: bytes per step = weights + keys and values read. The bound is
the bandwidth of a copy on this GPU, measured in this run. The time of decoding is that of a long run minus that of one
of the same prompts with few tokens; `tokens_per_s` is that of the long run with its prefill.

Two more rows for each shape, with graphs: all samples with a LoRA adapter, and samples of different lengths that arrive
one by one as others finish, as in RL, with and without prompts that join together.
"""

from __future__ import annotations

import tempfile
import time
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass
from pathlib import Path

import torch
from findings import Findings, findings_of_command_line
from machine import speeds
from profile_summary import shares_of_step
from shapes import SHAPES, model_dir

from prime_rl.inference.embedded.engine.engine import Engine
from prime_rl.inference.embedded.engine.generation import Generation, GenerationRequest, SamplingParams
from prime_rl.inference.embedded.engine.lora import Adapter, AdapterLimits, LowRank
from prime_rl.inference.embedded.engine.model import ModelRunner, load_model
from prime_rl.inference.embedded.engine.scheduler import EngineLimits
from prime_rl.inference.embedded.startup import STEPS_WITHOUT_PROMPTS

PROMPT_TOKENS = 128
ADAPTER_RANK = 16


def main(findings: Findings) -> None:
    bandwidth = speeds(findings.device, findings.is_tiny)["copy_tb_per_s"] * 1e12
    findings.fact(copy_tb_per_s=float(f"{bandwidth / 1e12:.4g}"))
    shapes, sizes = (("135M", "0.6B"), Sizes((16, 64, 256), 8, 264))
    if findings.is_tiny:
        shapes, sizes = (("tiny",), Sizes((4,), 2, 12))
    with tempfile.TemporaryDirectory() as scratch:
        for shape in shapes:
            for eager in (False, True):
                findings.attempt(
                    f"{shape}, {'eager' if eager else 'graphs'}",
                    lambda shape=shape, eager=eager: measured(shape, Path(scratch), sizes, eager, bandwidth, findings),
                )
            findings.attempt(
                f"{shape}, adapter and arrivals",
                lambda shape=shape: as_in_rl(shape, Path(scratch), sizes, findings),
            )


@dataclass(frozen=True)
class Sizes:
    batches: tuple[int, ...]
    few_tokens: int
    new_tokens: int


def measured(
    shape: str, scratch: Path, sizes: Sizes, is_eager: bool, bandwidth: float, findings: Findings
) -> tuple[bool, str]:
    directory = model_dir(shape, scratch, findings.device)
    model, source = load_model(str(directory), "bfloat16", torch.device(findings.device))
    kv_bytes = (1 if findings.is_tiny else 16) << 30
    runner = ModelRunner(model, kv_bytes, source, enforce_eager=is_eager)
    with Engine(runner, EngineLimits(max_running=max(sizes.batches))).in_thread() as engine:
        weight_bytes = sum(parameter.nbytes for parameter in model.parameters())
        for batch in sizes.batches:
            first_s = generate(engine, shape, batch, sizes.new_tokens)  # records the graphs of these sizes
            row = timed(engine, shape, batch, sizes)
            stored = PROMPT_TOKENS + (sizes.few_tokens + sizes.new_tokens) / 2
            used = weight_bytes + batch * stored * kv_bytes_per_token(shape)
            findings.row(
                shape=shape,
                decoding="eager" if runner.graphs is None or runner.graphs.is_off else "graphs",
                batch=batch,
                **row,
                bandwidth_share=round(used / (row["step_ms"] / 1e3) / bandwidth, 3),
                first_run_s=round(first_s, 2),
                graphs=runner.graphs.num_recorded if runner.graphs is not None else 0,
                shares=shares_of_step(lambda batch=batch: generate(engine, shape, batch, 8), findings.device),
            )
    is_right = findings.device == "cpu" or is_eager == (runner.graphs is None or runner.graphs.is_off)
    return is_right, f"{len(sizes.batches)} batch sizes" if is_right else "no graphs: the log of this part says why"


def as_in_rl(shape: str, scratch: Path, sizes: Sizes, findings: Findings) -> tuple[bool, str]:
    """Decode with an adapter, and answer samples that arrive one by one."""
    directory = model_dir(shape, scratch, findings.device)
    model, source = load_model(str(directory), "bfloat16", torch.device(findings.device))
    runner = ModelRunner(model, (1 if findings.is_tiny else 16) << 30, source)
    adapter = random_adapter(runner)
    batch = sizes.batches[len(sizes.batches) // 2]
    with Engine(runner, EngineLimits(max_running=batch)).in_thread() as engine:
        generate(engine, shape, batch, sizes.new_tokens, adapter)
        seconds = generate(engine, shape, batch, sizes.new_tokens, adapter)
    findings.row(
        shape=shape, decoding="adapter", batch=batch, tokens_per_s=round(batch * sizes.new_tokens / seconds, 1)
    )
    for waiting in (0, STEPS_WITHOUT_PROMPTS):
        with Engine(runner, EngineLimits(max_running=batch, steps_without_prompts=waiting)).in_thread() as engine:
            arriving(engine, shape, batch, sizes.new_tokens)
            tokens_per_s = arriving(engine, shape, batch, sizes.new_tokens)
        decoding = f"arriving, joining every {waiting + 1} steps"
        findings.row(shape=shape, decoding=decoding, batch=batch, tokens_per_s=round(tokens_per_s, 1))
    return True, f"{batch} samples at once"


def random_adapter(runner: ModelRunner) -> Adapter:
    """A LoRA adapter on all linear layers that are computed apart from others, whose update is small but not zero."""
    store = runner.adapter_store("base", AdapterLimits(1, ADAPTER_RANK))
    like = {"device": runner.device, "dtype": store.dtype}
    layers = {}
    for site in store.sites:
        shapes = [store.base[f"{path}.weight"] for path in site]
        num_outputs, num_inputs = sum(shape[0] for shape in shapes), shapes[0][1]
        rank = ADAPTER_RANK * len(site)
        down = torch.randn(rank, num_inputs, **like) / num_inputs**0.5
        layers[site] = LowRank(down, 1e-3 * torch.randn(num_outputs, rank, **like))
    return Adapter("random", runner.weights_dir or Path(), 1, layers)


def arriving(engine: Engine, shape: str, batch: int, most_tokens: int) -> float:
    """Tokens per second while `batch` samples run at once. A new one arrives as soon as one ends, `4 * batch` in all.

    Their lengths are drawn between an eighth of `most_tokens` and `most_tokens`.
    """
    generator = torch.Generator().manual_seed(batch)
    size = 4 * batch, PROMPT_TOKENS
    prompts = torch.randint(0, SHAPES[shape]["vocab_size"], size, generator=generator).tolist()
    lengths = torch.randint(max(1, most_tokens // 8), most_tokens + 1, (len(prompts),), generator=generator).tolist()
    started_s = time.perf_counter()
    pending: set[Future[Generation]] = set()
    for index, (prompt, length) in enumerate(zip(prompts, lengths, strict=True)):
        if len(pending) == batch:
            _, pending = wait(pending, return_when=FIRST_COMPLETED)
        params = SamplingParams(max_tokens=length, min_tokens=length)
        pending.add(engine.submit(GenerationRequest(prompt=tuple(prompt), params=params, seed=index)))
    wait(pending)
    return sum(lengths) / (time.perf_counter() - started_s)


def timed(engine: Engine, shape: str, batch: int, sizes: Sizes) -> dict[str, float]:
    """Tokens per second with prefill, and the time of a step that only decodes."""
    few_s = generate(engine, shape, batch, sizes.few_tokens)
    many_s = generate(engine, shape, batch, sizes.new_tokens)
    # Positive also where a run is so short that its time is noise, as in the dry form.
    step_s = max(many_s - few_s, 1e-6) / (sizes.new_tokens - sizes.few_tokens)
    return {
        "tokens_per_s": round(batch * sizes.new_tokens / many_s, 1),
        "decoded_per_s": round(batch / step_s, 1),
        "step_ms": round(1e3 * step_s, 4),
    }


def generate(engine: Engine, shape: str, batch: int, new_tokens: int, adapter: Adapter | None = None) -> float:
    """Seconds for `batch` samples, prefill included."""
    generator = torch.Generator().manual_seed(batch)
    prompts = torch.randint(0, SHAPES[shape]["vocab_size"], (batch, PROMPT_TOKENS), generator=generator).tolist()
    params = SamplingParams(max_tokens=new_tokens, min_tokens=new_tokens)
    engine.pause().result()
    futures = [
        engine.submit(GenerationRequest(prompt=tuple(prompt), params=params, seed=index, adapter=adapter))
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
