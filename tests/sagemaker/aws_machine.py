"""What the tests of the SageMaker back-end share: a project, a stand-in for docker, and options."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "reverse_text"

ROLE = "arn:aws:iam::123456789012:role/medarc-training"
ACCOUNT = [
    "--role",
    ROLE,
    "--region",
    "us-east-1",
    "--image",
    "registry/medarc-rl:1",
    "--instance-type",
    "ml.m5.xlarge",
]

SFT = """
device = "cpu"
max_steps = 2
[model]
name = "model"
attn = "sdpa"
[model.debug]
random_init = true
[data]
name = "rows.jsonl"
seq_len = 64
batch_size = 4
[ckpt]
interval = 1
"""

# Like docker: its own environment has the values of `--env NAME`, the container's has only what was named.
DOCKER = (
    f"#!{sys.executable}"
    + """
import json, os, subprocess, sys
from pathlib import Path
words, env, root, directory = sys.argv[1:], {}, None, Path(os.environ["FAKE_DOCKER"])
record = dict(argv=words)
if words[0] in ("build", "login"):
    content = sys.stdin.buffer.read()
    (directory / words[0]).write_bytes(content)
with (directory / "calls.jsonl").open("a") as calls:
    calls.write(json.dumps(record) + "\\n")
if words[0] != "run":
    sys.exit(int(os.environ.get("FAKE_DOCKER_" + words[0].upper(), "0")))
at = 1
while words[at].startswith("-"):
    option = words[at]
    if option in ("--rm", "--init"):
        at += 1
        continue
    value = words[at + 1]
    if option == "--env":
        name, equals, given = value.partition("=")
        env[name] = given if equals else os.environ[name]
    if option == "--volume":
        root = value.removesuffix(":/opt/ml")
    at += 2
image, *entry = words[at:]
kept = {name: os.environ[name] for name in ("PATH", "HOME", "PRIME_RL_RUNTIME_DIR") if name in os.environ}
argv = [sys.executable, *entry, "--root", root, "--local-disk", str(directory / "disk")]
os.execve(argv[0], argv, {**kept, **env})
"""
)


@dataclass(frozen=True)
class Docker:
    directory: Path

    @property
    def calls(self) -> list[list[str]]:
        record = self.directory / "calls.jsonl"
        return [json.loads(line)["argv"] for line in record.read_text().splitlines()] if record.exists() else []

    def env(self) -> dict[str, str]:
        path = f"{self.directory / 'bin'}{os.pathsep}{os.environ['PATH']}"
        return {"PATH": path, "FAKE_DOCKER": str(self.directory)}


def make_docker(directory: Path) -> Docker:
    program = directory / "bin" / "docker"
    program.parent.mkdir(parents=True)
    program.write_text(DOCKER)
    program.chmod(0o755)
    return Docker(directory)


def make_project(directory: Path) -> Path:
    """A project with a tiny model, rows, a config, and files that must not be sent."""
    directory.mkdir(parents=True)
    shutil.copytree(EXAMPLE / "model", directory / "model")
    lines = (EXAMPLE / "demonstrations.jsonl").read_text().splitlines()[:32]
    (directory / "rows.jsonl").write_text("\n".join(lines) + "\n")
    (directory / "sft.toml").write_text(SFT)
    (directory / ".env").write_text("HF_TOKEN=never-to-be-sent\n")
    return directory


def submit(project: Path, *words: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Run `medarc_submit` in a project, as a user would."""
    return command("medarc_submit", project, words, env)


def command(
    program: str, directory: Path, words: Sequence[str], env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-c", f"from medarc_rl.scripts import {program}; {program}()", *words]
    return subprocess.run(
        argv, cwd=directory, env={**os.environ, **(env or {})}, capture_output=True, text=True, check=False
    )
