"""Makes a separate environment for TRL, which needs datasets >= 4.7; this project's verifiers needs < 4.7."""

from __future__ import annotations

import os
import subprocess
from importlib.metadata import version
from pathlib import Path

TRL = "trl==1.16.0"
"""The newest version that works with this project's torch and transformers."""
DEFAULT_DIRECTORY = Path("outputs/benchmarks/trl-venv")


def trl_python(directory: Path = DEFAULT_DIRECTORY) -> Path:
    """The interpreter of the environment with TRL and this project's torch and transformers. Makes it if it is missing.

    Raises:
        subprocess.CalledProcessError: uv cannot make it.
    """
    python = directory / "bin" / "python"
    same_torch = f"import trl; from importlib.metadata import version as v; exit(v('torch') != {version('torch')!r})"
    if python.exists() and subprocess.run([python, "-c", same_torch], capture_output=True, check=False).returncode == 0:
        return python
    same_here = [f"{name}=={version(name)}" for name in ("torch", "transformers")]
    environment = dict(os.environ)
    # Use the same build of torch, because the CUDA build loads 0.4 GB more of libraries. The CPU build has a "+" in its
    # version and is only on some machines. If uv found both, it would install the CPU build for the other.
    environment.pop("UV_FIND_LINKS", None)
    if "+" in version("torch") and "PIP_FIND_LINKS" in os.environ:
        environment["UV_FIND_LINKS"] = os.environ["PIP_FIND_LINKS"]
    subprocess.run(["uv", "venv", "-q", "--clear", "--python", "3.11", directory], check=True, env=environment)
    install = ["uv", "pip", "install", "-q", "--compile-bytecode", "--python", python, TRL, "datasets>=4.7", *same_here]
    subprocess.run(install, check=True, env=environment)
    return python
