"""Memory over thousands of steps whose sequences have ever new lengths: a tiny model, trained with `sft` or `rl`.

    uv run benchmarks/growth/long_runs.py sft --steps 10000
    uv run benchmarks/growth/long_runs.py rl --steps 3000

Memory is the resident set of each process of the run. It does not depend on what else the machine does.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import string
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from datetime import date
from pathlib import Path
from typing import Any

import tomli_w

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from process_tree import process_tree  # noqa: E402
from this_machine import this_machine, versions  # noqa: E402

RESULTS = HERE / "long_runs"
ROWS = 20_000
POINTS = 100
"""How often memory is read, at equal distances."""
LOOK_S = 0.2
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
TINY = {
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "layer_types": ["full_attention"] * 2,
    "max_position_embeddings": 2048,
}
ENVIRONMENT = """
import random
import string
import verifiers as vf
from datasets import Dataset


def share_of_letters(completion):
    text = completion[-1]["content"] or ""
    return sum(character in string.ascii_letters for character in text) / max(len(text), 1)


def load_environment():
    draw = random.Random(0)
    rows = [
        {"question": "".join(draw.choices(string.ascii_lowercase, k=draw.randint(8, 700))), "answer": ""}
        for _ in range(20_000)
    ]
    return vf.SingleTurnEnv(dataset=Dataset.from_list(rows), rubric=vf.Rubric(funcs=[share_of_letters]))
"""


def write_model(folder: Path) -> None:
    """A model of 0.1 million random parameters; a token is a character."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    source = HERE.parents[1] / "examples/reverse_text/model"
    config = AutoConfig.from_pretrained(source, **TINY)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    AutoTokenizer.from_pretrained(source, model_max_length=TINY["max_position_embeddings"]).save_pretrained(folder)


def write_rows(file: Path) -> None:
    draw = random.Random(0)
    with file.open("w") as lines:
        for _ in range(ROWS):
            length = min(max(round(draw.lognormvariate(4, 1)), 2), 450)
            text = "".join(draw.choices(string.ascii_letters, k=length))
            asked = draw.randint(1, length)
            lines.write(json.dumps({"prompt": text[:asked], "completion": text[asked:] + "."}) + "\n")


def sft(folder: Path, steps: int) -> dict[str, Any]:
    write_rows(folder / "rows.jsonl")
    return {
        "device": "cpu",
        "max_steps": steps,
        "output_dir": str(folder / "out"),
        "model": {"name": str(folder / "model"), "attn": "sdpa", "compute_dtype": "bfloat16"},
        "data": {"name": str(folder / "rows.jsonl"), "seq_len": 512, "batch_size": 1, "pack_function": "best_fit"},
        "log": {"level": "warning"},
    }


def rl(folder: Path, steps: int) -> dict[str, Any]:
    (folder / "growing_lengths.py").write_text(ENVIRONMENT)
    return {
        "device": "cpu",
        "max_steps": steps,
        "seq_len": 1024,
        "output_dir": str(folder / "out"),
        "model": {"name": str(folder / "model")},
        "trainer": {"model": {"attn": "sdpa", "compute_dtype": "bfloat16"}},
        "orchestrator": {
            "batch_size": 8,
            "rollouts_per_example": 4,
            "sampling": {"max_tokens": 48},
            "env": [{"id": "growing-lengths"}],
        },
        "inference": {"model": {"max_model_len": 1024, "dtype": "bfloat16"}},
        "log": {"level": "warning"},
    }


RUNS = {"sft": sft, "rl": rl}


def resident_mib(root: int) -> dict[str, float]:
    """Of each kind of process below `root`, by the name of its command. Of several with one name, the largest."""
    found: dict[str, float] = {}
    for process in process_tree(root):
        try:
            arguments = Path(f"/proc/{process}/cmdline").read_text().split("\0")
            mib = int(Path(f"/proc/{process}/statm").read_text().split()[1]) * PAGE_BYTES / 2**20
        except OSError:
            continue
        name = process_name(arguments)
        found[name] = max(found.get(name, 0.0), round(mib, 1))
    return found


def process_name(arguments: list[str]) -> str:
    """The command's or the module's name, without Python and its options."""
    words = [word for word in arguments if word and not word.startswith("-")]
    words = [word for word in words if not Path(word).name.startswith("python")] or words
    return Path(words[0]).name.removesuffix(".py").rpartition(".")[2] if words else ""


def steps_done(metrics: Path) -> Iterator[int]:
    """The newest step in a file of metrics, each time that it is asked for."""
    newest, position = 0, 0
    while True:
        if metrics.exists():
            with metrics.open() as lines:
                lines.seek(position)
                for line in iter(lines.readline, ""):
                    if not line.endswith("\n"):
                        break
                    position += len(line)
                    newest = max(newest, int(json.loads(line).get("step") or 0))
        yield newest


def followed(command: list[str], folder: Path, metrics: Path, steps: int) -> list[dict[str, Any]]:
    points: list[dict[str, Any]] = []
    environment = {**os.environ, "PYTHONPATH": f"{folder}:{os.environ.get('PYTHONPATH', '')}", "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, env=environment) as process:
        newest = steps_done(metrics)
        while process.poll() is None:
            step = next(newest)
            if step >= (len(points) + 1) * steps // POINTS:
                points.append({"step": step, "mib": resident_mib(process.pid)})
                if len(points) % 10 == 0:
                    print(json.dumps(points[-1]), flush=True)
            time.sleep(LOOK_S)
        assert process.returncode == 0, f"the run failed with exit code {process.returncode}"
    return points


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", choices=RUNS)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the result, RUN.json")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory)
        write_model(folder / "model")
        (folder / "run.toml").write_text(tomli_w.dumps(RUNS[args.run](folder, args.steps)))
        command = [str(Path(sys.executable).with_name(args.run)), "@", str(folder / "run.toml")]
        started_s = time.monotonic()
        points = followed(command, folder, folder / "out/metrics.jsonl", args.steps)
        seconds = time.monotonic() - started_s
    result = {
        "run": args.run,
        "steps": args.steps,
        "points": points,
        "seconds": round(seconds),
        "machine": this_machine(),
        "versions": versions(),
        "date": date.today().isoformat(),
        "command": f"uv run benchmarks/growth/long_runs.py {args.run} --steps {args.steps}",
    }
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / f"{args.run}.json").write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
