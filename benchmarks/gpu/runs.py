"""Whole runs with the commands that users type: SFT stopped and resumed, and RL with trainer and engine on one GPU."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import tomli_w
from findings import Findings, findings_of_command_line

REPOSITORY = Path(__file__).resolve().parents[2]
EXAMPLE = REPOSITORY / "examples" / "reverse_text"
PROGRAMS = Path(sys.executable).parent


def main(findings: Findings) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        findings.attempt("sft resumes bit for bit", lambda: resumed(Path(scratch), findings))
        findings.attempt("rl on one device learns", lambda: learned(Path(scratch), findings))


def resumed(scratch: Path, findings: Findings) -> tuple[bool, str]:
    """Losses of a run that stops after half of its steps and resumes, next to those of one that does not."""
    steps = 4 if findings.is_tiny else 20
    whole, halves = scratch / "whole", scratch / "halves"
    sft(sft_config(whole, findings.device, steps, steps), scratch / "whole.toml")
    sft(sft_config(halves, findings.device, steps // 2, steps), scratch / "half.toml")
    sft(sft_config(halves, findings.device, steps, steps) | {"ckpt": {"resume_step": -1}}, scratch / "resume.toml")
    expected, found = losses(whole), losses(halves)
    return found == expected and len(
        found
    ) == steps, f"{len(found)} steps, last loss {found[-1]!r} and {expected[-1]!r}"


def sft_config(output: Path, device: str, steps: int, schedule_steps: int) -> dict[str, Any]:
    return {
        "device": device,
        "max_steps": steps,
        "output_dir": str(output),
        "model": {"name": str(EXAMPLE / "checkpoint")},
        "data": {"name": str(EXAMPLE / "demonstrations.jsonl"), "seq_len": 256, "batch_size": 4},
        "scheduler": {"type": "constant"},
        "ckpt": {},
    }


def sft(config: dict[str, Any], file: Path) -> None:
    file.write_bytes(tomli_w.dumps(config).encode())
    run([str(PROGRAMS / "sft"), "@", str(file)])


def losses(output: Path) -> list[float]:
    records = map(json.loads, (output / "metrics.jsonl").read_text().splitlines())
    return [record["loss/mean"] for record in records if "loss/mean" in record]


def learned(scratch: Path, findings: Findings) -> tuple[bool, str]:
    """The shipped example. On a GPU, trainer and embedded engine share it, and the trainer leaves while it samples."""
    steps, output = (3 if findings.is_tiny else 60), scratch / "rl"
    command = [str(PROGRAMS / "medarc_train"), "rl", str(EXAMPLE / "rl_cpu.toml"), "--output-dir", str(output)]
    command += ["--max-steps", str(steps)]
    if findings.device == "cuda":
        command += ["--single-gpu", "--device", "cuda", "--inference.backend", "embedded"]
        command += ["--max-async-level", "0", "--trainer.offload-while-sampling"]
    run(command)
    records = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    rewards = [record["reward/mean"] for record in records if "reward/mean" in record]
    mismatches = [value for record in records for name, value in record.items() if name.startswith("mismatch_kl/mean")]
    away = [record["perf/memory_while_sampling"] for record in records if "perf/memory_while_sampling" in record]
    findings.fact(memory_while_sampling_gib=away[-1:] or None)
    findings.fact(rewards=[round(reward, 3) for reward in rewards], mismatch_kl=mismatches[-1:] or None)
    few = max(1, len(rewards) // 10)
    first, last = (sum(part) / few for part in (rewards[:few], rewards[-few:]))
    is_right = len(rewards) == steps and (findings.is_tiny or last > first + 0.1)
    return is_right, f"{len(rewards)} steps, reward {first:.3f} at first, {last:.3f} at last"


def run(command: list[str]) -> None:
    """Raises RuntimeError with the last line of the output if the command fails."""
    done = subprocess.run(command, cwd=REPOSITORY, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        print(done.stdout[-6000:], flush=True)
        last = (done.stdout.strip().splitlines() or ["no output"])[-1]
        raise RuntimeError(f"{Path(command[0]).name} exited with {done.returncode}: {last}")


if __name__ == "__main__":
    main(findings_of_command_line(__doc__))
