"""The engine's programs started by hand, as on machines that share a directory and no launcher."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

from prime_rl.launch.placement import reserved_ports

MODEL = Path(__file__).resolve().parents[3] / "examples" / "reverse_text" / "checkpoint"
BIN = Path(sys.executable).parent

MODEL_TOML = f"""
device = "cpu"
[model]
name = "{MODEL}"
"""
INFERENCE_TOML = f"""
backend = "embedded"
{MODEL_TOML}
max_model_len = 64
enforce_eager = true
"""
ORCHESTRATOR_TOML = f"""
output_dir = "run_default"
max_steps = 2
batch_size = 4
rollouts_per_example = 4
num_train_workers = 2
seq_len = 64
[model]
name = "{MODEL}"
[sampling]
max_tokens = 8
[[env]]
id = "reverse-text"
"""
TRAINER_TOML = f"""
output_dir = "."
max_steps = 2
{MODEL_TOML}
attn = "sdpa"
seq_len = 64
"""


def started(directory: Path, *argv: object, **env: str) -> subprocess.Popen[str]:
    """A program in the shared directory, and its output in a file of its own."""
    log = directory / f"{len(list(directory.glob('*.out')))}.out"
    with log.open("w") as out:
        return subprocess.Popen(
            [*map(str, argv)],
            cwd=directory,
            env={**os.environ, "OMP_NUM_THREADS": "1", **env},
            stdout=out,
            stderr=subprocess.STDOUT,
            text=True,
        )


def torchrun(node: int, port: int) -> tuple[object, ...]:
    """The command of one of two nodes."""
    where = ("--nnodes", 2, "--node-rank", node, "--master-addr", "127.0.0.1", "--master-port", port)
    return (sys.executable, "-m", "torch.distributed.run", *where, "--nproc-per-node", 1, "-m")


def outputs(directory: Path) -> str:
    return "\n".join(path.read_text() for path in sorted(directory.glob("*.out")))


def losses(out: Path) -> list[float]:
    records = map(json.loads, (out / "metrics.jsonl").read_text().splitlines())
    return [record["loss/mean"] for record in records if "loss/mean" in record]


def test_a_server_an_orchestrator_and_two_torchruns_meet_in_a_directory(tmp_path: Path) -> None:
    for name, text in (("inference", INFERENCE_TOML), ("orchestrator", ORCHESTRATOR_TOML), ("trainer", TRAINER_TOML)):
        (tmp_path / f"{name}.toml").write_text(text)
    with reserved_ports(2) as (port, meeting), ExitStack() as started_here:

        def start(*argv: object) -> subprocess.Popen[str]:
            process = started(tmp_path, *argv, VLLM_API_KEY="the same text")
            started_here.callback(process.wait)
            started_here.callback(process.terminate)
            return process

        start(BIN / "inference", "@", "inference.toml", "--server.host", "127.0.0.1", "--server.port", port)
        url = ("--client.base-url", f"http://127.0.0.1:{port}/v1")
        orchestrator = start(BIN / "orchestrator", "@", "orchestrator.toml", *url)
        train = ("prime_rl.trainer.rl.train", "@", "trainer.toml")
        trainers = [start(*torchrun(node, meeting), *train) for node in range(2)]
        for process in (orchestrator, *trainers):
            assert process.wait() == 0, outputs(tmp_path)
    assert len(losses(tmp_path)) == 2
