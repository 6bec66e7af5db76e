"""Measures SFT against TRL: `uv run python benchmarks/sft/run.py`. README.md here says what is compared, and how.

Rows run one after another, each in its own process. Results are appended to `measurements.jsonl` in `--out`, so rounds
and rows can be spread over several calls; the table uses all of them.
"""

from __future__ import annotations

import argparse
import compileall
import json
import subprocess
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

BENCHMARKS = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(BENCHMARKS), str(Path(__file__).resolve().parent)]

import tomli_w  # noqa: E402
from children import run_watched  # noqa: E402
from conversations import write_conversations  # noqa: E402
from options import parse_options  # noqa: E402
from table import Measurement, comparison  # noqa: E402
from trl_venv import trl_python  # noqa: E402

SEQ_LEN, BATCH, LR, THREADS = 512, 4, 2e-5, 2
LOSS_SEQ_LEN = 256
"""Tokens per row when comparing losses. Each sample has more than half of them, so no two fit into one row."""
OURS = ("ours-best_fit", "ours-cat")
TRL = {"trl-bfd": {"packing_strategy": "bfd"}, "trl-wrapped": {"packing_strategy": "wrapped"}}
RECOMPUTING = ("trl-bfd-recomputing", "ours-best_fit-recomputing")
"""Rows with activation checkpointing, which is TRL's default. Only run if requested."""
ROWS = (*OURS, *TRL, "plain", *RECOMPUTING)
DEFAULT_ROWS = (*OURS, *TRL, "plain")


@dataclass(frozen=True, slots=True)
class Bench:
    """Where things are, and how long each row runs."""

    out: Path
    model: Path
    trl: Path
    steps: int

    def measure(self, row: str, round_index: int) -> Measurement:
        """Run one row in its own process."""
        work = self.out / "work" / f"{row}-{round_index}"
        work.mkdir(parents=True, exist_ok=True)
        data = self.conversations("chat.jsonl", 2000, words=(10, 370))
        if row.startswith("ours"):
            job = ours_job(self.model, data, work / "run", self.steps, row)
        else:
            job = self.foreign_job(row, data)
        return self.run(row, job, work)

    def run(self, row: str, job: dict[str, Any], work: Path) -> Measurement:
        result = work / "result.json"
        environment = {"OMP_NUM_THREADS": str(THREADS), "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        if row.startswith("ours"):
            (work / "sft.toml").write_bytes(tomli_w.dumps(job).encode())
            sft = str(Path(sys.executable).parent / "sft")
            watched = run_watched([sft, "@", str(work / "sft.toml")], work / "log", environment)
            result.write_text(json.dumps(steps_of_run(work / "run" / "metrics.jsonl")))
        else:
            (work / "job.json").write_text(json.dumps(job))
            python, script = (self.trl, "trl_row.py") if row.startswith("trl") else (sys.executable, "plain_row.py")
            argv = [str(python), str(Path(__file__).parent / script), str(work / "job.json"), str(result)]
            watched = run_watched(argv, work / "log", environment)
        return Measurement.from_run(row, watched, json.loads(result.read_text()))

    def foreign_job(self, row: str, data: Path) -> dict[str, Any]:
        job = {"model": str(self.model), "data": str(data), "lr": LR, "steps": self.steps}
        if row == "plain":
            return job | {"seq_len": SEQ_LEN, "batch": BATCH}
        strategy = TRL[row.removesuffix("-recomputing")]
        recomputing = row in RECOMPUTING
        return job | {
            "trl": trl_options(self.steps) | strategy | {"packing": True, "gradient_checkpointing": recomputing}
        }

    def conversations(self, name: str, count: int, words: tuple[int, int]) -> Path:
        file = self.out / "work" / name
        if not file.exists():
            write_conversations(file, count, seed=0, words=words)
        return file

    def losses(self, steps: int = 4) -> list[tuple[float, float]]:
        """Ours and TRL's loss of each step on the same unpacked samples in the same order, all in float32."""
        data = self.conversations("unpacked.jsonl", BATCH * steps, words=(150, 180))
        work = self.out / "work" / "losses"
        work.mkdir(parents=True, exist_ok=True)
        ours = ours_job(self.model, data, work / "run", steps, "ours-stack")
        ours["model"]["compute_dtype"] = "float32"
        ours["data"] |= {"seq_len": LOSS_SEQ_LEN, "micro_batch_size": BATCH, "shuffle": False}
        options = {"bf16": False, "max_length": LOSS_SEQ_LEN, "train_sampling_strategy": "sequential"}
        trl = {"model": str(self.model), "data": str(data), "trl": trl_options(steps) | options}
        rows = [self.run("ours-stack", ours, work).losses, self.run("trl-unpacked", trl, work).losses]
        return list(zip(*rows, strict=True))

    def matmul_gflops(self) -> float:
        result = self.out / "work" / "matmul.json"
        argv = [sys.executable, str(Path(__file__).parent / "matmul_peak.py"), str(result)]
        run_watched(argv, self.out / "work" / "matmul.log", {"OMP_NUM_THREADS": str(THREADS)})
        return json.loads(result.read_text())["gflops"]


def ours_job(model: Path, data: Path, output: Path, steps: int, row: str) -> dict[str, Any]:
    """The config of an `sft` run."""
    pack_function = row.removeprefix("ours-").removesuffix("-recomputing")
    return {
        "device": "cpu",
        "max_steps": steps,
        "output_dir": str(output),
        "clean_output_dir": True,
        "model": {
            "name": str(model),
            "attn": "sdpa",
            "compute_dtype": "bfloat16",
            **({"ac": {}} if row in RECOMPUTING else {}),
        },
        "data": {"name": str(data), "seq_len": SEQ_LEN, "batch_size": BATCH, "pack_function": pack_function},
        "optim": {"type": "adamw", "lr": LR, "weight_decay": 0.0, "max_norm": 1.0},
    }


def trl_options(steps: int) -> dict[str, Any]:
    return {
        "max_steps": steps,
        "per_device_train_batch_size": BATCH,
        "max_length": SEQ_LEN,
        "learning_rate": LR,
        "bf16": True,
        "gradient_checkpointing": False,
    }


def steps_of_run(metrics: Path) -> dict[str, Any]:
    """The same figures as the other rows, from the metrics of an `sft` run."""
    records = [record for record in map(json.loads, metrics.read_text().splitlines()) if "loss/mean" in record]
    totals = [0, *(record["progress/num_tokens"] for record in records)]
    steps = [
        {"ended_at": record["time"], "tokens": total - before, "loss": record["loss/mean"]}
        for record, before, total in zip(records, totals, totals[1:], strict=False)
    ]
    return {"first_step_began_at": records[0]["time"] - records[0]["time/step"], "steps": steps}


def main() -> None:
    options = parse_arguments()
    (options.out / "work").mkdir(parents=True, exist_ok=True)
    if not (options.model / "config.json").exists():
        subprocess.run(["uv", "run", str(BENCHMARKS / "smollm2.py"), str(options.model)], check=True)
    bench = Bench(
        options.out.resolve(), options.model.resolve(), trl_python(options.trl_venv).absolute(), options.steps
    )
    # Compile bytecode as a first start would, even if Python may not write it. Importing here would set variables.
    compileall.compile_dir(Path(find_spec("prime_rl").origin).parent, quiet=1)
    measured = bench.out / "measurements.jsonl"
    with measured.open("a") as lines:
        for index in range(options.rounds):
            lines.write(json.dumps({"row": "matmul", "gflops": bench.matmul_gflops()}) + "\n")
            for row in options.rows:
                print(f"round {index + 1} of {options.rounds}: {row}", flush=True)
                lines.write(json.dumps(bench.measure(row, index).as_dict()) + "\n")
                lines.flush()
        if options.losses:
            lines.write(json.dumps({"row": "losses", "ours_and_trl": bench.losses()}) + "\n")
    records = [json.loads(line) for line in measured.read_text().splitlines()]
    text, figures = comparison(records)
    (bench.out / "figures.json").write_text(json.dumps(figures, indent=2) + "\n")
    print(text)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--steps",
        type=int,
        default=4,
        help="of each row in each round; the first one warms up. With 1, only the start-up and memory are measured",
    )
    parser.add_argument("--losses", action="store_true", help="also compare losses on unpacked data")
    parser.add_argument(
        "--model", type=Path, default=Path("outputs/benchmarks/smollm2"), help="made if it is not there"
    )
    return parse_options(parser, Path("outputs/benchmarks/sft"), ROWS, DEFAULT_ROWS)


if __name__ == "__main__":
    main()
