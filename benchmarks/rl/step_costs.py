"""Shows where a step's core-seconds go: `uv run python benchmarks/rl/step_costs.py`. See README.md for the job.

Runs `medarc_train rl` on the job of `against_trl.py`, and reads from /proc how much CPU time each process took
between two steps. With `--trainer`, runs the trainer's part alone instead, on one thread under PyTorch's profiler, and
lists what its time was spent on.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import tomli_w  # noqa: E402
from against_trl import (  # noqa: E402
    GROUP,
    NEW_TOKENS,
    PROMPTS,
    WARMUP_STEPS,
    compute_in_bf16,
    our_config,
    our_steps,
    tiny_model,
)
from process_tree import process_tree  # noqa: E402

LOOK_EVERY_S = 0.05
NAMES = {"inference": "inference", "orchestrator": "orchestrator", "trainer.rl": "trainer", "medarc_train": "launcher"}
"""Part of the command line, and name, of each process."""
KINDS = {
    "matrix products": ("linear_pointwise", "aten::mm", "aten::addmm"),
    "attention": ("_BlockedAttention", "aten::bmm", "aten::baddbmm", "_softmax"),
    "optimizer": ("adamw",),
}
"""Parts of the names of PyTorch's operations. The rest is elementwise operations, copies and Python."""


def cpu_seconds(root: int) -> dict[str, float]:
    """User and system time of each process of a tree so far."""
    found: dict[str, float] = defaultdict(float)
    ticks = os.sysconf("SC_CLK_TCK")
    for process in process_tree(root):
        try:
            command = Path(f"/proc/{process}/cmdline").read_bytes().replace(b"\0", b" ").decode()
            fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        name = next((name for part, name in NAMES.items() if part in command), "others")
        found[name] += (int(fields[11]) + int(fields[12])) / ticks
    return found


def costs_of_run(out: Path, steps: int, async_level: int, is_bf16: bool) -> tuple[dict[str, float], float]:
    """Core-seconds per step of each process, and seconds per step, without the first steps and the last.

    Raises:
        RuntimeError: the run failed; the message contains the end of its log.
    """
    work = out / "work" / "step-costs"
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    config = our_config(tiny_model(out / "model"), work / "run", steps, async_level)
    if is_bf16:
        compute_in_bf16(config)
    (work / "rl.toml").write_text(tomli_w.dumps(config))
    argv = [str(Path(sys.executable).with_name("medarc_train")), "rl", str(work / "rl.toml")]
    path = {"PYTHONPATH": os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])}
    looks: list[tuple[float, dict[str, float]]] = []
    with (work / "log").open("w") as log:
        child = subprocess.Popen(argv, stdout=log, stderr=subprocess.STDOUT, env=os.environ | path)
        while child.poll() is None:
            looks.append((time.time(), cpu_seconds(child.pid)))
            time.sleep(LOOK_EVERY_S)
    if child.returncode != 0:
        raise RuntimeError(f"the run ended with {child.returncode}:\n{(work / 'log').read_text()[-3000:]}")
    ended_at = [step["ended_at"] for step in our_steps(work / "run")]
    first, last = ended_at[WARMUP_STEPS - 1], ended_at[-3]
    count = len(ended_at) - WARMUP_STEPS - 2
    begun, ended = _at(looks, first), _at(looks, last)
    return {name: (ended[name] - begun.get(name, 0.0)) / count for name in ended}, (last - first) / count


def _at(looks: Sequence[tuple[float, dict[str, float]]], when: float) -> dict[str, float]:
    return min(looks, key=lambda look: abs(look[0] - when))[1]


def costs_of_trainer(out: Path, steps: int, is_bf16: bool) -> tuple[dict[str, float], float]:
    """Core-seconds per step of each kind of operation in the trainer, and the median step's in all."""
    import numpy as np
    import torch
    from torch.profiler import ProfilerActivity, profile

    from prime_rl.configs.algorithms import ClipLossConfig
    from prime_rl.configs.trainer import AdamWConfig, ModelConfig
    from prime_rl.trainer.kernels.product_choice import ProductChoice
    from prime_rl.trainer.model.build import setup_model
    from prime_rl.trainer.optim.optimizer import clip_gradients, setup_optimizer
    from prime_rl.trainer.process.mesh import ParallelDims
    from prime_rl.trainer.process.world import setup_world
    from prime_rl.trainer.rl.batches import pack_batch
    from prime_rl.trainer.rl.loss import setup_loss
    from prime_rl.trainer.rl.rows import Row, vocab_chunk_of
    from prime_rl.trainer.rl.step import ForwardBackward, StepSize
    from prime_rl.transport.messages import TrainingBatch, TrainingSample

    torch.set_num_threads(1)
    mesh = ParallelDims(dp_replicate=1, dp_shard=1).mesh(setup_world("cpu", 3600, {}))
    dtype = "bfloat16" if is_bf16 else "float32"
    config = ModelConfig(name=str(tiny_model(out / "model")), seq_len=128, attn="sdpa", compute_dtype=dtype)
    choice = ProductChoice.measured()
    print(f"matrix products: {choice.narrow}")
    model = setup_model(config, mesh, products=choice)
    optimizer = setup_optimizer(AdamWConfig(lr=2e-5, weight_decay=0.0), model, False)
    passes = ForwardBackward(model, setup_loss(ClipLossConfig()), vocab_chunk_of(config), mesh)
    draw = np.random.default_rng(0)

    def samples() -> list[TrainingSample]:
        made = []
        for _ in range(PROMPTS):
            prompt = draw.integers(2, 128, 27).tolist()
            for count in np.minimum(NEW_TOKENS, draw.geometric(1 / 128, GROUP)).tolist():
                answer, ones = draw.integers(2, 128, count).tolist(), [True] * count
                made.append(
                    TrainingSample(
                        prompt, [False] * 27, answer, ones, [-4.8] * count, [1.0] * count, advantage=draw.normal()
                    )
                )
        return made

    def step(batch: TrainingBatch) -> float:
        started_s = time.process_time()
        messages = pack_batch(batch, 128, 4096, 1, group_tokens=2048)[0]
        rows = [Row.from_message(message, mesh.process.device) for message in messages]
        passes.run(rows, StepSize.from_rows(rows, mesh.data_axis)).gather(mesh.data_axis)
        clip_gradients(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return time.process_time() - started_s

    batches = [TrainingBatch(samples(), index) for index in range(4)]
    seconds = [step(batches[index % 4]) for index in range(WARMUP_STEPS + steps)][WARMUP_STEPS:]
    with profile(activities=[ProfilerActivity.CPU]) as recorded:
        for batch in batches:
            step(batch)
    return _by_kind(recorded.key_averages(), len(batches)), median(seconds)


def _by_kind(events: Sequence, steps: int) -> dict[str, float]:
    found: dict[str, float] = defaultdict(float)
    for event in events:
        kind = next((kind for kind, parts in KINDS.items() if any(part in event.key for part in parts)), "rest")
        found[kind] += event.self_cpu_time_total / 1e6 / steps
    return found


def table(costs: Mapping[str, float]) -> str:
    rows = sorted(costs.items(), key=lambda cost: -cost[1])
    return "\n".join(["| what | core-seconds per step |", "|---|---|", *(f"| {name} | {s:.3f} |" for name, s in rows)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=14)
    parser.add_argument("--async-level", type=int, default=1)
    parser.add_argument("--trainer", action="store_true", help="the trainer's part alone, by kind of operation")
    parser.add_argument("--bf16", action="store_true", help="compute in bfloat16 instead of float32")
    parser.add_argument("--out", type=Path, default=Path("outputs/benchmarks/rl"))
    options = parser.parse_args()
    out = options.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    if options.trainer:
        costs, step_s = costs_of_trainer(out, options.steps, options.bf16)
        print(f"{table(costs)}\n\n{step_s:.2f} core-seconds per step without the profiler (median of {options.steps})")
        return
    costs, step_s = costs_of_run(out, options.steps, options.async_level, options.bf16)
    print(f"{table(costs)}\n\n{step_s:.2f} s per step, {sum(costs.values()):.2f} core-seconds")


if __name__ == "__main__":
    main()
