"""Measures what each special path for CPUs is worth: CPU time of a step, or peak memory, with and without the path.

    uv run benchmarks/ablation.py --times JOB MODEL ROUNDS PATH...   # alternating in one process, on one thread
    uv run benchmarks/ablation.py --peak JOB MODEL [PATH]            # the most memory of a step, one process each

A JOB is `sft-smollm2`, `rl-tiny` or `decode-tiny`, or another combination of these words; with `-bf16` at the end it
computes in bfloat16. MODEL is a Transformers directory (`benchmarks/smollm2.py` makes one). `patches` lists the paths.
Prints JSON. A path that is worth less than 5% of any step should go.
"""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE / "rl")]

LAYERS = 10
"""Layers that are kept of SmolLM2, so that a step takes seconds."""
PRODUCTS = ("onednn_products", "mkl_products", "float32_products")
"""Paths that choose how matrices are multiplied (`products_of`)."""
BUILD, FUSED = "prime_rl.trainer.model.build", "prime_rl.inference.embedded.engine.fused"


def noop(*_: Any, **__: Any) -> None:
    """Stands in for a path that is off."""


def patches(path: str) -> dict[str, Any]:
    """Names to replace so that `path` is off."""
    from prime_rl.trainer.model.layouts import PrefixTree

    found: dict[str, dict[str, Any]] = {
        "lean_norm": {f"{BUILD}.use_lean_norms": noop},
        "lean_mlp": {f"{BUILD}.use_lean_mlps": noop},
        "kept_gradients": {f"{BUILD}.keep_gradients": noop},
        "blocked_attention": {f"{BUILD}.SequenceBlocks": PrefixTree},
        "gathered_once": {
            f"prime_rl.trainer.{kind}.step.accumulated": lambda model, rows, process: iter(rows)
            for kind in ("sft", "rl")
        },
        "glibc_tuning": {
            "prime_rl.trainer.process.world.map_large_tensors": noop,
            "prime_rl.trainer.optim.optimizer.keep_freed_memory": noop,
        },
        "packed_weights": {f"{FUSED}.is_packable": lambda model: False},
        "onednn_decoding": {f"{FUSED}.uses_onednn": lambda weight: False},
        "fused_decoder": {f"{FUSED}.FusedDecoder.supports": staticmethod(lambda m: False)},
    }
    if path and path not in found and path not in PRODUCTS:
        raise SystemExit(f"{path}: not a path; known are {', '.join([*found, *PRODUCTS])}")
    return found.get(path, {})


@contextmanager
def switched_off(path: str) -> Iterator[None]:
    from importlib import import_module

    undo = []
    for name, other in patches(path).items():
        parts = name.split(".")
        cut = len(parts) - 1 - parts[-2][0].isupper()
        owner: Any = import_module(".".join(parts[:cut]))
        for part in parts[cut:-1]:
            owner = getattr(owner, part)
        if parts[-1] not in vars(owner):
            raise SystemExit(f"{path}: {name} is gone, so nothing would be switched off")
        undo.append((owner, parts[-1], vars(owner)[parts[-1]]))
        setattr(owner, parts[-1], other)
    try:
        yield
    finally:
        for owner, name, value in undo:
            setattr(owner, name, value)


def products_of(path: str) -> Any:
    from dataclasses import replace

    from prime_rl.trainer.kernels.product_choice import LayerLibraries, Library, ProductChoice

    only = LayerLibraries.only
    if path == "onednn_products":
        return ProductChoice(only(Library.PYTORCH), only(Library.PYTORCH), bfloat16_in_float32=True)
    if path == "mkl_products":
        return ProductChoice(only(Library.ONEDNN), only(Library.ONEDNN), bfloat16_in_float32=True)
    measured = ProductChoice.measured()
    return replace(measured, bfloat16_in_float32=False) if path == "float32_products" else measured


class Job:
    """One kind of step, built with or without a path. All variants of a process share its process group."""

    def __init__(self, kind: str, model_dir: Path) -> None:
        import torch

        from prime_rl.trainer.process.mesh import ParallelDims
        from prime_rl.trainer.process.world import setup_world

        torch.set_num_threads(1)
        self.kind, self.model_dir = kind, model_dir
        self.mesh = None
        if not kind.startswith("decode"):
            self.mesh = ParallelDims(dp_replicate=1, dp_shard=1).mesh(setup_world("cpu", 3600, {}))

    def step(self, path: str) -> Callable[[], None]:
        """A step with `path` off; "" switches nothing off."""
        with switched_off(path):
            inner = decoding(self.kind, self.model_dir) if self.mesh is None else self._training(path)

        def step() -> None:
            with switched_off(path):
                inner()

        return step

    def _training(self, path: str) -> Callable[[], None]:
        from prime_rl.configs.algorithms import ClipLossConfig
        from prime_rl.configs.trainer import AdamWConfig, ModelConfig
        from prime_rl.trainer.model.build import setup_model
        from prime_rl.trainer.optim.optimizer import clip_gradients, setup_optimizer
        from prime_rl.trainer.rl.loss import setup_loss
        from prime_rl.trainer.rl.rows import vocab_chunk_of
        from prime_rl.trainer.rl.step import ForwardBackward

        dtype = "bfloat16" if self.kind.endswith("bf16") else "float32"
        debug = {"num_layers": LAYERS} if "smollm2" in self.kind else {}
        config = ModelConfig(name=str(self.model_dir), seq_len=512, attn="sdpa", compute_dtype=dtype, debug=debug)
        model = setup_model(config, self.mesh, has_dropout=self.kind.startswith("sft"), products=products_of(path))
        optimizer = setup_optimizer(AdamWConfig(lr=2e-5, weight_decay=0.0), model, False)
        if self.kind.startswith("sft"):
            from trainer_step import sft_pass

            run: Callable[[], object] = sft_pass(model, model.config.vocab_size, [101, 75, 50, 30], 2, self.mesh)
        else:
            passes = ForwardBackward(model, setup_loss(ClipLossConfig()), vocab_chunk_of(config), self.mesh)
            run = rl_steps(self.kind, passes, self.mesh)

        def step() -> None:
            run()
            clip_gradients(model, 1.0)
            optimizer.step()
            optimizer.zero_grad()

        return step


def rl_steps(job: str, passes: Any, mesh: Any) -> Callable[[], object]:
    import numpy as np
    from against_trl import GROUP, NEW_TOKENS, PROMPTS

    from prime_rl.trainer.rl.batches import pack_batch
    from prime_rl.trainer.rl.rows import Row
    from prime_rl.trainer.rl.step import StepSize
    from prime_rl.transport.messages import TrainingBatch, TrainingSample

    draw = np.random.default_rng(0)
    prompts = 1 if "smollm2" in job else PROMPTS

    def samples() -> list[TrainingSample]:
        made = []
        for _ in range(prompts):
            prompt = draw.integers(2, 128, 27).tolist()
            for count in np.minimum(NEW_TOKENS, 1 + draw.geometric(1 / 128, GROUP)).tolist():
                answer, ones = draw.integers(2, 128, count).tolist(), [True] * count
                temperatures = [1.0] * count
                made.append(
                    TrainingSample(
                        prompt, [False] * 27, answer, ones, [-4.8] * count, temperatures, advantage=draw.normal()
                    )
                )
        return made

    batches = [TrainingBatch(samples(), index) for index in range(4)]
    count = iter(range(10**6))

    def run() -> None:
        messages = pack_batch(batches[next(count) % 4], 128, 4096, 1, group_tokens=2048)[0]
        rows = [Row.from_message(message, mesh.process.device) for message in messages]
        passes.run(rows, StepSize.from_rows(rows, mesh.data_axis)).gather(mesh.data_axis)

    return run


def decoding(job: str, model_dir: Path) -> Callable[[], None]:
    import torch
    from inference_throughput import engine_tokens_per_s, prompts_of

    from prime_rl.inference.embedded.engine.engine import Engine
    from prime_rl.inference.embedded.engine.model import ModelRunner, load_model

    dtype = "bfloat16" if job.endswith("bf16") else "float32"
    model, _ = load_model(str(model_dir), dtype, torch.device("cpu"))
    running = Engine(ModelRunner(model, 1 << 30)).in_thread()
    engine = running.__enter__()
    prompts = prompts_of(64 if "tiny" in job else 16, model.config.vocab_size)
    # Lengths differ, as in a run, so that the number of sequences in a step changes.
    varied = [prompt[: 8 + index % 24] for index, prompt in enumerate(prompts)]

    def step(kept: object = running) -> None:  # the engine stops with its context
        engine_tokens_per_s(engine, varied)

    return step


def peak_bytes() -> int:
    return 1024 * int(re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text()).group(1))


def times(job: str, model_dir: Path, rounds: int, paths: Sequence[str]) -> None:
    """Print for each path the CPU seconds of a step with and without it, alternating in this process."""
    prepare()
    built = Job(job, model_dir)
    with_all = built.step("")
    for path in paths:
        without = built.step(path)
        seconds: dict[bool, list[float]] = {True: [], False: []}
        for number in range(rounds + 1):
            for is_on, step in ((True, with_all), (False, without)):
                started_s = time.process_time()
                step()
                if number:  # the first round warms up
                    seconds[is_on].append(time.process_time() - started_s)
        print(
            json.dumps(
                {
                    "job": job,
                    "path": path,
                    "on": median(seconds[True]),
                    "off": median(seconds[False]),
                    "all": [*seconds.values()],
                }
            ),
            flush=True,
        )
    os._exit(0)


def peak(job: str, model_dir: Path, path: str) -> None:
    """Print the most memory that a process with `path` off holds during a step."""
    prepare()
    step = Job(job, model_dir).step(path)
    step()
    Path("/proc/self/clear_refs").write_text("5")
    started_s = time.process_time()
    step()
    print(
        json.dumps({"job": job, "path": path, "bytes": peak_bytes(), "s": time.process_time() - started_s}), flush=True
    )
    os._exit(0)


def prepare() -> None:
    from prime_rl.utils.imports import bound_kernel_caches, import_transformers

    bound_kernel_caches()
    import_transformers()


def main(words: Sequence[str]) -> None:
    if words[0] == "--times":
        times(words[1], Path(words[2]), int(words[3]), words[4:])
    peak(words[1], Path(words[2]), words[3] if len(words) > 3 else "")


if __name__ == "__main__":
    main(sys.argv[1:])
