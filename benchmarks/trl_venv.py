"""An environment of its own for TRL: it wants datasets >= 4.7, and the verifiers that this project stands on < 4.7."""

from __future__ import annotations

import os
import subprocess
from importlib.metadata import version
from pathlib import Path

TRL = "trl==1.16.0"
"""The newest one that goes with this project's torch and transformers."""
DEFAULT_DIRECTORY = Path("outputs/benchmarks/trl-venv")


def trl_python(directory: Path = DEFAULT_DIRECTORY) -> Path:
    """The interpreter that has TRL, with the versions of torch and transformers that run here; made where it is not.

    Raises:
        subprocess.CalledProcessError: uv cannot make it.
    """
    python = directory / "bin" / "python"
    if (
        python.exists()
        and subprocess.run([python, "-c", "import trl"], capture_output=True, check=False).returncode == 0
    ):
        return python
    same_here = [f"{name}=={version(name).partition('+')[0]}" for name in ("torch", "transformers")]
    # Wheels that lie on this machine (a CPU build of torch, say) are taken before larger ones from the registry.
    found_here = {"UV_FIND_LINKS": os.environ["PIP_FIND_LINKS"]} if "PIP_FIND_LINKS" in os.environ else {}
    environment = {**found_here, **os.environ}
    subprocess.run(["uv", "venv", "-q", "--clear", "--python", "3.11", directory], check=True, env=environment)
    install = ["uv", "pip", "install", "-q", "--compile-bytecode", "--python", python, TRL, "datasets>=4.7", *same_here]
    subprocess.run(install, check=True, env=environment)
    return python
