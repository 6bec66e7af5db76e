"""Help and dry runs answer at once: they import nothing of what trains."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

HEAVY = ("torch", "transformers", "datasets", "verifiers", "vllm", "wandb", "numpy", "rich")
MODEL = Path(__file__).parents[1] / "examples" / "reverse_text" / "model"

RUN = """
import sys
from medarc_rl.{command} import main
sys.argv = ["{command}", *{words!r}]
try:
    main()
except SystemExit as end:
    assert end.code == 0, end.code
sys.stderr.write(" ".join(name for name in {heavy!r} if name in sys.modules))
"""


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("medarc_slurm", "--help"),
        ("medarc_slurm", "rl --help"),
        ("medarc_slurm", "rl {config} --output-dir {out} --dry-run"),
        ("medarc_submit", "rl --help"),
        ("medarc_jobs", "list --no-ask"),
        ("medarc_train", "rl --help"),
        ("medarc_train", "migrate --help"),
        ("medarc_train", "rl {config} --output-dir {out} --dry-run"),
        ("medarc_train", "rl {config} --output-dir {out} --model.name {model} --estimate --gpu 40"),
    ],
)
def test_nothing_heavy_is_imported(command: str, words: str, rl_toml: Path, tmp_path: Path) -> None:
    arguments = words.format(config=rl_toml, out=tmp_path / "out", model=MODEL).split()
    code = RUN.format(command=command, words=arguments, heavy=HEAVY)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_migration_imports_nothing_heavy(rl_toml: Path) -> None:
    code = RUN.format(command="medarc_train", words=["migrate", str(rl_toml)], heavy=HEAVY)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout == rl_toml.read_text(encoding="utf-8")
    assert done.stderr == f"{rl_toml}: rl config of this version: nothing to change\n"
