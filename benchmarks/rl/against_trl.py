"""Measures an RL step against TRL's: `uv run python benchmarks/rl/against_trl.py`. See README.md for what is compared.

Rows run one after another: `medarc_train rl` with its three processes, or TRL's GRPOTrainer. `TRL / this` compares with
the faster of TRL's rows. Results are appended to `measurements.jsonl` in `--out`, so rounds can be spread over several
calls; the table uses all of them.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import mean, median
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

import tomli_w  # noqa: E402
from options import parse_options  # noqa: E402
from trl_venv import trl_python  # noqa: E402

PROMPTS, GROUP, NEW_TOKENS, LR = 16, 8, 64, 2e-5
WARMUP_STEPS, LAST_STEPS = 2, 2
"""Steps excluded at the end: our run generates nothing there, so its steps are shorter."""
BF16 = "-bf16"
"""End of the names of rows that compute in bfloat16: TRL with autocast, ours with `compute_dtype` and the engine's
`dtype`. The others compute in float32. Weights, gradients and optimizer states are float32 everywhere."""
LEVELS = {"ours-async-1": 1, "ours-async-0": 0}
ROWS = tuple(name + dtype for dtype in ("", BF16) for name in ("trl", *LEVELS))
TOKENIZER = HERE.parents[1] / "examples" / "reverse_text" / "model"


@dataclass(frozen=True, slots=True)
class Measurement:
    """One row in one round."""

    row: str
    step_s: float
    """Mean over the steps, without the first and the last ones."""
    generated: float
    """Completion tokens per step; the same number is trained."""
    startup_s: float
    """From the start of the command to the end of the first step."""
    rewards: list[float]

    @classmethod
    def from_run(cls, row: str, started_at: float, steps: Sequence[Mapping[str, float]]) -> Measurement:
        measured = steps[WARMUP_STEPS - 1 : -LAST_STEPS]
        return cls(
            row=row,
            step_s=(measured[-1]["ended_at"] - measured[0]["ended_at"]) / (len(measured) - 1),
            generated=mean(step["generated"] for step in measured[1:]),
            startup_s=steps[0]["ended_at"] - started_at,
            rewards=[step["reward"] for step in steps],
        )


@dataclass(frozen=True, slots=True)
class Bench:
    """Where things are, and how long each row runs."""

    out: Path
    model: Path
    trl: Path
    steps: int

    def measure(self, row: str) -> Measurement:
        """Run one row in its own processes.

        Raises:
            RuntimeError: it failed; the message contains the end of its log.
        """
        work = self.out / "work" / row
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir(parents=True)
        name, is_bf16 = row.removesuffix(BF16), row.endswith(BF16)
        argv = self.trl_argv(work, is_bf16) if name == "trl" else self.our_argv(work, LEVELS[name], is_bf16)
        # As in an installation: modules are compiled once (by `compile_modules`), not on every start.
        environment = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
        environment |= {
            "PYTHONPATH": os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")]),
            "PYTHONPYCACHEPREFIX": str(self.out / "pycache"),
        }
        environment |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        started_at = time.time()
        with (work / "log").open("w") as log:
            code = subprocess.run(argv, stdout=log, stderr=subprocess.STDOUT, env=environment, check=False).returncode
        if code != 0:
            raise RuntimeError(f"{row} ended with {code}:\n{(work / 'log').read_text()[-3000:]}")
        steps = json.loads((work / "result.json").read_text())["steps"] if name == "trl" else our_steps(work / "run")
        return Measurement.from_run(row, started_at, steps)

    def compile_modules(self, rows: Sequence[str]) -> None:
        """Start TRL's rows and ours once without measuring: the first start of each compiles all modules."""
        sides = {row.startswith("trl"): row for row in reversed(rows)}
        for row in sides.values():
            print(f"not measured: {row}", flush=True)
            replace(self, steps=WARMUP_STEPS + LAST_STEPS + 2).measure(row)

    def trl_argv(self, work: Path, is_bf16: bool) -> list[str]:
        options = {
            "bf16": is_bf16,
            "max_steps": self.steps,
            "per_device_train_batch_size": PROMPTS * GROUP,
            "num_generations": GROUP,
            "max_completion_length": NEW_TOKENS,
            "learning_rate": LR,
            "loss_type": "grpo",
            "gradient_checkpointing": False,
        }
        (work / "job.json").write_text(json.dumps({"model": str(self.model), "trl": options}))
        return [str(self.trl), str(HERE / "trl_row.py"), str(work / "job.json"), str(work / "result.json")]

    def our_argv(self, work: Path, async_level: int, is_bf16: bool) -> list[str]:
        config = our_config(self.model, work / "run", self.steps, async_level)
        if is_bf16:
            compute_in_bf16(config)
        (work / "rl.toml").write_text(tomli_w.dumps(config))
        return [str(Path(sys.executable).with_name("medarc_train")), "rl", str(work / "rl.toml")]


def our_config(model: Path, output: Path, steps: int, async_level: int) -> dict[str, Any]:
    """The job as a run of ours."""
    return {
        "device": "cpu",
        "output_dir": str(output),
        "max_steps": steps,
        "max_async_level": async_level,
        "seq_len": 128,
        "algorithm": "grpo",
        "model": {"name": str(model)},
        "trainer": {"model": {"attn": "sdpa"}, "optim": {"lr": LR, "weight_decay": 0.0}},
        "orchestrator": {
            "batch_size": PROMPTS * GROUP,
            "rollouts_per_example": GROUP,
            "sampling": {"max_tokens": NEW_TOKENS},
            "env": [{"id": "letters"}],
        },
        "inference": {"backend": "embedded", "model": {"max_model_len": 128}},
    }


def compute_in_bf16(config: dict[str, Any]) -> None:
    """Let trainer and engine of a run compute in bfloat16."""
    config["trainer"]["model"]["compute_dtype"] = "bfloat16"
    config["inference"]["model"]["dtype"] = "bfloat16"


def our_steps(run: Path) -> list[dict[str, float]]:
    """The same figures as TRL's row, from the metrics of a run."""
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    batches = {r["step"]: r for r in records if r["source"] == "orchestrator" and "reward/mean" in r}
    return [
        {
            "ended_at": r["time"],
            "reward": batches[r["step"]]["reward/mean"],
            "generated": batches[r["step"]]["progress/decode_tokens"],
        }
        for r in records
        if r["source"] == "trainer" and "time/step" in r
    ]


def tiny_model(directory: Path) -> Path:
    """Qwen3 with 2.39 M random parameters in float32, with one token per character."""
    if not (directory / "config.json").exists():
        import torch
        from transformers import AutoModelForCausalLM, Qwen3Config

        torch.manual_seed(0)
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
            eos_token_id=1,
            pad_token_id=0,
        )
        AutoModelForCausalLM.from_config(config).save_pretrained(directory)
        for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
            shutil.copy(TOKENIZER / name, directory)
    return directory


def table(records: Sequence[Mapping[str, Any]]) -> str:
    """Medians over the rounds, in Markdown."""
    lines = [
        "| row | s/step (least to most of the rounds) | generated + trained tokens/s | first step, s | TRL / this |",
        "|---|---|---|---|---|",
    ]
    by_row = {row: [record for record in records if record["row"] == row] for row in ROWS}
    seconds = {row: median(record["step_s"] for record in same) for row, same in by_row.items() if same}
    theirs = [step_s for row, step_s in seconds.items() if row.startswith("trl")]
    for row, step_s in seconds.items():
        same = by_row[row]
        least, most = min(record["step_s"] for record in same), max(record["step_s"] for record in same)
        rate = 2 * median(record["generated"] for record in same) / step_s
        startup = median(record["startup_s"] for record in same)
        ratio = f"{min(theirs) / step_s:.2f}" if theirs else "-"
        lines.append(f"| {row} | {step_s:.2f} ({least:.2f} to {most:.2f}) | {rate:.0f} | {startup:.1f} | {ratio} |")
    return "\n".join(lines)


def main() -> None:
    options = parse_arguments()
    out = options.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    bench = Bench(out, tiny_model(out / "model"), trl_python(options.trl_venv).absolute(), options.steps)
    measured = out / "measurements.jsonl"
    if options.rounds:
        bench.compile_modules(options.rows)
    with measured.open("a") as lines:
        for index in range(options.rounds):
            for row in options.rows:
                print(f"round {index + 1} of {options.rounds}: {row}", flush=True)
                lines.write(json.dumps(asdict(bench.measure(row))) + "\n")
                lines.flush()
    print(table([json.loads(line) for line in measured.read_text().splitlines()]))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=14, help="of each row in each round")
    return parse_options(parser, Path("outputs/benchmarks/rl"), ROWS, ROWS)


if __name__ == "__main__":
    main()
