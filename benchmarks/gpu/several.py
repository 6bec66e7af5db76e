"""Two and more GPUs: loss and gradient of processes that divide rows, layers and experts; meshes beside FSDP alone.

On a CPU, two processes with gloo.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from findings import Findings, findings_of_command_line

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "prime-rl" / "tests" / "models"))
from divided_rows_of_a_launch import launched  # noqa: E402
from model_cases import Case  # noqa: E402

MODELS = {
    "dense": (Case("llama"), {2: "cp2 tp2", 4: "cp2 tp2 cp4 cp2-tp2 dp_replicate2-cp2 dp_replicate2-tp2"}),
    "experts": (Case("qwen3_moe"), {2: "cp2 tp2 ep2", 4: "cp2 tp2 ep2 ep4 cp2-ep4 tp2-ep4 dp_replicate2-ep2"}),
    "experts, adapter": (Case("qwen3_moe"), {2: "tp2 ep2", 4: "cp2 tp2 ep4 tp2-ep4"}),
    "short convolutions": (Case("lfm2"), {2: "cp2", 4: "cp4"}),
}
"""Models, and the meshes of a number of processes that divide them."""
LIMIT = 1e-4
"""Largest allowed |difference| / |gradient|, in float32."""


def main(findings: Findings) -> None:
    on_gpus = findings.device == "cuda"
    count = 2 if not on_gpus or torch.cuda.device_count() < 4 else 4
    if on_gpus and torch.cuda.device_count() < 2:
        findings.fact(left_out="this machine has one GPU")
        return
    models = dict(list(MODELS.items())[:2] if findings.is_tiny else MODELS)
    with tempfile.TemporaryDirectory() as scratch:
        named = {name: (case, meshes[count]) for name, (case, meshes) in models.items()}
        found = launched(Path(scratch), named, count, "cuda" if on_gpus else "cpu")
    for (model, mesh), (loss, gradient, _) in found.items():
        expected_loss, expected, _ = found[model, "whole rows"]
        error = max(abs(loss / expected_loss - 1), float((gradient - expected).norm() / expected.norm()))
        if mesh != "whole rows":
            findings.check(f"{model}, {mesh}", error < LIMIT, f"loss and gradient differ by {error:.1e}")
    for model in ("dense", "experts") if on_gpus else ("dense",):
        compared(findings, model, count)


def compared(findings: Findings, model: str, count: int) -> None:
    """Time, memory and bytes of meshes."""
    with tempfile.TemporaryDirectory() as scratch:
        rows = Path(scratch) / "rows.json"
        command = [sys.executable, str(ROOT / "benchmarks" / "meshes.py"), model, "--device", findings.device]
        tiny = ["--tokens", "256", "--steps", "1", "--meshes", "dp_shard", "cp2"] if findings.is_tiny else []
        subprocess.run([*command, "--processes", str(count), "--result", str(rows), *tiny], check=True)
        for row in json.loads(rows.read_text()):
            findings.row(model=model, **row)
            sent, expected = row["sent, MiB"], row["expected, MiB"]
            findings.check(
                f"bytes of {model}, {row['mesh']}",
                abs(sent / expected - 1) < 0.1,
                f"sent {sent} MiB, the estimate says {expected} MiB",
            )


if __name__ == "__main__":
    main(findings_of_command_line(__doc__))
