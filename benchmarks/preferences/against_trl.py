"""Measures DPO against TRL's DPOTrainer on the same pairs: tokens per second and peak memory, on a CPU.

    python benchmarks/preferences/against_trl.py --model DIR [--pairs 32] [--out DIR] [--trl-venv DIR]

`benchmarks/smollm2.py DIR` makes the model; an environment for TRL is made if it is missing. Each side trains one
epoch of the same made-up conversations in its own process: float32 weights, bfloat16 compute, AdamW, no recomputed
activations, 4 pairs in a forward pass and 8 in a step (ours packs as many tokens). A pair counts the tokens of both
answers with their prompt, on both sides. Rates are of all steps but the first, which warms up; `per CPU second`
divides by processor time, for a machine that others use too. TRL computes its reference in every step; ours, before
the first: its time is added, per pair.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

SEQ_LEN, PAIRS_OF_STEP, PAIRS_AT_ONCE, THREADS = 512, 8, 4, 2
PROMPT_WORDS, ANSWER_WORDS = (120, 220), (30, 110)


def write_pairs(file: Path, count: int) -> None:
    draw = random.Random(0)
    words = ["fever", "dose", "kidney", "the", "of", "daily", "and", "safe", "before", "doctor", "label", "night"]

    def text(limits: tuple[int, int]) -> str:
        return " ".join(draw.choice(words) for _ in range(draw.randint(*limits)))

    with file.open("w") as out:
        for _ in range(count):
            row = {"prompt": [{"role": "user", "content": text(PROMPT_WORDS)}]}
            row |= {side: [{"role": "assistant", "content": text(ANSWER_WORDS)}] for side in ("chosen", "rejected")}
            out.write(json.dumps(row) + "\n")


def trl_side(job: dict[str, Any]) -> dict[str, Any]:
    """Runs in TRL's environment."""
    import torch
    from datasets import load_dataset
    from transformers import AutoTokenizer, TrainerCallback
    from trl import DPOConfig, DPOTrainer

    torch.set_num_threads(THREADS)
    steps: list[dict[str, float]] = []

    class Clock(TrainerCallback):
        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            used = resource.getrusage(resource.RUSAGE_SELF)
            steps.append({"at": time.time(), "cpu": used.ru_utime + used.ru_stime})

    config = DPOConfig(
        output_dir=job["out"],
        model_init_kwargs={"dtype": "float32"},
        use_cpu=True,
        bf16=True,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
        num_train_epochs=1,
        max_length=SEQ_LEN,
        per_device_train_batch_size=PAIRS_AT_ONCE,
        gradient_accumulation_steps=PAIRS_OF_STEP // PAIRS_AT_ONCE,
        gradient_checkpointing=False,
        learning_rate=1e-6,
        beta=0.1,
    )
    tokenizer = AutoTokenizer.from_pretrained(job["model"])
    data = load_dataset("json", data_files=job["data"], split="train")
    trainer = DPOTrainer(job["model"], args=config, train_dataset=data, processing_class=tokenizer, callbacks=[Clock()])
    lengths = [
        2 * len(row["prompt_ids"]) + len(row["chosen_ids"]) + len(row["rejected_ids"]) for row in trainer.train_dataset
    ]
    trainer.train()
    pairs = PAIRS_OF_STEP * (len(steps) - 1)
    seconds, cpu = (steps[-1][key] - steps[0][key] for key in ("at", "cpu"))
    return {"pairs": pairs, "seconds": seconds, "cpu": cpu, "tokens_of_pair": sum(lengths) / len(lengths)}


def our_side(job: dict[str, Any]) -> dict[str, Any]:
    """Runs in this environment."""
    import torch

    from prime_rl.configs.dpo import DPOConfig
    from prime_rl.run.paths import RunPaths
    from prime_rl.trainer.preferences.reference import Reference
    from prime_rl.trainer.sft.loop import SFTTrainer
    from prime_rl.trainer.sft.run import run

    torch.set_num_threads(THREADS)
    marks: list[tuple[str, float, float]] = []

    def timed(owner: Any, name: str) -> None:
        whole = getattr(owner, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            began = time.time(), _cpu_s()
            found = whole(*args, **kwargs)
            marks.append((name, time.time() - began[0], _cpu_s() - began[1]))
            return found

        setattr(owner, name, call)

    timed(Reference, "compute_rest")
    timed(SFTTrainer, "train_step")
    config = DPOConfig(
        device="cpu",
        output_dir=job["out"],
        clean_output_dir=True,
        num_epochs=1,
        model={"name": job["model"], "attn": "sdpa", "compute_dtype": "bfloat16"},
        # Rows of two sequences of `seq_len` hold about two of these pairs.
        data={"name": job["data"], "seq_len": SEQ_LEN, "batch_size": PAIRS_OF_STEP // 2, "micro_batch_size": 2},
        optim={"lr": 1e-6},
        loss={"beta": 0.1},
    )
    assert run(config) == 0
    lines = [json.loads(line) for line in RunPaths(Path(job["out"])).metrics.read_text().splitlines()]
    samples = [line["progress/num_samples"] for line in lines if "progress/num_samples" in line]
    tokens = [line["progress/num_tokens"] for line in lines if "progress/num_tokens" in line]
    steps = [mark for mark in marks if mark[0] == "train_step"][1:]
    (reference,) = [mark for mark in marks if mark[0] == "compute_rest"]
    pairs = samples[-1] - samples[0]
    share = pairs / job["pairs"]
    return {
        "pairs": pairs,
        "seconds": sum(mark[1] for mark in steps) + reference[1] * share,
        "cpu": sum(mark[2] for mark in steps) + reference[2] * share,
        "tokens_of_pair": tokens[-1] / samples[-1],
    }


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--trl-venv", type=Path)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--pairs", type=int, default=32)
    parser.add_argument("--out", type=Path, default=Path("outputs/benchmarks/preferences"))
    parser.add_argument("--side", choices=("ours", "trl"))
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    data = options.out / "pairs.jsonl"
    job = {"model": str(options.model.resolve()), "data": str(data.resolve()), "pairs": options.pairs}
    job["out"] = str((options.out / f"run-{options.side}").resolve())
    if options.side is not None:
        found = trl_side(job) if options.side == "trl" else our_side(job)
        found["peak_gb"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9
        (options.out / f"{options.side}.json").write_text(json.dumps(found))
        return
    from trl_venv import DEFAULT_DIRECTORY, trl_python

    write_pairs(data, options.pairs)
    shared = ["--model", str(options.model), "--pairs", str(options.pairs), "--out", str(options.out)]
    rates = {}
    theirs = trl_python(options.trl_venv or DEFAULT_DIRECTORY).absolute()
    for side, python in (("ours", sys.executable), ("trl", str(theirs))):
        subprocess.run([python, __file__, "--side", side, *shared], check=True, stdout=subprocess.DEVNULL)
        found = json.loads((options.out / f"{side}.json").read_text())
        # The same tokens on both sides, whatever each counts.
        tokens = found["pairs"] * found["tokens_of_pair"]
        rates[side] = (tokens / found["seconds"], tokens / found["cpu"], found["peak_gb"])
        print(
            f"{side:5} {rates[side][0]:7.0f} tokens/s {rates[side][1]:7.0f} per CPU second "
            f"{found['peak_gb']:5.2f} GB peak ({found['pairs']} pairs of {found['tokens_of_pair']:.0f} tokens)",
            flush=True,
        )
    speed, of_cpu, memory = (ours / trl for ours, trl in zip(rates["ours"], rates["trl"], strict=True))
    print(f"ours / trl: {speed:.2f} x tokens/s, {of_cpu:.2f} x per CPU second, {memory:.2f} x memory")


if __name__ == "__main__":
    main()
